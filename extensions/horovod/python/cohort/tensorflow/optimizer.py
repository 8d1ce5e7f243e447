"""Horovod's optimizers for TensorFlow: Keras's are in `cohort.keras`; TensorFlow 1's are not supported."""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

from cohort.horovod.process_sets import ProcessSet, global_process_set
from cohort.horovod.operations import Average
from cohort.tensorflow.compression import Compression


def DistributedOptimizer(optimizer: Any, name: Any = None, use_locking: bool = False, device_dense: str = "",
                         device_sparse: str = "", compression: Any = Compression.none, sparse_as_dense: bool = False,
                         backward_passes_per_step: int = 1, op: int = Average, gradient_predivide_factor: float = 1.0,
                         average_aggregated_gradients: bool = False, num_groups: int = 0, groups: Any = None,
                         process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True) -> Any:  # fmt: skip
    """`cohort.keras.DistributedOptimizer` for an optimizer of Keras. Raises ValueError for one of TensorFlow 1."""
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise ValueError(
            f"DistributedOptimizer: {type(optimizer).__name__} is an optimizer of TensorFlow 1, which is not supported -- use "
            "one of tf.keras.optimizers, or hvd.DistributedGradientTape"
        )
    keras = importlib.import_module("cohort.keras")
    return keras.DistributedOptimizer(
        optimizer, name=name, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
        sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor, op=op,
        backward_passes_per_step=backward_passes_per_step, average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups, groups=groups, process_set=process_set, scale_local_gradients=scale_local_gradients,
    )  # fmt: skip


class BroadcastGlobalVariablesHook:
    """Raises NotImplementedError, because it belongs to the sessions of TensorFlow 1."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        raise NotImplementedError(
            "BroadcastGlobalVariablesHook: sessions of TensorFlow 1 are not supported -- call hvd.broadcast_variables("
            "model.variables, root_rank) before the first step"
        )
