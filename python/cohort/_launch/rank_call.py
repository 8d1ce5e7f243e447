"""Runs a call of `cohort.run` on one rank: reads it from the job's private folder, calls the function, and leaves the
outcome in the folder.

The folder holds `call` (pickled function and arguments), `sources` (lines of notebook cells, for tracebacks) and, for
each rank that has reached its end, `outcome-RANK`: a pickled dict of plain values, see `Outcome`.

Ranks that may be on other hosts do not see the folder. For them the command copies the files in its `to-ranks` into the
job's store, and the entries that the ranks make in the store into its `from-ranks`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import pathlib
import pickle
import stat
import sys
import threading
import time
import traceback

from cohort import _core
from cohort._launch import pickling as _pickling
from cohort.errors import Error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn, Optional, TypedDict

    class Outcome(TypedDict, total=False):
        value: Optional[bytes]  # pickled; None if nobody needs it
        error: str  # "ValueError: text", if it failed
        where: str  # what failed: "call", "load" (unpickling the call) or "result" (pickling the result)
        kind: str  # the exception's qualified class
        traceback: str
        exception: Optional[bytes]  # pickled, if possible
        python: str  # the rank's version
        path: list[str]  # its search path for modules
        follows: bool  # failed because of another rank's failure
        at: float  # time.monotonic(), one clock for all processes of a host


TO_RANKS, FROM_RANKS = "to-ranks", "from-ranks"
_SECONDS_TO_TRAVEL = 600.0  # for results of gigabytes over a slow network

# Failures of a rank that result from another rank's.
_FOLLOWING = {"PeerLost", "Aborted", "HorovodInternalError"}


def write_private(path: pathlib.Path, data: bytes) -> None:
    """Writes a whole file or none."""
    aside = path.with_name(f".{path.name}.new")
    with open(aside, "wb") as file:
        file.write(data)
    os.replace(aside, path)


class _Folder:
    """The job's folder, on this host."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def answer(self, rank: int, data: bytes) -> None:
        write_private(self.path / f"outcome-{rank}", data)


class _Elsewhere:
    """The job's store, which every host can reach."""

    def read(self, name: str) -> bytes | None:
        return _core.JobStore(_SECONDS_TO_TRAVEL).get(f"owner/{TO_RANKS}/{name}", _SECONDS_TO_TRAVEL)

    def answer(self, rank: int, data: bytes) -> None:
        _core.JobStore(_SECONDS_TO_TRAVEL).put(f"owner/{FROM_RANKS}/{rank}", data)


def main(folder_name: str) -> int:
    """Runs the call. Returns the exit status of the rank."""
    folder = pathlib.Path(folder_name)
    info = folder.stat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        print(f"cohort: {folder} is not private to this user; nothing in it is read", file=sys.stderr)
        return 1
    sys.argv = [sys.argv[0]]
    return _call(_Folder(folder))


def main_elsewhere(name: str) -> int:
    """Like `main`, if the folder may be on another host. `name`: the program's name in sys.argv."""
    sys.argv = [name]
    return _call(_Elsewhere())


def run_script(path: str, source: bytes, arguments: list[str]) -> None:
    """Runs a script, given by its source since the path may not exist here, as this rank's main program."""
    import runpy
    import tempfile

    with contextlib.ExitStack() as stack:
        if not os.path.isfile(path):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cohort-script-"))
            path = os.path.join(folder, os.path.basename(path))
            pathlib.Path(path).write_bytes(source)
        sys.argv = [path, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        runpy.run_path(path, run_name="__main__")


def end(status: int) -> NoReturn:
    """Ends the process like sys.exit. But if torch is loaded, it does not finalize Python, like multiprocessing: a torch
    thread that still releases a collective's memory (gloo's threads do, after the collective) would be ended inside of
    C++ destructors, which aborts the process, and a job that has its results would fail."""
    if "torch" not in sys.modules:
        sys.exit(status)
    for step in (threading._shutdown, atexit._run_exitfuncs, _flush_files):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):  # as in Python's finalization: errors change nothing
            step()
    os._exit(status)


def _flush_files() -> None:
    """Flushes Python's and C's files that are still open."""
    for one in gc.get_objects():
        if issubclass(type(one), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(Exception):
                one.flush()
    import ctypes

    ctypes.CDLL(None).fflush(None)


def _call(folder: _Folder | _Elsewhere) -> int:
    if "RANK" not in os.environ:
        print("cohort.run: a server has no function to call: add --server-program to options", file=sys.stderr)
        return 2
    rank = int(os.environ["RANK"])
    try:
        _learn_sources(folder)
        wants_value = rank == 0 or folder.read("all-values") is not None
        call = folder.read("call")
        if call is None:
            raise FileNotFoundError("there is no call for this rank; has its driver ended?")
        function, args, kwargs = _pickling.load_call(call)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        return _failed(folder, rank, error, "load")
    try:
        value = function(*args, **kwargs)
    except KeyboardInterrupt:
        return 130  # the driver reports it; tracebacks from all ranks would not help
    except SystemExit as ending:
        if ending.code not in (None, 0):
            return _failed(folder, rank, ending, "call")
        value = None
    except BaseException as error:
        return _failed(folder, rank, error, "call")
    try:
        outcome: Outcome = {"value": _pickling.dumps(value) if wants_value else None}
        folder.answer(rank, pickle.dumps(outcome))
    except Exception as error:
        return _failed(folder, rank, error, "result")
    return 0


def _failed(folder: _Folder | _Elsewhere, rank: int, error: BaseException, where: str) -> int:
    own = error.__traceback__
    if where == "call" and own is not None:
        own = own.tb_next  # begins in the user's function, not in this module
    text = "".join(traceback.format_exception(type(error), error, own))
    if where == "result":
        text = ""  # all its lines would be pickle's
    outcome: Outcome = {
        "error": "".join(traceback.format_exception_only(type(error), error)).strip(),
        "where": where,
        "kind": type(error).__qualname__,
        "traceback": text,
        "exception": _exception_bytes(error) if where == "call" else None,
        "python": sys.executable,
        "path": list(sys.path),
        "follows": any(kind.__name__ in _FOLLOWING for kind in type(error).__mro__),
        "at": time.monotonic(),
    }
    try:
        folder.answer(rank, pickle.dumps(outcome))
    except (OSError, Error) as trouble:
        print(f"cohort: rank {rank} cannot leave word of its failure: {trouble}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.write(text or f"the result of this rank cannot be sent back: {outcome['error']}\n")
    sys.stderr.flush()
    # Reported to the other ranks when the process ends.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF or 1
    return 1


def _exception_bytes(error: BaseException) -> bytes | None:
    """Returns the pickled exception; None if the driver should not raise it itself, or cannot unpickle it (a class
    whose __init__ needs more than `args`)."""
    if not isinstance(error, Exception):
        return None
    try:
        data = _pickling.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _learn_sources(folder: _Folder | _Elsewhere) -> None:
    import linecache

    sources = folder.read("sources")
    if sources is None:
        return
    for name, lines in pickle.loads(sources).items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
