"""How an optimizer becomes another one that has its class among its bases and shares its groups and state."""

from __future__ import annotations

from typing import Any, Type, TypeVar

import torch

T = TypeVar("T")


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
