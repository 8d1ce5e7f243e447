"""For callers in torch's C++, from torch 2.14 on: a `torch.distributed.Backend` in Python, inside the process group.

For most operations torch calls a process group written in Python directly, and for the rest the backend in it. This is
that backend; it calls the group. Python still calls the group, because from the Works that a Backend returns C++ passes
on only `wait` and `get_future`, so `is_completed`, `exception` and `result` would be useless.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from cohort.distributed.work import TORCH

# Operations of torch 2.14's C++ (PyBackend.hpp), by the names under which it calls Python.
_OPERATIONS = (
    "allgather allgather_coalesced all_gather_single all_gather_single_coalesced allreduce allreduce_coalesced alltoall "
    "all_to_all_single barrier broadcast gather monitored_barrier recv recv_anysource reduce reduce_scatter "
    "reduce_scatter_single reduce_scatter_single_coalesced scatter send set_timeout getBackendName abort shutdown "
    "_get_sequence_number_for_group"
).split()


def attach(group: Any, devices: Sequence[str]) -> None:
    """Gives a group its backend for these devices, if this torch supports it."""
    if TORCH < (2, 14):
        return
    kind = dist.ProcessGroup.BackendType.CUSTOM
    backend = _backend_class()(group)
    for device in devices:
        dist.ProcessGroup._register_backend(group, torch.device(device), kind, backend)
    dist.ProcessGroup._set_default_backend(group, kind)


def _forward(name: str) -> Callable[..., Any]:
    def call(self: Any, *arguments: Any) -> Any:
        return getattr(self.group(), name)(*arguments)

    return call


_made: list[type] = []


def _backend_class() -> type:
    """Creates the class when needed: earlier versions of torch lack its base class."""
    if not _made:

        class Backend(c10d.Backend):
            def __init__(self, group: Any) -> None:
                super().__init__(group._rank, group._size)
                self.group: Any = weakref.ref(group)  # the group holds this object

            @property
            def options(self) -> Any:
                return self.group().options

            def allreduce_sparse(self, *arguments: Any) -> Any:
                return self.group().allreduce(*arguments)

        for name in _OPERATIONS:
            setattr(Backend, name, _forward(name))
        _made.append(Backend)
    return _made[0]
