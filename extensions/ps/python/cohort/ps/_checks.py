"""Checks options and arguments of cohort.ps before the core gets them. An error names the parameter, the value given,
and what to pass."""

from __future__ import annotations

import math
import operator
import os
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn, Optional

from cohort.errors import InvalidArgument

_PLAIN = (bool, int, float, complex, str, bytes, range, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset)
_SCALES = {"K": 10, "M": 20, "G": 30, "T": 40}


def shown(value: Any) -> str:
    """Describes a value: 'sgd', the class Sgd, the function Async, a torch.optim.sgd.SGD."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return f"the function {value.__name__}"
    if isinstance(value, _PLAIN) or (isinstance(value, _CONTAINERS) and len(value) <= 4):
        text = repr(value)
        if isinstance(value, _PLAIN) or "\n" not in text:
            return text if len(text) <= 60 else f"{text[:57]}..."
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def refuse(what: str, name: str, value: Any, wanted: str) -> NoReturn:
    raise InvalidArgument(f"{what}: {name} is {shown(value)} -- {wanted}")


def number(what: str, name: str, value: Any) -> float:
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    refuse(what, name, value, "pass a number")


_LEAST, _MOST = -(2**63), 2**63 - 1


def integer(what: str, name: str, value: Any, least: int = 0, most: int = _MOST) -> int:
    try:
        given = operator.index(value)
    except TypeError:
        given = None
    if given is None or not least <= given <= most:
        bound = f" from {least} to {most}" if most != _MOST else f" from {least} on" if least != _LEAST else ""
        refuse(what, name, value, f"pass an integer{bound}")
    return given


def seconds(what: str, name: str, value: Any) -> float:
    given = number(what, name, value)
    if not given >= 0:  # refuses NaN, too
        refuse(what, name, value, "pass seconds, 0 or more")
    return given


def size(what: str, name: str, value: Any) -> int:
    """Returns a number of bytes; accepts text such as "6G" or "500M", powers of 1024."""
    number_of, scale = value, 0
    if isinstance(value, str):
        scale = _SCALES.get(value[-1:].upper(), 0)
        number_of = value[:-1] if scale else value
    try:
        given = float(number_of) * 2**scale
    except (TypeError, ValueError):
        given = math.nan
    if not 0 <= given < 2**63 or (not scale and given != int(given)):
        refuse(what, name, value, 'pass bytes, or a text such as "500M" or "6G"')
    return int(number_of) if isinstance(number_of, int) else int(given)


def text(what: str, name: str, value: Any, wanted: str = "pass a text") -> str:
    if not isinstance(value, str):
        refuse(what, name, value, wanted)
    return value


def path(what: str, name: str, value: Any) -> str:
    try:
        return os.fsdecode(value)
    except TypeError:
        refuse(what, name, value, "pass a path")


def rate(what: str, lr: Any) -> Optional[float]:
    """Checks the learning rate of a push."""
    return lr if lr is None or type(lr) is float else number(what, "lr", lr)
