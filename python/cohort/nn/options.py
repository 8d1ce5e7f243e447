"""Options and statistics of DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Any

from cohort import _core

# The core's list of options, with its names and defaults; `observer` is each rank's own.
_FIELDS = [(name, Any, field(default=value)) for name, value in {**_core.standard_options(), "observer": None}.items()]
DistributedDataParallelOptions: Any = make_dataclass(
    "DistributedDataParallelOptions", _FIELDS, frozen=True, namespace={"__module__": __name__}
)


@dataclass
class ReducerStats:
    """Statistics of the reducer. Times are of this rank, in seconds."""

    steps: int = 0  # synchronised backward passes, and steps without samples
    non_finite_steps: int = 0  # the steps that ended in a NonFiniteError
    parameter_comparisons: int = 0  # done because of compare_parameters_every
    buckets: int = 0
    bucket_bytes: int = 0  # of all buckets together
    exposed_communication_seconds: float = 0.0  # of the last step: waiting after the backward
    exposed_communication_seconds_total: float = 0.0
    gradients_written: int = 0  # written into a bucket by assignment, in all steps
    gradients_moved: int = 0  # found outside their bucket and copied in (order rebuilt, .grad replaced)


@dataclass(frozen=True)
class BucketSlot:
    """The place of a gradient in its bucket; for tests and tools."""

    bucket: int
    begin: int  # address of the bucket's memory
    bytes: int  # of the bucket's memory
    offset: int  # of the gradient in it, in bytes
