"""The mean over ranks of a model's gradients, for communicators and multi-node optimizers after a backward."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch

from cohort import Communicator, Work
from cohort.errors import InvalidArgument, Mismatch

Parameters = Union[torch.nn.Module, Iterable[torch.Tensor]]
Named = Sequence[tuple[str, torch.Tensor]]


def named_parameters(model: Parameters) -> Named:
    """Returns a module's parameters by name, or tensors with numbers as names."""
    if isinstance(model, torch.nn.Module):
        return list(model.named_parameters())
    if isinstance(model, torch.Tensor) or not isinstance(model, Iterable):
        raise TypeError(f"a torch.nn.Module or a list of its parameters is needed, not {type(model).__name__}")
    return [(f"parameter {number}", tensor) for number, tensor in enumerate(model)]


def dtype_named(value: Any) -> Optional[torch.dtype]:
    """Returns the type in which to reduce gradients, from ChainerMN's forms: 'float16', numpy.float16 or torch.float16;
    None: the gradients' own.

    Raises ValueError for anything else.
    """
    if value is None:
        return None
    name = str(value)[6:] if isinstance(value, torch.dtype) else getattr(value, "__name__", str(value))
    dtype = getattr(torch, name, None)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise InvalidArgument(
            f"allreduce_grad_dtype is {value!r} -- 'float16', 'bfloat16', 'float32' or 'float64' is needed, or None"
        )
    return dtype


class Collected(NamedTuple):
    """Parameters whose gradients are reduced."""

    tensors: list[torch.Tensor]
    digest: int  # tells which of all parameters these are; the same on all ranks
    others: list[str]  # names of all other parameters


def collected(comm: Communicator, parameters: Named, zero_fill: bool) -> Collected:
    """Returns the parameters whose gradients are reduced, each with a dense gradient; the same on all ranks.

    zero_fill  parameters without a gradient get zeros; otherwise they are left out, which has to be so on all ranks.

    A frozen parameter that still has a gradient is included, because the optimizer steps it, too.

    Raises Mismatch on every rank if the ranks differ; with zero_fill the reduction does.
    """
    if zero_fill:
        trained = [(name, tensor) for name, tensor in parameters if tensor.requires_grad or tensor.grad is not None]
    else:
        trained = [(name, tensor) for name, tensor in parameters if tensor.grad is not None]
        if comm.size() > 1:
            _require_same_gaps(comm, parameters)
    for _, tensor in trained:
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor, requires_grad=False)
        elif tensor.grad.layout != torch.strided:
            tensor.grad = tensor.grad.to_dense()
    reduced = {id(tensor) for _, tensor in trained}
    return Collected(
        [tensor for _, tensor in trained],
        zlib.crc32(bytes(id(tensor) in reduced for _, tensor in parameters)),
        [name for name, tensor in parameters if id(tensor) not in reduced],
    )


def _require_same_gaps(comm: Communicator, parameters: Named) -> None:
    has = [int(tensor.grad is not None) for _, tensor in parameters]
    # For each gradient, 1 if any rank has it, and 1 if any lacks it.
    seen = torch.tensor([*has, *(1 - one for one in has)], dtype=torch.uint8)
    if len(seen):
        comm.all_reduce(seen, op="max")
    some, none = seen[: len(has)].tolist(), seen[len(has) :].tolist()
    for (name, _), have, lack, here in zip(parameters, some, none, has):
        if have and lack:
            raise Mismatch(
                f"mean of gradients: '{name}' has a gradient on some ranks only (here: {bool(here)}) "
                "-- with zero_fill=True the others bring zeros"
            )


class Mean:
    """Gradients being reduced, as copies if they cannot or must not be reduced in place."""

    def __init__(
        self, comm: Communicator, given: Collected, dtype: Optional[torch.dtype], *, copied: bool
    ) -> None:
        """Starts the reduction. copied: the parameters' own gradients stay unchanged until `deliver`."""
        self.parameters, self._others = given.tensors, given.others
        gradients = [tensor.grad.detach() for tensor in self.parameters]
        self._used = [
            one.to(dtype or one.dtype, memory_format=torch.contiguous_format, copy=copied).contiguous()
            for one in gradients
        ]
        self._work: Optional[Work] = None
        if comm.size() > 1:
            # A rank without gradients takes part, so that the error names it if others have some.
            used = self._used or [torch.zeros(0)]
            self._work = comm.all_reduce(used, op="average", tag=given.digest, async_op=True)

    def wait(self) -> None:
        """Waits for the means. Raises Mismatch on all ranks if they bring gradients of different parameters."""
        if self._work is not None:
            try:
                self._work.wait()
            except Mismatch as error:
                but = f" but {', '.join(map(repr, self._others[:4]))}" if self._others else ""
                raise Mismatch(
                    f"mean of gradients: the ranks bring different ones (here: of all parameters{but}) -- freeze and use the "
                    f"same parameters on all ranks, with one allreduce_grad_dtype: {error}"
                ) from error

    def deliver(self) -> None:
        """Waits, and sets the parameters' gradients to the means."""
        self.wait()
        for tensor, mean in zip(self.parameters, self._used):
            if tensor.grad is None:
                tensor.grad = torch.empty_like(tensor, requires_grad=False)
            if tensor.grad.data_ptr() != mean.data_ptr() or tensor.grad.dtype != mean.dtype:
                tensor.grad.detach().copy_(mean)
