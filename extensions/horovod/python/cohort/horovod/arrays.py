"""Operations on NumPy arrays, for frameworks whose tensors can be viewed as such without a copy."""

from __future__ import annotations

import math
from typing import Any, List, Sequence, Tuple

import numpy as np

from cohort.horovod.operations import Adasum, Call, adasum, note_of, require_same_notes, wait_for
from cohort.horovod.process_sets import engine_of, root_in

# Frameworks take over memory with this alignment without a copy; below this size a copy costs less.
_ALIGNMENT = 64
LEAST_TO_HAND_OVER = 64 << 10


def carry_out(call: Call, arrays: Sequence[Any]) -> Tuple[List[Any], List[List[int]]]:
    """Runs the operation and waits. Returns new arrays and, for allgather and alltoall, the rows of each by rank."""
    if call.kind in ("allreduce", "broadcast") and call.op != Adasum:
        made = [empty(array.shape, array.dtype) for array in arrays]
        if call.kind == "allreduce":
            wait_for(call.start(arrays, made))
            return made, []
        if engine_of(call.process_set).rank() == root_in(call.process_set, call.root):
            for copied, array in zip(made, arrays):
                np.copyto(copied, array)
        wait_for(call.start(made))
        return made, []
    adds = call.op == Adasum
    works = call.start([_with_note(array, note_of(call)) for array in arrays] if adds else arrays)
    wait_for(works)
    results = [_made_by(work, array.dtype) for work, array in zip(works, arrays)]
    if adds:
        return [_combined(rows, array, call, work.received_splits) for rows, array, work in zip(results, arrays, works)], []
    return results, [] if call.kind == "reducescatter" else [list(work.received_splits) for work in works]


def _with_note(array: Any, note: bytes) -> Any:
    """Returns the array's elements, followed by elements that hold the note's bytes."""
    return np.concatenate([array.reshape(-1), np.frombuffer(note, np.uint8).view(array.dtype)])


def _combined(rows: Any, array: Any, call: Call, received: Sequence[int]) -> Any:
    require_same_notes(call, [row[array.size :].tobytes() for row in rows], received)
    rows = rows[:, : array.size]
    wide = np.float64 if array.dtype == np.float64 else np.float32
    vectors = [row.astype(wide) * wide(call.prescale) for row in rows]
    result = adasum(vectors, lambda a, b: float(a.astype(np.float64) @ b.astype(np.float64))) * wide(call.postscale)
    return result.astype(array.dtype).reshape(array.shape)


def empty(shape: Tuple[int, ...], dtype: Any) -> Any:
    """Returns memory for a result that frameworks can take over."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST_TO_HAND_OVER:
        return np.empty(shape, dtype)
    whole = np.empty(size + _ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % _ALIGNMENT
    return whole[start : start + size].view(dtype).reshape(shape)


def _made_by(work: Any, dtype: Any) -> Any:
    """Returns an operation's result, without a copy, as elements of `dtype`, because the buffer protocol has no bfloat16."""
    result = work.result
    if result.nbytes == 0:
        return np.empty(result.shape, dtype)
    return np.frombuffer(result, np.uint8).view(np.dtype(dtype)).reshape(result.shape)
