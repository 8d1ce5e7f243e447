"""The exceptions of Horovod's API. Cohort's own exception is their `__cause__`."""

from __future__ import annotations

import re
from typing import Optional

from cohort.errors import Aborted, Error, InvalidArgument, PeerLost

__all__ = [
    "HorovodInitError",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
]


class HorovodInternalError(RuntimeError):
    """An operation failed: ranks disagreed about it, a rank was lost, or the world has ended.

    After a disagreement (the cause is `cohort.Mismatch`) the world is still usable; after any other cause, call `shutdown` and
    `init`, as `elastic.run` does.

    error  the cause, even if a framework has removed `__cause__`
    """

    error: Optional[Error] = None


class HorovodInitError(HorovodInternalError, ValueError):
    """`init` failed: the world was not formed."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts came or left. `skip_sync`: hosts only left, so the state of the remaining ranks is still good."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts were added or removed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Exists for programs that catch it; Cohort has no separate version for each framework."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"{name} was built with version {version}, but {installed_version} is installed -- build it again"
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version


def translated(error: Error) -> Exception:
    """Returns the exception for callers of Horovod's API: ValueError for invalid arguments, else
    HorovodInternalError."""
    if isinstance(error, InvalidArgument):
        return error  # InvalidArgument is a ValueError
    internal = HorovodInternalError(str(error))
    internal.__cause__ = internal.error = error
    return internal


def retold(text: str) -> HorovodInternalError:
    """Returns the error of an operation from its text, if a framework has kept nothing else."""
    internal = HorovodInternalError(text)
    for kind, words in ((Aborted, "aborted by rank"), (PeerLost, "lost rank")):
        found = re.search(rf"\b{words} (\d+)", text)
        if found:
            internal.error = kind(text)
            internal.error.peer = int(found[1])
            break
    internal.__cause__ = internal.error
    return internal
