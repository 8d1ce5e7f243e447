"""Horovod's module of this name: its names are those of `cohort.torch.elastic`."""

from __future__ import annotations

import cohort.torch.elastic as _elastic
from cohort.torch.elastic import *  # noqa: F403


def __getattr__(name: str) -> object:
    return getattr(_elastic, name)
