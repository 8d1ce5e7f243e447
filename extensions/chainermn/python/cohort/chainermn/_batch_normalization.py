"""Batch normalization over the batches of all ranks, with ChainerMN's arguments."""

from __future__ import annotations

import copy
from typing import Any, Optional

import torch
from torch import Tensor

from cohort._batch_norm import OverRanks, Ranks, replaced
from cohort.chainermn.communicators import CommunicatorBase
from cohort.errors import InvalidArgument

_BACKENDS = ("auto", "mpi", "nccl")


class _RanksOf(Ranks):
    name = "MultiNodeBatchNormalization"

    def __init__(self, communicator: CommunicatorBase) -> None:
        self._comm = communicator.communicator

    def gather(self, own: Tensor, channels: int) -> Tensor:
        rows = own.new_empty(self._comm.size(), own.size(1))
        self._comm.all_gather(own, rows)
        return rows

    def add_up(self, sums: Tensor, channels: int) -> Tensor:
        total = sums.contiguous().clone()
        self._comm.all_reduce(total)
        return total


class MultiNodeBatchNormalization(OverRanks):
    """Like torch.nn.BatchNorm1d to 3d, over the batches of all ranks, which may be of different sizes.

    Input: (N, C, ...) of any floating type. In training all ranks take part in forward and backward; evaluation, which
    is not collective, uses the running statistics. The gradients of weight and bias are this rank's own; multi-node
    optimizers compute their mean over the ranks. Parameters and buffers have torch's names, so state_dict() is like that of
    torch.nn.BatchNorm2d. Copies share the communicator.

    size                      channels
    comm                      the ranks
    decay                     decay of the running statistics; torch's momentum is 1 - decay
    eps                       added to the variance
    dtype                     type of parameters and statistics; default: torch's
    use_gamma, use_beta       whether to have a scale (weight), a shift (bias)
    initial_gamma, initial_beta  their first values: a number, or an array of `size`; default: 1 and 0
    communication_backend     'auto', 'mpi', or 'nccl', which needs the communicator 'pure_nccl'. All have the same
                              effect
    """

    def __init__(self, size: int, comm: CommunicatorBase, decay: float = 0.9, eps: float = 2e-5,
                 dtype: Optional[torch.dtype] = None, use_gamma: bool = True, use_beta: bool = True,
                 initial_gamma: Any = None, initial_beta: Any = None,
                 communication_backend: str = "auto") -> None:  # fmt: skip
        super().__init__(size, eps, 1.0 - decay, dtype=dtype)
        if communication_backend not in _BACKENDS or (communication_backend == "nccl" and comm.name != "pure_nccl"):
            raise InvalidArgument(
                f"MultiNodeBatchNormalization: communication_backend is {communication_backend!r} with the communicator "
                f"{comm.name!r} -- 'auto' or 'mpi' is needed, or 'nccl' with 'pure_nccl'"
            )
        self.comm = comm
        for name, used, initial in (("weight", use_gamma, initial_gamma), ("bias", use_beta, initial_beta)):
            if not used:
                self.register_parameter(name, None)
            elif initial is not None:
                with torch.no_grad():
                    getattr(self, name).copy_(torch.as_tensor(initial))

    def start_finetuning(self) -> None:
        """Makes the next forward with finetune=True begin the running statistics anew, as means over the batches from
        then on.
        """
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.zero_()

    def forward(self, input: Tensor, finetune: bool = False) -> Tensor:
        """finetune: the running statistics become the means over all batches since start_finetuning."""
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        return self.over(_RanksOf(self.comm), input, None if finetune else self.momentum)


def create_mnbn_model(
    link: torch.nn.Module, comm: CommunicatorBase, communication_backend: str = "auto"
) -> torch.nn.Module:
    """Returns a copy of a module, with each batch normalization replaced by a MultiNodeBatchNormalization.

    Each keeps parameters, statistics and settings of the original. Raises InvalidArgument for one that keeps no running
    statistics, or averages them over all batches (momentum None).
    """

    def made(module: Any) -> MultiNodeBatchNormalization:
        if module.momentum is None or module.running_mean is None:
            raise InvalidArgument(
                "create_mnbn_model: a batch normalization without running statistics, or with momentum=None, has no counterpart "
                "-- give it a momentum and track_running_stats=True"
            )
        return MultiNodeBatchNormalization(module.num_features, comm, 1.0 - module.momentum, module.eps,
                                           communication_backend=communication_backend)  # fmt: skip

    return replaced(copy.deepcopy(link), MultiNodeBatchNormalization, made)
