"""Horovod's API for PyTorch over Cohort: `import cohort.torch as hvd`, and the rest of a program stays unchanged.

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

Differences from Horovod are listed in docs/reference/horovod.md. Tensors are on the CPU, or on CUDA
(docs/reference/gpu.md).
"""

from __future__ import annotations

from cohort.hvd.objects import allgather_object, broadcast_object
from cohort.torch import elastic, mpi_ops
from cohort.torch.compression import Compression
from cohort.torch.functions import broadcast_optimizer_state, broadcast_parameters
from cohort.torch.mpi_ops import *  # noqa: F403 -- the operations and the questions
from cohort.torch.optimizer import DistributedOptimizer
from cohort.torch.sync_batch_norm import SyncBatchNorm

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
