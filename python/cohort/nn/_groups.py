"""The ranks that train together: a Communicator, a group of torch.distributed, or the default world."""

from __future__ import annotations

import sys
from typing import Any, Optional

import cohort
from cohort import Communicator
from cohort.errors import InvalidArgument


def default_world() -> Communicator:
    """Returns the default world (on a thread of run_on_threads, that thread's), or the group of
    init_process_group("cohort") if only that was called. Raises InvalidArgument if there is neither."""
    distributed = sys.modules.get("cohort.distributed")
    if not cohort.is_initialized() and distributed is not None:
        import torch.distributed as dist

        if dist.is_initialized() and isinstance(dist.group.WORLD, distributed.ProcessGroup):
            return dist.group.WORLD.communicator
    return cohort.world()


def communicator_of(process_group: Any, who: str = "DistributedDataParallel") -> Optional[Communicator]:
    """Returns the group's Communicator, None for None. Raises InvalidArgument unless it is a "cohort" group of this process."""
    if process_group is None:
        return None
    from cohort.distributed import ProcessGroup

    if isinstance(process_group, ProcessGroup):
        return process_group.communicator
    raise InvalidArgument(
        f"{who}: process_group is a {type(process_group).__name__} -- a group of the backend "
        '"cohort" is wanted (init_process_group("cohort"), new_group), of which this process is a member'
    )
