"""Faults of the kinds that the suite is to find, put into Cohort's Python on the ranks: for tests of the suite itself."""

from __future__ import annotations

from typing import Any

import torch

import cohort
import cohort.nn
import cohort.optim
from cohort._local_sgd import LocalSteps
from cohort.nn import comm_hooks


def list_taken_once() -> None:
    """DistributedDataParallel averages the parameters that were trained when it was made."""

    def as_it_was(self: Any, reducer: Any) -> Any:
        return reducer

    cohort.nn.DistributedDataParallel._attach_again_if_changed = as_it_was
    cohort.nn.DistributedDataParallel._refuse_what_came_too_late = lambda self: None


def local_list_taken_once() -> None:
    """LocalSGD averages those."""
    LocalSteps._require_held = lambda self, where: None  # type: ignore[method-assign]


def residual_spoiled() -> None:
    """A refused step leaves large residuals, which come with the next step's gradients."""

    def begin(self: Any, refused: bool) -> None:
        if self._refused or refused:  # of gradients that were large
            for _, residual in self._residuals.values():
                residual.fill_(1e6)
        self._refused = False

    comm_hooks.WireState._begin_step = begin  # type: ignore[method-assign]


def rate_not_compared() -> None:
    """Each rank of a sharded optimizer steps its part with whatever rate it has."""
    cohort._core.Transaction.require_sums = lambda self, comm, sums, where: None  # type: ignore[method-assign]


def rate_apart() -> None:
    """Rank 1 has another rate than the program says."""
    step: Any = torch.optim.SGD.step

    def other(self: Any, *arguments: Any, **more: Any) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= 1.5 if cohort.rank() == 1 else 1.0
        try:
            return step(self, *arguments, **more)
        finally:
            for group, rate in zip(self.param_groups, rates):
                group["lr"] = rate

    torch.optim.SGD.step = other  # type: ignore[method-assign]


def buffers_apart() -> None:
    """Statistics of BatchNorm stay each rank's."""
    cohort.nn.DistributedDataParallel._broadcast_buffers = lambda self: None


def refusal_alone() -> None:
    """Rank 0 refuses its third step by itself."""
    forward: Any = cohort.nn.DistributedDataParallel.forward
    times = [0]

    def refusing(self: Any, *arguments: Any, **more: Any) -> Any:
        times[0] += 1
        if times[0] % 100 == 3 and cohort.rank() == 0:
            times[0] = 0
            raise cohort.InvalidArgument("planted")
        return forward(self, *arguments, **more)

    cohort.nn.DistributedDataParallel.forward = refusing


def plant(name: str) -> None:
    globals()[name]()
