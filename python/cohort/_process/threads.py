"""Ranks that are threads of this process, or of the processes that a launcher has started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from cohort import _core
from cohort._process import world as _world
from cohort._core import Communicator
from cohort.errors import InvalidArgument


def run_on_threads(function: Callable[..., Any], threads: int, args: Sequence[Any] = (),
                   kwargs: Optional[Mapping[str, Any]] = None, *, across: Optional[Communicator] = None,
                   timeout: Any = None) -> list[Any]:  # fmt: skip
    """Calls `function(world, *args, **kwargs)` on `threads` threads, each of them a rank; returns the results of this
    process's ranks, in order.

    world     that rank's Communicator, valid until the function returns, and meanwhile its thread's default world, used
              by cohort.rank(), cohort.world() and functions with a `comm` argument
    across    a world with one rank for each process: threads of process P are then ranks P * threads to P * threads +
              threads - 1 of one world. One task per Slurm node can thus fill its node with threads. All processes call
              it, with the same number. None: only this process
    timeout   deadline, in seconds, of operations without one of their own; default: as for `across`, else 1800

    The first exception ends the world, and is raised here after all threads have ended; other threads get its text
    (Aborted). An interrupt has the same effect. Threads' Python code takes turns; computations of torch and Cohort run
    in parallel. torch's CPU random number generator is shared by all threads. A thread started by the function is no
    rank and has no default world (InvalidArgument), so pass `world` to it. Raises InvalidArgument for a number below 1,
    Mismatch if processes give different numbers, Unavailable if they are on several hosts and have no secret.
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise InvalidArgument(f"run_on_threads: {threads!r} threads -- give a number from 1")
    run = _Run(function, args, kwargs or {}, _core.form_thread_world(threads, timeout, across))
    with _world.threads_run():
        return run.results()


class _Run:
    def __init__(self, function: Any, args: Any, kwargs: Any, worlds: list[Communicator]) -> None:
        self.function, self.args, self.kwargs, self.worlds = function, args, kwargs, worlds
        self.returned: list[Any] = [None] * len(worlds)
        self.lock = threading.Lock()
        self.failed: Optional[BaseException] = None

    def rank(self, number: int) -> None:
        try:
            world = self.worlds[number]
            with _world.thread_is_rank(world):
                self.returned[number] = self.function(world, *self.args, **self.kwargs)
            if not world.has_left:
                world.leave(reason=f"the function of rank {world.rank()} has returned")
        except BaseException as error:
            with self.lock:
                first, self.failed = self.failed is None, self.failed or error
            if first:
                self.abort(error)

    def abort(self, why: BaseException) -> None:
        for world in self.worlds:
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
