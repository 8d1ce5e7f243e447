"""Data-parallel training of torch modules: DistributedDataParallel over processes, DataParallel over threads.

Needs torch 1.13 or 2.x, for the CPU.
"""

from __future__ import annotations

from cohort.nn.data_parallel import DataParallel
from cohort.nn.distributed import DistributedDataParallel
from cohort.nn.options import BucketSlot, DistributedDataParallelOptions, ReducerStats

__all__ = [
    "BucketSlot",
    "DataParallel",
    "DistributedDataParallel",
    "DistributedDataParallelOptions",
    "ReducerStats",
]
