"""Options and statistics of DistributedDataParallel."""

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
    wire_format         "bfloat16", "int8" or "int4": what gradients of float32 travel as between hosts
    error_feedback      adds what rounding loses to the next step's gradients; None: only with int4
    non_finite          "ignore", or "raise": if any rank has a gradient that is NaN or infinite, backward() raises
                        NonFiniteError on all ranks, which names the gradient
    compare_parameters_every
                        N > 0: every N synchronised steps the parameters of all ranks are compared to the bit; 0: never
    check_replicas      each step compares some values of 8 parameters over the ranks, all parameters in turn
    sharding            "none", "optimizer", "gradients" or "parameters": what is divided over the ranks, for
                        cohort.optim.Sharded
    protect_parameters  for debugging, with sharding="parameters": writes not by the optimizer end a rank with SIGSEGV
    observer            called with (number, bytes) of each bucket that becomes ready
    """

    bucket_bytes: int = 25 << 20
    first_bucket_bytes: int = 1 << 20
    broadcast_buffers: bool = True
    observer: Optional[Callable[[int, int], None]] = None
    wire_format: Optional[str] = None
    error_feedback: Optional[bool] = None
    non_finite: str = "ignore"
    compare_parameters_every: int = 0
    check_replicas: bool = True
    sharding: str = "none"
    protect_parameters: bool = False

    def __post_init__(self) -> None:
        if self.wire_format not in (None, "none", "bfloat16", "int8", "int4"):
            raise InvalidArgument(
                f"DistributedDataParallel: gradients cannot travel as {self.wire_format}, only as bfloat16, int8 or int4"
            )
        if self.non_finite not in ("ignore", "raise"):
            raise InvalidArgument(
                f"DistributedDataParallel: non_finite={self.non_finite!r} -- 'ignore' and 'raise' are possible"
            )
        if self.sharding not in ("none", "optimizer", "gradients", "parameters"):
            raise InvalidArgument(
                f"DistributedDataParallel: sharding={self.sharding!r} -- 'none', 'optimizer', 'gradients' and 'parameters' "
                "are possible"
            )
        if self.protect_parameters and self.sharding != "parameters":
            raise InvalidArgument(
                "DistributedDataParallel: protect_parameters is for parameters that ranks share (sharding='parameters')"
            )
        if self.compare_parameters_every < 0:
            raise InvalidArgument(
                f"DistributedDataParallel: compare_parameters_every={self.compare_parameters_every} -- 0 is never"
            )
        if self.bucket_bytes < 1 or self.first_bucket_bytes < 1:
            raise InvalidArgument("DistributedDataParallel: a bucket has at least 1 byte")


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
