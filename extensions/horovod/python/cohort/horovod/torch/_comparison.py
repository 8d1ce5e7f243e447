"""Compares, during training, what has to be the same on all ranks: options of the optimizer, and weights.

Every few steps a digest of both is sent with the step's gradients, in one small reduction for which nobody waits before
the next step.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import torch
from cohort.horovod.exceptions import HorovodInternalError
from cohort.horovod.objects import allgather_object
from cohort.horovod.process_sets import ProcessSet
from cohort.horovod.operations import Max
from cohort.errors import Mismatch
from cohort.horovod.torch import _collectives as start
from cohort.horovod.torch import _handles
from torch import Tensor

PERIOD = 20  # steps; more if there are more groups
_SLICE = 1 << 16  # elements of one parameter compared each time
_TOLERANCE = 1e-3  # relative to the largest weight, because different kinds of hosts round differently

# Options that select an implementation, not a result.
_HOW = frozenset(["foreach", "fused", "capturable", "differentiable"])

Options = List[Tuple[int, str, Any]]


def options_of(groups: Sequence[Mapping[str, Any]], names: Iterable[str]) -> Options:
    """Returns (group, name, value) for the options of these names that are numbers."""
    names = [name for name in names if name not in _HOW]
    found: Options = []
    for number, group in enumerate(groups):
        for name in names:
            value = group.get(name)
            if isinstance(value, Tensor):
                value = value.item() if value.numel() == 1 else None
            if isinstance(value, (int, float, tuple)):
                found.append((number, name, value))
    return found


def digest_of(value: Any) -> int:
    return zlib.crc32(value if isinstance(value, memoryview) else repr(value).encode())


def period_of(groups: Sequence[Any]) -> int:
    return max(PERIOD, len(groups))


def difference_of(everyone: Sequence[Options], ranks: Sequence[int]) -> Optional[str]:
    """Returns the option that differs, and the ranks; None if none differs."""
    for rank, theirs in zip(ranks, everyone):
        for own, other in zip(everyone[0], theirs):
            if own[:2] != other[:2] or not _close(own[2], other[2]):
                where = f"'{own[1]}' of parameter group {own[0]}"
                return f"{where} is {own[2]} on rank {ranks[0]} and {other[2]} on rank {rank}"
        if len(theirs) != len(everyone[0]):
            return f"rank {ranks[0]} has {len(everyone[0])} options in its parameter groups, and rank {rank} {len(theirs)}"
    return None


def _close(one: Any, other: Any) -> bool:
    """Returns whether values are equal up to rounding, since hosts may round a schedule's powers and cosines differently."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_close, one, other))
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    return (numbers and math.isclose(one, other, rel_tol=1e-6)) or repr(one) == repr(other)


ADVICE = (
    "ranks would train apart -- let all of them change it alike (a schedule that looks at a metric needs the one of all "
    "ranks, hvd.allreduce gives it), or give compare_ranks=False"
)


class Comparison:
    """Compares one optimizer on its ranks, which all call `step` in each step."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], process_set: ProcessSet,
                 name: str) -> None:  # fmt: skip
        """names: the parameters' names. name: the reduction's name, different for each optimizer."""
        self._groups: List[Dict[str, Any]] = optimizer.param_groups
        self._options = list(optimizer.defaults)
        self._names = names
        self._process_set = process_set
        self._name = name
        self._handle: Optional[int] = None
        self._sent: Tuple[Tuple[Options, List[str]], Optional[Tuple[str, Tensor]]] = (([], []), None)
        self._world: Any = None
        self._steps = 0
        self._at = (0, 0)  # the next parameter, and its next element
        self.weights = True  # True: the weights have to be the same, too

    def step(self) -> None:
        """Raises Mismatch, on all ranks, for a difference found in the last comparison."""
        if self._world is not self._process_set._counters:  # new ranks, or back from `join`, so all ranks restart counts
            self._world, self._handle, self._steps, self._at = self._process_set._counters, None, 0, (0, 0)
        if self._handle is not None:
            handle, self._handle = self._handle, None
            most = _handles.synchronize(handle).tolist()
            if most[0] != -most[1] or most[2] != -most[3]:
                self._raise(most[0] != -most[1])
        self._steps += 1
        if self._steps % period_of(self._groups) == 0:
            frozen = [name for parameter, name in self._names.items() if not parameter.requires_grad]
            options = options_of(self._groups, self._options), frozen
            part = self._next_part() if self.weights else None
            one, two = digest_of(options), digest_of(part[1].numpy().data.cast("B")) if part is not None else 0
            self._sent = options, part
            words = torch.tensor([one, -one, two, -two], dtype=torch.int64)
            self._handle = start.allreduce_async_(words, None, self._name, Max, process_set=self._process_set)

    def _next_part(self) -> Optional[Tuple[str, Tensor]]:
        """Returns the next part of the weights, copied, and its parameter's name; None if it is not on the CPU."""
        number, begin = self._at
        parameters = list(self._names)
        if not parameters:
            return None
        parameter = parameters[number % len(parameters)]
        end = begin + _SLICE
        self._at = (number, end) if end < parameter.numel() else ((number + 1) % len(parameters), 0)
        weights = parameter.detach()
        if weights.device.type != "cpu" or not weights.is_floating_point() or not weights.is_contiguous():
            return None
        return self._names[parameter], weights.reshape(-1)[begin:end].float().clone()

    def _raise(self, of_options: bool) -> None:
        options, part = self._sent
        own = options if of_options else None if part is None else (part[0], part[1].numpy())
        try:
            everyone = allgather_object(own, self._name, self._process_set)
        except HorovodInternalError:  # some ranks have joined
            raise Mismatch(f"ranks have different {'options of the optimizer' if of_options else 'weights'}") from None
        ranks = self._process_set.ranks or []
        if of_options:
            difference = difference_of([theirs for theirs, _ in everyone], ranks)
            if difference is not None:
                raise Mismatch(f"{difference}, {self._when()}: {ADVICE}")
            for rank, (_, theirs) in zip(ranks, everyone):
                for name in sorted({*theirs} ^ {*everyone[0][1]}):
                    trains, other = (ranks[0], rank) if name in theirs else (rank, ranks[0])
                    raise Mismatch(
                        f"'{name}' requires a gradient on rank {trains} and not on rank {other}, {self._when()}: ranks train "
                        "apart -- set requires_grad alike on all of them, or give compare_ranks=False"
                    )
            return
        for rank, theirs in zip(ranks, everyone):
            if theirs is None or everyone[0] is None or theirs[1].shape != everyone[0][1].shape:
                continue
            apart = abs(theirs[1] - everyone[0][1])
            worst = int(apart.argmax())
            if not apart[worst] <= _TOLERANCE * float(abs(everyone[0][1]).max()) and not math.isnan(apart[worst]):
                raise Mismatch(
                    f"'{theirs[0]}' is {everyone[0][1][worst]} on rank {ranks[0]} and {theirs[1][worst]} on rank {rank} in one "
                    f"place, {self._when()}: ranks train apart -- call hvd.broadcast_parameters before the first step, and "
                    "change weights on all ranks alike, or give compare_ranks=False"
                )

    def _when(self) -> str:
        return f"in step {self._steps} of the optimizer"
