"""Horovod's API for TensorFlow over Cohort: `import cohort.tensorflow as hvd`, the rest of a program stays as it is.

    hvd.init()
    tape = hvd.DistributedGradientTape(tape)
    hvd.broadcast_variables(model.variables, root_rank=0)

Differences from Horovod are listed in docs/reference/tensorflow.md. Tensors are in the host's memory. For Keras:
`cohort.keras`.
"""

from __future__ import annotations

import contextlib
from typing import Any

from cohort.tensorflow import _library, elastic, mpi_ops
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

__all__ = [
    *mpi_ops.__all__,
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "allgather_object",
    "as_internal_error",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
]


def __getattr__(name: str) -> Any:
    # The class derives from a layer of TensorFlow's current Keras, which is loaded only when needed.
    if name == "SyncBatchNormalization":
        try:
            from cohort.tensorflow.sync_batch_norm import SyncBatchNormalization
        except ImportError as error:
            raise AttributeError(f"SyncBatchNormalization needs TensorFlow's Keras -- {error}") from error
        return SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# A saved graph needs the library's operations when loaded. Eager operations do not; building a graph reports the error.
with contextlib.suppress(RuntimeError):
    _library.loaded()
