"""Carries out operations: at once in eager mode; in a graph by an op that runs when its inputs are there.

A `Call` says what is asked for; `run` gives the results. Nothing here is differentiable: see `_collectives.py`.
"""

from __future__ import annotations

import functools
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from cohort.hvd.arrays import LEAST_TO_HAND_OVER, carry_out
from cohort.hvd.operations import Adasum, Call
from cohort.hvd.process_sets import engine_of
from cohort.tensorflow import _library
from cohort.tensorflow._errors import as_of_tensorflow

# There is nothing for AutoGraph to convert in functions that are called while a graph is made; it would take long.
as_it_is = tf.autograph.experimental.do_not_convert

Tensor = Any  # a tf.Tensor, eager or of a graph

# Element types whose larger results TensorFlow takes without a copy; for small ones that takes longer than a copy.
_HANDED_OVER = frozenset(np.dtype(name) for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"))


def outermost_graph() -> Any:
    """The graph that is being made, with all that lies within: branches, loops, functions that it calls."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph
    return graph


TYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
         "bool", "complex64", "complex128")  # fmt: skip

# Kinds that keep the tensors' shapes. The others change dimension 0, and report how many rows came from each rank.
_SAME_SHAPES = frozenset(["allreduce", "broadcast"])


def run(call: Call, tensors: Sequence[Tensor], splits: Optional[Tensor] = None) -> Tuple[List[Tensor], List[Tensor]]:
    """The results, and of allgather and alltoall for each the rows that came from each rank (int64).

    splits  of alltoall, which takes one tensor: rows for each rank
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
    engine_of(call.process_set)  # or the reason why this rank has none; a graph may be used in later worlds, too
    library = _library.loaded()
    if library is None or (call.op == Adasum and call.kind == "allreduce"):
        return _by_python(call, tensors, splits)
    return _by_library(library, call, tensors, splits)


# --- eager ---


def _now(call: Call, tensors: Sequence[Tensor], splits: Optional[Tensor]) -> Tuple[List[Tensor], List[Tensor]]:
    arrays = [np.asarray(tensor) for tensor in tensors]  # without a copy, if in the host's memory
    if splits is not None:
        counts = tuple(int(count) for count in np.asarray(splits))
        call = call._replace(splits=counts)
        if arrays[0].ndim > 0 and min(counts, default=0) >= 0:
            arrays[0] = arrays[0][: sum(counts)]  # later rows are not sent
    results, received = carry_out(call, arrays)
    hand_over = call.kind in _SAME_SHAPES and call.op != Adasum  # then nobody else uses them
    tensors = [_tensor_over(one) if hand_over else tf.convert_to_tensor(one) for one in results]
    return tensors, [tf.constant(rows, tf.int64) for rows in received]


def _tensor_over(array: Any) -> Tensor:
    """A tensor of an array that nobody else uses."""
    if array.nbytes >= LEAST_TO_HAND_OVER and array.dtype in _HANDED_OVER:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)


# --- in a graph ---

def _by_library(library: Any, call: Call, tensors: Sequence[Tensor],
                splits: Optional[Tensor]) -> Tuple[List[Tensor], List[Tensor]]:  # fmt: skip
    """One op of the library for all tensors. It finds the set's engine when it runs, which may be in a later world."""
    asked = {
        **call.numbers(),
        "names": call.names,
        "prescale": float(call.prescale).hex(),
        "postscale": float(call.postscale).hex(),
        "needs_all_ranks": int(call.needs_all_ranks),
    }
    # A function within another may be called there several times, and the names are the same in all of its calls.
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


def _changing() -> Tensor:
    """An input that is not taken for a constant: of constants alone, operations would be carried out once, as a graph is
    optimised, and never again."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        # In a session nothing is passed in. TensorFlow does not fold its generators of random numbers; nor does it put
        # them, unlike other stateful operations, in the order of the program.
        zero, one = tf.constant(0, tf.int64), tf.constant(1, tf.int64)
        return tf.raw_ops.RandomUniformInt(shape=tf.zeros([0], tf.int32), minval=zero, maxval=one, seed=1, seed2=1)
    return _passed_in()


@functools.lru_cache(maxsize=None)
def _passed_in() -> Tensor:
    """Returns a tensor from outside of functions, which is an argument of theirs, unless it is so small that they copy
    it."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.zeros([1024], tf.int64)


def _has_an_order() -> bool:
    """True if operations of the graph that is being made are carried out in their order, as within functions."""
    graph = tf.compat.v1.get_default_graph()
    return tf.compat.v1.executing_eagerly_outside_functions() or getattr(graph, "_add_control_dependencies", False)


def _by_python(call: Call, tensors: Sequence[Tensor], splits: Optional[Tensor]) -> Tuple[List[Tensor], List[Tensor]]:
    """One op that calls Python for all tensors."""
    if not _has_an_order():
        kind = "adasum" if call.op == Adasum else call.kind
        raise RuntimeError(
            f"{kind} {call.names[0]!r} -- in a graph of TensorFlow 1 -- by a call back into Python it holds one of "
            "TensorFlow's threads until it is done, and such a graph has no order that is the same on all ranks: they would "
            "wait for each other -- call it within a tf.function of that graph, or use the op library (not Adasum; "
            "COHORT_TENSORFLOW_OP unset)"
        )
    tensors = list(tensors)
    given = tensors if splits is None else [*tensors, splits]
    counted = call.kind in ("allgather", "alltoall")

    def carry_out(*values: Tensor) -> List[Tensor]:
        with as_of_tensorflow():
            results, received = _now(call, values[: len(tensors)], values[len(tensors)] if splits is not None else None)
        return [*results, *received]

    types = [tensor.dtype for tensor in tensors] + [tf.int64] * (len(tensors) if counted else 0)
    made = tf.py_function(carry_out, given, types)
    results, received = made[: len(tensors)], made[len(tensors) :]
    set_shapes(call, tensors, results, received)
    return results, received


def set_shapes(call: Call, tensors: Sequence[Tensor], results: List[Tensor], received: List[Tensor]) -> None:
    """Tells the graph what is known of the results' shapes."""
    for tensor, result in zip(tensors, results):
        if call.kind in _SAME_SHAPES:
            result.set_shape(tensor.shape)
        elif tensor.shape.rank:
            result.set_shape([None, *tensor.shape[1:]])
    for rows in received:
        rows.set_shape([None])
