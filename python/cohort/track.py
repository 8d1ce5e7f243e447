"""A training run's results for people: its record, and a progress bar.

    cohort.track.log(step, loss=loss, lr=lr)                 # keeps rank 0's value; other ranks do nothing
    cohort.track.log(step, step_ms=ms, reduce="max")         # on all ranks, in the same order

Rank 0 makes records and bars; other ranks make none.

    file = os.path.join(cohort.track.run_folder(), "run.jsonl")
    record = cohort.track.RunRecord(file, program="digits", world_size=cohort.size(), parameters={"lr": 0.1})
    record.observe(cohort.world())
    record.write("step", step=step, epoch=1.25, train_loss=loss)
    ...
    record.write_communication()

`cohort export` sends logged values to TensorBoard, MLflow, Prometheus or a CSV file, while the run goes on or
afterwards; `cohort plot` draws them. docs/tracking.md has the rest.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref

from cohort._process import world as _world
from cohort._core import Metrics, Progress, RunRecord as _RunRecord, add_span, traced
from cohort.errors import InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, Callable

__all__ = ["Progress", "RunRecord", "close", "flush", "log", "run_folder", "span"]


class span(contextlib.ContextDecorator):
    """A context manager and decorator that shows the code within it in the trace of `cohort run --trace`, on this
    thread's row. Spans may be nested. Without --trace a span costs 0.1 to 0.2 microseconds. Any thread.

        with cohort.track.span("augment"):
            ...
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = 0

    def _recreate_cm(self) -> span:
        return span(self._name)  # calls of a decorated function may be nested or on several threads

    def __enter__(self) -> span:
        self._begun = time.monotonic_ns() if traced() else 0
        return self

    def __exit__(self, *_: object) -> None:
        if self._begun:
            add_span(self._name, self._begun)


class RunRecord(_RunRecord):
    """RunRecord(file, *, program="", world_size=1, parameters={}): one file of JSON lines per run, made on rank 0.

    docs/reference/run-record.md is its schema; C++ writes the same. Creates the file's folder, appends to an existing
    file (a resumed run), and writes a `start` line. Any thread. Raises Io, naming the path, and Unavailable if another
    process is writing to the file.
    """

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        global _latest
        _latest = weakref.ref(self)

    def write_weights(self, step: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Appends a 128-bit digest of each tensor's bytes after `step`, and one of all. `cohort runs compare A B` says from
        them until which step two runs have the same weights, and which tensors differ first.

        tensors  pairs of a name and a dense tensor or array, as model.state_dict().items()

        Shapes, types and the order of tensors do not count. Reads each tensor once. Raises Io as `write`, and InvalidArgument
        for what is no dense array, and if two have one name. Any thread.
        """
        self._write_weights(step, [(name, _flat(name, tensor)) for name, tensor in tensors])


def _flat(name: str, tensor: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        return tensor
    from cohort.nn._tensors import flat_on_host

    return flat_on_host(tensor, name, "write_weights").view(torch.uint8)


def run_folder() -> str:
    """Returns the folder for a run's record, in which `cohort watch`, `cohort plot` and `--track` look. It is the run's
    folder under `cohort run` (COHORT_RUN_DIR), else "", the working directory."""
    return os.environ.get("COHORT_RUN_DIR", "")


def _none() -> None:
    return None


_lock = threading.Lock()
_latest: Callable[[], RunRecord | None] = _none
_record: RunRecord | None = None  # the record to which values are written
_own: Metrics | None = None  # values of this rank
_shared: Metrics | None = None  # values of all ranks


def _rank() -> int:
    return _world.rank() if _world.is_initialized() else int(os.environ.get("RANK", "0"))


def _open_record() -> RunRecord | None:
    """Returns the record to which all values are written; only rank 0 has one."""
    global _record
    if _record is None and _rank() == 0:
        _record = _latest()
        if _record is None:
            program = os.path.splitext(os.path.basename(sys.argv[0]))[0]
            size = _world.size() if _world.is_initialized() else 1
            file = os.path.join(run_folder(), "run.jsonl")
            _record = RunRecord(file, program=program, world_size=size)
    return _record


def log(step: int, *, reduce: str | None = None, **values: Any) -> None:
    """Logs numbers, or arrays of one element of NumPy and torch, in microseconds. Any thread.

    step    the optimizer step they belong to
    reduce  None: rank 0's values are kept; other ranks do nothing. "mean" (or "average": each rank counts equally),
            "max", "min", "sum", or "each", which keeps all values with their ranks: all ranks then log in the same
            order, and the first such call is collective
    values  by their names

    A thread writes the values each second and at the end, so a killed process loses the last second. They go to the
    RunRecord that this process has made before, else to `run.jsonl` in `run_folder()`. A full disk or a lost rank is
    reported in the log, and the training goes on. Raises InvalidArgument for a value that is not a number and for
    another `reduce`, Io and Unavailable if the record cannot be made.
    """
    global _own, _shared
    own = _world.rank_thread()
    if own is not None:
        if reduce is not None:
            raise InvalidArgument(
                f"track.log(reduce={reduce!r}): on a thread of run_on_threads values are not reduced -- log what "
                "cohort.metrics.average gives"
            )
        if own.rank() != 0:
            return
    metrics = _own if reduce is None else _shared
    if metrics is None:
        if reduce is not None and not _world.is_initialized():
            _world.world()  # raises with what is missing
        with _lock:
            if reduce is None:
                metrics = _own = _own or Metrics(_open_record())
            else:
                metrics = _shared = _shared or Metrics(_open_record(), _world.world())
    metrics.log(step, values, reduce)


def flush() -> None:
    """Writes what was logged, now. Raises Io on failure; the values are kept for the next attempt."""
    for metrics in (_own, _shared):
        if metrics is not None:
            metrics.flush()


def close() -> None:
    """Writes the remaining values and releases the record, as the end of the program and `cohort.shutdown` do; waits up
    to 10 s for reduced values of all ranks."""
    _close(None)


def _close(patience: float | None) -> None:
    global _own, _shared, _record
    with _lock:
        ending = (_shared, _own)
        _own = _shared = _record = None
    for metrics in ending:
        if metrics is not None:
            metrics.close(patience)


def _at_exit() -> None:
    # After a failure the other ranks have to learn of it immediately.
    _close(None if getattr(sys, "last_value", None) is None else 0.0)


def _after_fork() -> None:
    # The writing threads are the parent's, and so is the record.
    global _lock, _own, _shared, _record, _latest
    _lock = threading.Lock()
    _kept.extend((_own, _shared))
    _own = _shared = _record = None
    _latest = _none


_kept: list[Metrics | None] = []  # keeps the parent's objects undestroyed in a child
_world.before_shutdown.append(close)
atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
