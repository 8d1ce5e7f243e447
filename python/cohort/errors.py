"""Exceptions of Cohort: one class for each of the C++ core's error codes, all of them `cohort.Error`.

Each is also the built-in exception that a Python program would expect (`ValueError`, `TimeoutError`, ...). The message
says what failed, where, why, and what to try; the same is in attributes, None where it does not apply:

    rank       the rank that reports
    host       its host
    peer       the rank that the operation failed with
    operation  e.g. "all_reduce(float32[1024], sum)"
    sequence   number of the operation on its communicator, from 1
    cause      errno's text, or the first failing rank's message
    system_error  errno, where the operating system refused
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
    """The root of all that Cohort raises. `code` is the name of the C++ core's ErrorCode."""

    code: str = "Internal"
    rank: int | None = None
    host: str | None = None
    peer: int | None = None
    operation: str | None = None
    sequence: int | None = None
    cause: str | None = None
    system_error: int | None = None
    _tagged: bool = False  # of a Mismatch: all ranks had brought an operation with a tag

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:  # others' are of the code that they derive from
            cls.code = cls.__name__


class InvalidArgument(Error, ValueError):
    """The caller asked for something that has no meaning; nothing was done."""


class Unavailable(Error):
    """A resource or a service is not there (memory, a port, a file, a backend)."""


class Timeout(Error, TimeoutError):
    """A deadline passed; the communicator is unusable afterwards."""


class PeerLost(Error, ConnectionError):
    """A peer died or left; the communicator is unusable afterwards."""


class Mismatch(Error):
    """Ranks asked for different things; refused on all, the communicator stays usable."""


class Aborted(Error):
    """Another rank failed first or `abort` was called; unusable afterwards."""


class Io(Error, OSError):
    """The operating system refused to read or write."""


class Corrupt(Error):
    """Bytes from outside are damaged or not of the expected format."""


class NonFinite(Error, ArithmeticError):
    """A value is NaN or infinite that must not be; refused on all, the communicator stays usable."""


class Internal(Error):
    """A bug in Cohort."""


class RankFailed(Error):
    """A rank that this program has started (`cohort.run`, `cohort.Distributor`) failed: raised itself, or the `__cause__`
    of what the rank raised.

    rank       which one; None where it is not known
    status     the job's exit status: the rank's code, or 128 + signal
    traceback  the rank's traceback as text; None where it ended without one
    """

    status: int | None = None
    traceback: str | None = None

    def __init__(self, message: str = "", *, rank: int | None = None, host: str | None = None,
                 status: int | None = None, traceback: str | None = None) -> None:  # fmt: skip
        super().__init__(message)
        self.rank, self.host, self.status, self.traceback = rank, host, status, traceback
