"""The optimizer that lets each rank step by itself and reduces what that has changed, by Adasum."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Type, Union

import torch
from cohort._core import count_step
from cohort.hvd.process_sets import ProcessSet
from cohort.hvd.operations import Adasum
from cohort.torch import _collectives as start
from cohort.torch._comparison import Comparison
from cohort.torch._handles import synchronize
from cohort.torch._wrapping import Wrapped, derived
from cohort.torch.compression import Compressor
from torch import Tensor


class AdasumOptimizer(Wrapped):
    """Mixed into the optimizer's class: the rest of `self` is the optimizer."""

    _names: List[Tuple[str, Tensor]]
    _compression: Union[Type[Compressor], Compressor]
    _process_set: ProcessSet
    _included: bool
    _comparison: Optional[Comparison]
    backward_passes_per_step: int

    @classmethod
    def wrap(cls, optimizer: torch.optim.Optimizer, names: Sequence[Tuple[str, Tensor]],
             compression: Union[Type[Compressor], Compressor], passes: int, process_set: ProcessSet,
             included: bool, compare: bool) -> Any:  # fmt: skip
        """The optimizer with its steps reduced over the set. included: this rank takes part. compare: check whether
        ranks train alike."""
        self = derived(cls, optimizer)
        self._names = list(names)
        self._compression = compression
        self._process_set = process_set
        self._included = included
        self._comparison = Comparison(optimizer, dict(self._parameter_names), process_set) if compare else None
        self.backward_passes_per_step = passes
        return self

    @property
    def _parameter_names(self) -> Dict[Tensor, str]:
        return {parameter: name for name, parameter in self._names}

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Backward passes before a step: gradients add up on each rank by themselves, so nothing depends on it."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Does nothing: gradients are not reduced."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises AssertionError: there is nothing to skip."""
        raise AssertionError("skip_synchronize: with op=hvd.Adasum gradients are not reduced, but the steps")
        yield

    def step(self, closure: Optional[Callable[[], Any]] = None, *args: Any, **kwargs: Any) -> Any:
        """Lets the optimizer step with this rank's gradients, and adds the Adasum of all ranks' steps instead."""
        named = [(name, parameter) for name, parameter in self._names if parameter.requires_grad]
        before = [parameter.detach().clone() for _, parameter in named]
        arguments = args if closure is None else (closure, *args)
        result = super().step(*arguments, **kwargs)  # type: ignore[misc]
        if not self._included:
            count_step()
            return result
        handles = []
        for (name, parameter), old in zip(named, before):
            sent, context = self._compression.compress(parameter.detach() - old)
            handle = start.allreduce_async(sent, None, name, Adasum, process_set=self._process_set)
            handles.append((parameter, old, handle, context))
        for parameter, old, handle, context in handles:
            change = self._compression.decompress(synchronize(handle), context)
            parameter.detach().copy_(old + change)
        if self._comparison is not None:
            self._comparison.step()
        count_step()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the optimizer's own step runs the hooks of users
