"""Generators from which a rank draws: where they were at the last step, kept in this process."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any

_MT19937_BYTES = 4 * 624 + 4  # the words and the position among them


class _NumpyGlobal:
    """NumPy's global generator. Asking for its state takes 20 us, so this looks first whether anything was drawn."""

    _seen: tuple[bytes, Any] = (b"", None)

    def getstate(self) -> Any:
        numpy_random = sys.modules["numpy.random"]
        bits = numpy_random.mtrand._rand._bit_generator
        words = b""
        if type(bits) is numpy_random.MT19937:
            words = ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)
            # A normal number may be left over from the last draw, and its use changes no word.
            if words == self._seen[0] and not self._seen[1]["has_gauss"]:
                return self._seen[1]
        self._seen = words, numpy_random.get_state(legacy=False)
        return self._seen[1]

    def setstate(self, state: Any) -> None:
        sys.modules["numpy.random"].set_state(state)


_numpy_global = _NumpyGlobal()


def global_generators() -> list:
    """Of what is imported."""
    found: list = [random]
    if "numpy.random" in sys.modules:
        found.append(_numpy_global)
    torch = sys.modules.get("torch")
    if torch is not None:
        found.append(torch.default_generator)
        if torch.cuda.is_initialized():
            found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def is_generator(thing: Any) -> bool:
    torch, numpy_random = sys.modules.get("torch"), sys.modules.get("numpy.random")
    return (
        isinstance(thing, random.Random)
        or (torch is not None and isinstance(thing, torch.Generator))
        or (numpy_random is not None and isinstance(thing, numpy_random.Generator))
    )


def access(generators: Callable[[], list]) -> tuple[Callable[[], bytes], Callable[[bytes], None]]:
    """How a State gets and sets their states. What it keeps is a number, since these states never leave the process."""
    kept: dict[bytes, list] = {}
    number = 0

    def get() -> bytes:
        nonlocal number
        number += 1
        copy = number.to_bytes(8, "little")
        kept[copy] = [(one, _state_of(one)) for one in generators()]
        if len(kept) > 2:
            del kept[next(iter(kept))]
        return copy

    def set_states(copy: bytes) -> None:
        for one, state in kept[copy]:
            if hasattr(one, "setstate"):
                one.setstate(state)
            elif hasattr(one, "set_state"):
                one.set_state(state)
            else:
                one.bit_generator.state = state

    return get, set_states


def _state_of(generator: Any) -> Any:
    if hasattr(generator, "getstate"):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state
