"""Batch normalization with the mean and variance of all ranks' batches: a Keras layer for TensorFlow."""

from __future__ import annotations

from typing import Any, Tuple

import tensorflow as tf

from cohort.horovod.process_sets import ProcessSet, global_process_set
from cohort.horovod.operations import Sum
from cohort.tensorflow._collectives import allreduce


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Like tf.keras.layers.BatchNormalization, over the batches of all ranks of a set, which may be of different sizes.

    Statistics are in float32, or in float64 for float64 input. With a mask, and in inference, it is the ordinary layer.
    """

    def __init__(self, *args: Any, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        if hasattr(tf.keras.layers.BatchNormalization, "_fused_can_be_used"):  # Keras 2
            if kwargs.get("fused"):
                raise ValueError("SyncBatchNormalization: fused=True computes each rank's own statistics")
            kwargs["fused"] = False
        super().__init__(*args, **kwargs)
        self.process_set = process_set

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> Tuple[Any, Any]:
        # Keras 3: (inputs, mask); Keras 2: (inputs, reduction_axes, keep_dims).
        masked = bool(args) and args[0] is not None and hasattr(args[0], "dtype")
        if masked or self.process_set.size() == 1:
            result: Tuple[Any, Any] = super()._moments(inputs, *args, **kwargs)
            return result
        axis = self.axis if isinstance(self.axis, int) else self.axis[0]
        axis %= inputs.shape.rank
        axes = [i for i in range(inputs.shape.rank) if i != axis]
        keep_dims = bool(args[1] if len(args) > 1 else kwargs.get("keep_dims", False))
        wide = tf.cast(inputs, tf.float64 if inputs.dtype == tf.float64 else tf.float32)
        rows = tf.cast(tf.size(wide) / tf.maximum(tf.shape(wide)[axis], 1), wide.dtype)
        own = tf.concat([tf.reduce_sum(wide, axes), tf.reduce_sum(tf.square(wide), axes), [rows]], 0)
        total = allreduce(own, op=Sum, name=f"sync_batch_norm.{self.name}", process_set=self.process_set)
        sums, squares = tf.split(total[:-1], 2)
        mean = sums / total[-1]
        variance = tf.maximum(squares / total[-1] - tf.square(mean), 0.0)
        if keep_dims:
            shape = [1] * inputs.shape.rank
            shape[axis] = -1
            mean, variance = tf.reshape(mean, shape), tf.reshape(variance, shape)
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)
