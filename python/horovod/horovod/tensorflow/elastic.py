"""Horovod's module of this name: its names are those of `cohort.tensorflow.elastic`."""

from __future__ import annotations

import cohort.tensorflow.elastic as _hvd
from cohort.tensorflow.elastic import *  # noqa: F403


def __getattr__(name: str) -> object:
    return getattr(_hvd, name)
