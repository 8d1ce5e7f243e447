"""Horovod's API for Keras over Cohort: `import cohort.keras as hvd`, and the rest of a program stays as it is.

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

For Keras 3 with TensorFlow, torch or JAX behind it, and for Keras 2 (tf_keras). docs/reference/keras.md has the rest.
"""

from __future__ import annotations

from cohort._horovod.exceptions import HorovodInternalError
from cohort._horovod.objects import allgather_object, broadcast_object
from cohort._horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from cohort._horovod.reduce_ops import Average, Max, Min, Product, Sum
from cohort._horovod.runtime import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from cohort.keras import _flavor, _training, callbacks, elastic
from cohort.keras._models import load_model
from cohort.keras._values import allgather, allreduce, broadcast, broadcast_global_variables, reducescatter
from cohort.keras.compression import Compression
from cohort.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer

# Before there is an optimizer: in `model.compile(hvd.DistributedOptimizer(...))` the method is found first.
_training.install(_flavor.name())

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
