"""A module's parameters on parameter servers. Every worker reads them, and pushes its gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

import torch

from cohort.errors import InvalidArgument
from cohort.ps import Client, Consistency, Optimizer, Variable, Work
from cohort.ps._checks import refuse, shown, text
from cohort.ps._options import consistency_of, optimizer_of


_NAME = "DistributedOptimizer"


class DistributedOptimizer:
    """Keeps a module's parameters on the servers, and steps them there.

    client            this worker's client
    named_parameters  `module.named_parameters()`: float32, contiguous, on the CPU, the same names and shapes on all
                      workers
    optimizer         an optimizer of cohort.ps; default: Sgd()
    consistency       Sync() (default), Bounded(staleness), Async(); "sync" and "async" may stand for these
    prefix            prefix of the variables' names on the servers

    All workers create it. The parameters become worker 0's or, if training is under way, the servers'. With Sync the
    gradients of all workers are averaged into one step; otherwise each worker's gradients are a separate step.
    Buffers (running means of a batch normalization) stay each worker's own.
    """

    def __init__(self, client: Client, named_parameters: Optional[Iterable[tuple[str, torch.nn.Parameter]]] = None, *,
                 optimizer: Optional[Optimizer] = None, consistency: Consistency = None,
                 prefix: str = "") -> None:  # fmt: skip
        if not isinstance(client, Client):
            refuse(_NAME, "client", client, "pass this worker's first, as ps.connect() returns it, then module.named_parameters()")
        named = _named(named_parameters)
        optimizer = optimizer_of(_NAME, optimizer)
        consistency = consistency_of(_NAME, consistency)
        text(_NAME, "prefix", prefix)
        self._client = client
        self._scale = 1 / client.workers if consistency.adds_workers else 1.0
        self._parameters: list[tuple[torch.nn.Parameter, Variable]] = []
        self._names = [name for name, _ in named]
        for name, parameter in named:
            shape = tuple(parameter.shape) or (1,)
            variable = client.variable(prefix + name, shape, optimizer=optimizer, consistency=consistency)
            self._parameters.append((parameter, variable))
        if client.now == 0:  # otherwise training is under way with other initial values
            if client.worker == 0:
                _wait(variable.assign(parameter.data, async_op=True) for parameter, variable in self._parameters)
            client.barrier()
        self.pull()

    def pull(self) -> None:
        """Reads the servers' values into the parameters. Waits as the consistency says."""
        _wait(variable.pull(parameter.data, async_op=True) for parameter, variable in self._parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter, _ in self._parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def step(self, lr: Optional[float] = None) -> None:
        """Pushes the gradients, ends this worker's clock, and reads the parameters for the next step. `lr` replaces the
        optimizer's own rate."""
        works: list[Work] = []
        for name, (parameter, variable) in zip(self._names, self._parameters):
            if parameter.grad is None:
                continue
            if parameter.grad.layout != torch.strided:
                raise InvalidArgument(
                    f"{_NAME}: the gradient of {name} is sparse -- make its module without sparse, or keep its rows in a table"
                )
            gradient = parameter.grad.contiguous()
            if self._scale != 1:
                gradient = gradient * self._scale
            works.append(variable.push(gradient, lr=lr, async_op=True))
        _wait(works)
        self._client.clock()
        self.pull()


def _named(given: Any) -> list[tuple[str, torch.nn.Parameter]]:
    wanted = "pass module.named_parameters()"
    if given is None or isinstance(given, (torch.nn.Module, torch.Tensor, dict, str)):
        refuse(_NAME, "named_parameters", given, wanted)
    try:
        named = list(given)
    except TypeError:
        refuse(_NAME, "named_parameters", given, wanted)
    if not named:
        raise InvalidArgument("DistributedOptimizer: there are no parameters")
    for one in named:
        if not isinstance(one, tuple) or len(one) != 2 or not isinstance(one[0], str) or not isinstance(one[1], torch.Tensor):
            raise InvalidArgument(f"{_NAME}: named_parameters has {shown(one)}, and not pairs of a name and a parameter -- {wanted}")
        name, parameter = one
        if parameter.dtype != torch.float32 or not parameter.is_contiguous() or parameter.device.type != "cpu":
            raise InvalidArgument(f"{_NAME}: {name} is not float32, contiguous and on the CPU")
    return named


def _wait(works: Iterable[Work]) -> None:
    for work in list(works):
        work.wait()
