"""Ranks that are threads of this process, or of the processes that a launcher has started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from cohort import _core, _world
from cohort._collective import all_gather_bytes, broadcast_bytes
from cohort._core import Communicator
from cohort.errors import InvalidArgument, Mismatch, Timeout, Unavailable


def run_on_threads(
    function: Callable[..., Any],
    threads: int,
    args: Sequence[Any] = (),
    kwargs: Optional[Mapping[str, Any]] = None,
    *,
    across: Optional[Communicator] = None,
    timeout: Any = None,
) -> list[Any]:
    """Calls `function(world, *args, **kwargs)` on so many threads, each of them a rank; returns what each returned, by
    rank of this process.

    world     that rank's Communicator, good until the function returns; `cohort.world()` is not concerned
    across    the world of this process, with one rank for each process: process P's threads are then ranks P * threads to
              P * threads + threads - 1 of one world. So one task for each node of Slurm fills its node with threads. All
              processes call it, with the same number. None: this process alone
    timeout   deadline in seconds of operations that give none of their own; default: 1800

    The first exception ends the world, and is raised here once all threads have ended; others are told its text
    (Aborted). An interrupt does so, too. Python code of threads runs in turn; what torch and Cohort compute does not.
    torch's generator of random numbers on the CPU is one for all threads. Raises InvalidArgument for a number below 1,
    Mismatch where processes give different ones.
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise InvalidArgument(f"run_on_threads: {threads!r} threads -- give a number from 1")
    size = across.size() if across is not None else 1
    worlds: Callable[[int], Communicator]
    if across is not None and size > 1:
        counts = [int(one) for one in all_gather_bytes(across, str(threads).encode())]
        if len(set(counts)) > 1:
            raise Mismatch(f"run_on_threads: the processes give {counts} threads, by rank -- give the same number")
        worlds = _over_processes(across, threads, timeout)
    else:
        formed = _core.form_thread_world(threads, timeout)
        worlds = formed.__getitem__
    return _Run(function, args, kwargs or {}, worlds, threads).results()


class _Run:
    def __init__(self, function: Any, args: Any, kwargs: Any, worlds: Any, threads: int) -> None:
        self.function, self.args, self.kwargs, self.worlds = function, args, kwargs, worlds
        self.returned: list[Any] = [None] * threads
        self.communicators: list[Optional[Communicator]] = [None] * threads
        self.lock = threading.Lock()
        self.failed: Optional[BaseException] = None

    def rank(self, number: int) -> None:
        try:
            world = self.worlds(number)
            with self.lock:
                self.communicators[number] = world
                ended = self.failed
            if ended is not None:
                self.abort(ended)
            self.returned[number] = self.function(world, *self.args, **self.kwargs)
            world.leave(reason=f"the function of rank {world.rank()} has returned")
        except BaseException as error:
            with self.lock:
                first, self.failed = self.failed is None, self.failed or error
            if first:
                self.abort(error)

    def abort(self, why: BaseException) -> None:
        with self.lock:
            formed = [world for world in self.communicators if world is not None]
        for world in formed:
            if not world.has_left:
                world.abort(f"{type(why).__name__}: {why}")

    def results(self) -> list[Any]:
        ranks = [threading.Thread(target=self.rank, args=(n,), name=f"cohort rank thread {n}") for n in range(len(self.returned))]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            while thread.is_alive():
                try:
                    thread.join()
                except KeyboardInterrupt as interrupt:
                    with self.lock:
                        self.failed = self.failed or interrupt
                    self.abort(interrupt)
        if self.failed is not None:
            raise self.failed
        return self.returned


def _over_processes(across: Communicator, threads: int, timeout: Any) -> Callable[[int], Communicator]:
    """The ranks learn where to meet through the world of their processes. What lets them in does not go that way: it is the
    job's secret, or the one that processes have since they met through their launcher."""
    if _core.way_to_meet(across.rank(), across.size()) not in ("secret", "launcher") and across.cross_size() > 1:
        raise Unavailable(
            "run_on_threads(across=...): the processes are on several hosts and have no secret -- start them by `cohort "
            "run`, srun or mpirun, or give them COHORT_SECRET_FILE"
        )
    told, said, lock = threading.Event(), [""], threading.Lock()

    def tell(text: str) -> None:
        said[0] = broadcast_bytes(across, text.encode()).decode()
        told.set()

    def share(key: str, mine: Optional[str], seconds: float) -> str:
        if mine is not None:
            tell(mine)
        elif across.rank() != 0:
            with lock:  # the first thread listens for all of them
                if not told.is_set():
                    tell("")
        if not told.wait(seconds):
            raise Timeout(f"run_on_threads: rank 0 did not say within {seconds:g} s where to meet")
        return said[0]

    def world_of(number: int) -> Communicator:
        return _world.join(
            rank=across.rank() * threads + number,
            world_size=across.size() * threads,
            share=share,
            share_name="the world of the processes",
            group_name="threads",
            timeout=timeout,
        )

    return world_of
