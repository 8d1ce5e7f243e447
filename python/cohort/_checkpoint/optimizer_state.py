"""Takes the state of any torch optimizer and restores it unchanged.

Other objects may refer to an optimizer's groups and states (a schedule made before the optimizer was wrapped, a
wrapper, a running average), so these stay the same objects, and so do tensors that fit. torch's `load_state_dict`
replaces them, and casts loaded values to the type of the parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def take(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state, in the form for `put`. Its tensors are the optimizer's own.

    sizes       number of parameters in each group
    groups      the options of each group
    parameters  the state of each parameter with a state, by its number
    others      state with other keys
    own         `state_dict()`, if the optimizer's class has its own version, which may hold more
    within      if the optimizer wraps others, the same for each of these, by attribute
    """
    numbers = {id(parameter): number for number, parameter in enumerate(parameters_of(optimizer))}
    state = optimizer.state
    return {
        "sizes": [len(group["params"]) for group in optimizer.param_groups],
        "groups": [{name: one for name, one in group.items() if name != "params"} for group in optimizer.param_groups],
        "parameters": {numbers[id(key)]: dict(state[key]) for key in state if id(key) in numbers},
        "others": {key: one for key, one in state.items() if not isinstance(key, Tensor)},
        "own": optimizer.state_dict() if _has_own_form(optimizer) else None,
        "within": {name: take(one) for name, one in _within(optimizer).items()},
    }


def is_empty(taken: Mapping[str, Any]) -> bool:
    """Returns whether the optimizer, and inner ones, had no state yet."""
    return not taken["parameters"] and not taken["others"] and all(map(is_empty, taken["within"].values()))


def put(optimizer: torch.optim.Optimizer, taken: Mapping[str, Any]) -> None:
    """Sets the optimizer to the state that `take` returned for an optimizer with the same groups; other options stay.

    Raises ValueError if the groups differ.
    """
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != taken["sizes"]:
        raise ValueError(
            f"the state of an optimizer does not fit: its groups have {taken['sizes']} parameters, and those here {sizes}"
        )
    if taken["own"] is not None:
        with same_objects(optimizer):
            _class_of(optimizer).load_state_dict(optimizer, taken["own"])
    for name, one in _within(optimizer).items():
        if name in taken["within"]:
            put(one, taken["within"][name])
    for group, options in zip(optimizer.param_groups, taken["groups"]):
        put_items(group, options, keep=group)
    parameters = parameters_of(optimizer)
    fresh = {**{parameters[number]: one for number, one in taken["parameters"].items()}, **taken["others"]}
    put_states(optimizer.state, fresh)


def load(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Like `load_state_dict`, but casts nothing, and keeps the same groups and states."""
    with same_objects(optimizer):
        optimizer.load_state_dict(state_dict)
        for number, parameter in enumerate(parameters_of(optimizer)):
            saved, state = state_dict["state"].get(number, {}), optimizer.state.get(parameter, {})
            for name, value in saved.items():
                if isinstance(value, Tensor) and isinstance(state.get(name), Tensor) and state[name].dtype != value.dtype:
                    state[name] = value.to(state[name].device)


@contextlib.contextmanager
def same_objects(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While the context lasts, `load_state_dict` puts the new values into the existing groups and states, also for inner
    optimizers. This also holds for code in an optimizer's own load_state_dict after its call of torch's."""
    if "__setstate__" in vars(optimizer):  # already within this context
        yield
        return
    groups, state = optimizer.param_groups, optimizer.state
    options, states = list(groups), dict(state)

    def restore() -> None:
        fresh, fresh_state = list(optimizer.param_groups), dict(optimizer.state)
        for old, now in zip(options, fresh):
            if now is not old:
                put_items(old, now)
        groups[:] = [*options[: len(fresh)], *fresh[len(options) :]]
        optimizer.param_groups = groups
        state.clear()
        state.update(states)
        put_states(state, fresh_state)
        optimizer.state = state

    def set_state(new: Any) -> None:  # torch's load_state_dict calls it with the new state
        type(optimizer).__setstate__(optimizer, new)
        restore()

    with contextlib.ExitStack() as stack:
        for one in _within(optimizer).values():
            stack.enter_context(same_objects(one))
        vars(optimizer)["__setstate__"] = set_state
        try:
            yield
        finally:
            del vars(optimizer)["__setstate__"]
    restore()


def _within(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    return {name: one for name, one in vars(optimizer).items() if isinstance(one, torch.optim.Optimizer)}


def put_items(mine: MutableMapping[Any, Any], items: Mapping[Any, Any], keep: Container[Any] = ()) -> None:
    """Makes a dict hold only these items, and those in `keep`. Tensors that fit are filled in place."""
    for key in [key for key in mine if key not in items and key not in keep]:
        del mine[key]
    for key, value in items.items():
        old: Any = mine.get(key)
        if old is not value and _fits(old, value):
            with torch.no_grad():
                old.copy_(value)
        else:
            mine[key] = value


def put_states(state: MutableMapping[Any, Any], fresh: Mapping[Any, Any]) -> None:
    """Makes an optimizer's state hold only these values, each in the existing dict."""
    old = dict(state)
    state.clear()
    for key, value in fresh.items():
        before = old.get(key)
        if isinstance(before, MutableMapping) and isinstance(value, Mapping):
            put_items(before, value)
            value = before
        state[key] = value


def _fits(old: Any, value: Any) -> bool:
    return (
        type(old) is type(value) is Tensor
        and (old.dtype, old.device, old.layout, old.shape) == (value.dtype, value.device, value.layout, value.shape)
        and old.layout is torch.strided
        and old.stride() == value.stride()
        and 0 not in old.stride()
        and not old.is_inference()
    )


def _class_of(optimizer: torch.optim.Optimizer) -> Any:
    """Returns the optimizer's class; for one that is wrapped for ranks, the original class."""
    return next(one for one in type(optimizer).__mro__ if not getattr(one, "wraps_for_ranks", False))


def _has_own_form(optimizer: torch.optim.Optimizer) -> bool:
    kind, plain = _class_of(optimizer), torch.optim.Optimizer
    hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return (
        kind.state_dict is not plain.state_dict
        or kind.load_state_dict is not plain.load_state_dict
        or any(getattr(optimizer, name, None) for name in hooks)
    )
