"""Horovod's API for JAX over Cohort: operations by name between processes, eagerly and within compiled programs.

    import cohort.jax as hvd

    hvd.init()
    parameters = hvd.broadcast_parameters(parameters)
    step = jax.jit(hvd.value_and_grad(loss))      # gradients are those of all ranks
    value, gradients = step(parameters, batch)

docs/reference/jax.md lists what is supported. Arrays are in host memory, each in one process.
"""

from __future__ import annotations

from cohort.horovod import names
from cohort.horovod.basics import cuda_built, nccl_built
from cohort.horovod.names import *  # noqa: F403
from cohort.horovod.objects import allgather_object, broadcast_object
from cohort.horovod.operations import join
from cohort.jax import _cluster, _collectives, _gradients, _life
from cohort.jax._collectives import *  # noqa: F403
from cohort.jax._errors import as_internal_error
from cohort.jax._gradients import *  # noqa: F403
from cohort.jax.compression import Compression
from cohort.jax.functions import broadcast_parameters

__all__ = [
    *names.__all__,
    *_collectives.__all__,
    *_gradients.__all__,
    "Compression",
    "allgather_object",
    "as_internal_error",
    "broadcast_object",
    "broadcast_parameters",
    "cuda_built",
    "join",
    "nccl_built",
]

_life.watch()
_cluster.register()
