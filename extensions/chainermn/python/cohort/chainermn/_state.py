"""Divides a state_dict() into a JSON text and the tensors that the text refers to. The state has numbers, texts, lists,
tuples and dicts of such, like those of optimizers and schedulers. Nothing is pickled."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from cohort.errors import InvalidArgument

_PLAIN = (bool, int, float, str)


def outline(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> str:
    """Returns the text, and adds the tensors to the dict, under names that begin with `name`. Raises InvalidArgument
    for any other value.
    """
    return json.dumps(_outlined(value, name, tensors))


def _outlined(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if value is None or type(value) in _PLAIN:
        return {"plain": value}
    if type(value) in (dict, OrderedDict, Counter):
        for key in value:
            if type(key) not in (int, str):
                raise InvalidArgument(f"cannot save {name}: a key of it is {key!r} -- numbers and texts can be keys")
        kind = "counter" if type(value) is Counter else "dict"
        return {kind: [[key, _outlined(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        items = [_outlined(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
        return {type(value).__name__: items}
    raise InvalidArgument(
        f"cannot save {name}: it is a {type(value).__name__} -- numbers, texts, tensors, and lists, tuples and dicts of such can be"
    )


def filled(text: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Returns the value of a text and its tensors: the inverse of `outline`."""
    return _filled(json.loads(text), tensors)


def _filled(value: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "plain":
        return content
    if kind in ("dict", "counter"):
        made = {key: _filled(item, tensors) for key, item in content}
        return made if kind == "dict" else Counter(made)
    items = [_filled(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)
