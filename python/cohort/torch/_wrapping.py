"""How an optimizer becomes another one that has its class among its bases and shares its groups and state."""

from __future__ import annotations

from typing import Any, Type, TypeVar

import torch
from cohort._optimizer_state import same_objects


class Wrapped:
    """The base of what is mixed into an optimizer's class: the rest of `self` is the optimizer."""

    wraps_for_ranks = True

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own, but groups and states stay the same objects, which others (a schedule, say) may hold.
        Gradients that are under way are forgotten."""
        self._forget()
        with same_objects(self):
            return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _forget(self) -> None:
        """Begins anew, whatever becomes of gradients that are under way."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"an optimizer that is wrapped for all ranks ({type(self).__name__}) cannot be copied or pickled: it belongs "
            "to this process's ranks and parameters -- keep its state_dict(), and wrap a new optimizer"
        )


T = TypeVar("T", bound=Wrapped)


def derived(mixin: Type[T], optimizer: torch.optim.Optimizer) -> T:
    """An object of a class that puts `mixin` before the optimizer's class, with the optimizer's attributes.

    Its constructor is not called again: nobody knows the arguments of those that others wrote.
    """
    base = type(optimizer)
    bases: Any = (mixin, base)
    make: Any = type
    made = make(base.__name__, bases, {"__module__": base.__module__, "__doc__": base.__doc__})
    wrapped: Any = made.__new__(made)
    # A learning-rate scheduler puts a `step` of its own on the optimizer, which is the one without ranks.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    return wrapped
