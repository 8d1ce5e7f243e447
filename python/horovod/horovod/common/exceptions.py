"""Horovod's exceptions: those that `cohort.torch` raises."""

from __future__ import annotations

from cohort._horovod.exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
