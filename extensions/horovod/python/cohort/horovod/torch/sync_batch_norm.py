"""Batch normalization with the mean and variance of all ranks' batches."""

from __future__ import annotations

from typing import Any, Optional

import torch
from cohort._batch_norm import OverRanks, Ranks, replaced
from cohort.horovod.process_sets import ProcessSet, engine_of, global_process_set
from cohort.horovod.operations import Sum
from cohort.horovod.torch._collectives import call_of, run
from torch import Tensor


class SyncBatchNorm(OverRanks):
    """Like torch.nn.BatchNorm1d to 3d, over the batches of all ranks of a set, which may be of different sizes.

    Input: (N, C, ...) of any floating type; statistics are in float32, or in float64 for float64 input. In evaluation,
    and in a set of one rank, it is an ordinary batch normalization. The gradients of weight and bias are this rank's own.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: Optional[float] = 0.1, affine: bool = True,
                 track_running_stats: bool = True, process_set: ProcessSet = global_process_set) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training or engine_of(self.process_set).size() == 1:
            return super().forward(input)
        return self.over(_Ranks(self.process_set), input, self.momentum)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module,
                               process_set: ProcessSet = global_process_set) -> torch.nn.Module:  # fmt: skip
        """Returns the module with every batch normalization replaced by this one, keeping parameters and statistics."""
        return replaced(module, SyncBatchNorm, lambda one: cls(one.num_features, one.eps, one.momentum, one.affine,
                                                               one.track_running_stats, process_set))  # fmt: skip


class _Ranks(Ranks):
    """Gives Normalize access to the ranks of a process set."""

    name = "SyncBatchNorm"

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set

    def gather(self, own: Tensor, channels: int) -> Tensor:
        return self._run(f"forward.{channels}", own, kind="allgather", needs_all_ranks=False)

    def add_up(self, sums: Tensor, channels: int) -> Tensor:
        return self._run(f"backward.{channels}", sums, kind="allreduce", op=Sum)

    def _run(self, name: str, tensor: Tensor, **how: Any) -> Tensor:
        return run(call_of(name=f"sync_batch_norm.{name}", process_set=self._process_set, **how), [tensor])[0][0]
