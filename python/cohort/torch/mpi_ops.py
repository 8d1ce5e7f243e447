"""The operations and questions under the name that Horovod's programs know them by."""

from __future__ import annotations

import sys
from typing import Any

from cohort import _core
from cohort._horovod.exceptions import HorovodInternalError
from cohort._horovod.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    is_process_set_registered,
    remove_process_set,
)
from cohort._horovod.reduce_ops import Adasum, Average, Max, Min, Product, Sum
from cohort._horovod.runtime import (
    ccl_built,
    cross_rank,
    cross_size,
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
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from cohort.torch._collectives import (
    allgather_async,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    barrier,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    join,
    reducescatter_async,
    sparse_allreduce_async,
)
from cohort.torch._differentiable import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from cohort.torch._handles import poll, synchronize
from torch import cuda

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_process_set_registered",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def cuda_built() -> bool:
    """Whether this process sees a GPU whose tensors these operations take. It asks CUDA's driver: not before a fork."""
    return _core.gpu_count() > 0


def nccl_built() -> int:
    """The version of the NCCL that carries out operations on a GPU's tensors, 23007 for 2.30.7; 0 where there is none
    (`cohort check-build` says why): then they are staged through host memory."""
    return _core.nccl_version()


def __getattr__(name: str) -> Any:
    # Extension checks of Horovod's launcher ask for it by this name.
    if name == "_check_has_gpu":
        return cuda.is_available
    if name == "_basics":
        return sys.modules[__name__]  # it has all functions of Horovod's object
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
