"""Other backends in one group: "cpu:cohort,cuda:nccl". Each backend gets the tensors of its devices.

torch keeps a process group that is written in Python as the whole group, and so never creates the other backends of
such a list. This module creates them as torch does, and attaches them.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import cohort


def asked_for() -> dict[str, str]:
    """Returns the other backends, by device, of the group being made. torch does not pass them to a backend's
    constructor function, but the function that calls it knows them."""
    frame: Optional[FrameType] = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            return {}
        if frame.f_globals is c10d.__dict__ and "backend_config" in frame.f_locals:
            devices = frame.f_locals["backend_config"].get_device_backend_map()
            return {device: name for device, name in devices.items() if name != "cohort"}
        frame = frame.f_back
    return {}


def attach(group: Any, backends: dict[str, str], options: Any, backend_options: Any) -> None:
    """Attaches the backends of other devices to the group. Raises Unavailable if this torch does not have one."""
    if not backends:
        return
    container = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    for device, name in backends.items():
        store = c10d.PrefixStore(f"cohort/{device}/", options.store)
        backend, kind = _make(name, device, store, options, backend_options)
        container._register_backend(torch.device(device), kind, backend)
        # For operations in which torch's C++ does not call Python.
        group._register_backend(torch.device(device), kind, backend)
        container._set_default_backend(kind)
    group.set_beside(container, list(backends))


def _make(name: str, device: str, store: Any, options: Any, backend_options: Any) -> tuple[Any, Any]:
    types = dist.ProcessGroup.BackendType
    rank, size = options.group_rank, options.group_size
    if name == "gloo" and dist.is_gloo_available():
        backend = c10d.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
        backend._set_sequence_number_for_group()
        return backend, types.GLOO
    if name == "nccl" and dist.is_nccl_available():
        own = backend_options
        if own is None:
            own = c10d.ProcessGroupNCCL.Options()
            own.is_high_priority_stream = False
        own._timeout = options.timeout
        if hasattr(own, "global_ranks_in_group"):
            own.global_ranks_in_group = options.global_ranks_in_group
            own.group_name = str(options.group_id)
        backend = c10d.ProcessGroupNCCL(store, rank, size, own)
        backend._set_sequence_number_for_group()
        return backend, types.NCCL
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is not None:
        if plugin.extended_api:
            inner = c10d._DistributedBackendOptions()
            for field in ("group_rank", "group_size", "timeout", "group_id", "global_ranks_in_group"):
                setattr(inner, field, getattr(options, field))
            inner.store = store
            made = plugin.creator_fn(inner, backend_options)
        else:
            made = plugin.creator_fn(store, rank, size, options.timeout)
        if not isinstance(made, dist.ProcessGroup):
            return made, types.CUSTOM
    raise cohort.Unavailable(
        f'init_process_group("cpu:cohort,{device}:{name}"): the backend {name} is not in this torch ({torch.__version__}), or '
        "cannot stand beside another -- beside cohort can be nccl, gloo, and others' that are written in C++"
    )
