"""Makes variables equal on all ranks."""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

from cohort.horovod.objects import broadcast_object
from cohort.horovod.process_sets import ProcessSet, engine_of, global_process_set, root_in
from cohort.horovod.operations import finished, named
from cohort.keras import _flavor


def broadcast_variables(variables: Sequence[Any], root_rank: int, name: str,
                        process_set: ProcessSet = global_process_set) -> None:  # fmt: skip
    """Sets variables to the values of `root_rank`. If name, shape or type differ, raises ValueError on the ranks
    concerned and HorovodInternalError on the others."""
    import numpy

    engine = engine_of(process_set)
    if engine.size() == 1:
        return
    root = root_in(process_set, root_rank)
    paths = _flavor.unique_paths(variables)
    values = [_flavor.value_of(one) for one in variables]
    outline = [(path, tuple(value.shape), str(value.dtype)) for path, value in zip(paths, values)]
    theirs: List[Tuple[str, Tuple[int, ...], str]] = broadcast_object(outline, root_rank, f"keras.{name}", process_set)
    if [one[1:] for one in theirs] != [one[1:] for one in outline]:
        raise ValueError(f"broadcast of {name}: {_difference(outline, theirs, root_rank)}")
    if not values:
        return
    # Sent as bytes, because 16-bit types of other packages do not support buffers.
    flat = [numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8) for value in values]
    names = [named("broadcast", f"keras.{name}.{i}.{one[0]}", process_set) for i, one in enumerate(theirs)]
    full = [i for i, one in enumerate(flat) if one.size]
    sent = [names[i] for i in full]
    finished("BROADCAST", sent, engine.broadcast_group, sent, [flat[i] for i in full], root, needs_all_ranks=True)
    if engine.rank() != root:
        for variable, value, data in zip(variables, values, flat):
            variable.assign(data.view(value.dtype).reshape(value.shape))


def _difference(mine: Sequence[Any], theirs: Sequence[Any], root_rank: int) -> str:
    for own, other in zip(mine, theirs):
        if own[1:] != other[1:]:
            return (
                f"this rank has {own[0]} {list(own[1])} {own[2]} where rank {root_rank} has {other[0]} {list(other[1])} "
                f"{other[2]} -- make the same model on all ranks"
            )
    return f"this rank has {len(mine)} variables, rank {root_rank} {len(theirs)} -- make the same model on all ranks"
