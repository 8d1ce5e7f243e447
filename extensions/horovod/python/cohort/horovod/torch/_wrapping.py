"""Turns an optimizer into another one that has its class among its bases and shares its groups and state."""

from __future__ import annotations

import sys
import weakref
from typing import Any, Dict, List, Type, TypeVar

import torch
from cohort._core import count_step
from cohort._checkpoint.optimizer_state import same_objects

# The function of every torch GradScaler (1.13 to 2.13) that checks whether gradients are finite, and unscales them.
_SCALER = "_unscale_grads_"


class Wrapped:
    """The base of classes mixed into an optimizer's class, so that the rest of `self` is the optimizer."""

    wraps_for_ranks = True

    _made_of: "weakref.ref[torch.optim.Optimizer]"

    @property
    def param_groups(self) -> List[Dict[str, Any]]:
        """The optimizer's groups. A GradScaler reads the gradients through them, and all ranks have to decide alike."""
        if sys._getframe(1).f_code.co_name == _SCALER:
            self._before_scaler()
        else:
            self._before_reading()
        return self._groups_unread()

    @param_groups.setter
    def param_groups(self, groups: List[Dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def _groups_unread(self) -> List[Dict[str, Any]]:
        """Returns the groups, for callers that do not read gradients."""
        groups = self.__dict__.get("param_groups")
        return super().param_groups if groups is None else groups  # type: ignore[misc]

    def _before_scaler(self) -> None:
        """Called when a GradScaler is about to check the gradients, once in each iteration, on all ranks."""

    def _before_reading(self) -> None:
        """Called when other code is about to read the gradients."""

    def _stepped(self) -> None:
        """Called when the optimizer has stepped."""
        count_step()
        # A schedule made before the optimizer was wrapped refers to the original, and checks whether that has stepped.
        before: Any = self._made_of()
        if before is not None:
            before._opt_called = True
            if "_step_count" in vars(before):  # torch before 2.4
                before._step_count += 1

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like the optimizer's own, but groups and states stay the same objects, to which others (a schedule, for
        example) may refer. Gradients under way are forgotten."""
        self._forget()
        with same_objects(self):
            return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _forget(self) -> None:
        """Starts over, without regard to gradients under way."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"an optimizer that is wrapped for all ranks ({type(self).__name__}) cannot be copied or pickled: it belongs "
            "to this process's ranks and parameters -- keep its state_dict(), and wrap a new optimizer"
        )


T = TypeVar("T", bound=Wrapped)


def derived(mixin: Type[T], optimizer: torch.optim.Optimizer) -> T:
    """Returns an object of a class that puts `mixin` before the optimizer's class, with the optimizer's attributes.

    Its constructor is not called again, since the arguments of custom optimizers are unknown.
    """
    base = type(optimizer)
    bases: Any = (mixin, base)
    make: Any = type
    made = make(base.__name__, bases, {"__module__": base.__module__, "__doc__": base.__doc__})
    wrapped: Any = made.__new__(made)
    # Leaves out a `step` that a learning-rate scheduler has set on the optimizer, since it would not reduce.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    wrapped._made_of = weakref.ref(optimizer)
    return wrapped
