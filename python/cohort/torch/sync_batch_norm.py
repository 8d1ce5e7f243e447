"""Batch normalization with the mean and variance of all ranks' batches."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from cohort.torch import _collectives as start
from cohort.torch._handles import synchronize
from cohort.torch.process_sets import ProcessSet, engine_of, global_process_set
from cohort.torch.reduce_ops import Sum


class SyncBatchNorm(_BatchNorm):
    """As torch.nn.BatchNorm1d to 3d, over the batches of all ranks of a set, which may be of different sizes.

    Input: (N, C, ...) of any floating type; statistics are in float32, or float64 of such input. In evaluation, and in a
    set of one rank, it is the ordinary batch normalization. The gradients of weight and bias are this rank's.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: Optional[float] = 0.1, affine: bool = True,
                 track_running_stats: bool = True, process_set: ProcessSet = global_process_set) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: at least 2 dimensions are needed, (N, C, ...), not {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training or engine_of(self.process_set).size() == 1:
            return super().forward(input)
        if input.size(1) != self.num_features:
            raise RuntimeError(f"SyncBatchNorm: {self.num_features} channels are needed, not {input.size(1)}")
        factor = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        tracked = self.track_running_stats and self.running_mean is not None
        result: Tensor = _Normalize.apply(
            input,
            self.weight,
            self.bias,
            self.running_mean if tracked else None,
            self.running_var if tracked else None,
            factor,
            self.eps,
            self.process_set,
        )
        return result

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module,
                               process_set: ProcessSet = global_process_set) -> torch.nn.Module:  # fmt: skip
        """The module with every batch normalization in it replaced by this one, with its parameters and statistics."""
        result = module
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            result = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats,
                         process_set)  # fmt: skip
            result._parameters.update(module._parameters)
            result._buffers.update(module._buffers)
            result.training = module.training
        for name, child in module.named_children():
            result.add_module(name, cls.convert_sync_batchnorm(child, process_set))
        return result


def _like_channels(vector: Tensor, input: Tensor) -> Tensor:
    return vector.reshape(1, -1, *[1] * (input.dim() - 2))


class _Normalize(torch.autograd.Function):
    """Statistics are combined from each rank's count, mean and sum of squared deviations: sums of squares would lose
    digits where the mean is large."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Optional[Tensor], bias: Optional[Tensor],
                running_mean: Optional[Tensor], running_var: Optional[Tensor], factor: float, eps: float,
                process_set: ProcessSet) -> Tensor:  # fmt: skip
        wide = torch.promote_types(input.dtype, torch.float32)
        x = input.to(wide)
        channels = x.size(1)
        others = [dim for dim in range(x.dim()) if dim != 1]
        count = x.numel() // channels
        mean = x.mean(others) if count else x.new_zeros(channels)
        deviations = (x - _like_channels(mean, x)).square().sum(others)
        own = torch.cat([mean, deviations, mean.new_tensor([count])]).double().unsqueeze(0)
        name = f"sync_batch_norm.forward.{channels}"
        all_ranks = synchronize(start.allgather_active_async(own, name, process_set))

        means, squares, counts = all_ranks[:, :channels], all_ranks[:, channels:-1], all_ranks[:, -1:]
        total = counts.sum()
        if total <= 1:
            raise ValueError("SyncBatchNorm: more than one value per channel is needed in training, over all ranks")
        mean = (means * counts).sum(0) / total
        squared = (squares + counts * (means - mean).square()).sum(0)
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), factor)
            running_var.lerp_((squared / (total - 1)).to(running_var.dtype), factor)

        mean, inverse = mean.to(wide), (squared / total + eps).rsqrt().to(wide)
        normal = (x - _like_channels(mean, x)) * _like_channels(inverse, x)
        ctx.save_for_backward(normal, inverse, weight)
        ctx.total, ctx.process_set, ctx.dtype = float(total), process_set, input.dtype
        result = normal if weight is None else normal * _like_channels(weight.to(wide), x)
        if bias is not None:
            result = result + _like_channels(bias.to(wide), x)
        return result.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        normal, inverse, weight = ctx.saved_tensors
        grad = grad_output.to(normal.dtype)
        others = [dim for dim in range(grad.dim()) if dim != 1]
        by_bias, by_weight = grad.sum(others), (grad * normal).sum(others)
        by_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([by_bias, by_weight])
            name = f"sync_batch_norm.backward.{grad.size(1)}"
            means = synchronize(start.allreduce_async(sums, None, name, Sum, process_set=ctx.process_set)) / ctx.total
            scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
            inner = grad - _like_channels(means[0], grad) - normal * _like_channels(means[1], grad)
            by_input = (inner * _like_channels(scale, grad)).to(ctx.dtype)
        by_weight = by_weight.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        by_bias = by_bias.to(weight.dtype) if weight is not None and ctx.needs_input_grad[2] else None
        return by_input, by_weight, by_bias, None, None, None, None, None
