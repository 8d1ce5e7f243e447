"""Horovod's module of this name: its names are those of `cohort.tensorflow`."""

from __future__ import annotations

import cohort.tensorflow as _hvd
from cohort.tensorflow import *  # noqa: F403


def __getattr__(name: str) -> object:
    return getattr(_hvd, name)
