"""Horovod's module of this name: its names are those of `cohort.keras.callbacks`."""

from __future__ import annotations

from horovod.keras.callbacks import *  # noqa: F403
from horovod.keras.callbacks import __getattr__  # noqa: F401
