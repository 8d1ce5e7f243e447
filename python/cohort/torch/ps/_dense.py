"""Parameters of a module on parameter servers: every worker reads them, and pushes its gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

import torch

from cohort.errors import InvalidArgument
from cohort.ps import Client, Optimizer, Variable, Work


class DistributedOptimizer:
    """Keeps a module's parameters on the servers, and steps them there.

    client            this worker's
    named_parameters  `module.named_parameters()`: float32, contiguous, the same names and shapes at all workers
    optimizer         of cohort.ps; Sgd() unless said otherwise
    consistency       Sync() unless said otherwise, Bounded(staleness), Async()
    prefix            of the variables' names on the servers

    Made by all workers. The parameters become worker 0's, or, of a training that is under way, those of the servers. With
    Sync the gradients of all workers are averaged into one step, of all but the backup workers where there are such; with
    the others each worker's are a step of its own.
    Buffers (running means of a batch normalization) stay each worker's own.
    """

    def __init__(
        self,
        client: Client,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        optimizer: Optional[Optimizer] = None,
        consistency: Any = None,
        prefix: str = "",
    ) -> None:
        self._client = client
        counted = client.workers - (0 if consistency is None else consistency.backup_workers)
        self._scale = 1 / max(1, counted) if consistency is None or consistency.adds_workers else 1.0
        self._parameters: list[tuple[torch.nn.Parameter, Variable]] = []
        for name, parameter in named_parameters:
            if parameter.dtype != torch.float32 or not parameter.is_contiguous():
                raise InvalidArgument(f"DistributedOptimizer: {name} is not float32 and contiguous")
            shape = tuple(parameter.shape) or (1,)
            variable = client.variable(prefix + name, shape, optimizer=optimizer, consistency=consistency)
            self._parameters.append((parameter, variable))
        if not self._parameters:
            raise InvalidArgument("DistributedOptimizer: there are no parameters")
        if client.now == 0:  # else others are under way, and have what they began with
            if client.worker == 0:
                _wait(variable.assign(parameter.data, async_op=True) for parameter, variable in self._parameters)
            client.barrier()
        self.pull()

    def pull(self) -> None:
        """The servers' values, in the parameters. Waits as the consistency says."""
        _wait(variable.pull(parameter.data, async_op=True) for parameter, variable in self._parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter, _ in self._parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def step(self, lr: Optional[float] = None) -> None:
        """Pushes the gradients, ends this worker's clock, and reads the parameters for the next step. `lr` in place of the
        optimizer's own."""
        works: list[Work] = []
        for parameter, variable in self._parameters:
            if parameter.grad is None:
                continue
            gradient = parameter.grad.contiguous()
            if self._scale != 1:
                gradient = gradient * self._scale
            works.append(variable.push(gradient, lr=lr, async_op=True))
        _wait(works)
        self._client.clock()
        self.pull()


def _wait(works: Iterable[Work]) -> None:
    for work in list(works):
        work.wait()
