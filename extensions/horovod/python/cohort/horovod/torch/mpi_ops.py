"""The operations and queries, under the module name that Horovod's programs use."""

from __future__ import annotations

import sys
from typing import Any

from cohort import _core
from cohort.horovod import names
from cohort.horovod.names import *  # noqa: F403
from cohort.horovod.operations import Adasum, join
from cohort.horovod.torch import _collectives, _differentiable
from cohort.horovod.torch._collectives import *  # noqa: F403
from cohort.horovod.torch._differentiable import *  # noqa: F403
from cohort.horovod.torch._handles import poll, synchronize
from torch import cuda

__all__ = [
    *names.__all__,
    *_collectives.__all__,
    *_differentiable.__all__,
    "Adasum",
    "cuda_built",
    "join",
    "nccl_built",
    "poll",
    "synchronize",
]


def cuda_built() -> bool:
    """Returns True if this process sees a GPU supported by these operations. Asks CUDA's driver; do not fork afterwards."""
    return _core.gpu_count() > 0


def nccl_built() -> int:
    """Returns the version of the NCCL that runs operations on a GPU's tensors, 23007 for 2.30.7. Returns 0 if there is no
    NCCL (`cohort doctor --build` says why); then tensors are staged through host memory."""
    return _core.nccl_version()


def __getattr__(name: str) -> Any:
    # Extension checks of Horovod's launcher look it up by this name.
    if name == "_check_has_gpu":
        return cuda.is_available
    if name == "_basics":
        return sys.modules[__name__]  # this module has all functions of Horovod's object
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
