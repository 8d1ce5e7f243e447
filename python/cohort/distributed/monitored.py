"""For groups of torch.distributed: waits for all ranks and names the missing ones, ends a group, and tells whether it has
ended."""

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
    """Ends a group of the backend "cohort" (default: the world) on all its ranks: operations under way and later ones
    raise cohort.Aborted with this reason. To continue, call destroy_process_group, then init_process_group."""
    group = _group(group, "abort")
    if not isinstance(group, ProcessGroup):
        raise cohort.InvalidArgument('abort: this group is not of the backend "cohort"')
    group.abort(reason)


def is_over() -> bool:
    """Returns True if an operation of this process's default group, or of one made from it, has reported a lost rank, a
    missed deadline, or an abort of the group. Then destroy_process_group and init_process_group form a new one. Tells
    programs whether a RuntimeError (as DDP's backward raises) is due to the group or to the program."""
    return dist.is_initialized() and bool(groups.ended)


def members_changed(step: Optional[int] = None) -> bool:
    """Returns True if the elastic job (`cohort run --min-np`) continues with members that differ from the default
    group's: workers wait to be members, or some leave. All ranks call it together and get the same answer; it is an all_reduce
    of a few bytes. If True, destroy_process_group and init_process_group form the world of the current members. False
    in other jobs.

    step  the number of steps that have ended, the same on all ranks

    A call declares that this rank has the training's state after those steps: call it before each step, and in a new
    world only when it has rank 0's state. The job does not release the last rank that has the state until another one
    has it. If all ranks are new, and earlier ranks had trained in this attempt of the job, raises Unavailable on all
    ranks: that training is lost, unless a checkpoint gives a `step` that is no smaller. Raises Mismatch if ranks give
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
    group.has_trained = True  # used from the next call on
    return bool(is_changed)
