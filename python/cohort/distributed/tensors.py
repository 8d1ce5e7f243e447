"""Tensors in the form the core needs: dense, contiguous, in host or GPU memory, of a supported type.

A tensor is used in place if possible. Otherwise a contiguous copy is used, and `deliver` writes it back.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch

import cohort

# Device types that the backend supports.
DEVICES = ("cpu", "cuda")

_KNOWN: dict[torch.dtype, bool] = {}

try:
    from torch.autograd.graph import increment_version as _increment_version
except ImportError:  # before torch 2.1
    _increment_version = None


def is_known(dtype: torch.dtype) -> bool:
    """Returns True if the core supports elements of this type. Others (8-bit floats) can only be moved, as bytes."""
    known = _KNOWN.get(dtype)
    if known is None:
        known = _KNOWN[dtype] = cohort.supports(dtype, "sum")
    return known


def check(tensor: Any, operation: str) -> None:
    """Raises InvalidArgument for an unsupported tensor: another device, a sparse layout."""
    if not isinstance(tensor, torch.Tensor):
        raise cohort.InvalidArgument(f"{operation}: {type(tensor).__name__} is no tensor -- pass torch tensors")
    kind = tensor.device.type
    if kind not in DEVICES:
        raise cohort.InvalidArgument(
            f'{operation}: the tensor lies on {tensor.device}, and the backend "cohort" moves memory of the host and of CUDA '
            f'-- pass tensor.cpu() and copy the result back, or init_process_group("cpu:cohort,{kind}:BACKEND"), which '
            "leaves tensors of that device to a backend of its own (torch 2.x)"
        )
    if tensor.layout != torch.strided:
        raise cohort.InvalidArgument(
            f"{operation}: the tensor is of the layout {tensor.layout} -- pass tensor.to_dense(); only "
            "all_reduce takes sparse ones"
        )


def check_device(tensors: Sequence[torch.Tensor], operation: str) -> None:
    """Raises InvalidArgument unless all tensors of one operation are on the same device."""
    for tensor in tensors:
        if tensor.device != tensors[0].device:
            raise cohort.InvalidArgument(
                f"{operation}: its tensors lie on {tensors[0].device} and on {tensor.device} -- pass tensors of one device"
            )


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns True if the tensor's memory holds its values, element after element."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def arrive(tensor: torch.Tensor) -> None:
    """Waits until a result's copy to the tensor has ended. On a GPU the copy is queued on a stream, and a thread that
    waits for the operation may use another stream."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def changed(tensor: torch.Tensor) -> None:
    """Tells autograd that the memory was written, so that a backward pass that needs the old values fails."""
    if _increment_version is not None and not tensor.is_inference():
        _increment_version(tensor)


def as_moved(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the contiguous tensor as elements that the core can move."""
    return tensor if is_known(tensor.dtype) else tensor.detach().reshape(-1).view(torch.uint8)


def read(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    """Returns the tensor itself, or a contiguous copy; for tensors that are only read."""
    check(tensor, operation)
    return tensor if is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous()


class Written:
    """A tensor that an operation writes; the core writes to `memory`."""

    __slots__ = ("memory", "tensor")

    def __init__(self, tensor: torch.Tensor, operation: str, *, reads: bool) -> None:
        """reads   the operation also reads the tensor, as an all_reduce in place does"""
        check(tensor, operation)
        self.tensor = tensor
        if is_plain(tensor):
            self.memory = tensor
        elif reads:
            self.memory = tensor.detach().resolve_conj().resolve_neg().contiguous()
        else:
            self.memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    @property
    def copies(self) -> bool:
        """Returns True if `deliver` copies."""
        return self.memory is not self.tensor

    def deliver(self) -> None:
        if self.copies:
            with torch.no_grad():
                self.tensor.copy_(self.memory)
            arrive(self.tensor)
        else:
            changed(self.tensor)


class Pieces:
    """Tensors as parts of one contiguous memory, in order. `memory` is their own if they are contiguous already."""

    __slots__ = ("counts", "memory", "tensors", "_own")

    def __init__(self, tensors: Sequence[torch.Tensor], operation: str, *, reads: bool) -> None:
        if not tensors:
            raise cohort.InvalidArgument(f"{operation}: the list of tensors is empty")
        for tensor in tensors:
            check(tensor, operation)
            if tensor.dtype != tensors[0].dtype:
                raise cohort.InvalidArgument(
                    f"{operation}: the tensors of one list are of the types {tensors[0].dtype} and {tensor.dtype} -- pass "
                    "tensors of one type"
                )
        check_device(tensors, operation)
        self.tensors = tensors
        self.counts = [tensor.numel() for tensor in tensors]
        row = _row(tensors, self.counts)
        self._own = row is None
        if row is None:
            row = torch.empty(sum(self.counts), dtype=tensors[0].dtype, device=tensors[0].device)
            if reads:
                with torch.no_grad():
                    for part, tensor in zip(self._parts(row), tensors):
                        part.copy_(tensor)
        self.memory = row

    def _parts(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [part.view(tensor.shape) for part, tensor in zip(row.split(self.counts), self.tensors)]

    @property
    def are_equal(self) -> bool:
        return all(count == self.counts[0] for count in self.counts)

    @property
    def copies(self) -> bool:
        """Returns True if `deliver` copies."""
        return self._own

    def deliver(self) -> None:
        if self._own:
            with torch.no_grad():
                for part, tensor in zip(self._parts(self.memory), self.tensors):
                    tensor.copy_(part)
            arrive(self.memory)
        else:
            for tensor in self.tensors:
                changed(tensor)


def _row(tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> Optional[torch.Tensor]:
    first = tensors[0]
    at = end = first.data_ptr()
    size = first.element_size()
    # Only within one storage: two storages that happen to be adjacent are not one memory.
    storage = first.storage()._cdata if not hasattr(first, "untyped_storage") else first.untyped_storage()._cdata
    for tensor, count in zip(tensors, counts):
        here = tensor.storage()._cdata if not hasattr(tensor, "untyped_storage") else tensor.untyped_storage()._cdata
        if here != storage or tensor.data_ptr() != end or not is_plain(tensor):
            return None
        end += count * size
    if end == at:
        return None
    return first.detach().as_strided((sum(counts),), (1,))
