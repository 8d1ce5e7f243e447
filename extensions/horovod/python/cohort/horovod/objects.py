"""Sends any object, or a small array, to all ranks of a set; without a framework."""

from __future__ import annotations

import array
from typing import Any, List, Optional, Tuple

from cohort._launch.pickling import dumps_for_ranks, loads_of_ranks
from cohort.horovod.exceptions import HorovodInternalError
from cohort.horovod.process_sets import ProcessSet, engine_of, global_process_set, root_in
from cohort.horovod.operations import finished, named


def broadcast_array(data: Any, root_rank: int, name: str, process_set: ProcessSet = global_process_set) -> None:
    """Fills `data`, any writable buffer, with the contents of `root_rank`'s `data`. All ranks of the set call it."""
    engine = engine_of(process_set)
    root = root_in(process_set, root_rank)
    full = named("broadcast", name, process_set)
    finished("BROADCAST", [full], engine.broadcast_group, [full], [data], root, needs_all_ranks=True)


def broadcast_object(obj: Any, root_rank: int = 0, name: Optional[str] = None,
                     process_set: ProcessSet = global_process_set) -> Any:  # fmt: skip
    """Returns `root_rank`'s object on every rank; on that rank the same object. The object is pickled.

    Raises on that rank the error of pickling, and on the others HorovodInternalError with its text; also raised on
    ranks that cannot unpickle the object.
    """
    is_root = engine_of(process_set).rank() == root_in(process_set, root_rank)
    base = named("object", name, process_set)
    data, failure = bytearray(), None
    if is_root:
        try:
            data = bytearray(dumps_for_ranks(obj))
        except Exception as error:  # the other ranks have to learn of the error
            failure = error
            data = bytearray(dumps_for_ranks(f"{type(error).__name__}: {error}"))
    head = array.array("q", [len(data), int(failure is not None)])
    broadcast_array(head, root_rank, f"{base}.size", process_set)
    size, failed = head
    if not is_root:
        data = bytearray(size)
    broadcast_array(data, root_rank, f"{base}.data", process_set)
    if failure is not None:
        raise failure
    if failed:
        raise HorovodInternalError(f"broadcast_object: rank {root_rank} could not pickle its object -- {loads_of_ranks(data)}")
    return obj if is_root else _loaded(data, "broadcast_object", root_rank)


def allgather_object(obj: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> List[Any]:
    """Returns the objects of all ranks of the set, in rank order. Objects are pickled.

    Raises on a rank the error of pickling its object, and on the others HorovodInternalError with its text; raises on
    all ranks if an object cannot be unpickled.
    """
    failure = None
    try:
        data = bytearray(dumps_for_ranks((None, obj)))
    except Exception as error:  # the other ranks have to learn of the error
        failure = error
        data = bytearray(dumps_for_ranks((f"{type(error).__name__}: {error}", None)))
    engine = engine_of(process_set)
    full = named("object", name, process_set)
    work = finished("ALLGATHER", [full], engine.all_gather_group, [full], [data], needs_all_ranks=True)[0]
    if failure is not None:
        raise failure
    everything = memoryview(work.result)  # there is a result: all ranks have contributed theirs
    parts: List[Tuple[Optional[str], Any]] = []
    at = 0
    ranks = process_set.ranks or []
    for rank, size in zip(ranks, work.received_splits):
        parts.append(_loaded(everything[at : at + size], "allgather_object", rank))
        at += size
    for rank, (problem, _) in zip(ranks, parts):
        if problem is not None:
            raise HorovodInternalError(f"allgather_object: rank {rank} could not pickle its object -- {problem}")
    return [one for _, one in parts]


def _loaded(data: Any, what: str, rank: int) -> Any:
    try:
        return loads_of_ranks(data)
    except Exception as error:
        raise HorovodInternalError(
            f"{what}: the object of rank {rank} was pickled there and cannot be unpickled here -- {type(error).__name__}: {error} "
            "-- give its class a __reduce__ or a __getstate__ that fits its constructor, or send plain values"
        ) from error
