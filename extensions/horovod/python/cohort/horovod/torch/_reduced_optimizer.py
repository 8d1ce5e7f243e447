"""The optimizer that reduces gradients: the result of `DistributedOptimizer` for all ops except Adasum."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Callable, Dict, Iterator, Optional

import torch
from cohort.horovod import basics
from cohort.horovod.operations import Average
from cohort.horovod.torch import _collectives as start
from cohort.horovod.torch._comparison import Comparison
from cohort.horovod.torch._gradients import Reducer
from cohort.horovod.torch._wrapping import Wrapped, derived
from torch import Tensor


class ReducedOptimizer(Wrapped):
    """Mixed into the optimizer's class, so that the rest of `self` is the optimizer."""

    _reducer: Reducer
    _included: bool
    _should_synchronize: bool
    _reading: bool

    @classmethod
    def wrap(cls, optimizer: torch.optim.Optimizer, reducer: Reducer, included: bool, compare: bool) -> Any:
        """Returns the optimizer with `reducer` for its gradients. included: this rank takes part. compare: check
        whether ranks train alike."""
        self = derived(cls, optimizer)
        self._reducer = reducer
        self._included = included
        self._should_synchronize = True
        self._reading = False
        alone = (reducer._process_set.size() or 1) == 1 and not basics.may_grow()
        if included and (not alone or reducer.raises_non_finite):
            reducer.attach()
            if compare and not alone:  # if other ranks join later, it is made then
                name = reducer.name_for("comparison")
                reducer.comparison = Comparison(optimizer, reducer.names, reducer._process_set, name)
        return self

    @property
    def _parameter_names(self) -> Dict[Tensor, str]:
        return self._reducer.names

    @property
    def backward_passes_per_step(self) -> int:
        return self._reducer.passes

    def _before_reading(self) -> None:
        # Gradients read through the groups are reduced ones, as far as this rank has any. Does not wait for gradients that
        # only other ranks have, because a single rank may read a learning rate.
        reducer = self.__dict__.get("_reducer")
        if reducer is not None and reducer.pending() and not self._reading:
            self._reading = True
            try:
                reducer.finish(complete=False)
            finally:
                self._reading = False

    def _before_scaler(self) -> None:
        # A rank without a gradient contributes zeros now, since in `step`, which all ranks may skip, the others' gradients
        # are unscaled already.
        reducer = self._reducer
        if reducer.attached and (reducer.scaled or not reducer.synchronized):
            reducer.finish()
            reducer.scaled = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets how many backward passes' gradients are summed before a reduction, from the next pass on."""
        if passes < 1:
            raise ValueError(f"set_backward_passes_per_step({passes}): at least 1 is needed")
        if passes > 1 and self._reducer._counts_samples:
            raise ValueError(f"set_backward_passes_per_step({passes}): average_by='samples' goes with 1 alone")
        self._reducer.set_passes(passes)

    def set_sample_count(self, count: int) -> None:
        """With average_by="samples", call it once before each backward. This rank's loss is the mean of `count`
        samples; 0 if it has none left, and its gradients do not count. Raises ValueError for other counts."""
        self._reducer.set_sample_count(count)

    def synchronize(self) -> None:
        """Waits until all gradients are reduced, for example to clip them. Then step within `skip_synchronize`.

        Raises HorovodInternalError if the reduction failed, NonFiniteError if that check is on and finds a value, and
        InvalidArgument (a ValueError) if a gradient was changed after backward, while it was being reduced.
        """
        self._add_new()
        self._reducer.finish()
        self._reducer.synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Makes `step` use the gradients unchanged while the context lasts."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Optional[Callable[[], Any]] = None, *args: Any, **kwargs: Any) -> Any:
        """Waits for the reduced gradients, like `synchronize` (unless within `skip_synchronize`, or a GradScaler has done
        so), and lets the optimizer step.

        closure  gradients that it computes are reduced before the optimizer sees them; for LBFGS also the loss, which
                 it compares
        """
        self._add_new()
        wanted = self._should_synchronize and not self._reducer.scaled
        if wanted and (closure is None or self._reducer.pending()):
            if self._reducer.synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): "
                    "gradients are reduced a second time",
                    stacklevel=2,
                )
            self.synchronize()
        elif self._reducer.comparison is not None and not (self._reducer.synchronized or self._reducer.scaled):
            self._reducer.comparison.weights = False  # this rank steps alone
        self._reducer.synchronized = self._reducer.scaled = False
        if closure is None:
            result = super().step(*args, **kwargs)  # type: ignore[misc]
        else:
            result = super().step(self._reducing(closure) if wanted else closure, *args, **kwargs)  # type: ignore[misc]
        self._stepped()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the optimizer's own step runs the hooks of users

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            loss = closure()
            self._reducer.finish()
            if isinstance(self, torch.optim.LBFGS) and self._reducer.attached:
                # Ranks that saw different losses would take different numbers of steps.
                loss = torch.as_tensor(loss).detach().clone()
                start.allreduce_(loss, None, self._reducer.name_for("lbfgs.loss"), Average, process_set=self._reducer._process_set)
            return loss

        return call

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Like the optimizer's own. Raises AssertionError while gradients are being reduced."""
        if self._reducer.pending():
            raise AssertionError(
                "zero_grad() while gradients are being reduced, which would be lost: there was a backward() since the last "
                "step() or synchronize() of this optimizer -- call zero_grad() before backward(), or, where that backward() "
                "was of a loss that another optimizer steps for (a GAN's), this optimizer's synchronize() before its "
                "zero_grad()"
            )
        self._reducer.renew()
        return super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def _forget(self) -> None:
        self._reducer.forget()
        self._should_synchronize = True

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Like the optimizer's own; the gradients of the new parameters are reduced, too, named by their position."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._add_new()

    def _add_new(self) -> None:
        """Adds parameters of the groups that are not reduced yet."""
        reducer, groups = self._reducer, self._groups_unread()
        if not reducer.attached or sum(len(group["params"]) for group in groups) == len(reducer.names):
            return
        for index, group in enumerate(groups):
            for i, parameter in enumerate(group["params"]):
                if parameter not in reducer.names:
                    reducer.add(f"allreduce.noname.{index}.{i}", parameter)
