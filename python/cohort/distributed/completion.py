"""Threads that fulfil futures when operations end: one waiting thread for each line (ordered sequence) of operations.

The operations of a line end in the order in which they began, so one thread at a time waits for the first. While it
waits, without the GIL, the core can carry out the operation on this thread.
"""

from __future__ import annotations

import atexit
import collections
import os
import threading
from typing import Any, Callable, Hashable

from cohort._process import world as _world

# Seconds after which a line without operations, and its thread, end.
_IDLE_SECONDS = 1.0


class _Line:
    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.changed = threading.Condition()
        self.entries: collections.deque[tuple[Any, Callable[[], None]]] = collections.deque()
        self.waited_for = False  # a thread waits for the operation that was first
        self.idle = 0
        self.closed = False  # no further operations: idle threads end

    def add(self, work: Any, then: Callable[[], None]) -> None:
        with self.changed:
            self.entries.append((work, then))
            if not self.waited_for:
                self._somebody()

    def _somebody(self) -> None:
        """Makes a thread take the first entry."""
        if self.idle:
            self.changed.notify()
            return
        thread = threading.Thread(target=self._serve, name="cohort-future", daemon=True)
        with _lock:
            _threads.add(thread)
        thread.start()

    def _next(self) -> tuple[Any, Callable[[], None]] | None:
        with self.changed:
            while self.waited_for or not self.entries:
                self.idle += 1
                in_time = not self.closed and self.changed.wait(_IDLE_SECONDS)
                self.idle -= 1
                if not in_time and (self.waited_for or not self.entries):
                    with _lock:
                        _threads.discard(threading.current_thread())
                        if not self.entries and not self.waited_for and _lines.get(self.key) is self:
                            del _lines[self.key]  # or lines of all peers and tags would pile up
                    return None
            self.waited_for = True
            return self.entries.popleft()

    def _serve(self) -> None:
        while True:
            entry = self._next()
            if entry is None:
                return
            work, then = entry
            try:
                work.wait()
            except Exception:
                pass
            with self.changed:
                # `then` may wait for a later operation of this line (PowerSGD's hook does).
                self.waited_for = False
                if self.entries:
                    self._somebody()
            then()
            del work, then, entry  # not kept until the next entry comes

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


_lock = threading.Lock()  # taken after a line's lock, never before it
_lines: dict[Hashable, _Line] = {}
_threads: set[threading.Thread] = set()  # threads of all lines, including forgotten ones


def call_after(line: Hashable, work: Any, then: Callable[[], None]) -> None:
    """Calls `then` on a separate thread when `work` (of the core) has ended, with or without an error."""
    with _lock:
        if line not in _lines:
            _lines[line] = _Line(line)
        found = _lines[line]
    found.add(work, then)


def forget(lines: Callable[[Any], bool]) -> None:
    """Drops the lines of groups that no longer exist. Callbacks of their last operations may still be running."""
    with _lock:
        gone = [_lines.pop(line) for line in list(_lines) if lines(line)]
    for line in gone:
        line.close()


def _end() -> None:
    """Called at the process's end: ends all operations, then the threads that waited for them, before Python ends.

    A thread that is still in C++ then, as in `set_result`, would end the process by std::terminate, because Python
    unwinds it through destructors as soon as it asks for the GIL.
    """
    _world._at_exit()
    forget(lambda _: True)
    with _lock:
        threads = list(_threads)
    for thread in threads:
        thread.join(5.0)


def _after_fork() -> None:
    global _lock, _lines, _threads
    _lock, _lines, _threads = threading.Lock(), {}, set()


atexit.register(_end)
os.register_at_fork(after_in_child=_after_fork)
