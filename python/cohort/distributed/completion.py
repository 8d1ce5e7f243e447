"""Futures need somebody who sees that an operation has ended: threads that wait, one for each line of operations.

The operations of a line end in the order in which they began, so one thread waits for one after the other. It waits
without the GIL, and so lets the core carry the operation out on it.
"""

from __future__ import annotations

import atexit
import collections
import os
import threading
from typing import Any, Callable, Hashable

from cohort import _world

# A line with nothing to do keeps its thread for so long.
_IDLE_SECONDS = 10.0


class _Line:
    def __init__(self, name: str) -> None:
        self.ready = threading.Condition()
        self.entries: collections.deque[tuple[Any, Callable[[], None]]] = collections.deque()
        self.name = name
        self.thread: threading.Thread | None = None

    def add(self, work: Any, then: Callable[[], None]) -> None:
        with self.ready:
            self.entries.append((work, then))
            if self.thread is None:
                self.thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                self.thread.start()
            else:
                self.ready.notify()

    def _serve(self) -> None:
        while True:
            with self.ready:
                self.ready.wait_for(lambda: self.entries or _ending, _IDLE_SECONDS)
                if not self.entries:
                    self.thread = None
                    return
                work, then = self.entries.popleft()
            try:
                work.wait()
            except Exception:  # noqa: BLE001 -- `then` asks the operation itself
                pass
            then()
            del work, then  # not until the next one comes


_lock = threading.Lock()
_lines: dict[Hashable, _Line] = {}
_ending = False


def call_after(line: Hashable, work: Any, then: Callable[[], None]) -> None:
    """Calls `then` once `work` (of the core) has ended, with or without an error, on a thread of its own."""
    with _lock:
        if line not in _lines:
            _lines[line] = _Line("cohort-future")
        found = _lines[line]
    found.add(work, then)


def forget(lines: Callable[[Hashable], bool]) -> None:
    """Of groups that are gone."""
    with _lock:
        for line in [line for line in _lines if lines(line)]:
            entry = _lines.pop(line)
            with entry.ready:
                entry.ready.notify()


def _end() -> None:
    """At the process's end: first every operation ends, then those who waited for them, before Python itself does."""
    global _ending
    _world._at_exit()
    _ending = True
    with _lock:
        lines = list(_lines.values())
    for line in lines:
        with line.ready:
            thread = line.thread
            line.ready.notify_all()
        if thread is not None:
            thread.join(5.0)


def _after_fork() -> None:
    global _lock, _lines
    _lock, _lines = threading.Lock(), {}


atexit.register(_end)
os.register_at_fork(after_in_child=_after_fork)
