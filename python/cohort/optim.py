"""The learning rate of N ranks: N times the batch wants a larger rate, reached gradually (Goyal et al. 2017, arXiv
1706.02677). The optimizers themselves are torch's. Needs torch; nothing is collective."""

from __future__ import annotations

import enum
import math
from typing import Callable, Optional, Union

import torch
from torch.optim.lr_scheduler import LambdaLR

from cohort import _world
from cohort.errors import InvalidArgument

__all__ = ["Scaling", "WarmupScheduler", "scale_factor"]


class Scaling(enum.Enum):
    """How the rate grows with the number of ranks, n."""

    LINEAR = "linear"  # times n: for SGD, while the batch is far smaller than the data
    SQUARE_ROOT = "square_root"  # times sqrt(n): often better for Adam and its kin
    NONE = "none"  # unchanged: also for a global batch that does not grow with n


def scale_factor(scaling: Union[Scaling, str], world_size: int) -> float:
    """The factor that `scaling` gives for `world_size` ranks. Raises InvalidArgument for a world below 1."""
    if world_size < 1:
        raise InvalidArgument(f"learning rate for a world of {world_size} ranks")
    kind = Scaling(scaling)
    return float(world_size) if kind is Scaling.LINEAR else math.sqrt(world_size) if kind is Scaling.SQUARE_ROOT else 1.0


class WarmupScheduler(LambdaLR):
    """Sets the optimizer's rate at once, for step 0, and after each `step()`.

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)      # the rate of one rank
        schedule = cohort.optim.WarmupScheduler(optimizer, warmup_steps=200)
        ...  optimizer.step(); schedule.step()

    world_size    default: the default world's (1 where there is none)
    scaling       "linear", "square_root" or "none"
    warmup_steps  optimizer steps over which the rate climbs in a straight line from the optimizer's own to the scaled
                  one; 0: at once
    decay         a further factor for each step from 0; default: 1
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, world_size: Optional[int] = None,
                 scaling: Union[Scaling, str] = Scaling.LINEAR, warmup_steps: int = 0,
                 decay: Optional[Callable[[int], float]] = None) -> None:  # fmt: skip
        """Raises InvalidArgument for a world below 1 or negative warm-up."""
        if world_size is None:
            world_size = _world.size() if _world.is_initialized() else 1
        if warmup_steps < 0:
            raise InvalidArgument(f"learning rate: {warmup_steps} warm-up steps")
        full = scale_factor(scaling, world_size)

        def factor(step: int) -> float:
            value = full if step >= warmup_steps else 1.0 + (full - 1.0) * step / warmup_steps
            return value * decay(step) if decay is not None else value

        self._factor = factor
        super().__init__(optimizer, factor)

    @property
    def steps(self) -> int:
        """Optimizer steps done; save it, and restore it with `set_step`."""
        return self.last_epoch

    def set_step(self, step: int) -> None:
        """Goes on from a step, and sets its rates."""
        if step < 0:
            raise InvalidArgument(f"learning rate of step {step}")
        self.last_epoch = step
        self._last_lr = []
        for group, base in zip(self.optimizer.param_groups, self.base_lrs):
            rate = base * self._factor(step)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            self._last_lr.append(group["lr"])

    def rate_at(self, step: int) -> float:
        """The rate of parameter group 0 at a step."""
        return float(self.base_lrs[0]) * self._factor(step)

    def state_dict(self) -> dict:
        """torch's, without the function: it is made again by the constructor."""
        state = super().state_dict()
        state.pop("_factor", None)
        return state
