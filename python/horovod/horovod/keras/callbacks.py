"""Horovod's module of this name: its names are those of `cohort.keras.callbacks`."""

from __future__ import annotations

import cohort.keras.callbacks as _callbacks
from cohort.keras.callbacks import *  # noqa: F403


def __getattr__(name: str) -> object:
    return getattr(_callbacks, name)
