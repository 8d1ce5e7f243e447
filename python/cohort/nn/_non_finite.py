"""The first value of a tensor that is NaN or infinite, and the report to all ranks of a model's first such gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch

from cohort import _core
from cohort.errors import InvalidArgument, NonFinite


@dataclass(frozen=True)
class NonFiniteElement:
    """One element of a tensor."""

    index: int  # row-major, the last dimension running fastest
    position: tuple[int, ...]  # the same position, one number per dimension; empty for a scalar
    value: float  # of a complex number, the part that is not finite


@dataclass(frozen=True)
class NonFiniteGradient:
    """The first gradient that is not finite: first by bucket, in the order of reduction, then by rank, then by place in
    memory."""

    rank: int
    host: str  # that rank's
    parameter: str  # its name
    element: NonFiniteElement
    step: int  # synchronised steps before this one


class NonFiniteError(NonFinite):
    """Raised on every rank, with the same text and gradient, before a gradient of the step can be used.

    `gradient` is a NonFiniteGradient, `peer` its rank. The communicator and the model can still be used.
    """

    gradient: NonFiniteGradient


def first_non_finite(tensor: torch.Tensor, wire_format: Any = None) -> Optional[NonFiniteElement]:
    """Returns the first element that is NaN or infinite; None if there is none. Integers are finite.

    tensor      dense, contiguous or not; a tensor on a GPU is copied
    wire_format  torch.bfloat16 or its name: a float32 that becomes infinite as bfloat16 counts as well

    Raises InvalidArgument for other tensors, and for types that collectives do not support. Any thread may call.
    """
    if tensor.layout != torch.strided:
        raise InvalidArgument(f"first_non_finite: the tensor is not dense ({tensor.layout}) -- use .to_dense()")
    values = tensor.detach().cpu().contiguous().reshape(-1)
    index = _core.first_non_finite(values, None if wire_format is None else str(wire_format))
    if index is None:
        return None
    value = values[index].item()
    if isinstance(value, complex):
        value = value.imag if math.isfinite(value.real) else value.real
    return NonFiniteElement(index, position_of(index, tensor.shape), value)


def position_of(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the position of element `index` in a tensor of this shape: one number per dimension."""
    position = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        position.append(at)
    return tuple(reversed(position))


def error_of(
    text: str, rank: int, host: str, parameter: str, index: int, position: tuple[int, ...], value: float, step: int
) -> NonFiniteError:
    """Returns the error that all ranks raise."""
    error = NonFiniteError(text)
    error.gradient = NonFiniteGradient(rank, host, parameter, NonFiniteElement(index, position, value), step)
    error.peer = rank
    return error
