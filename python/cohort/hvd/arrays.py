"""Operations on NumPy arrays, for frameworks whose tensors are seen as such where they lie."""

from __future__ import annotations

import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from cohort.hvd.operations import ENGINE_OPS, Adasum, Average, adasum, finished
from cohort.hvd.process_sets import ProcessSet, engine_of, root_in

# Frameworks take over memory that begins so, without a copy; below this size a copy costs less.
_ALIGNMENT = 64
LEAST_TO_HAND_OVER = 64 << 10


class Call(NamedTuple):
    """An operation on some tensors, each under a name of its own, which all ranks of the set ask for."""

    kind: str  # allreduce (also Adasum), broadcast, allgather, reducescatter or alltoall
    names: Sequence[str]
    process_set: ProcessSet
    op: int = Average
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0  # a rank of the world
    needs_all_ranks: bool = True  # of broadcast and allgather: fails while some ranks have joined
    splits: Optional[Tuple[int, ...]] = None  # of alltoall, which takes one tensor: rows for each rank

    # Of a compiled program of JAX's: the rows of each rank, which the others have to have brought.
    rows: Tuple[Tuple[int, ...], ...] = ()
    # In a graph of TensorFlow's each name is asked for once at a time, however functions call each other.
    once: bool = False


def carry_out(call: Call, arrays: Sequence[Any]) -> Tuple[List[Any], List[List[int]]]:
    """Does it, and waits. Returns new arrays and, of allgather and alltoall, the rows that came from each rank for each."""
    engine, names = engine_of(call.process_set), list(call.names)
    if not names:
        return [], []
    if call.kind == "broadcast":
        made = [empty(array.shape, array.dtype) for array in arrays]
        root = root_in(call.process_set, call.root)
        if engine.rank() == root:
            for copied, array in zip(made, arrays):
                np.copyto(copied, array)
        finished("BROADCAST", names, engine.broadcast_group, names, made, root, needs_all_ranks=call.needs_all_ranks)
        return made, []
    if call.op == Adasum:
        rows = [array.reshape(1, -1) for array in arrays]
        works = finished("ADASUM", names, engine.all_gather_group, names, rows, needs_all_ranks=True)
        return [_combined(_made_by(work, array.dtype), array, call) for work, array in zip(works, arrays)], []
    if call.kind == "allreduce":
        made = [empty(array.shape, array.dtype) for array in arrays]
        finished("ALLREDUCE", names, engine.all_reduce_group, names, arrays, made, op=ENGINE_OPS[call.op],
                 prescale=call.prescale, postscale=call.postscale)  # fmt: skip
        return made, []
    if call.kind == "reducescatter":
        works = finished("REDUCESCATTER", names, engine.reduce_scatter_group, names, arrays, op=ENGINE_OPS[call.op],
                         prescale=call.prescale, postscale=call.postscale)  # fmt: skip
        return [_made_by(work, array.dtype) for work, array in zip(works, arrays)], []
    if call.kind == "allgather":
        works = finished("ALLGATHER", names, engine.all_gather_group, names, arrays, needs_all_ranks=call.needs_all_ranks)
    else:
        works = finished("ALLTOALL", names, engine.all_to_all, names[0], arrays[0], call.splits)
    results = [_made_by(work, array.dtype) for work, array in zip(works, arrays)]
    return results, [list(work.received_splits) for work in works]


def _combined(rows: Any, array: Any, call: Call) -> Any:
    wide = np.float64 if array.dtype == np.float64 else np.float32
    vectors = [row.astype(wide) * wide(call.prescale) for row in rows]
    result = adasum(vectors, lambda a, b: float(a.astype(np.float64) @ b.astype(np.float64))) * wide(call.postscale)
    return result.astype(array.dtype).reshape(array.shape)


def empty(shape: Tuple[int, ...], dtype: Any) -> Any:
    """Memory for a result, such as frameworks take over."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST_TO_HAND_OVER:
        return np.empty(shape, dtype)
    whole = np.empty(size + _ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % _ALIGNMENT
    return whole[start : start + size].view(dtype).reshape(shape)


def _made_by(work: Any, dtype: Any) -> Any:
    """What an operation has made, where it lies, in elements of `dtype`: the buffer protocol knows no bfloat16."""
    result = work.result
    if result.nbytes == 0:
        return np.empty(result.shape, dtype)
    return np.frombuffer(result, np.uint8).view(np.dtype(dtype)).reshape(result.shape)
