"""Process sets: groups of ranks with separate operations. Each has its own engine, so sets do not block each other.

`add_process_set` and `remove_process_set` may be called at any time, by all ranks, in the same order.
"""

from __future__ import annotations

import itertools
import numbers
from collections import defaultdict
from typing import Any, DefaultDict, Dict, Iterable, Iterator, List, Optional, Sequence, Union

from cohort._core import NamedEngine, environment_value
from cohort._process.world import refuse_on_threads
from cohort.errors import Error
from cohort.horovod.exceptions import HorovodInternalError, translated

__all__ = ["ProcessSet", "add_process_set", "get_process_set_ids_and_ranks", "global_process_set",
           "is_process_set_registered", "remove_process_set"]  # fmt: skip

_keys = itertools.count()


class ProcessSet:
    """A set of ranks.

    process_set_id  None until the set is added; 0 is the set of all ranks
    ranks           their numbers in the world of `init`, ascending
    mpi_comm        always None: sets are given by ranks

    Raises ValueError unless `ranks` is a list of different ranks, also for an MPI communicator.
    """

    process_set_id: Optional[int] = None
    ranks: Optional[List[int]] = None
    mpi_comm: Any = None

    # The set's key in compiled programs: unique to this set, and the same after the next `init`.
    _key: int

    # For a set that has been added: its engine (None if this rank is not in the set) and the numbers of unnamed
    # operations.
    _engine: Optional[NamedEngine] = None
    _counters: DefaultDict[str, Iterator[int]]

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        if hasattr(ranks_or_comm, "Get_rank"):
            raise ValueError(
                "a process set of an MPI communicator -- Cohort does not use MPI here -- give the list of its ranks"
            )
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(f"ProcessSet({ranks_or_comm!r}): a list of ranks is needed")
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, numbers.Integral) or isinstance(rank, bool) for rank in ranks):
            raise ValueError(f"ProcessSet({ranks_or_comm!r}): ranks have to be integers")
        self.ranks = sorted(int(rank) for rank in ranks)
        self._key = next(_keys)
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"ProcessSet({ranks_or_comm!r}): each rank can be in it only once")
        self._counters = _new_counters()

    def size(self) -> Optional[int]:
        """Returns the number of ranks; None until the set is added."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> Optional[int]:
        """Returns this process's number in the set; None until it is added. Raises ValueError if not in the set."""
        if self.process_set_id is None or self.ranks is None:
            return None
        if self._engine is None:
            raise ValueError(f"{self}: this process is rank {_global_rank()}, which is not in it")
        return self._engine.rank()

    def included(self) -> Optional[bool]:
        """Returns True if this process is in the set; None until the set is added."""
        return None if self.process_set_id is None else self._engine is not None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__

    def __deepcopy__(self, memo: Any) -> "ProcessSet":
        return self  # a copy of a layer with a set uses the same set

    def __reduce__(self) -> Any:
        return _unpickled, (self.ranks, self is global_process_set)

    # --- of this package ---

    def _open(self, number: int, engine: Optional[NamedEngine]) -> None:
        self.process_set_id = number
        self._engine = engine
        if engine is not None:
            engine.publish(self._key)
        self._counters = _new_counters()

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        self.process_set_id = None
        if engine is not None:
            try:
                engine.shutdown()
            except Error:
                pass  # the engine had ended before, and its waiting callers know why

    def _renumber(self) -> None:
        """Numbers unnamed operations from 0 again, on all ranks."""
        self._counters = _new_counters()

    def _number(self, kind: str) -> int:
        """Returns the next number for an unnamed operation of a kind; the same on all ranks, if called in one order."""
        return next(self._counters[kind])


def _new_counters() -> DefaultDict[str, Iterator[int]]:
    return defaultdict(itertools.count)


def _unpickled(ranks: List[int], is_global: bool) -> ProcessSet:
    """Returns the set of these ranks, if there is one; else a new one that is not added yet."""
    if is_global:
        return global_process_set
    return next((one for one in _sets.values() if one.ranks == ranks), ProcessSet(ranks))


global_process_set = ProcessSet([])
"""The set of all ranks. Already usable as an argument before `init`."""

_sets: Dict[int, ProcessSet] = {}  # sets that were added, except the global one


def engine_of(process_set: ProcessSet) -> NamedEngine:
    """Returns the engine that runs the set's operations; raises with the reason if this rank has none."""
    refuse_on_threads("an operation")
    engine = process_set._engine
    if engine is not None:
        return engine
    if global_process_set._engine is None:
        raise HorovodInternalError(
            "there is no world for this operation -- hvd.init() was not called, or hvd.shutdown() was -- call hvd.init()"
        )
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} was not added, or removed -- call hvd.add_process_set on all ranks")
    raise ValueError(
        f"{process_set}: this process is rank {_global_rank()}, which is not in it -- only its ranks may call this"
    )


def root_in(process_set: ProcessSet, root_rank: int) -> int:
    """Converts a rank of the world to its number in the set."""
    if process_set is global_process_set:
        return root_rank  # the engine knows its ranks
    try:
        return (process_set.ranks or []).index(root_rank)
    except ValueError:
        raise ValueError(f"root rank {root_rank} is not in {process_set} -- root ranks are ranks of the world") from None


def _global_rank() -> Optional[int]:
    engine = global_process_set._engine
    return None if engine is None else engine.rank()


def require_world(what: str) -> None:
    """Raises ValueError before `init`, as Horovod does, which needs the world's size here."""
    _global_engine(what)


def _global_engine(what: str) -> NamedEngine:
    engine = global_process_set._engine
    if engine is None:
        raise ValueError(f"{what}: there is no world yet -- call hvd.init() first")
    return engine


def add_process_set(process_set: Union[ProcessSet, Sequence[int]]) -> ProcessSet:
    """Makes a set usable; all ranks call it, with the same ranks, in the same order. Blocks until all have called.

    Returns the set. Raises ValueError before `init`, for ranks that do not exist, and for a set of the same ranks as
    another; HorovodInternalError if the ranks did not agree.
    """
    engine = _global_engine("add_process_set")
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = process_set.ranks or []
    if process_set.process_set_id is not None:
        raise ValueError(f"add_process_set: {process_set} has been added already")
    if not ranks or ranks[0] < 0 or ranks[-1] >= engine.size():
        raise ValueError(f"add_process_set({ranks}): its ranks have to be among the {engine.size()} of the world")
    for other in (global_process_set, *_sets.values()):
        if other.ranks == ranks:
            raise ValueError(f"add_process_set({ranks}): there is a set of the same ranks already -- {other}")
    try:
        communicator = engine.form_group(ranks)
        own = None if communicator is None else NamedEngine(communicator, **engine_options())
    except Error as error:
        raise translated(error) from error
    number = next(number for number in itertools.count(1) if number not in _sets)
    _sets[number] = process_set
    process_set._open(number, own)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a set; all ranks call it, in the same order. Blocks until all have called. Its operations in progress fail.

    Returns False, and does nothing, for a set that was not added and for the global one. Raises HorovodInternalError if
    the ranks did not agree.
    """
    number = process_set.process_set_id
    if number is None or _sets.get(number) is not process_set:
        return False
    engine = _global_engine("remove_process_set")
    try:
        # Two ranks that remove different sets wait under different names, and fail at the deadline.
        engine.barrier(f"remove_process_set.{process_set.ranks}").wait()
    except Error as error:
        raise translated(error) from error
    del _sets[number]
    process_set._close()
    return True


def is_process_set_registered(process_set: ProcessSet) -> bool:
    """Returns True if ranks in the set can call its operations."""
    return process_set.process_set_id is not None


def get_process_set_ids_and_ranks() -> Dict[int, List[int]]:
    """Returns all sets: {process_set_id: ranks}, with the global one."""
    sets = {0: global_process_set, **_sets} if global_process_set.process_set_id is not None else {}
    return {number: list(one.ranks or []) for number, one in sets.items()}


def engine_options() -> Dict[str, Any]:
    """Returns arguments for `NamedEngine` from HOROVOD_* variables. Raises InvalidArgument for wrong values."""
    stall = environment_value("HOROVOD_STALL_CHECK_TIME_SECONDS")
    options: Dict[str, Any] = {
        "fusion_threshold": environment_value("HOROVOD_FUSION_THRESHOLD"),
        "cache_capacity": environment_value("HOROVOD_CACHE_CAPACITY"),
    }
    if environment_value("HOROVOD_STALL_CHECK_DISABLE") is True:
        options["stall_after"] = None
    elif stall:
        options["stall_after"] = stall
    limit = environment_value("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    if limit:
        options["timeout"] = limit
    return options


def open_world(engine: NamedEngine) -> None:
    """Called when `init` has formed a world."""
    global_process_set.ranks = list(range(engine.size()))
    global_process_set._open(0, engine)


def close_world() -> None:
    """Ends all sets, the global one last, since the others depend on it."""
    for process_set in list(_sets.values()):
        process_set._close()
    _sets.clear()
    global_process_set._close()
    global_process_set.ranks = []
