"""Keeps compiled programs and worlds consistent: their ends, and worlds of another size."""

from __future__ import annotations

import atexit
import sys
from typing import Optional, Tuple

import jax
import jax.numpy as jnp
from cohort.hvd import basics

_last: Optional[Tuple[int, int]] = None


def watch() -> None:
    """Called once, as this package is imported: after `cohort`, so that its end comes before that of the worlds."""
    atexit.register(_finish)
    basics.when_formed.append(_formed)


def _finish() -> None:
    # Programs run behind Python's back, and their operations need a world until they are done. JAX runs those of a thread
    # one after the other, so that one more waits for all that this one has started; results tell of other threads'.
    # Nobody is left to report failures to. After an exception nothing is waited for: the world's end tells others.
    if not basics.is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    try:
        (jnp.zeros(()) + 1).block_until_ready()
        for array in jax.live_arrays("cpu"):
            array.block_until_ready()
    except Exception:
        pass


def _formed() -> None:
    # Programs have the rank and the size of the world in their shapes.
    global _last
    place = basics._place
    now = None if place is None else (place.rank, place.size)
    if _last is not None and now != _last:
        jax.clear_caches()
    _last = now
