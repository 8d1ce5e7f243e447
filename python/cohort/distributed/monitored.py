"""Waiting for all ranks of a group with the missing ones named, ending a group, and what has ended it: for groups of
torch.distributed."""

from __future__ import annotations

import datetime
from typing import Any, Optional, Union

import torch
import torch.distributed as dist

import cohort
from cohort import _core
from cohort.distributed import environment, group as groups
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


def is_over() -> bool:
    """Whether an operation of this process's default group, or of one made from it, has told that a rank was lost, that a
    deadline was over, or that the group was aborted: then destroy_process_group, and init_process_group forms a new one.
    For programs that handle a RuntimeError (what DDP's backward raises then): others are their own."""
    return dist.is_initialized() and bool(groups.ended)


def members_changed() -> bool:
    """Whether the elastic job (`cohort run --min-np`) goes on with other members than those of the default group: workers
    wait to come, or some leave. All ranks call it together and have the same answer; it is an all_reduce of a byte. If so,
    destroy_process_group, and init_process_group forms the world of those who are members now. False in other jobs.

    Who calls it says that it has the training's state: in a new world it is called once that has come from rank 0. The job
    lets the last rank that has it go only once another has."""
    group = _group(None, "members_changed")
    if not getattr(group, "elastic", False):
        return False
    _core.note_state()
    changed = torch.tensor([_core.job_news(environment.MEMBERS) is not None], dtype=torch.uint8)
    dist.all_reduce(changed, dist.ReduceOp.MAX)
    return bool(changed)
