"""The exceptions of Horovod's API. What Cohort itself raised is their `__cause__`."""

from __future__ import annotations

from cohort.errors import Error, InvalidArgument

__all__ = [
    "HorovodInitError",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
]


class HorovodInternalError(RuntimeError):
    """An operation failed: ranks disagreed about it, one was lost, or the world has ended.

    After a disagreement (the cause is `cohort.Mismatch`) everything goes on; after all else `shutdown` and `init` are
    what helps, which `elastic.run` does.
    """


class HorovodInitError(HorovodInternalError, ValueError):
    """`init` failed: the world was not formed."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts came or went. `skip_sync`: they only went, so that the state of those who stay is still good."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts were added or removed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Kept for programs that catch it: Cohort's module has no version of its own per framework."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"{name} was built with version {version}, but {installed_version} is installed -- build it again"
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version


def translated(error: Error) -> Exception:
    """What a caller of Horovod's API expects instead: ValueError for what has no meaning, else HorovodInternalError."""
    if isinstance(error, InvalidArgument):
        return error  # it is a ValueError
    internal = HorovodInternalError(str(error))
    internal.__cause__ = error
    return internal
