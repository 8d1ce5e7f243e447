"""Horovod's module of this name: its names are those of `cohort.keras.elastic`."""

from __future__ import annotations

import cohort.keras.elastic as _elastic
from cohort.keras.elastic import *  # noqa: F403


def __getattr__(name: str) -> object:
    return getattr(_elastic, name)
