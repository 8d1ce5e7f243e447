"""Messages between two ranks of a process group. They progress apart from its collectives."""

from __future__ import annotations

from typing import Any, Optional

import torch

from cohort.distributed.arguments import only
from cohort.distributed.tensors import Written, as_moved, read
from cohort.distributed.work import for_caller


class Messages:
    """What ProcessGroup has of send and recv."""

    def send(self: Any, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        other = self._elsewhere(tensors[0])
        if other is not None:
            return other.send(tensors, rank, tag)
        source = as_moved(read(only(tensors, "send"), "send"))
        line, how = (self._number, "send", rank, tag), {"tag": tag, "timeout": self._timeout}
        return for_caller(self._start("send", tensors, tensors, [], self.communicator.send, [source, rank], how, line))

    def recv(self: Any, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        other = self._elsewhere(tensors[0])
        if other is not None:
            return other.recv(tensors, rank, tag)
        return for_caller(self._receive("recv", tensors, rank, tag))

    def recv_anysource(self: Any, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        other = self._elsewhere(tensors[0])
        if other is not None:
            return other.recv_anysource(tensors, tag)
        return for_caller(self._receive("recvAnySource", tensors, None, tag))

    def _receive(self: Any, name: str, tensors: list[torch.Tensor], rank: Optional[int], tag: int) -> Any:
        """From `rank`, or from whichever comes first."""
        written = Written(only(tensors, "recv"), "recv", reads=False)
        call, memory, how = self.communicator.recv, as_moved(written.memory), {"tag": tag, "timeout": self._timeout}
        line = (self._number, "recv", rank, tag)
        return self._start(name, tensors, tensors, [written], call, [memory, rank], how, line, rank)
