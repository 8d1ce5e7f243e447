"""Horovod's exceptions: those that `cohort.torch` raises."""

from __future__ import annotations

from cohort.hvd.exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
