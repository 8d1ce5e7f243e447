"""The optimizer that lets each rank step by itself and reduces the changes of that step by Adasum."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple, Type, Union

import torch
from cohort.horovod.claims import claimed
from cohort.horovod.process_sets import ProcessSet
from cohort.horovod.operations import Max
from cohort.horovod.torch import _collectives as start
from cohort.horovod.torch._comparison import Comparison
from cohort.horovod.torch._handles import synchronize
from cohort.horovod.torch._wrapping import Wrapped, derived
from cohort.horovod.torch.compression import Compressor
from torch import Tensor


class AdasumOptimizer(Wrapped):
    """Mixed into the optimizer's class, so that the rest of `self` is the optimizer."""

    _parameter_names: Dict[Tensor, str]
    _meet: Dict[Tensor, str]  # names under which ranks reduce parameters, unique over optimizers
    _steps_here: int  # number of steps in this world
    _steps_in: Any
    _ever: Set[Tensor]  # parameters that have required a gradient in this world
    _trained_in: Any
    _compression: Union[Type[Compressor], Compressor]
    _process_set: ProcessSet
    _included: bool
    _comparison: Optional[Comparison]
    backward_passes_per_step: int

    @classmethod
    def wrap(cls, optimizer: torch.optim.Optimizer, names: Sequence[Tuple[str, Tensor]],
             compression: Union[Type[Compressor], Compressor], passes: int, process_set: ProcessSet,
             included: bool, compare: bool) -> Any:  # fmt: skip
        """Returns the optimizer with its steps reduced over the set. included: this rank takes part. compare: check
        whether ranks train alike."""
        self = derived(cls, optimizer)
        self._parameter_names, self._meet = {}, {}
        self._steps_here, self._steps_in = 0, None
        self._ever, self._trained_in = set(), None
        self._compression = compression
        self._process_set = process_set
        self._included = included
        self.backward_passes_per_step = passes
        for name, parameter in names:
            self._add(name, parameter)
        key = self._name_for("comparison")
        self._comparison = Comparison(optimizer, self._parameter_names, process_set, key) if compare else None
        return self

    def _add(self, name: str, parameter: Tensor) -> None:
        self._parameter_names[parameter] = name
        self._meet[parameter] = claimed(name, parameter, self._process_set)

    def _name_for(self, what: str) -> str:
        return f"cohort.{what}.{next(iter(self._meet.values()), '')}"

    def _trained(self) -> List[Tensor]:
        """Returns the parameters in the groups that the optimizer may step: those that require a gradient, or have
        required one in this world, since a rank may have used them before they were frozen."""
        if self._trained_in is not self._process_set._counters:
            self._trained_in, self._ever = self._process_set._counters, set()
        found = []
        for index, group in enumerate(self._groups_unread()):
            for i, parameter in enumerate(group["params"]):
                if parameter not in self._parameter_names:
                    self._add(f"allreduce.noname.{index}.{i}", parameter)
                if parameter.requires_grad:
                    self._ever.add(parameter)
                if parameter in self._ever:
                    found.append(parameter)
        return found

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets backward passes before a step; nothing changes, since gradients accumulate on each rank anyway."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Does nothing, because gradients are not reduced."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises AssertionError, because there is nothing to skip."""
        raise AssertionError("skip_synchronize: with op=hvd.Adasum gradients are not reduced, but the steps")
        yield

    def _before_scaler(self) -> None:
        """Makes a GradScaler find on all ranks what it finds on any, so that all ranks skip a step or none does."""
        if not self._included:
            return
        trained = self._trained()
        given = [parameter for parameter in trained if parameter.grad is not None]
        if trained and not given:  # a GradScaler needs at least one gradient
            trained[0].grad = torch.zeros_like(trained[0], requires_grad=False)
            given = trained[:1]
        finite = all(bool(torch.isfinite(_values_of(parameter)).all()) for parameter in given)
        worst = torch.tensor([int(not finite)], dtype=torch.int32)
        start.allreduce_(worst, None, self._name_for("finite"), Max, process_set=self._process_set)
        if finite and given and worst.item():
            given[0].grad = torch.full_like(given[0], float("inf"), requires_grad=False)

    def step(self, closure: Optional[Callable[[], Any]] = None, *args: Any, **kwargs: Any) -> Any:
        """Lets the optimizer step with this rank's gradients, and adds the Adasum of all ranks' steps instead."""
        trained = self._trained()
        before = [parameter.detach().clone() for parameter in trained]
        arguments = args if closure is None else (closure, *args)
        result = super().step(*arguments, **kwargs)  # type: ignore[misc]
        if not self._included:
            self._stepped()
            return result
        if self._steps_in is not self._process_set._counters:  # new ranks, or back from `join`, so all ranks restart counts
            self._steps_in, self._steps_here = self._process_set._counters, 0
        self._steps_here += 1
        handles = []
        for parameter, old in zip(trained, before):
            sent, context = self._compression.compress(parameter.detach() - old)
            handle = start.adasum_async(sent, self._meet[parameter], self._steps_here, self._process_set)
            handles.append((parameter, old, handle, context))
        for parameter, old, handle, context in handles:
            change = self._compression.decompress(synchronize(handle), context)
            parameter.detach().copy_(old + change)
        if self._comparison is not None:
            self._comparison.step()
        self._stepped()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the optimizer's own step runs the hooks of users


def _values_of(parameter: Tensor) -> Tensor:
    """Returns the values that a GradScaler checks."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout is torch.strided:
        return gradient
    if gradient.dtype is torch.float16:  # a sum of float16 entries may be infinite
        gradient = gradient.coalesce()
    return gradient._values()
