"""Finds the tensors in the arguments and results of a forward pass, and broadcasts many tensors together."""

from __future__ import annotations

import ctypes
import dataclasses
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Optional

import torch

from cohort import Communicator
from cohort.errors import InvalidArgument

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 16  # alignment of the widest element


def tensors_in(value: object) -> Iterable[torch.Tensor]:
    """Yields tensors in order, from nested lists, tuples, mappings and dataclasses. Other types are skipped."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def flat_on_host(tensor: torch.Tensor, name: str, who: str) -> torch.Tensor:
    """Returns the values as one row in host memory, a copy only if they lie otherwise. Raises InvalidArgument, naming `who`
    and the tensor, if it is not dense."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "on the meta device" if tensor.is_meta else str(tensor.layout)
        raise InvalidArgument(f"{who}: {name} is not dense ({kind})")
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)


_DIGESTED = 1 << 22  # elements of a tensor that are digested; evenly spread if it has more


def digest_of(value: object) -> Optional[int]:
    """Returns a digest of the dense tensors in `value`; None if there are none."""
    digest: Optional[int] = None
    for tensor in tensors_in(value):
        if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda") or tensor.numel() == 0:
            continue
        flat = tensor.detach().reshape(-1)
        flat = flat[:: flat.numel() // _DIGESTED + 1].cpu().contiguous()
        try:
            address = flat.data_ptr()
        except RuntimeError:
            continue  # the tensor has no memory (torch.func)
        raw = (ctypes.c_char * (flat.numel() * flat.element_size())).from_address(address)
        digest = zlib.crc32(raw, zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest or 0))
    return digest


def gpu_of(tensor: torch.Tensor) -> int:
    """Returns CUDA's number of the tensor's GPU; -1 if the tensor is in host memory."""
    return -1 if tensor.device.type == "cpu" else tensor.device.index


class Pack:
    """Tensors of one device that travel together through one piece of memory, as bytes, whatever their types."""

    def __init__(self, comm: Communicator, tensors: Sequence[torch.Tensor]) -> None:
        """tensors: dense; tensors that are moved later (by `module.to`) are copied all the same."""
        self._comm = comm
        self._tensors = list(tensors)
        offsets, size = [], 0
        for tensor in self._tensors:
            offsets.append(size)
            size += tensor.numel() * tensor.element_size()
            size = (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        self._stage = _memory(comm, size, self._tensors[0].device) if size else None
        self._places = []
        for tensor, offset in zip(self._tensors, offsets):
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes == 0:
                self._places.append(torch.empty(tensor.shape, dtype=tensor.dtype))
                continue
            assert self._stage is not None  # the size is not 0
            self._places.append(self._stage[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape))

    def broadcast(self, root: int = 0) -> None:
        """Overwrites the tensors of all ranks with those of the root. Collective; waits (for tensors on a GPU, in
        torch's current stream).

        Every rank packs its own tensors, so if the root has joined, the lowest active rank sends its own.
        """
        if self._stage is None or self._comm.size() == 1:
            return
        with torch.no_grad():
            for place, tensor in zip(self._places, self._tensors):
                place.copy_(tensor)
            self._comm.broadcast(self._stage, root=root, async_op=True).synchronize()
            if self._comm.rank() == root:
                return
            for place, tensor in zip(self._places, self._tensors):
                # Through .data: running statistics are not part of an earlier pass's gradient and must not
                # invalidate it.
                tensor.data.copy_(place)


def broadcast_tensors(comm: Communicator, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """Overwrites the tensors of all ranks with those of the root, many per broadcast. Collective; waits.

    All ranks give dense tensors of the same shapes, types and kinds of devices in the same order.
    """
    if comm.size() == 1:
        return
    for device in sorted({tensor.device for tensor in tensors}, key=str):
        _broadcast_of_one_device(comm, [tensor for tensor in tensors if tensor.device == device], root)


def _memory(comm: Communicator, nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return comm.allocate(nbytes).as_torch("uint8")
    # Between hosts NCCL does not accept uint8, which a program may load as code; a tensor's bytes are not code.
    return torch.empty(nbytes, dtype=torch.int8, device=device)


def _broadcast_of_one_device(comm: Communicator, tensors: Sequence[torch.Tensor], root: int) -> None:
    group: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes >= _CHUNK_BYTES and tensor.is_contiguous():
            as_bytes = torch.uint8 if tensor.device.type == "cpu" else torch.int8
            comm.broadcast(tensor.data.view(-1).view(as_bytes), root=root)
            continue
        if group and filled + nbytes > _CHUNK_BYTES:
            Pack(comm, group).broadcast(root)
            group, filled = [], 0
        group.append(tensor)
        filled += nbytes
    if group:
        Pack(comm, group).broadcast(root)


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the elements fill their memory without gaps and overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def shown_of(module: torch.nn.Module) -> list[tuple[str, int, str, str, list[int], bool]]:
    """Returns a module's parameters, each only once, in the form in which models are compared (C++, train/step)."""
    return [(name, id(one), str(one.dtype), str(one.device), list(one.shape), one.requires_grad)
            for name, one in module.named_parameters()]  # fmt: skip
