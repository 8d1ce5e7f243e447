"""Runs operations, in eager mode immediately, in a graph by an op that runs when its inputs are computed.

A `Call` describes an operation; `run` returns its results. Nothing here is differentiable: see `_collectives.py`.
"""

from __future__ import annotations

import functools
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from cohort.horovod.arrays import LEAST_TO_HAND_OVER, carry_out
from cohort.horovod.operations import Adasum, Call
from cohort.horovod.process_sets import engine_of
from cohort.tensorflow import _library
from cohort.tensorflow._errors import as_of_tensorflow

# AutoGraph would find nothing to convert in functions called while building a graph, and would take long.
as_it_is = tf.autograph.experimental.do_not_convert

Tensor = Any  # a tf.Tensor, eager or of a graph

# Element types whose large results TensorFlow accepts without a copy; for small results a copy is faster.
_HANDED_OVER = frozenset(np.dtype(name) for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"))


def outermost_graph() -> Any:
    """Returns the graph being built that contains the others (branches, loops, functions that it calls)."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph
    return graph


TYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
         "bool", "complex64", "complex128")  # fmt: skip

# Kinds that keep the tensors' shapes. The others change dimension 0, and report the number of rows by rank.
_SAME_SHAPES = frozenset(["allreduce", "broadcast"])


def run(call: Call, tensors: Sequence[Tensor], splits: Optional[Tensor] = None) -> Tuple[List[Tensor], List[Tensor]]:
    """Returns the results and, for allgather and alltoall, the number of rows of each by rank (int64).

    splits  for alltoall, which takes one tensor: rows for each rank
    """
    if not tensors:
        return [], []
    for tensor in tensors:
        if tensor.dtype.name not in TYPES:
            raise ValueError(
                f"{call.names[0]}: tensors of {tensor.dtype.name} do not travel -- known are {', '.join(TYPES)}"
            )
    if tf.executing_eagerly():
        with as_of_tensorflow():
            return _now(call, tensors, splits)
    engine_of(call.process_set)  # raises if this rank has no engine; a graph may be used in later worlds, too
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            f"{call.names[0]}: graphs and sessions of TensorFlow 1 are not supported -- call it in eager mode, or in a "
            "tf.function of TensorFlow 2"
        )
    if call.op == Adasum and call.kind == "allreduce":
        return _adasum(call, tensors), []
    return _by_library(call, tensors, splits)


# --- eager ---


def _now(call: Call, tensors: Sequence[Tensor], splits: Optional[Tensor]) -> Tuple[List[Tensor], List[Tensor]]:
    arrays = [np.asarray(tensor) for tensor in tensors]  # without a copy, if in host memory
    if splits is not None:
        counts = tuple(int(count) for count in np.asarray(splits))
        call = call._replace(splits=counts)
        if arrays[0].ndim > 0 and min(counts, default=0) >= 0:
            arrays[0] = arrays[0][: sum(counts)]  # later rows are not sent
    results, received = carry_out(call, arrays)
    hand_over = call.kind in _SAME_SHAPES and call.op != Adasum  # nobody else uses the results then
    tensors = [_tensor_over(one) if hand_over else tf.convert_to_tensor(one) for one in results]
    return tensors, [tf.constant(rows, tf.int64) for rows in received]


def _tensor_over(array: Any) -> Tensor:
    """Returns a tensor over an array that nobody else uses."""
    if array.nbytes >= LEAST_TO_HAND_OVER and array.dtype in _HANDED_OVER:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)


# --- in a graph ---

def _by_library(call: Call, tensors: Sequence[Tensor], splits: Optional[Tensor]) -> Tuple[List[Tensor], List[Tensor]]:
    """Creates one op of the library for all tensors. It finds the set's engine when it runs, even in a later world."""
    library = _library.loaded()
    asked = {
        **call.numbers(),
        "names": call.names,
        "prescale": float(call.prescale).hex(),
        "postscale": float(call.postscale).hex(),
        "needs_all_ranks": int(call.needs_all_ranks),
    }
    # A function within a function may be called several times, always with the same names, so its ops run in order.
    in_order = not call.once and tf.compat.v1.get_default_graph() is not outermost_graph()
    with tf.device("CPU:0"):
        if call.kind in _SAME_SHAPES:
            reduce = library.cohort_reduce_in_order if in_order else library.cohort_reduce
            return reduce(tensors=tensors, changing=_changing(), **asked), []
        rows = tf.zeros([0], tf.int64)
        if splits is not None:
            rows = tf.cast(splits, tf.int64)
            tensors = [tensors[0][: tf.reduce_sum(rows)]]  # later rows are not sent
        collective = library.cohort_collective_in_order if in_order else library.cohort_collective
        made = collective(tensors=tensors, splits=rows, changing=_changing(), count=len(tensors), **asked)
    set_shapes(call, tensors, made.results, made.received)
    return made.results, [] if call.kind == "reducescatter" else made.received


@functools.lru_cache(maxsize=None)
def _changing() -> Tensor:
    """Returns an input that is not treated as a constant. An operation with only constant inputs would run once, when a
    graph is optimised, and never again. The input is a tensor from outside of functions; it becomes an argument of
    theirs, unless it is so small that they copy it."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.zeros([1024], tf.int64)


def _adasum(call: Call, tensors: Sequence[Tensor]) -> List[Tensor]:
    """Creates one op that calls Python, which combines the vectors."""

    def carry_out(*values: Tensor) -> List[Tensor]:
        with as_of_tensorflow():
            return _now(call, values, None)[0]

    results = tf.py_function(carry_out, list(tensors), [tensor.dtype for tensor in tensors])
    set_shapes(call, tensors, results, [])
    return results


def set_shapes(call: Call, tensors: Sequence[Tensor], results: List[Tensor], received: List[Tensor]) -> None:
    """Sets the known parts of the results' shapes."""
    for tensor, result in zip(tensors, results):
        if call.kind in _SAME_SHAPES:
            result.set_shape(tensor.shape)
        elif tensor.shape.rank:
            result.set_shape([None, *tensor.shape[1:]])
    for rows in received:
        rows.set_shape([None])
