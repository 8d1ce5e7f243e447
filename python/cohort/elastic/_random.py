"""Random generators of a rank: their states as of the last step, kept in this process."""

from __future__ import annotations

import array
import random
import sys
import threading
from collections.abc import Callable
from typing import Any, Optional

from cohort import _core

_MT19937_BYTES = 4 * 624 + 4  # the words and the position in them


class _NumpyGlobal:
    """NumPy's global generator. Getting its state takes 20 us, so checks first whether its words have changed."""

    _bits: Any = None
    _watch: Optional[_core.Watch] = None
    _state: Any = None

    def getstate(self) -> Any:
        numpy_random = sys.modules["numpy.random"]
        bits = numpy_random.mtrand._rand._bit_generator
        if bits is not self._bits:
            known = type(bits) is numpy_random.MT19937
            self._bits = bits
            self._watch = _core.Watch(bits.ctypes.state_address, _MT19937_BYTES) if known else None
        # The last draw may have left a second normal number; using that changes no word.
        if self._watch is None or self._watch.changed() or self._state["has_gauss"]:
            self._state = numpy_random.get_state(legacy=False)
        return self._state

    def setstate(self, state: Any) -> None:
        sys.modules["numpy.random"].set_state(state)


class _PythonGlobal:
    """Python's global generator, whose state is a tuple of 625 numbers. First checks whether its memory has changed.
    CPython's memory layout is assumed, and compared with the tuple each time that a tuple is made."""

    _generator: Any = None
    _watch: Optional[_core.Watch] = None
    _state: Any = None

    def getstate(self) -> Any:
        generator: Any = random._inst
        if generator is not self._generator:
            fits = type(generator).__basicsize__ >= object.__basicsize__ + _MT19937_BYTES
            self._generator = generator
            self._watch = _core.Watch(id(generator) + object.__basicsize__, _MT19937_BYTES) if fits else None
        if self._watch is None or self._watch.changed() or self._state[2] != generator.gauss_next:
            self._state = random.getstate()
            *words, position = self._state[1]
            if self._watch is not None and self._watch.copy != array.array("I", [position, *words]).tobytes():
                self._watch = None  # the layout is not the assumed one
        return self._state

    def setstate(self, state: Any) -> None:
        random.setstate(state)


_numpy_global, _python_global = _NumpyGlobal(), _PythonGlobal()


class GlobalGenerators:
    """Global generators of imported modules; of GPUs, only the current device of the thread that made this object."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._device: Optional[int] = None

    def __call__(self) -> list:
        found: list = [_python_global]
        if "numpy.random" in sys.modules:
            found.append(_numpy_global)
        torch = sys.modules.get("torch")
        if torch is not None:
            found.append(torch.default_generator)
            if torch.version.cuda is not None and torch.cuda.is_initialized():
                if self._device is None or threading.get_ident() == self._thread:  # other threads have their own device
                    self._device = torch.cuda.current_device()
                found.append(torch.cuda.default_generators[self._device])
        return found


def is_generator(thing: Any) -> bool:
    torch, numpy_random = sys.modules.get("torch"), sys.modules.get("numpy.random")
    return (
        isinstance(thing, random.Random)
        or (torch is not None and isinstance(thing, torch.Generator))
        or (numpy_random is not None and isinstance(thing, numpy_random.Generator))
    )


def access(generators: Callable[[], list]) -> tuple[Callable[[], bytes], Callable[[bytes], None]]:
    """Returns functions by which a State gets and sets the generators' states. The State keeps only a number, because
    these states never leave the process."""
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
