"""Keeps compiled programs consistent with worlds: when these end, and when a new world has another size."""

from __future__ import annotations

import atexit
import sys
from typing import Optional, Tuple

import jax
import jax.numpy as jnp
from cohort.horovod import basics

_last: Optional[Tuple[int, int]] = None


def watch() -> None:
    """Called once, on this package's import: after `cohort`'s import, so that it runs before the worlds end."""
    atexit.register(_finish)
    basics.when_formed.append(_formed)


def _finish() -> None:
    # Programs run outside of Python, and their operations need a world until they are done. JAX runs a thread's
    # programs in order, so an additional one waits for all that this thread has started; other threads' are known by
    # their results. Nobody is left to receive failures. After an exception nothing is waited for: the world's end tells
    # other ranks.
    if not basics.is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    try:
        (jnp.zeros(()) + 1).block_until_ready()
        for array in jax.live_arrays("cpu"):
            array.block_until_ready()
    except Exception:
        pass


def _formed() -> None:
    # Programs have the world's rank and size in their shapes.
    global _last
    place = basics._place
    now = None if place is None else (place.rank, place.size)
    if _last is not None and now != _last:
        jax.clear_caches()
    _last = now
