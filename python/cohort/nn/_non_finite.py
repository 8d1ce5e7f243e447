"""The first value of a tensor that is NaN or infinite, and how all ranks of a model learn which gradient was the first."""

from __future__ import annotations

import array
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch

from cohort import Communicator, _core
from cohort._collective import broadcast_bytes
from cohort.errors import InvalidArgument, NonFinite

_NOBODY = 2**63 - 1


@dataclass(frozen=True)
class NonFiniteElement:
    """One element of a tensor."""

    index: int  # in the order of the dimensions, the last one running fastest
    position: tuple[int, ...]  # the same, one number per dimension; empty for a scalar
    value: float  # of a complex number the part that is not finite


@dataclass(frozen=True)
class NonFiniteGradient:
    """A gradient that is not finite, the first one: of the bucket that is reduced first, there of the lowest rank, there
    of the gradient that lies first."""

    rank: int
    host: str  # that rank's
    parameter: str  # its name
    element: NonFiniteElement
    step: int  # synchronised steps before this one


class NonFiniteError(NonFinite):
    """Raised on every rank, with the same text and gradient, before a gradient of the step can be used.

    `gradient` is a NonFiniteGradient, `peer` its rank. The communicator and the model stay usable.
    """

    gradient: NonFiniteGradient


def first_non_finite(tensor: torch.Tensor, wire_dtype: Any = None) -> Optional[NonFiniteElement]:
    """The first element that is NaN or infinite, None if there is none; integers are finite.

    tensor      dense and on the CPU, contiguous or not; read once
    wire_dtype  torch.bfloat16 or its name: a float32 that becomes infinite as bfloat16 counts as well

    Raises InvalidArgument for other tensors, and for types that collectives do not know. Any thread may call.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise InvalidArgument(
            f"first_non_finite: the tensor is not dense and on the CPU ({tensor.device}, {tensor.layout}) -- use .cpu() "
            "and .to_dense()"
        )
    values = tensor.detach().contiguous().reshape(-1)
    index = _core.first_non_finite(values, None if wire_dtype is None else str(wire_dtype))
    if index is None:
        return None
    value = values[index].item()
    if isinstance(value, complex):
        value = value.imag if math.isfinite(value.real) else value.real
    return NonFiniteElement(index, position_of(index, tensor.shape), value)


def position_of(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The element with this number, in a tensor of this shape: one number per dimension."""
    position = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        position.append(at)
    return tuple(reversed(position))


@dataclass(frozen=True)
class LocalNonFinite:
    """The first that this rank has found."""

    order: int  # when it is reduced: its bucket
    parameter: str
    shape: tuple[int, ...]
    element: NonFiniteElement


def first_of_all_ranks(comm: Communicator, mine: LocalNonFinite | None, step: int) -> NonFiniteError | None:
    """Collective. The error for that of the lowest order, and there of the lowest rank; None if no rank has one.

    By a minimum and a broadcast: in those, ranks that have joined take part without a word.
    """
    first = array.array("q", [_NOBODY if mine is None else mine.order * comm.size() + comm.rank()])
    comm.all_reduce(first, op="min")
    if first[0] == _NOBODY:
        return None
    rank = first[0] % comm.size()
    is_mine = mine is not None and rank == comm.rank()
    description = broadcast_bytes(comm, describe(mine, comm.host()) if mine is not None and is_mine else b"", root=rank)
    error = error_of(description, rank, step)
    error.rank, error.host, error.operation = comm.rank(), comm.host(), "DistributedDataParallel"
    return error


def describe(found: LocalNonFinite, host: str) -> bytes:
    """What other ranks have to know of it, in less than 4 KiB: of very long names the end."""
    element = found.element
    return json.dumps(
        [host[-100:], found.parameter[-400:], found.shape, element.index, element.position, element.value]
    ).encode()


def error_of(description: bytes, rank: int, step: int) -> NonFiniteError:
    """The error for what `describe` told on a rank."""
    host, parameter, shape, index, position, value = json.loads(description)
    what = "nan" if math.isnan(value) else str(value)
    if math.isfinite(value):
        what = f"{value:g}, which is infinite as the type that it is sent as"
    error = NonFiniteError(
        f"the gradients of step {step} are not finite -- rank {rank} ({host}), parameter '{parameter}' of {shape}, "
        f"element {index} at {position} -- it is {what}, the first one found -- go on with the next batch (gradients are "
        f"None now, on all ranks), or look at rank {rank}'s batch and loss and at the learning rate"
    )
    error.gradient = NonFiniteGradient(rank, host, parameter, NonFiniteElement(index, tuple(position), value), step)
    error.peer = rank
    return error
