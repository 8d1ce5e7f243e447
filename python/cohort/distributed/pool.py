"""Tensors in memory that the other ranks of the host read directly, for `allocate_tensor` of a process group."""

from __future__ import annotations

import bisect
import sys
import threading
from typing import Any

import torch

# Smaller tensors are copied as fast as they are read in place, and every rank has to map each block.
_LEAST = 1 << 16

_probe = [object()]
_IDLE = sys.getrefcount(_probe[0])  # references to an object that only one list holds


class Pool:
    """Blocks of a communicator's memory, reused when no tensor refers to them. Creating a block takes longer than an
    operation, since the other ranks map it. Blocks are kept as long as the group."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self._lock = threading.Lock()
        self._blocks: list[Any] = []
        self._sizes: list[int] = []  # the blocks' sizes, ascending

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised 1-D tensor of `count` elements."""
        nbytes = count * torch.empty(0, dtype=dtype).element_size()
        if nbytes < _LEAST or self._communicator.size() == 1:
            return torch.empty(count, dtype=dtype)
        with self._lock:
            return torch.frombuffer(self._idle(nbytes), dtype=dtype, count=count)

    def _idle(self, nbytes: int) -> Any:
        first = bisect.bisect_left(self._sizes, nbytes)
        for at in range(first, bisect.bisect_right(self._sizes, 2 * nbytes)):
            if sys.getrefcount(self._blocks[at]) == _IDLE:  # a tensor's memory holds a reference to the block
                return self._blocks[at]
        block = self._communicator.allocate(nbytes)
        self._blocks.insert(first, block)
        self._sizes.insert(first, nbytes)
        return block
