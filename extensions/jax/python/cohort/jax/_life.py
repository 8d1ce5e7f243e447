"""Keeps compiled programs consistent with worlds, when a world ends and when the next one has a different size."""

from __future__ import annotations

import atexit
import sys
from typing import Optional, Tuple

import jax
import jax.numpy as jnp
from cohort.horovod import basics

_last: Optional[Tuple[int, int]] = None


def watch() -> None:
    """Called once, when this package is imported; after `cohort`, so that `_finish` runs before the worlds end."""
    atexit.register(_finish)
    basics.when_formed.append(_formed)


def _finish() -> None:
    # Programs run outside of Python, and their operations need a world until they are done. JAX runs the programs that a
    # thread has started in order, so this waits for one more program, which ends after all others of this thread. The
    # programs of other threads are known by their results. Nobody is left to receive failures. After an exception this
    # waits for nothing, and the end of the world informs the other ranks.
    if not basics.is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    try:
        (jnp.zeros(()) + 1).block_until_ready()
        for array in jax.live_arrays("cpu"):
            array.block_until_ready()
    except Exception:
        pass


def _formed() -> None:
    # Compiled programs depend on the world's rank and size.
    global _last
    place = basics._place
    now = None if place is None else (place.rank, place.size)
    if _last is not None and now != _last:
        jax.clear_caches()
    _last = now
