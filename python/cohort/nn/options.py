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
    observer            called with (number, bytes) of each bucket that becomes ready
    """

    bucket_bytes: int = 25 << 20
    first_bucket_bytes: int = 1 << 20
    broadcast_buffers: bool = True
    observer: Optional[Callable[[int, int], None]] = None
    wire_dtype: Optional[str] = None

    def __post_init__(self) -> None:
        if self.wire_dtype not in (None, "bfloat16"):
            raise InvalidArgument(
                f"DistributedDataParallel: gradients cannot travel as {self.wire_dtype}, only as bfloat16"
            )
        if self.bucket_bytes < 1 or self.first_bucket_bytes < 1:
            raise InvalidArgument("DistributedDataParallel: a bucket has at least 1 byte")


@dataclass
class ReducerStats:
    """What the reducer did. Times are of this rank, in seconds."""

    steps: int = 0  # synchronised backward passes, with those without samples
    buckets: int = 0
    bucket_bytes: int = 0  # of all buckets together
    exposed_communication_seconds: float = 0.0  # of the last step: waiting after its backward had ended
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
