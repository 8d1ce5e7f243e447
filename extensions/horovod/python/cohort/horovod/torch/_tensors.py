"""Tensors in the form the engine needs: on the CPU or a GPU, contiguous. Other tensors are copied, and results copied
back."""

from __future__ import annotations

from typing import Any, List, Sequence

import torch
from torch import Tensor

DEVICES = ("cpu", "cuda")


def dense(tensor: Any, what: str) -> Tensor:
    """Returns the tensor itself if the engine can use it directly, else a contiguous copy. Raises ValueError if neither
    works."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{what}: a torch.Tensor is needed, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{what}: a dense tensor is needed, not {tensor.layout} -- for sparse ones: sparse_allreduce_async")
    if tensor.device.type not in DEVICES:
        raise ValueError(
            f"{what}: the tensor is on {tensor.device} -- these operations take tensors on the CPU and on CUDA -- pass "
            "tensor.cpu(), and copy the result back"
        )
    if tensor.is_contiguous() and not tensor.is_neg() and not (tensor.is_complex() and tensor.is_conj()):
        return tensor
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def copy_back(tensor: Tensor, used: Tensor) -> Tensor:
    """Returns the caller's tensor, with the result of the tensor that was used in its place."""
    if used is not tensor:
        tensor.detach().copy_(used)
    return tensor


def result_of(work: Any) -> Tensor:
    """Returns the tensor that an operation made."""
    result = work.result
    tensor: Tensor = result if isinstance(result, Tensor) else result.as_torch()
    return tensor


def check_list(tensors: Any, what: str) -> List[Tensor]:
    """Returns the tensors of a group."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        raise ValueError(f"{what}: a list of tensors is needed, not {type(tensors).__name__}")
    return list(tensors)
