"""The world of this API: `init`, `shutdown`, this process's numbers, and the features of this build.

The world is a group of all ranks of `cohort`'s default world, with a communicator of its own, so both APIs work at the
same time. `init` forms the default world if there is none, and then `shutdown` leaves that world too.
"""

from __future__ import annotations

import array
import os
import threading
from typing import Any, Callable, Iterable, List, NamedTuple, Optional, Sequence, Union

import cohort
from cohort._core import Communicator, NamedEngine, environment_value, is_elastic
from cohort._process.world import refuse_on_threads
from cohort.errors import Aborted, Error, PeerLost
from cohort.horovod import process_sets, timeline
from cohort.horovod.exceptions import HorovodInitError
from cohort.horovod.process_sets import ProcessSet, engine_options

__all__ = ["ccl_built", "cross_rank", "cross_size", "ddl_built", "gloo_built", "gloo_enabled", "init", "is_homogeneous",
           "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "rank",
           "rocm_built", "shutdown", "size", "start_timeline", "stop_timeline"]  # fmt: skip


class _Place(NamedTuple):
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


_lock = threading.RLock()
_place: Optional[_Place] = None
_formed_world = False  # if this API formed the default world, it leaves it, too

when_formed: List[Callable[[], None]] = []  # called when a world begins, to drop state of the last one


def init(comm: Any = None, process_sets: Union[None, str, Sequence[ProcessSet]] = None) -> None:
    """Meets the other ranks. All call it; does nothing if it was called already.

    comm          None: all ranks of the world. A list of ranks: these form a world of their own, numbered as listed;
                  every rank of the world calls `init`, each with a list that contains it. An object with mpi4py's
                  `allgather`: the ranks in that communicator
    process_sets  sets to add, the same on all ranks. "dynamic" changes nothing: sets can always be added

    Raises ValueError for a list that has no meaning or differs between its ranks, and HorovodInitError (a
    ValueError and a HorovodInternalError) if the world could not be formed.
    """
    global _place, _formed_world
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'init: process_sets={process_sets!r} -- give a list of ProcessSet, or "dynamic"')
        process_sets = None
    wanted = list(process_sets or ())
    refuse_on_threads("init")
    with _lock:
        if is_initialized():
            return
        options = engine_options()
        while True:
            try:
                if not cohort.is_initialized():
                    cohort.init()
                    _formed_world = True
                communicator = _members(cohort.world(), comm)
                _place = _place_of(communicator)
                _open(NamedEngine(communicator, **options), wanted)
                break
            except BaseException as error:
                shutdown()
                # A rank of an elastic job that is lost now will not be in the next world. (An error of cohort.init is
                # final, because cohort.init itself waits for the next world.)
                if is_elastic() and isinstance(error, (Aborted, PeerLost)) and error.operation != "init":
                    cohort.shutdown()
                    continue
                if isinstance(error, Error) and not isinstance(error, ValueError):
                    raise HorovodInitError(f"init failed -- {error}") from error
                raise
        path = str(environment_value("HOROVOD_TIMELINE") or "")
        if path not in ("", "DYNAMIC"):
            start_timeline(path, is_on("HOROVOD_TIMELINE_MARK_CYCLES"))


def form_again() -> None:
    """Leaves the world and forms the next; in an elastic job even if the program had formed the default world."""
    shutdown()
    if is_elastic():
        cohort.shutdown()
    init()


def may_grow() -> bool:
    """Returns True if a world of one has to act as larger ones do, since it may become larger."""
    return is_elastic() or is_on("HOROVOD_ELASTIC")


def is_on(name: str) -> bool:
    """Returns True if a variable's value means yes."""
    return environment_value(name) is True


def _open(engine: NamedEngine, wanted: List[ProcessSet]) -> None:
    for forget in when_formed:
        forget()
    process_sets.open_world(engine)
    for process_set in wanted:
        process_sets.add_process_set(process_set)


def _members(world: Communicator, comm: Any) -> Communicator:
    """Returns a communicator of the ranks that `comm` names. Every rank of the world calls it."""
    if hasattr(comm, "allgather"):
        comm = comm.allgather(world.rank())
    if comm is not None and not isinstance(comm, Iterable):
        comm = [repr(comm)]  # is no rank of the world, so that all ranks learn of the error
    ranks = [] if comm is None else list(comm)
    if not ranks:
        group = world.split()
        assert group is not None
        return group
    known = all(isinstance(r, int) and 0 <= r < world.size() for r in ranks) and len(set(ranks)) == len(ranks)
    fine = known and world.rank() in ranks
    # A rank with a wrong argument takes part, too, because the others wait for it.
    group = world.split(min(ranks), ranks.index(world.rank())) if fine else world.split(None)
    if not known:
        raise ValueError(f"init(comm={ranks}): these are no different ranks of a world of {world.size()}")
    if group is None:
        raise ValueError(
            f"init(comm={ranks}): this process is rank {world.rank()}, which is not in the list -- give each rank a list "
            "that it is in"
        )
    if group.size() != len(ranks):
        raise ValueError(f"init(comm={ranks}): not all of these ranks gave the same list")
    return group


def _place_of(communicator: Communicator) -> _Place:
    sizes = array.array("q", [0] * communicator.size())
    communicator.all_gather(array.array("q", [communicator.local_size()]), sizes)
    return _Place(
        communicator.rank(),
        communicator.size(),
        cohort.local_rank() if is_elastic() else communicator.local_rank(),
        communicator.local_size(),
        communicator.cross_rank(),
        communicator.cross_size(),
        len(set(sizes)) == 1,
    )


def shutdown() -> None:
    """Ends the operations of all ranks; those under way fail on each. `init` may be called again, any number of times.

    Leaves cohort's default world if `init` had formed it. Does nothing if there is no world.
    """
    global _place, _formed_world
    with _lock:
        timeline.stop()
        process_sets.close_world()
        _place = None
        if _formed_world:
            _formed_world = False
            cohort.shutdown()


def is_initialized() -> bool:
    """Returns True if `init` was called, and `shutdown` not yet."""
    return _place is not None


def start_timeline(file_path: Union[str, "os.PathLike[str]"], mark_cycles: bool = False,
                   all_ranks: bool = False) -> None:
    """Writes the progress of each operation from now on to a file for chrome://tracing and Perfetto; rank 0 does.

    mark_cycles  also record when operations were started together
    all_ranks    every rank that calls writes: rank 3 of "a.json" to "a-rank-3.json"; `cohort trace merge` joins them

    Raises ValueError before `init`, and if a timeline is already being written; OSError if the file cannot be written.
    """
    place = _whereabouts("start_timeline")
    if place.rank == 0 or all_ranks:
        timeline.start(os.fspath(file_path), mark_cycles, place.rank, place.size)


def stop_timeline() -> None:
    """Ends the timeline, and completes the file. Raises ValueError before `init`."""
    _whereabouts("stop_timeline")
    timeline.stop()


def _whereabouts(what: str) -> _Place:
    refuse_on_threads(what)
    if _place is None:
        raise ValueError(f"{what}: there is no world yet -- call hvd.init() first")
    return _place


def rank() -> int:
    """Returns this process's number, from 0. This function and those below raise ValueError before `init`."""
    return _whereabouts("rank").rank


def size() -> int:
    """Returns the number of processes."""
    return _whereabouts("size").size


def local_rank() -> int:
    """Returns this process's number among those of its host; see `cohort.local_rank`. So
    `torch.cuda.set_device(hvd.local_rank())` gives a new process the GPU that is free."""
    return _whereabouts("local_rank").local_rank


def local_size() -> int:
    """Returns the number of processes on this host."""
    return _whereabouts("local_size").local_size


def cross_rank() -> int:
    """Returns this host's number among the hosts that have this local rank."""
    return _whereabouts("cross_rank").cross_rank


def cross_size() -> int:
    """Returns the number of hosts that have this local rank."""
    return _whereabouts("cross_size").cross_size


def is_homogeneous() -> bool:
    """Returns True if all hosts have the same number of processes."""
    return _whereabouts("is_homogeneous").homogeneous


def mpi_threads_supported() -> bool:
    """Raises ValueError: there is no MPI here."""
    _whereabouts("mpi_threads_supported")
    raise ValueError("mpi_threads_supported: MPI is not in use")


def mpi_built() -> bool:
    """Returns False: processes meet without MPI."""
    return False


def gloo_built() -> bool:
    """Returns True: programs use it to learn whether they run without MPI, and may call `init` after `shutdown`."""
    return True


def rocm_built() -> bool:
    """Returns False."""
    return False


def cuda_built() -> bool:
    """Returns False: operations on tensors of TensorFlow, Keras and JAX work in host memory."""
    return False


def nccl_built() -> int:
    """Returns 0, for the reason that `cuda_built` gives."""
    return 0


mpi_enabled, gloo_enabled = mpi_built, gloo_built
ccl_built = ddl_built = rocm_built


def _after_fork() -> None:
    # Another thread of the parent may have held the lock; that thread does not exist here and could not release it.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
