"""A step's communication if Keras uses TensorFlow: operations of a graph, or eager ones."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from cohort.horovod.process_sets import ProcessSet
from cohort.horovod.operations import Min, Sum

from cohort.tensorflow._gradients import alike, reduce_gradients, zeros
from cohort.tensorflow.compression import Compression

__all__ = ["Compression", "alike", "reduce_gradients", "zeros"]


OVERLAPS = True  # a graph's operations begin when their inputs are computed


def total(count: Any, name: str, process_set: ProcessSet) -> Any:
    """Returns the sum of a number over ranks."""
    return reduce_gradients([tf.cast(count, tf.float64)], [name], op=Sum, process_set=process_set)[0]


def all_true(flag: Any, name: str, process_set: ProcessSet) -> Any:
    """Returns whether a flag is set on all ranks."""
    return tf.cast(reduce_gradients([tf.cast(flag, tf.uint8)], [name], op=Min, process_set=process_set)[0], tf.bool)


def factor_of(count: Any, ranks: int, samples: Any) -> Any:
    """Returns this rank's fraction of all samples, times the number of ranks."""
    return tf.math.divide_no_nan(tf.cast(count, tf.float64) * ranks, samples)


def times(value: Any, factor: Any) -> Any:
    """Returns a loss or a gradient, multiplied by that factor."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(times(value.values, factor), value.indices, value.dense_shape)
    return value * tf.cast(factor, value.dtype)


def samples_in(leaf: Any) -> Any:
    """Returns the number of samples of a batch."""
    return leaf.shape[0] if leaf.shape[0] is not None else tf.shape(leaf)[0]


def type_of_indices(gradient: Any) -> Any:
    """Returns the type of a sparse gradient's indices; None for others."""
    return gradient.indices.dtype if isinstance(gradient, tf.IndexedSlices) else None
