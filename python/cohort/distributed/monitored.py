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
    """True if an operation of this process's default group, or of one made from it, has reported a lost rank, a missed
    deadline, or an abort of the group: then destroy_process_group, and init_process_group forms a new one.
    For programs that handle a RuntimeError (what DDP's backward raises then): others are their own."""
    return dist.is_initialized() and bool(groups.ended)


def members_changed(step: Optional[int] = None) -> bool:
    """True if the elastic job (`cohort run --min-np`) goes on with other members than those of the default group:
    workers wait to come, or some leave. All ranks call it together and have the same answer; it is an all_reduce of a
    few bytes. If so, destroy_process_group, and init_process_group forms the world of those who are members now. False
    in other jobs.

    step  how many steps have ended, the same on all ranks

    A call declares that this rank has the training's state, after those steps: call it before each step, and in a new
    world only once it has the state of rank 0. The job lets the last rank that has the state go only once another has
    it. If all ranks are new, and others had trained before them in this attempt of the job, it raises Unavailable on
    all of them: that training is lost, unless `step` is no less, from a checkpoint. Raises Mismatch if ranks give
    different steps.
    """
    group = _group(None, "members_changed")
    if not getattr(group, "elastic", False):
        return False
    number = -1 if step is None else step
    anew = not _core.has_state()
    lost = _core.lost_training(number) if anew and dist.get_rank() == 0 else ""
    changed = _core.job_news(environment.MEMBERS) is not None
    said = torch.tensor([int(changed), int(not anew), int(bool(lost)), number, -number], dtype=torch.int64)
    dist.all_reduce(said, dist.ReduceOp.MAX)
    is_changed, somebody_has_it, is_lost, most, least = said.tolist()
    if most != -least:
        say = [f"{'no step' if each < 0 else f'step {each}'}" for each in (-least, most)]
        raise cohort.Mismatch(f"members_changed: a rank says {say[0]}, another {say[1]} -- give the same on all ranks")
    if is_lost and not somebody_has_it:
        raise cohort.Unavailable(f"members_changed: {lost or _core.lost_training(number) or 'as rank 0 says'}")
    _core.note_state()
    if dist.get_rank() == 0 and group.has_trained:
        _core.note_trained(max(number, 0))
    group.has_trained = True  # by the next call
    return bool(is_changed)
