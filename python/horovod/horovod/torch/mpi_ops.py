"""Horovod's module of this name: its names are those of `cohort.torch.mpi_ops`."""

from __future__ import annotations

from cohort.torch import mpi_ops as _ops
from cohort.torch.mpi_ops import *  # noqa: F403


def __getattr__(name: str) -> object:
    return getattr(_ops, name)
