"""The operations and queries, under the module name that Horovod's programs use."""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from cohort.horovod import names
from cohort.horovod.basics import cuda_built, nccl_built
from cohort.horovod.names import *  # noqa: F403
from cohort.horovod.operations import Adasum
from cohort.tensorflow import _collectives
from cohort.tensorflow._collectives import *  # noqa: F403

__all__ = [*names.__all__, *_collectives.__all__, "Adasum", "cuda_built", "nccl_built"]


def __getattr__(name: str) -> Any:
    # Extension checks of Horovod's launcher look it up by this name.
    if name == "_check_has_gpu":
        return lambda: bool(tf.config.list_physical_devices("GPU"))
    if name == "_basics":
        return sys.modules[__name__]  # this module has all functions of Horovod's object
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
