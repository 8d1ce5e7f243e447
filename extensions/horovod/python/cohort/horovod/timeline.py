"""The timeline: the progress of each operation, in the format of `cohort run --trace`, written by the same code.

Each name is a row ("process"). In that row NEGOTIATE_<OPERATION> lasts from the call on this rank until all ranks have
called the operation, and <OPERATION> from then until it is done. The file is complete JSON after the timeline is
stopped; before that, its list is open, which viewers accept.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import queue
import threading
import time
from typing import Dict, List, Optional

from cohort import _core
from cohort._core import NamedWork

_LOOK_S = 0.1  # interval between writes


def now() -> float:
    """Returns seconds of the clock that the engine uses, too."""
    return time.monotonic()


class Timeline:
    """A file that a separate thread writes. Any thread may call."""

    def __init__(self, path: str, mark_cycles: bool, rank: int, size: int) -> None:
        # Unbuffered, because a forked child would write the buffer's contents a second time.
        self._file = open(path, "wb", buffering=0)
        self._mark_cycles = mark_cycles
        self._began = now()
        start = {"start_time_since_epoch_in_micros": time.time_ns() // 1000, "rank": rank, "size": size}
        self._rows: Dict[str, int] = {}
        self._last_cycle = -1.0
        self._lock = threading.Lock()
        self._queue: "queue.SimpleQueue[str]" = queue.SimpleQueue()
        self._ending = threading.Event()
        self._file.write(b"[\n" + json.dumps({"name": "start_time", "ph": "M", "pid": 0, "args": start}).encode())
        _core.named_records_keep(True)
        self._thread = threading.Thread(target=self._write, name="cohort-timeline", daemon=True)
        self._thread.start()

    def watch(self, kind: str, names: List[str], works: List[NamedWork], began: float) -> None:
        """Records the progress of operations that were started at `began`."""
        for name, work in zip(names, works):
            work.add_done_callback(functools.partial(self._done, kind, name, began))

    def _done(self, kind: str, name: str, began: float, work: NamedWork) -> None:
        if current is not self:
            return
        ended = work.ended_at or now()
        error = work.error()
        self._note(kind, name, began, work.agreed_at or ended, ended, "" if error is None else str(error))

    def _note(self, kind: str, name: str, began: float, agreed: float, ended: float, error: str) -> None:
        agreed = min(max(agreed, began), ended)
        with self._lock:
            row = self._rows.get(name)
            if row is None:
                row = self._rows[name] = len(self._rows) + 1
                self._queue.put(_core.trace_row(row, name))
            # Operations on which all ranks agreed at the same time belong to one round of the engine.
            if self._mark_cycles and agreed > self._last_cycle:
                self._last_cycle = agreed
                self._put(0, "CYCLE_START", agreed)
        self._put(row, f"NEGOTIATE_{kind}", began, agreed)
        if not error:
            self._put(row, kind, agreed, ended)
        else:
            self._put(row, "FAILED", ended, error=error)

    def _put(self, row: int, name: str, began: float, ended: Optional[float] = None, error: str = "") -> None:
        ended_ns = None if ended is None else self._ns_of(ended)
        self._queue.put(_core.trace_event(row, name, self._ns_of(began), ended_ns, error))

    def _ns_of(self, at: float) -> int:
        return round((at - self._began) * 1e9)

    def _write(self) -> None:
        going = True
        while going:
            going = not self._ending.wait(_LOOK_S)
            for record in _core.named_records_take():  # operations of compiled programs, which do not call Python
                self._note(*record)
            lines = []
            while not self._queue.empty():
                lines.append(self._queue.get())
            self._file.write("".join(lines).encode())

    def close(self) -> None:
        """Writes the remaining records, and the end of the file."""
        self._ending.set()
        self._thread.join()
        _core.named_records_keep(False)
        self._file.write(b"\n]\n")
        self._file.close()


current: Optional[Timeline] = None


def path_of(path: str, rank: int) -> str:
    """Returns the path of this rank's timeline; on rank 0 it is `path` itself."""
    stem, ending = os.path.splitext(path)
    return path if rank == 0 else f"{stem}-rank-{rank}{ending}"


def start(path: str, mark_cycles: bool, rank: int, size: int) -> None:
    """Begins a file. Raises ValueError while another is being written."""
    global current
    if current is not None:
        raise ValueError("start_timeline: a timeline is being written already -- call hvd.stop_timeline() before")
    current = Timeline(path_of(path, rank), mark_cycles, rank, size)


def stop() -> None:
    """Ends the file, if there is one."""
    global current
    ending, current = current, None
    if ending is not None:
        ending.close()


def _after_fork() -> None:
    global current
    current = None  # the timeline is the parent's


atexit.register(stop)
os.register_at_fork(after_in_child=_after_fork)
