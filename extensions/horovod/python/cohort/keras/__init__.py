"""Horovod's API for Keras over Cohort: `import cohort.keras as hvd`, and the rest of a program stays unchanged.

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

For Keras 3 with TensorFlow, torch or JAX as its backend, and for Keras 2 (tf_keras). See docs/reference/keras.md.
"""

from __future__ import annotations

from cohort.horovod import names
from cohort.horovod.basics import cuda_built, nccl_built
from cohort.horovod.names import *  # noqa: F403
from cohort.horovod.objects import allgather_object, broadcast_object
from cohort.keras import _flavor, _training, _values, callbacks, elastic
from cohort.keras._models import load_model
from cohort.keras._values import *  # noqa: F403
from cohort.keras.compression import Compression
from cohort.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer

# Before an optimizer exists, because `model.compile(hvd.DistributedOptimizer(...))` looks up the method first.
_training.install(_flavor.name())

__all__ = [
    *names.__all__,
    *_values.__all__,
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather_object",
    "broadcast_object",
    "callbacks",
    "cuda_built",
    "elastic",
    "load_model",
    "nccl_built",
]
