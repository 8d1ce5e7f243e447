"""Horovod's API for PyTorch over Cohort: `import cohort.horovod.torch as hvd`, and the rest of a program stays unchanged.

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

Differences from Horovod are listed in docs/reference/horovod.md. Tensors are on the CPU, or on CUDA
(docs/reference/gpu.md).
"""

from __future__ import annotations

from cohort.horovod.objects import allgather_object, broadcast_object
from cohort.horovod.torch import elastic, mpi_ops
from cohort.horovod.torch.compression import Compression
from cohort.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters
from cohort.horovod.torch.mpi_ops import *  # noqa: F403 -- the operations and the questions
from cohort.horovod.torch.optimizer import DistributedOptimizer
from cohort.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    *mpi_ops.__all__,
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
]
