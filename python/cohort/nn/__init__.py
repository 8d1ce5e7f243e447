"""Data-parallel training of torch modules: DistributedDataParallel over processes, DataParallel over threads.

Needs torch 1.13 or 2.x. Modules are on the CPU, or on a GPU of each rank's own (docs/reference/gpu.md).
"""

from __future__ import annotations

from cohort.nn._hooks import GradBucket
from cohort.nn._non_finite import NonFiniteElement, NonFiniteError, NonFiniteGradient, first_non_finite
from cohort.nn._same_parameters import require_same_parameters
from cohort.nn.data_parallel import DataParallel
from cohort.nn.distributed import DistributedDataParallel
from cohort.nn.options import BucketSlot, DistributedDataParallelOptions, ReducerStats

__all__ = [
    "BucketSlot",
    "DataParallel",
    "DistributedDataParallel",
    "DistributedDataParallelOptions",
    "GradBucket",
    "NonFiniteElement",
    "NonFiniteError",
    "NonFiniteGradient",
    "ReducerStats",
    "first_non_finite",
    "require_same_parameters",
]
