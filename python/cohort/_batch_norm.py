"""Batch normalization with the mean and variance of all ranks' batches, for cohort.horovod.torch and cohort.chainermn.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

import torch
from cohort.errors import InvalidArgument
from torch import Tensor


class Ranks:
    """Gives Normalize access to the other ranks."""

    name = ""  # the layer's name in error messages

    def gather(self, own: Tensor, channels: int) -> Tensor:
        """Returns one row from each rank that takes part."""
        raise NotImplementedError

    def add_up(self, sums: Tensor, channels: int) -> Tensor:
        """Returns the sum over the ranks."""
        raise NotImplementedError


def _like_channels(vector: Tensor, input: Tensor) -> Tensor:
    return vector.reshape(1, -1, *[1] * (input.dim() - 2))


class Normalize(torch.autograd.Function):
    """Combines each rank's count, mean and sum of squared deviations, because sums of squares would lose digits if the
    mean is large."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Optional[Tensor], bias: Optional[Tensor],
                running_mean: Optional[Tensor], running_var: Optional[Tensor], factor: float, eps: float,
                ranks: Ranks) -> Tensor:  # fmt: skip
        wide = torch.promote_types(input.dtype, torch.float32)
        x = input.to(wide)
        channels = x.size(1)
        others = [dim for dim in range(x.dim()) if dim != 1]
        count = x.numel() // channels
        mean = x.mean(others) if count else x.new_zeros(channels)
        deviations = (x - _like_channels(mean, x)).square().sum(others)
        own = torch.cat([mean, deviations, mean.new_tensor([count])]).double().unsqueeze(0)
        all_ranks = ranks.gather(own, channels)

        means, squares, counts = all_ranks[:, :channels], all_ranks[:, channels:-1], all_ranks[:, -1:]
        total = counts.sum()
        if total == 1:
            raise ValueError(f"{ranks.name}: more than one value per channel is needed in training, over all ranks")
        empty = not total  # the same on all ranks; then the result is empty and statistics stay, as in torch
        mean = (means * counts).sum(0) / total.clamp_min(1)
        squared = (squares + counts * (means - mean).square()).sum(0)
        if running_mean is not None and running_var is not None and not empty:
            running_mean.lerp_(mean.to(running_mean.dtype), factor)
            running_var.lerp_((squared / (total - 1)).to(running_var.dtype), factor)

        mean, inverse = mean.to(wide), (squared / total.clamp_min(1) + eps).rsqrt().to(wide)
        normal = (x - _like_channels(mean, x)) * _like_channels(inverse, x)
        ctx.save_for_backward(normal, inverse, weight)
        ctx.total, ctx.ranks, ctx.dtype = max(float(total), 1.0), ranks, input.dtype
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
            means = ctx.ranks.add_up(sums, grad.size(1)) / ctx.total
            scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
            inner = grad - _like_channels(means[0], grad) - normal * _like_channels(means[1], grad)
            by_input = (inner * _like_channels(scale, grad)).to(ctx.dtype)
        by_weight = by_weight.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        by_bias = by_bias.to(weight.dtype) if weight is not None and ctx.needs_input_grad[2] else None
        return by_input, by_weight, by_bias, None, None, None, None, None


class OverRanks(_BatchNorm):
    """The base of layers that normalize over ranks."""

    def over(self, ranks: Ranks, input: Tensor, momentum: Optional[float]) -> Tensor:
        """Normalizes in training. momentum: None averages over the batches so far."""
        if input.size(1) != self.num_features:
            raise InvalidArgument(f"{ranks.name}: {self.num_features} channels are needed, not {input.size(1)}")
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if momentum is None else momentum
        mean, var = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        result: Tensor = Normalize.apply(input, self.weight, self.bias, mean, var, momentum or 0.0, self.eps, ranks)
        return result

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"{type(self).__name__}: at least 2 dimensions are needed, (N, C, ...), not {input.dim()}")


# Classes whose forward can be replaced.
_ORDINARY = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm, OverRanks)


def _is_converted(name: str, module: torch.nn.Module, kind: type) -> bool:
    if not isinstance(module, _BatchNorm) or isinstance(module, kind):
        return False
    which = type(module).__name__ + (f" '{name}'" if name else "")
    if isinstance(module, LazyModuleMixin):
        raise InvalidArgument(f"{which} has no channels yet -- run one forward of the module before it is converted")
    known = (one for one in type(module).__mro__ if one in (*_ORDINARY, _BatchNorm) or issubclass(one, OverRanks))
    theirs: Any = next(known)
    own = type(module).forward is not theirs.forward or "forward" in module.__dict__
    if own or module._modules:
        raise InvalidArgument(
            f"{which} does more than normalize, which would be lost: its {'forward' if own else 'parts'} is not that of torch's "
            "batch normalization -- replace it by hand, or by an ordinary one and a module with what it does besides"
        )
    return True


def replaced(module: torch.nn.Module, kind: type, make: Callable[[_BatchNorm], OverRanks]) -> torch.nn.Module:
    """Replaces each batch normalization in the module by the result of `make`, an object of class `kind`, which takes
    over its parameters, statistics and hooks. A shared layer remains shared. Raises InvalidArgument, before changing
    anything, for a layer whose replacement would lose something."""
    made: dict[torch.nn.Module, torch.nn.Module] = {}
    for name, part in module.named_modules():
        if _is_converted(name, part, kind):
            made[part] = _like(make(part), part)
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if child in made:
                part._modules[name] = made[child]
    return made.get(module, module)


def _like(result: OverRanks, module: torch.nn.Module) -> OverRanks:
    for name, value in module.__dict__.items():
        # Hooks and their kinds are kept, so that handles can still remove them.
        if "_hooks" in name or name in ("training", "_is_full_backward_hook", "_non_persistent_buffers_set"):
            result.__dict__[name] = value
        else:
            result.__dict__.setdefault(name, value)
    for mine, theirs in (result._parameters, module._parameters), (result._buffers, module._buffers):
        mine.clear()
        mine.update(theirs)
    return result
