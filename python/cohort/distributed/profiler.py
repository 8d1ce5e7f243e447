"""Operations as events of torch's profiler, "cohort:all_reduce" and the like, from their start to their end.

Operations end on another thread than they began on, so the profiler counts them as asynchronous, like those of torch's
own backends. Waiting for the operation includes the end of its event.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, Hashable, Optional, Sequence

import torch
from torch.autograd import profiler as _profiler

from cohort.distributed.completion import call_after


class _Always:
    _is_profiler_enabled = True


# torch 2's flag _is_profiler_enabled, read before each operation, is false if no profiler is running. torch 1.13 has no
# such flag.
flag: Any = _profiler if hasattr(_profiler, "_is_profiler_enabled") else _Always

_end_after = torch.ops.profiler._call_end_callbacks_on_jit_fut
_end_after = getattr(_end_after, "_RecordFunction", _end_after)
# Limit for the profiler's list of shapes, to keep it readable.
_MOST_INPUTS = 64


def begin(name: str, inputs: Sequence[Any]) -> Optional[Any]:
    """Begins an event and returns it; None if no profiler records this thread."""
    if not torch.autograd._profiler_enabled():
        return None
    shown = [tensor for tensor in itertools.islice(inputs, _MOST_INPUTS) if isinstance(tensor, torch.Tensor)]
    return torch.autograd._record_function_with_args_enter(f"cohort:{name}", *shown)


class Seen:
    """The core's work of an operation, together with its event."""

    def __init__(self, core: Any, event: Any, line: Hashable) -> None:
        self._core = core
        self._ended = threading.Event()
        # Ends the event in the profiler of the thread that began it.
        end = torch.futures.Future()
        _end_after(event, end)

        def see() -> None:
            end.set_result(None)
            self._ended.set()

        call_after(line, core, see)

    def wait(self, timeout: Optional[float] = None) -> bool:
        try:
            over = self._core.wait(timeout)
        except BaseException:
            if self._core.done():
                self._ended.wait()
            raise
        if over:
            self._ended.wait()
        return bool(over)

    def synchronize(self, stream: Any = None) -> None:
        self._core.synchronize(stream)

    def done(self) -> bool:
        return self._ended.is_set()

    def source(self) -> int:
        """Returns the rank that a message came from, when the work has ended."""
        return int(self._core.source())
