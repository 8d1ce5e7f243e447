"""Horovod's module of this name: its names are those of `cohort.torch`."""

from __future__ import annotations

import cohort.torch as _hvd
from cohort.torch import *  # noqa: F403


def __getattr__(name: str) -> object:
    return getattr(_hvd, name)
