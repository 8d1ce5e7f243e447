"""What the operations of a process group check of their arguments."""

from __future__ import annotations

from typing import Any, Sequence

import cohort


def only(tensors: Sequence[Any], operation: str) -> Any:
    """torch passes lists, of one tensor each."""
    if len(tensors) != 1:
        raise cohort.InvalidArgument(f"{operation}: takes one tensor of each rank, not {len(tensors)}")
    return tensors[0]


def one_for_each(lists: Sequence[Any], size: int, operation: str) -> Any:
    tensors = only(lists, operation)
    if len(tensors) != size:
        raise cohort.InvalidArgument(
            f"{operation}: the list has {len(tensors)} tensors, and the group {size} ranks -- give one for each"
        )
    return tensors
