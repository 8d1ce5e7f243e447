"""Horovod's module of this name: its names are those of `cohort.tensorflow.mpi_ops`."""

from __future__ import annotations

import cohort.tensorflow.mpi_ops as _hvd
from cohort.tensorflow.mpi_ops import *  # noqa: F403


def __getattr__(name: str) -> object:
    return getattr(_hvd, name)
