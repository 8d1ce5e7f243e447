"""Horovod's module of this name: its names are those of `cohort.keras.elastic`."""

from __future__ import annotations

from horovod.keras.elastic import *  # noqa: F403
from horovod.keras.elastic import __getattr__  # noqa: F401
