"""Waiting for all ranks of a group with the missing ones named, and ending a group: for groups of torch.distributed."""

from __future__ import annotations

import datetime
from typing import Any, Optional, Union

import torch.distributed as dist

import cohort
from cohort.distributed.group import ProcessGroup


def _group(group: Any, operation: str) -> Any:
    if not dist.is_initialized():
        raise cohort.InvalidArgument(f'{operation}: there is no process group -- call init_process_group("cohort") first')
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise cohort.InvalidArgument(f"{operation}: this process is not in the group")
    return group


def monitored_barrier(
    group: Any = None, timeout: Union[None, float, datetime.timedelta] = None, wait_all_ranks: bool = False
) -> None:
    """See cohort.monitored_barrier."""
    group = _group(group, "monitored_barrier")
    if isinstance(group, ProcessGroup):
        group.monitored_barrier(timeout, wait_all_ranks)
        return
    if isinstance(timeout, (int, float)):
        timeout = datetime.timedelta(seconds=timeout)
    dist.monitored_barrier(group, timeout, wait_all_ranks)


def abort(reason: str, group: Optional[Any] = None) -> None:
    """Ends a group of the backend "cohort" (default: the world) on all its ranks: what is under way and what comes raises
    cohort.Aborted with this reason. Then destroy_process_group, and init_process_group forms a new one."""
    group = _group(group, "abort")
    if not isinstance(group, ProcessGroup):
        raise cohort.InvalidArgument('abort: this group is not of the backend "cohort"')
    group.abort(reason)
