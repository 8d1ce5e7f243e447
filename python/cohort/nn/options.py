"""What DistributedDataParallel is told, and what it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

from cohort.errors import InvalidArgument


@dataclass(frozen=True)
class DistributedDataParallelOptions:
    """bucket_bytes        size of a gradient bucket, that is of one all_reduce (a larger gradient has one of its own)
    first_bucket_bytes  size of the bucket that is ready first, so that communication begins early
    broadcast_buffers   buffers (running statistics) of all ranks become rank 0's before each synchronising forward
    wire_dtype          "bfloat16": gradients of float32 travel between hosts as bfloat16, half the bytes
    non_finite          "ignore", or "raise": if any rank brings a gradient that is NaN or infinite, backward() raises
                        NonFiniteError on all of them, with its name
    compare_parameters_every
                        N > 0: every N synchronised steps the parameters of all ranks are compared to the bit; 0: never
    check_replicas      each step compares some values of 8 parameters over the ranks, all parameters in turn
    observer            called with (number, bytes) of each bucket that becomes ready
    """

    bucket_bytes: int = 25 << 20
    first_bucket_bytes: int = 1 << 20
    broadcast_buffers: bool = True
    observer: Optional[Callable[[int, int], None]] = None
    wire_dtype: Optional[str] = None
    non_finite: str = "ignore"
    compare_parameters_every: int = 0
    check_replicas: bool = True

    def __post_init__(self) -> None:
        if self.wire_dtype not in (None, "bfloat16"):
            raise InvalidArgument(
                f"DistributedDataParallel: gradients cannot travel as {self.wire_dtype}, only as bfloat16"
            )
        if self.non_finite not in ("ignore", "raise"):
            raise InvalidArgument(
                f"DistributedDataParallel: non_finite={self.non_finite!r} -- 'ignore' and 'raise' are possible"
            )
        if self.compare_parameters_every < 0:
            raise InvalidArgument(
                f"DistributedDataParallel: compare_parameters_every={self.compare_parameters_every} -- 0 is never"
            )
        if self.bucket_bytes < 1 or self.first_bucket_bytes < 1:
            raise InvalidArgument("DistributedDataParallel: a bucket has at least 1 byte")


@dataclass
class ReducerStats:
    """What the reducer did. Times are of this rank, in seconds."""

    steps: int = 0  # synchronised backward passes, with those without samples
    non_finite_steps: int = 0  # of these, the ones that ended in a NonFiniteError
    parameter_comparisons: int = 0  # done because of compare_parameters_every
    buckets: int = 0
    bucket_bytes: int = 0  # of all buckets together
    exposed_communication_seconds: float = 0.0  # of the last step: the host's waiting after its backward
    exposed_communication_seconds_total: float = 0.0
    gradients_written: int = 0  # written into a bucket by assignment, in all steps
    gradients_moved: int = 0  # found outside their bucket and copied in (order rebuilt, .grad replaced)


@dataclass(frozen=True)
class BucketSlot:
    """Where a gradient lies; for tests and tools."""

    bucket: int
    begin: int  # address of the bucket's memory
    bytes: int  # of the bucket's memory
    offset: int  # of the gradient in it, in bytes
