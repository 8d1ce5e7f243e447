"""Communication inside a model: functions of torch tensors whose backward communicates the other way.

A rank whose result is elsewhere gets a *delegate variable*, a tensor of one zero: `delegate.backward()`, or a loss
connected with it by `pseudo_connect`, makes this rank take part in the backward. If the sender's tensors require no
gradient (gradients are off, or nothing is trained), no gradient is sent back. Sends in forward and backward do not wait for
the receiver, so two ranks may both send first and then receive. Double backward is not supported. One thread per rank.
"""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohort.chainermn import _packets
from cohort.chainermn._packets import Received
from cohort.chainermn.communicators import CommunicatorBase, _require_tag, of_one_type
from cohort.errors import InvalidArgument

__all__ = ["allgather", "alltoall", "bcast", "gather", "pseudo_connect", "recv", "scatter", "send"]

Tensors = Union[Tensor, tuple[Tensor, ...]]


def _anchor() -> Tensor:
    """Returns an input that requires a gradient, so that autograd calls the backward of functions without other such inputs."""
    return torch.zeros((), requires_grad=True)


def _can_have_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _tensors(value: Any, what: str) -> tuple[Tensor, ...]:
    tensors = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"functions.{what}: torch tensors are needed, not {type(tensor).__name__}")
    return tensors


def _require_peer(communicator: CommunicatorBase, rank: int, what: str) -> None:
    if rank == communicator.rank:
        raise InvalidArgument(
            f"functions.{what}: rank {rank} is this rank itself, which would wait for itself for ever"
        )
    if not 0 <= rank < communicator.size:
        raise InvalidArgument(f"functions.{what}: rank {rank} in a world of {communicator.size}")


def _mark_plain(ctx: Any, outputs: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*[one for one in outputs if not _can_have_gradient(one)])


# --- from rank to rank ---


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, communicator: CommunicatorBase, rank: int, tag: int, many: bool, reply: int, _: Tensor, *xs: Tensor
    ) -> Tensor:
        packet = _packets.of_arrays(xs if many else xs[0], "functions.send", reply)
        communicator._send_later(packet, rank, tag)
        ctx.communicator, ctx.rank, ctx.reply = communicator, rank, reply
        ctx.has = [_can_have_gradient(x) for x in xs]
        return torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        if ctx.reply == 0:
            return (None,) * (6 + len(ctx.has))
        came = iter(ctx.communicator._recv_gradients(ctx.rank, ctx.reply, "the backward of functions.send"))
        return (None,) * 6 + tuple(next(came) if has else None for has in ctx.has)


def send(x: Any, communicator: CommunicatorBase, rank: int, tag: int = 0) -> Tensor:
    """Sends a tensor, or a tuple of tensors, to `rank`, which calls `recv`. Returns a delegate variable.

    Its backward waits for the gradients. Raises InvalidArgument if `rank` is this rank, or not in the communicator.
    """
    xs = _tensors(x, "send")
    _require_peer(communicator, rank, "send")
    _require_tag(tag)
    reply = communicator._next_reply() if _wants_gradient(*xs) else 0
    delegate: Tensor = _Send.apply(communicator, rank, tag, isinstance(x, (tuple, list)), reply, _anchor(), *xs)
    return delegate


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, communicator: CommunicatorBase, rank: int, reply: int, _: Tensor, *came: Tensor) -> Any:
        ctx.communicator, ctx.rank, ctx.reply = communicator, rank, reply
        outputs = tuple(one.view_as(one) for one in came)
        _mark_plain(ctx, outputs)
        ctx.has = [_can_have_gradient(one) for one in came]
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.reply:
            mine = tuple(grad for grad, has in zip(grads, ctx.has) if has)
            packet = _packets.of_arrays(mine, "the backward of functions.recv")
            ctx.communicator._send_gradients(packet, ctx.rank, ctx.reply)
        return (None, None, None, torch.zeros(()), *[None for _ in grads])


def recv(communicator: CommunicatorBase, rank: int, delegate_variable: Optional[Tensor] = None, tag: int = 0,
         force_tuple: bool = False) -> Tensors:  # fmt: skip
    """Receives from `rank`: a tensor, or a tuple of tensors if a tuple was sent or `force_tuple` is set.

    delegate_variable  result of an earlier send of this rank; the backward reaches that send after this recv has sent
                       its gradients
    """
    _require_peer(communicator, rank, "recv")
    received = Received(communicator._recv(rank, tag), rank, "functions.recv")
    came = received.arrays()
    many = isinstance(came, tuple)
    tensors = _tensors(came, "recv")
    if delegate_variable is None and not received.reply:
        outputs: tuple[Tensor, ...] = tensors
    else:
        outputs = _Recv.apply(
            communicator, rank, received.reply, _anchor() if delegate_variable is None else delegate_variable, *tensors
        )
    return outputs if many or force_tuple else outputs[0]


class _Connect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delegate: Tensor, *tensors: Tensor) -> Any:
        outputs = tuple(tensor.view_as(tensor) for tensor in tensors)
        _mark_plain(ctx, outputs)
        ctx.like = torch.zeros_like(delegate)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (ctx.like, *grads)


def pseudo_connect(delegate_variable: Optional[Tensor], *actual_variables: Any) -> Any:
    """Returns the actual variables unchanged (one, or a tuple of several); their backward also reaches the delegate
    variable.

    Without a delegate variable, returns only the actual variables; without these, the delegate variable.
    """
    tensors = _tensors(actual_variables, "pseudo_connect")
    if not tensors:
        return delegate_variable
    outputs = tensors if delegate_variable is None else _Connect.apply(delegate_variable, *tensors)
    return outputs if len(outputs) > 1 else outputs[0]


# --- all ranks ---


class _Bcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, communicator: CommunicatorBase, root: int, _: Tensor, x: Tensor) -> Tensor:
        ctx.communicator, ctx.root = communicator, root
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.clone(memory_format=torch.contiguous_format)
        ctx.communicator.communicator.reduce(total, root=ctx.root)
        return None, None, None, total if ctx.communicator.rank == ctx.root else None


def bcast(communicator: CommunicatorBase, x: Optional[Tensor] = None, root: int = 0) -> Tensor:
    """Returns the root's tensor, on all ranks. The backward sums all ranks' gradients on the root; all ranks have to
    take part.

    x  on ranks other than the root None, or a tensor that the backward should reach as well, with zeros
    """
    is_root = communicator.rank == root
    communicator._require_rank(root, "functions.bcast")
    reply = 0

    def make() -> bytearray:
        nonlocal reply
        tensor = _tensors((x,), "bcast")[0]
        reply = int(_wants_gradient(tensor) and _can_have_gradient(tensor))
        return _packets.of_arrays(tensor, "functions.bcast", reply)

    received = communicator._bcast(make, root, "functions.bcast")
    if received is not None:
        reply = received.reply
    tensor: Any = x if received is None or is_root else received.arrays()
    result: Tensor = _Bcast.apply(communicator, root, _anchor(), tensor) if reply else tensor
    return result if is_root else _connected(x, result)


def _connected(given: Any, result: Tensor) -> Tensor:
    """Returns the result, whose backward also reaches unused input tensors, since this rank may have computed them with other
    ranks.
    """
    for tensor in given if isinstance(given, (tuple, list)) else (given,):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            result = pseudo_connect(tensor, result)
    return result


class _Gather(torch.autograd.Function):
    """Runs on the root, which has all `parts`, and on the other ranks, which have none."""

    @staticmethod
    def forward(
        ctx: Any, communicator: CommunicatorBase, root: int, replies: list[int], _: Tensor, x: Tensor, *parts: Tensor
    ) -> Any:
        ctx.communicator, ctx.root, ctx.replies = communicator, root, replies
        if communicator.rank != root:
            return torch.zeros(())
        outputs = tuple(part.view_as(part) for part in parts)
        _mark_plain(ctx, outputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        communicator, own = ctx.communicator, None
        if communicator.rank != ctx.root:
            if ctx.replies[0]:
                own = communicator._recv_gradients(ctx.root, ctx.replies[0], "the backward of functions.gather")
            return None, None, None, None, own
        for rank, (grad, reply) in enumerate(zip(grads, ctx.replies)):
            if rank == ctx.root:
                own = grad
            elif reply:
                packet = _packets.of_arrays(grad, "the backward of functions.gather")
                communicator._send_gradients(packet, rank, reply)
        return (None, None, None, None, own, *[None for _ in grads])


def gather(communicator: CommunicatorBase, x: Tensor, root: int = 0) -> Tensors:
    """Returns, on the root, a tuple of all ranks' tensors, of one type; a delegate variable on the others.

    The root's backward gives each rank the gradient of its own tensor.
    """
    reply = 0

    def make() -> bytearray:
        nonlocal reply
        tensor = _tensors((x,), "gather")[0]
        if _wants_gradient(tensor) and _can_have_gradient(tensor):
            reply = communicator._next_reply()
        return _packets.of_arrays(tensor, "functions.gather", reply)

    received = communicator._gather(make, root, "functions.gather")
    if received is None:
        delegate: Tensor = _Gather.apply(communicator, root, [reply], _anchor(), x)
        return delegate
    replies = [one.reply for one in received]
    parts = of_one_type(received, "functions.gather")
    if not any(replies):
        return parts
    outputs: tuple[Tensor, ...] = _Gather.apply(communicator, root, replies, _anchor(), x, *parts)
    return outputs


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, communicator: CommunicatorBase, root: int, replies: list[int], _: Tensor, own: Tensor, *xs: Tensor
    ) -> Tensor:
        ctx.communicator, ctx.root, ctx.replies, ctx.parts = communicator, root, replies, len(xs)
        return own.view_as(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        communicator = ctx.communicator
        if communicator.rank != ctx.root:
            packet = _packets.of_arrays(grad, "the backward of functions.scatter")
            communicator._send_gradients(packet, ctx.root, ctx.replies[communicator.rank])
            return None, None, None, None, None
        what = "the backward of functions.scatter"
        parts = [
            grad if rank == ctx.root else communicator._recv_gradients(rank, reply, what)
            for rank, reply in enumerate(ctx.replies)
        ]
        return (None, None, None, None, None, *parts)


def scatter(communicator: CommunicatorBase, xs: Any = None, root: int = 0) -> Tensor:
    """Returns this rank's part of the root's tensors, a tuple with one for each rank.

    The backward gathers the gradients on the root; all ranks have to take part.

    xs  on ranks other than the root None, or tensors that the backward should reach as well, with zeros
    """
    tensors: tuple[Tensor, ...] = ()
    replies = [0] * communicator.size

    def make() -> list[bytearray]:
        nonlocal tensors, replies
        tensors = _tensors(communicator._one_for_each(xs, "functions.scatter"), "scatter")
        if _wants_gradient(*tensors) and all(_can_have_gradient(one) for one in tensors):
            replies = [communicator._next_reply() for _ in tensors]
        return [_packets.of_arrays(one, "functions.scatter", reply) for one, reply in zip(tensors, replies)]

    received = communicator._scatter(make, root, "functions.scatter")
    is_root = communicator.rank == root
    if not received.reply:
        return received.arrays() if is_root else _connected(xs, received.arrays())
    replies[communicator.rank] = received.reply
    result: Tensor = _Scatter.apply(communicator, root, replies, _anchor(), received.arrays(), *tensors)
    return result if is_root else _connected(xs, result)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, communicator: CommunicatorBase, came: list[Tensor], _: Tensor, *xs: Tensor) -> Any:
        ctx.communicator = communicator
        return tuple(came)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, None, None, *ctx.communicator.alltoall(grads))


def alltoall(communicator: CommunicatorBase, xs: Any) -> tuple[Tensor, ...]:
    """Sends xs[r] to rank r, and returns the tensors received, by rank, of one type and any shapes. The backward does
    the same with gradients.

    All ranks have to take part in the backward if any rank's tensors require a gradient.
    """

    def make() -> list[bytearray]:
        tensors = _tensors(communicator._one_for_each(xs, "functions.alltoall"), "alltoall")
        reply = int(_wants_gradient(*tensors))
        return [_packets.of_arrays(one, "functions.alltoall", reply) for one in tensors]

    received = communicator._exchange(make, "functions.alltoall")
    came = of_one_type(received, "functions.alltoall")
    if not any(one.reply for one in received):
        return came
    outputs: tuple[Tensor, ...] = _AllToAll.apply(communicator, list(came), _anchor(), *_tensors(tuple(xs), "alltoall"))
    return outputs


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, communicator: CommunicatorBase, came: list[Tensor], _: Tensor, x: Tensor) -> Any:
        ctx.communicator, ctx.shape = communicator, x.shape
        return tuple(came)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        together = torch.cat([grad.reshape(-1) for grad in grads])
        own = torch.empty(ctx.shape.numel(), dtype=together.dtype)
        ctx.communicator.communicator.reduce_scatter_v(together, own, [grad.numel() for grad in grads])
        return None, None, None, own.reshape(ctx.shape)


def allgather(communicator: CommunicatorBase, x: Tensor) -> tuple[Tensor, ...]:
    """Returns a tuple of all ranks' tensors, of one type and any shapes. Backward sums the ranks' gradients of each.

    All ranks have to take part in the backward if any rank's tensor requires a gradient.
    """

    def make() -> bytearray:
        tensor = _tensors((x,), "allgather")[0]
        return _packets.of_arrays(tensor, "functions.allgather", int(_wants_gradient(tensor)))

    received = communicator._all_gather(make, "functions.allgather")
    came = of_one_type(received, "functions.allgather")
    if not any(one.reply for one in received):
        return came
    outputs: tuple[Tensor, ...] = _AllGather.apply(communicator, list(came), _anchor(), x)
    return outputs
