"""Horovod's API for TensorFlow over Cohort: `import cohort.tensorflow as hvd`, and the rest of a program stays as it is.

    hvd.init()
    tape = hvd.DistributedGradientTape(tape)
    hvd.broadcast_variables(model.variables, root_rank=0)

What differs from Horovod is listed in docs/reference/tensorflow.md. Tensors are in the host's memory. For Keras:
`cohort.keras`.
"""

from __future__ import annotations

from cohort.tensorflow import elastic, mpi_ops
from cohort.tensorflow._errors import as_internal_error
from cohort.tensorflow.compression import Compression
from cohort.tensorflow.functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from cohort.tensorflow.gradient_tape import DistributedGradientTape, PartialDistributedGradientTape
from cohort.tensorflow.mpi_ops import *  # noqa: F403 -- the operations and the questions
from cohort.tensorflow.optimizer import BroadcastGlobalVariablesHook, DistributedOptimizer
from cohort.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    *mpi_ops.__all__,
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather_object",
    "as_internal_error",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
]
