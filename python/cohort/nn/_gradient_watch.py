"""How a reducer finds gradients that are not finite: before they are reduced, or in their averages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from cohort import Communicator
from cohort.nn._bucket import Bucket
from cohort.nn._non_finite import LocalNonFinite, NonFiniteError, first_non_finite, first_of_all_ranks
from cohort.nn.options import DistributedDataParallelOptions

if TYPE_CHECKING:
    from cohort.nn._reducer import _Parameter


class GradientWatch:
    """Of one rank, one step after the other. One thread at a time."""

    def __init__(self, comm: Communicator, options: DistributedDataParallelOptions) -> None:
        self.on = options.non_finite == "raise"
        # On one host a large gradient that is reduced out of where autograd made it is not looked at before, which would
        # be to read it once more: whoever makes a part of the average looks at that, and the gradient is still there.
        self.looks_at_averages = self.on and 1 < comm.size() == comm.local_size()
        self._comm = comm
        # A float32 is rounded to bfloat16 only between hosts.
        self._wire_dtype = options.wire_dtype if comm.local_size() < comm.size() else None
        self._first: LocalNonFinite | None = None  # of this rank, in this step

    def begin_step(self) -> None:
        self._first = None

    @property
    def has_found(self) -> bool:
        """In this step, on this rank, so far."""
        return self._first is not None

    def look(self, number: int, bucket: Bucket, members: Sequence[_Parameter]) -> None:
        """Right before the reduction of the bucket with this number, which reads the same memory next."""
        if self.has_found:
            return

        def reduced(position: int) -> torch.Tensor | None:
            member = members[position]
            if member.unread is None:
                return member.place
            return None if self.looks_at_averages else member.unread

        position = bucket.first_non_finite(reduced, self._wire_dtype)
        if position is not None:
            self._note(number, members[position])

    def look_again(self, buckets: Sequence[Bucket], member_of: Callable[[int, int], _Parameter]) -> None:
        """Some average is not finite: at what `look` has left out. member_of: by bucket and position."""
        for number in range(len(buckets) if self._first is None else self._first.order + 1):
            for position in buckets[number].large:
                member = member_of(number, position)
                if member.unread is not None and first_non_finite(member.unread) is not None:
                    self._note(number, member)
                    return

    def _note(self, number: int, member: _Parameter) -> None:
        gradient = member.place if member.unread is None else member.unread
        element = first_non_finite(gradient, self._wire_dtype)
        assert element is not None
        self._first = LocalNonFinite(number, member.name, tuple(member.tensor.shape), element)

    def error(self, step: int) -> NonFiniteError | None:
        """Collective. What all ranks raise; None if no rank has found a gradient: then only their average is not finite."""
        return first_of_all_ranks(self._comm, self._first, step)
