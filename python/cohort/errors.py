"""Exceptions of Cohort: one class for each of the C++ core's error codes, all of them `cohort.Error`.

Each class is also the built-in exception that a Python program would expect (`ValueError`, `TimeoutError`, ...). The
message says what failed, where, why, and what to try; attributes give the same, None if not applicable:

    rank       the rank that reports
    host       its host
    peer       the rank with which the operation failed
    operation  e.g. "all_reduce(float32[1024], sum)"
    sequence   number of the operation on its communicator, from 1
    cause      errno's text, or the first failing rank's message
    system_error  errno, if the operating system refused
"""

from __future__ import annotations

__all__ = [
    "Aborted",
    "Corrupt",
    "Error",
    "Internal",
    "InvalidArgument",
    "Io",
    "Mismatch",
    "NonFinite",
    "PeerLost",
    "RankFailed",
    "Timeout",
    "Unavailable",
]


class Error(RuntimeError):
    """The root of all exceptions that Cohort raises. `code` is the name of the C++ core's ErrorCode."""

    code: str = "Internal"
    rank: int | None = None
    host: str | None = None
    peer: int | None = None
    operation: str | None = None
    sequence: int | None = None
    cause: str | None = None
    system_error: int | None = None
    _tagged: bool = False  # for a Mismatch: all ranks had started an operation with a tag

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:  # subclasses defined elsewhere keep the code of the class that they derive from
            cls.code = cls.__name__


class InvalidArgument(Error, ValueError):
    """An argument has no meaning; nothing was done."""


class Unavailable(Error):
    """A resource or a service is not there (memory, a port, a file, a backend)."""


class Timeout(Error, TimeoutError):
    """A deadline passed; the communicator cannot be used afterwards."""


class PeerLost(Error, ConnectionError):
    """A peer died or left; the communicator cannot be used afterwards."""


class Mismatch(Error):
    """Ranks asked for different operations; refused on all ranks, the communicator stays usable."""


class Aborted(Error):
    """Another rank failed first or `abort` was called; the communicator cannot be used afterwards."""


class Io(Error, OSError):
    """The operating system refused to read or write."""


class Corrupt(Error):
    """Bytes from outside are damaged or not of the expected format."""


class NonFinite(Error, ArithmeticError):
    """A value that must be finite is NaN or infinite; refused on all ranks, the communicator stays usable."""


class Internal(Error):
    """A bug in Cohort."""


class RankFailed(Error):
    """A rank that this program has started (`cohort.run`, `cohort.Distributor`) failed. This class is raised itself, or
    is the `__cause__` of the exception that the rank raised.

    rank       the rank that failed; None if not known
    status     the job's exit status: the rank's code, or 128 + signal
    traceback  the rank's traceback as text; None if the rank ended without one
    """

    status: int | None = None
    traceback: str | None = None

    def __init__(self, message: str = "", *, rank: int | None = None, host: str | None = None,
                 status: int | None = None, traceback: str | None = None) -> None:  # fmt: skip
        super().__init__(message)
        self.rank, self.host, self.status, self.traceback = rank, host, status, traceback
