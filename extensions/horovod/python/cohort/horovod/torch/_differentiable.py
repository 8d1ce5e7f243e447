"""The operations that wait for their results, with gradients if autograd needs them.

Gradients are those that Horovod computes. If all ranks get the same result (allgather, broadcast), ranks average the
incoming gradients, which is right if the loss is the average of the ranks' losses. Minimum, maximum and product have
true gradients: incoming gradients are summed, and passed to the ranks whose values made the result.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple, Type, Union

import torch
from cohort.horovod.process_sets import ProcessSet, engine_of, global_process_set
from cohort.horovod.operations import Average, Call, Max, Min, Product, Sum, reduced_back, resolve
from cohort.horovod.torch import _collectives as start
from cohort.horovod.torch._collectives import Splits, call_of, run
from cohort.horovod.torch._handles import synchronize
from cohort.horovod.torch._tensors import check_list
from cohort.horovod.torch.compression import Compression, Compressor
from torch import Tensor

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "grouped_allgather", "grouped_allreduce",
           "grouped_reducescatter", "reducescatter"]  # fmt: skip

Compressors = Union[Type[Compressor], Compressor]


def _results(call: Call, tensors: Sequence[Tensor]) -> List[Tensor]:
    return run(call, tensors)[0]


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)


def _carried_out(function: Any, call: Call, tensors: Sequence[Tensor],
                 compression: Compressors = Compression.none) -> List[Tensor]:  # fmt: skip
    """Returns the results of autograd's function for tensors that are compressed for sending, or of the call itself if
    no gradient is wanted."""
    call = call._replace(wire_format=getattr(compression, "wire_format", None))
    compressed = [compression.compress(tensor) for tensor in tensors]
    sent = [one for one, _ in compressed]
    results = function.apply(call, *sent) if _wants_gradient(*sent) else _results(call, sent)
    return [compression.decompress(result, context) for result, (_, context) in zip(results, compressed)]


# --- allreduce ---


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Any:
        ctx.call = call
        if call.op in (Min, Max, Product):
            ctx.save_for_backward(*tensors)
        return tuple(_results(call, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        equal = lambda a, b: (a == b).to(a.dtype)  # noqa: E731
        back = ctx.call.also("grad")
        # Asked for only if saved: otherwise torch would refuse a second backward, through another result of a group.
        values = ctx.saved_tensors if back.op in (Min, Max, Product) else ()
        return (None, *reduced_back(back, grads, values, _results, equal, _products_of_others))


def _products_of_others(back: Call, values: Sequence[Tensor]) -> List[Tensor]:
    # Ranks that have joined contribute nothing.
    ask = Call("allgather", back.also("others").names, back.process_set, needs_all_ranks=False)
    rows, received = run(ask, [value.detach().unsqueeze(0) for value in values])
    rank = engine_of(back.process_set).rank()
    products = []
    for every, counts in zip(rows, received):
        own = sum(counts[:rank])
        product = (torch.cat([every[:own], every[own + 1 :]]) * back.prescale).prod(0)
        products.append(product.conj() if product.is_complex() else product)
    return products


def allreduce(tensor: Tensor, average: Optional[bool] = None, name: Optional[str] = None,
              compression: Compressors = Compression.none, op: Optional[int] = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set) -> Tensor:  # fmt: skip
    """Reduces a tensor over the set's ranks and returns the result, a new tensor; see `allreduce_async`.

    compression  the format in which the tensor is sent: hvd.Compression.none, fp16, bf16, int8 or int4
    """
    op = resolve(op, average)
    if compression is Compression.none and not _wants_gradient(tensor):  # the fast path
        return synchronize(start.allreduce_async(tensor, None, name, op, prescale_factor, postscale_factor, process_set))
    call = call_of("allreduce", name, process_set, op, prescale_factor, postscale_factor)
    return _carried_out(_AllReduce, call, [tensor], compression)[0]


def grouped_allreduce(tensors: Sequence[Tensor], average: Optional[bool] = None, name: Optional[str] = None,
                      compression: Compressors = Compression.none, op: Optional[int] = None,
                      prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set) -> List[Tensor]:  # fmt: skip
    """Like `allreduce` for several tensors, none of which is reduced before all ranks have called for all."""
    given, op = check_list(tensors, "grouped_allreduce"), resolve(op, average)
    call = call_of("allreduce", name, process_set, op, prescale_factor, postscale_factor, group=given)
    return _carried_out(_AllReduce, call, given, compression)


# --- allgather ---


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Any:
        ctx.call = call
        results, ctx.rows = run(call, tensors)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mean = _results(ctx.call.also("grad", kind="allreduce"), grads)
        rank = engine_of(ctx.call.process_set).rank()
        return (None, *(grad.narrow(0, sum(rows[:rank]), rows[rank]) for grad, rows in zip(mean, ctx.rows)))


def allgather(tensor: Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenates the ranks' tensors along dimension 0, which may differ. Returns a new tensor."""
    return _carried_out(_AllGather, call_of("allgather", name, process_set), [tensor])[0]


def grouped_allgather(tensors: Sequence[Tensor], name: Optional[str] = None,
                      process_set: ProcessSet = global_process_set) -> List[Tensor]:  # fmt: skip
    """Like `allgather` for several tensors, none of which is gathered before all ranks have called for all."""
    given = check_list(tensors, "grouped_allgather")
    return _carried_out(_AllGather, call_of("allgather", name, process_set, group=given), given)


# --- broadcast ---


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, tensor: Tensor) -> Any:
        ctx.call = call
        return tuple(_results(call, [tensor]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        mean = _results(ctx.call.also("grad", kind="allreduce"), [grad])[0]
        is_root = engine_of(global_process_set).rank() == ctx.call.root
        return None, mean if is_root else torch.zeros_like(mean)


def broadcast(tensor: Tensor, root_rank: int, name: Optional[str] = None,
              process_set: ProcessSet = global_process_set) -> Tensor:  # fmt: skip
    """Returns a copy of the tensor of `root_rank` (a rank of the world, also for process sets) on every rank."""
    return _carried_out(_Broadcast, call_of("broadcast", name, process_set, root=root_rank), [tensor])[0]


# --- alltoall ---


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Splits, name: Optional[str], process_set: ProcessSet) -> Any:
        result, received = synchronize(start.alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.name, ctx.process_set = received.tolist(), name, process_set
        ctx.rows = tensor.size(0)
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        name = None if ctx.name is None else f"{ctx.name}.grad"
        result = synchronize(start.alltoall_async(grad, ctx.received, name, ctx.process_set))[0]
        if result.size(0) < ctx.rows:  # rows that were not sent
            result = torch.cat([result, result.new_zeros(ctx.rows - result.size(0), *result.shape[1:])])
        return result, None, None, None


def alltoall(tensor: Tensor, splits: Splits = None, name: Optional[str] = None,
             process_set: ProcessSet = global_process_set) -> Union[Tensor, Tuple[Tensor, Tensor]]:  # fmt: skip
    """Sends rows to all ranks, and returns the rows received; with `splits` also a tensor with their numbers by rank. See
    `alltoall_async`."""
    if _wants_gradient(tensor):
        result, received = _AllToAll.apply(tensor, splits, name, process_set)
    else:
        result, received = synchronize(start.alltoall_async(tensor, splits, name, process_set))
    return result if splits is None else (result, received)


# --- reducescatter ---


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Any:
        ctx.call = call
        return tuple(_results(call, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        call = ctx.call
        factor = call.prescale * call.postscale * (engine_of(call.process_set).size() if call.op == Sum else 1)
        given = [grad if factor == 1 else grad * factor for grad in grads]
        return (None, *_results(call.also("grad", kind="allgather", op=Average), given))


def reducescatter(tensor: Tensor, name: Optional[str] = None, compression: Compressors = Compression.none,
                  op: int = Average, process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> Tensor:  # fmt: skip
    """Reduces a tensor and returns this rank's rows of the result; see `reducescatter_async`."""
    call = call_of("reducescatter", name, process_set, op, prescale_factor, postscale_factor)
    return _carried_out(_ReduceScatter, call, [tensor], compression)[0]


def grouped_reducescatter(tensors: Sequence[Tensor], name: Optional[str] = None,
                          compression: Compressors = Compression.none, op: int = Average,
                          process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0) -> List[Tensor]:  # fmt: skip
    """Like `reducescatter` for several tensors, none of which is reduced before all ranks have called for all."""
    given = check_list(tensors, "grouped_reducescatter")
    call = call_of("reducescatter", name, process_set, op, prescale_factor, postscale_factor, group=given)
    return _carried_out(_ReduceScatter, call, given, compression)
