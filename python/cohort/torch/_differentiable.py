"""The operations that wait, with gradients where autograd asks for them.

Gradients are those that Horovod gives. Where the result is one for all ranks (allgather, broadcast) ranks average what
comes back, as a loss that each rank has of its own, and that is averaged over ranks, asks for. Minimum, maximum and
product have true gradients: what comes back is added up, and goes to the ranks whose values made the result.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple, Type, Union

import torch
from cohort.hvd.process_sets import ProcessSet, engine_of, global_process_set
from cohort.hvd.operations import Average, Max, Min, Product, Sum, resolve, shares_of_winners
from cohort.torch import _collectives as start
from cohort.torch import _handles
from cohort.torch._collectives import Splits
from cohort.torch._handles import synchronize
from cohort.torch._tensors import check_list
from cohort.torch.compression import Compression, Compressor
from torch import Tensor

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "grouped_allgather", "grouped_allreduce",
           "grouped_reducescatter", "reducescatter"]  # fmt: skip

Compressors = Union[Type[Compressor], Compressor]


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)


def _grad_name(name: Optional[str]) -> Optional[str]:
    return None if name is None else f"{name}.grad"


# --- allreduce ---


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Tuple[Any, ...], name: Optional[str], grouped: bool, *tensors: Tensor) -> Any:
        ctx.options, ctx.name, ctx.grouped = options, name, grouped
        if options[0] in (Min, Max, Product):
            ctx.save_for_backward(*tensors)
        return tuple(_reduced(list(tensors), name, grouped, options))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.options
        name = _grad_name(ctx.name)
        if op not in (Min, Max, Product):
            return (None, None, None, *_reduced(list(grads), name, ctx.grouped, ctx.options))
        total = _reduced(list(grads), name, ctx.grouped, (Sum, 1.0, 1.0, process_set))
        values = list(ctx.saved_tensors)

        def reduce(values: List[Tensor], op: int, what: str) -> List[Tensor]:
            part = None if name is None else f"{name}.{what}"
            return _reduced(values, part, ctx.grouped, (op, 1.0, 1.0, process_set))

        if op == Product:
            shares = _products_of_others(values, name, prescale, process_set)
        else:
            shares = shares_of_winners(values, op, prescale, reduce, lambda a, b: (a == b).to(a.dtype))
        return (None, None, None, *(grad * (prescale * postscale) * share for grad, share in zip(total, shares)))


def _products_of_others(values: List[Tensor], name: Optional[str], prescale: float,
                        process_set: ProcessSet) -> List[Tensor]:  # fmt: skip
    """The products of the other ranks' (scaled) values: dividing the result by one's own would fail at zeros."""
    products = []
    for i, value in enumerate(values):
        part = None if name is None else f"{name}.{i}"
        handle = start.allgather_active_async(value.detach().unsqueeze(0), part, process_set)
        work = _handles.works_of(handle)[0]
        rows = synchronize(handle)
        own = sum(work.received_splits[: engine_of(process_set).rank()])
        product = (torch.cat([rows[:own], rows[own + 1 :]]) * prescale).prod(0)
        products.append(product.conj() if product.is_complex() else product)
    return products


def _reduced(tensors: List[Tensor], name: Optional[str], grouped: bool, options: Tuple[Any, ...]) -> List[Tensor]:
    op, prescale, postscale, process_set = options
    if grouped:
        handle = start.grouped_allreduce_async(tensors, None, name, op, prescale, postscale, process_set)
        results: List[Tensor] = synchronize(handle)
        return results
    return [synchronize(start.allreduce_async(tensors[0], None, name, op, prescale, postscale, process_set))]


def allreduce(tensor: Tensor, average: Optional[bool] = None, name: Optional[str] = None,
              compression: Compressors = Compression.none, op: Optional[int] = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set) -> Tensor:  # fmt: skip
    """Reduces a tensor over the set's ranks and returns the result, a new tensor; see `allreduce_async`.

    compression  what the tensor travels as: hvd.Compression.none, fp16 or bf16
    """
    options = (resolve(op, average), prescale_factor, postscale_factor, process_set)
    return _compressed([tensor], name, compression, options, False, _AllReduce, _reduced)[0]


def grouped_allreduce(tensors: Sequence[Tensor], average: Optional[bool] = None, name: Optional[str] = None,
                      compression: Compressors = Compression.none, op: Optional[int] = None,
                      prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set) -> List[Tensor]:  # fmt: skip
    """As `allreduce` for several tensors: none is carried out before all ranks have asked for all."""
    tensors = check_list(tensors, "grouped_allreduce")
    options = (resolve(op, average), prescale_factor, postscale_factor, process_set)
    return _compressed(tensors, name, compression, options, True, _AllReduce, _reduced)


def _compressed(tensors: List[Tensor], name: Optional[str], compression: Compressors, options: Tuple[Any, ...],
                grouped: bool, function: Any, plain: Callable[..., List[Tensor]]) -> List[Tensor]:  # fmt: skip
    """What autograd's function makes of tensors that are compressed on their way, or the plain one where no gradient is
    wanted."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    sent = [one for one, _ in compressed]
    wanted = _wants_gradient(*sent)
    results = function.apply(options, name, grouped, *sent) if wanted else plain(sent, name, grouped, options)
    return [compression.decompress(result, context) for result, (_, context) in zip(results, compressed)]


# --- allgather ---


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Optional[str], process_set: ProcessSet, grouped: bool, *tensors: Tensor) -> Any:
        results, rows = _gathered(list(tensors), name, process_set, grouped)
        ctx.name, ctx.process_set, ctx.grouped = name, process_set, grouped
        ctx.rows = rows
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        options = (Average, 1.0, 1.0, ctx.process_set)
        mean = _reduced(list(grads), _grad_name(ctx.name), ctx.grouped, options)
        rank = engine_of(ctx.process_set).rank()
        own = [grad.narrow(0, sum(rows[:rank]), rows[rank]) for grad, rows in zip(mean, ctx.rows)]
        return (None, None, None, *own)


def _gathered(tensors: List[Tensor], name: Optional[str], process_set: ProcessSet,
              grouped: bool) -> Tuple[List[Tensor], List[List[int]]]:  # fmt: skip
    """The results, and how many rows of each came from which rank."""
    if grouped:
        handle = start.grouped_allgather_async(tensors, name, process_set)
    else:
        handle = start.allgather_async(tensors[0], name, process_set)
    works = _handles.works_of(handle)
    results = synchronize(handle)
    return (results if grouped else [results]), [list(work.received_splits) for work in works]


def allgather(tensor: Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenates the ranks' tensors along dimension 0, which may differ. Returns a new tensor."""
    if _wants_gradient(tensor):
        return _AllGather.apply(name, process_set, False, tensor)[0]
    result: Tensor = synchronize(start.allgather_async(tensor, name, process_set))
    return result


def grouped_allgather(tensors: Sequence[Tensor], name: Optional[str] = None,
                      process_set: ProcessSet = global_process_set) -> List[Tensor]:  # fmt: skip
    """As `allgather` for several tensors: none is carried out before all ranks have asked for all."""
    tensors = check_list(tensors, "grouped_allgather")
    if _wants_gradient(*tensors):
        return list(_AllGather.apply(name, process_set, True, *tensors))
    result: List[Tensor] = synchronize(start.grouped_allgather_async(tensors, name, process_set))
    return result


# --- broadcast ---


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: Optional[str], process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, name, process_set
        return synchronize(start.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        mean = _reduced([grad], _grad_name(ctx.name), False, (Average, 1.0, 1.0, ctx.process_set))[0]
        is_root = engine_of(global_process_set).rank() == ctx.root_rank
        return mean if is_root else torch.zeros_like(mean), None, None, None


def broadcast(tensor: Tensor, root_rank: int, name: Optional[str] = None,
              process_set: ProcessSet = global_process_set) -> Tensor:  # fmt: skip
    """Returns rank `root_rank`'s tensor (a rank of the world, also for process sets), a new one, on every rank."""
    if _wants_gradient(tensor):
        result: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
        return result
    result = synchronize(start.broadcast_async(tensor, root_rank, name, process_set))
    return result


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
        back = start.alltoall_async(grad, ctx.received, _grad_name(ctx.name), ctx.process_set)
        result = synchronize(back)[0]
        if result.size(0) < ctx.rows:  # rows that were not sent
            result = torch.cat([result, result.new_zeros(ctx.rows - result.size(0), *result.shape[1:])])
        return result, None, None, None


def alltoall(tensor: Tensor, splits: Splits = None, name: Optional[str] = None,
             process_set: ProcessSet = global_process_set) -> Union[Tensor, Tuple[Tensor, Tensor]]:  # fmt: skip
    """Sends rows to all ranks, and returns those received; with `splits` also how many came from each, a tensor. See
    `alltoall_async`."""
    if _wants_gradient(tensor):
        result, received = _AllToAll.apply(tensor, splits, name, process_set)
    else:
        result, received = synchronize(start.alltoall_async(tensor, splits, name, process_set))
    return result if splits is None else (result, received)


# --- reducescatter ---


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Tuple[Any, ...], name: Optional[str], grouped: bool, *tensors: Tensor) -> Any:
        ctx.options, ctx.name, ctx.grouped = options, name, grouped
        return tuple(_scattered(list(tensors), name, grouped, options))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.options
        factor = prescale * postscale * (engine_of(process_set).size() if op == Sum else 1)
        given = [grad if factor == 1 else grad * factor for grad in grads]
        return (None, None, None, *_gathered(given, _grad_name(ctx.name), process_set, ctx.grouped)[0])


def _scattered(tensors: List[Tensor], name: Optional[str], grouped: bool, options: Tuple[Any, ...]) -> List[Tensor]:
    op, prescale, postscale, process_set = options
    if grouped:
        handle = start.grouped_reducescatter_async(tensors, name, op, process_set, prescale, postscale)
        results: List[Tensor] = synchronize(handle)
        return results
    return [synchronize(start.reducescatter_async(tensors[0], name, op, process_set, prescale, postscale))]


def reducescatter(tensor: Tensor, name: Optional[str] = None, compression: Compressors = Compression.none,
                  op: int = Average, process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> Tensor:  # fmt: skip
    """Reduces a tensor and returns this rank's rows of the result; see `reducescatter_async`."""
    options = (op, prescale_factor, postscale_factor, process_set)
    return _compressed([tensor], name, compression, options, False, _ReduceScatter, _scattered)[0]


def grouped_reducescatter(tensors: Sequence[Tensor], name: Optional[str] = None,
                          compression: Compressors = Compression.none, op: int = Average,
                          process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0) -> List[Tensor]:  # fmt: skip
    """As `reducescatter` for several tensors: none is carried out before all ranks have asked for all."""
    tensors = check_list(tensors, "grouped_reducescatter")
    options = (op, prescale_factor, postscale_factor, process_set)
    return _compressed(tensors, name, compression, options, True, _ReduceScatter, _scattered)
