"""Tensors in memory that the other ranks of the host read where it lies: what `allocate_tensor` of a process group gives."""

from __future__ import annotations

import bisect
import sys
import threading
from typing import Any

import torch

# Smaller tensors are copied as fast as they are read in place, and a block is a mapping of every rank.
_LEAST = 1 << 16

_probe = [object()]
_IDLE = sys.getrefcount(_probe[0])  # references to an object that only one list holds


class Pool:
    """Blocks of a communicator's memory, which are used again once no tensor lies in them. To make one takes longer than an
    operation: the other ranks map it. They stay as long as the group does."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self._lock = threading.Lock()
        self._blocks: list[Any] = []
        self._sizes: list[int] = []  # the blocks' sizes, ascending

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """One dimension of `count` elements, of any values."""
        nbytes = count * torch.empty(0, dtype=dtype).element_size()
        if nbytes < _LEAST or self._communicator.size() == 1:
            return torch.empty(count, dtype=dtype)
        with self._lock:
            return torch.frombuffer(self._idle(nbytes), dtype=dtype, count=count)

    def _idle(self, nbytes: int) -> Any:
        first = bisect.bisect_left(self._sizes, nbytes)
        for at in range(first, bisect.bisect_right(self._sizes, 2 * nbytes)):
            if sys.getrefcount(self._blocks[at]) == _IDLE:  # a tensor's memory holds on to it
                return self._blocks[at]
        block = self._communicator.allocate(nbytes)
        self._blocks.insert(first, block)
        self._sizes.insert(first, nbytes)
        return block
