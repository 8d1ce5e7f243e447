"""The operations that return handles, and those in place. They are not differentiable: see `_differentiable.py`.

Shapes are those of the tensors; a tensor that is not contiguous is copied (and back, in place). All raise ValueError for
what has no meaning (nothing was done then), and HorovodInternalError where there is no world. While a rank has joined,
allgather, broadcast, reducescatter and alltoall fail with HorovodInternalError on those that have not.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import torch
from cohort._core import NamedWork
from cohort.errors import Error
from cohort.hvd import timeline
from cohort.hvd.exceptions import translated
from cohort.hvd.operations import ENGINE_OPS, Adasum, Average, group_names, named, require_scattering, resolve, started
from cohort.hvd.process_sets import ProcessSet, engine_of, global_process_set, require_world, root_in
from cohort.torch import _adasum, _handles
from cohort.torch._handles import synchronize
from cohort.torch._tensors import check_list, copy_back, dense, result_of
from torch import Tensor

__all__ = ["allgather_async", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall_async", "broadcast_",
           "broadcast_async", "broadcast_async_", "grouped_allgather_async", "grouped_allreduce_",
           "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter_async", "reducescatter_async",
           "sparse_allreduce_async"]  # fmt: skip

# What ranks have made of valid tensors is valid; torch 2.x wants to be told.
UNCHECKED: Any = {"check_invariants": False} if hasattr(torch.sparse, "check_sparse_tensor_invariants") else {}

Splits = Union[None, Sequence[int], Tensor]


# --- allreduce ---


def _reduce(tensor: Tensor, output: Optional[Tensor], name: str, op: int, prescale: float, postscale: float,
            process_set: ProcessSet) -> NamedWork:  # fmt: skip
    engine = process_set._engine or engine_of(process_set)
    if timeline.current is not None:
        return started("ALLREDUCE", [name], engine.all_reduce, name, tensor, output, op=ENGINE_OPS[op],
                       prescale=prescale, postscale=postscale)[0]  # fmt: skip
    try:  # the shortest way: programs do this for each of thousands of tensors
        return engine.all_reduce(name, tensor, output, op=ENGINE_OPS[op], prescale=prescale, postscale=postscale)
    except Error as error:
        raise translated(error) from error


def _reduce_group(tensors: List[Tensor], outputs: Optional[List[Tensor]], names: List[str], op: int, prescale: float,
                  postscale: float, process_set: ProcessSet) -> List[NamedWork]:  # fmt: skip
    engine = engine_of(process_set)
    if not tensors:
        return []
    return started("ALLREDUCE", names, engine.all_reduce_group, names, tensors, outputs, op=ENGINE_OPS[op],
                   prescale=prescale, postscale=postscale)  # fmt: skip


def allreduce_async(tensor: Tensor, average: Optional[bool] = None, name: Optional[str] = None, op: Optional[int] = None,
                    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                    process_set: ProcessSet = global_process_set) -> int:  # fmt: skip
    """Starts reducing a tensor over the set's ranks; `synchronize` gives the result, a new tensor.

    op                one of hvd.Average (default), Sum, Min, Max, Product, Adasum; averages of integers are truncated
    prescale_factor   each rank's values are multiplied by it before
    postscale_factor  the result is multiplied by it
    """
    op = resolve(op, average)
    if op == Adasum:
        return _adasum.start([tensor], None, [named("adasum", name, process_set)], prescale_factor, postscale_factor,
                             process_set, single=True)  # fmt: skip
    used = dense(tensor, "allreduce")
    output = torch.empty_like(used, requires_grad=False)
    full = named("allreduce", name, process_set)
    work = _reduce(used, output, full, op, prescale_factor, postscale_factor, process_set)
    return _handles.add_one(work, output, output)


def allreduce_async_(tensor: Tensor, average: Optional[bool] = None, name: Optional[str] = None,
                     op: Optional[int] = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                     process_set: ProcessSet = global_process_set) -> int:  # fmt: skip
    """As `allreduce_async`, in place. Until `synchronize` the tensor is neither the old nor the new one."""
    op = resolve(op, average)
    if op == Adasum:
        return _adasum.start([tensor], [tensor], [named("adasum", name, process_set)], prescale_factor,
                             postscale_factor, process_set, single=True)  # fmt: skip
    used = dense(tensor, "allreduce_")
    full = named("allreduce", name, process_set)
    work = _reduce(used, None, full, op, prescale_factor, postscale_factor, process_set)
    return _handles.add_one(work, tensor, used)


def allreduce_async_to(tensor: Tensor, output: Tensor, name: str, op: int, prescale: float, postscale: float,
                       process_set: ProcessSet) -> int:  # fmt: skip
    """As `allreduce_async`, into a tensor that is given. The engine can use both where they lie; `op` is not Adasum."""
    work = _reduce(tensor, output, named("allreduce", name, process_set), op, prescale, postscale, process_set)
    return _handles.add_one(work, output, output)


def allreduce_(tensor: Tensor, average: Optional[bool] = None, name: Optional[str] = None, op: Optional[int] = None,
               prescale_factor: float = 1.0, postscale_factor: float = 1.0,
               process_set: ProcessSet = global_process_set) -> Tensor:  # fmt: skip
    """As `allreduce_async_`, and waits. Returns the tensor."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: Tensor = synchronize(handle)
    return result


def grouped_allreduce_async(tensors: Sequence[Tensor], average: Optional[bool] = None, name: Optional[str] = None,
                            op: Optional[int] = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> int:  # fmt: skip
    """As `allreduce_async` for several tensors: none is carried out before all ranks have asked for all."""
    return _grouped(tensors, "grouped_allreduce", resolve(op, average), name, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(tensors: Sequence[Tensor], average: Optional[bool] = None, name: Optional[str] = None,
                             op: Optional[int] = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = global_process_set) -> int:  # fmt: skip
    """As `grouped_allreduce_async`, in place."""
    return _grouped(tensors, "grouped_allreduce_", resolve(op, average), name, prescale_factor, postscale_factor, process_set)


def _grouped(given: Sequence[Tensor], what: str, op: int, name: Optional[str], prescale: float, postscale: float,
             process_set: ProcessSet) -> int:  # fmt: skip
    tensors, in_place = check_list(given, what), what.endswith("_")
    if op == Adasum:
        names = group_names("adasum", name, process_set, len(tensors))
        return _adasum.start(tensors, tensors if in_place else None, names, prescale, postscale, process_set)
    used = [dense(tensor, what) for tensor in tensors]
    outputs = None if in_place else [torch.empty_like(tensor, requires_grad=False) for tensor in used]
    names = group_names("allreduce", name, process_set, len(tensors))
    works = _reduce_group(used, outputs, names, op, prescale, postscale, process_set)
    if outputs is not None:
        return _handles.add(works, lambda: outputs)
    return _handles.add(works, lambda: [copy_back(to, of) for to, of in zip(tensors, used)])


def grouped_allreduce_async_to(tensors: List[Tensor], outputs: List[Optional[Tensor]], name: str, op: int,
                               prescale: float, postscale: float, process_set: ProcessSet) -> int:  # fmt: skip
    """As `grouped_allreduce_async`, into tensors that are given (as `allreduce_async_to`), or in place where there is
    none."""
    used = [dense(one, "grouped_allreduce_") if to is None else one for one, to in zip(tensors, outputs)]
    into = [one if to is None else to for one, to in zip(used, outputs)]
    names = group_names("allreduce", name, process_set, len(tensors))
    works = _reduce_group(used, into, names, op, prescale, postscale, process_set)

    def finish() -> List[Tensor]:
        return [copy_back(one, to) if output is None else to for one, to, output in zip(tensors, into, outputs)]

    return _handles.add(works, finish)


def grouped_allreduce_(tensors: Sequence[Tensor], average: Optional[bool] = None, name: Optional[str] = None,
                       op: Optional[int] = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                       process_set: ProcessSet = global_process_set) -> List[Tensor]:  # fmt: skip
    """As `grouped_allreduce_async_`, and waits. Returns the tensors."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    result: List[Tensor] = synchronize(handle)
    return result


def sparse_allreduce_async(tensor: Tensor, name: Optional[str], op: Optional[int],
                           process_set: ProcessSet = global_process_set) -> Callable[[], Tensor]:  # fmt: skip
    """Starts adding up sparse COO tensors, of any number of entries on each rank. Returns a function that waits and
    gives the sum (or the average, if op is hvd.Average) as a sparse tensor that is not coalesced."""
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"sparse_allreduce: a sparse COO tensor is needed, not {tensor.layout}")
    base = named("sparse_allreduce", name, process_set)
    names = [f"{base}.indices", f"{base}.values"]
    engine = engine_of(process_set)
    tensor = tensor.detach()
    # Entry by entry, since dimension 0 is what ranks may differ in.
    parts = [tensor._indices().t().contiguous(), dense(tensor._values(), "sparse_allreduce")]
    handle = _handles.add(started("ALLGATHER", names, engine.all_gather_group, names, parts), lambda: None)
    works = _handles.works_of(handle)

    def wait() -> Tensor:
        synchronize(handle)
        indices, values = (result_of(work) for work in works)
        if op is None or op == Average:
            exact = values.is_floating_point() or values.is_complex()
            values = values / engine.size() if exact else values.div(engine.size(), rounding_mode="trunc")
        return torch.sparse_coo_tensor(indices.t(), values, tensor.size(), **UNCHECKED)

    wait.handle = handle  # type: ignore[attr-defined]
    return wait


# --- the others ---


def allgather_async(tensor: Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts concatenating tensors along dimension 0, in the order of ranks. Dimension 0 may differ, others must not."""
    return _gather([tensor], [named("allgather", name, process_set)], process_set, lambda results: results[0])


def allgather_active_async(tensor: Tensor, name: Optional[str], process_set: ProcessSet) -> int:
    """As `allgather_async`, also while some ranks have joined: they bring no rows. For what is right without them."""
    names = [named("allgather", name, process_set)]
    return _gather([tensor], names, process_set, lambda results: results[0], needs_all_ranks=False)


def grouped_allgather_async(tensors: Sequence[Tensor], name: Optional[str] = None,
                            process_set: ProcessSet = global_process_set) -> int:  # fmt: skip
    """As `allgather_async` for several tensors: none is carried out before all ranks have asked for all."""
    tensors = check_list(tensors, "grouped_allgather")
    return _gather(tensors, group_names("allgather", name, process_set, len(tensors)), process_set, lambda results: results)


def _gather(tensors: List[Tensor], names: List[str], process_set: ProcessSet, pick: Callable[[List[Tensor]], Any],
            needs_all_ranks: bool = True) -> int:  # fmt: skip
    used = [dense(tensor, "allgather") for tensor in tensors]
    if any(tensor.dim() == 0 for tensor in used):
        raise ValueError("allgather: a tensor without dimensions cannot be concatenated -- pass tensor.reshape(1)")
    gather = engine_of(process_set).all_gather_group
    works = started("ALLGATHER", names, gather, names, used, needs_all_ranks=needs_all_ranks) if used else []
    return _handles.add(works, lambda: pick([result_of(work) for work in works]))


def broadcast_async(tensor: Tensor, root_rank: int, name: Optional[str] = None,
                    process_set: ProcessSet = global_process_set) -> int:  # fmt: skip
    """Starts sending one rank's tensor to all; `synchronize` gives it, a new tensor.

    root_rank  a rank of the world, also for process sets
    """
    used = dense(tensor, "broadcast").detach().clone()
    return _broadcast([used], [named("broadcast", name, process_set)], root_rank, process_set, lambda: used)


def broadcast_async_(tensor: Tensor, root_rank: int, name: Optional[str] = None,
                     process_set: ProcessSet = global_process_set) -> int:  # fmt: skip
    """As `broadcast_async`, in place."""
    used = dense(tensor, "broadcast_")
    names = [named("broadcast", name, process_set)]
    return _broadcast([used], names, root_rank, process_set, lambda: copy_back(tensor, used))


def broadcast_(tensor: Tensor, root_rank: int, name: Optional[str] = None,
               process_set: ProcessSet = global_process_set) -> Tensor:  # fmt: skip
    """As `broadcast_async_`, and waits. Returns the tensor."""
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def broadcast_active_(tensor: Tensor, root_rank: int, name: str, process_set: ProcessSet) -> None:
    """As `broadcast_`, also while some ranks have joined (but the root)."""
    used = dense(tensor, "broadcast_")
    names = [named("broadcast", name, process_set)]
    finish = lambda: copy_back(tensor, used)  # noqa: E731
    synchronize(_broadcast([used], names, root_rank, process_set, finish, needs_all_ranks=False))


def broadcast_group_async_(tensors: List[Tensor], root_rank: int, names: List[Optional[str]],
                           process_set: ProcessSet) -> int:  # fmt: skip
    """As `broadcast_async_` for several tensors, each under its own name."""
    used = [dense(tensor, "broadcast_") for tensor in tensors]
    full = [named("broadcast", name, process_set) for name in names]
    finish = lambda: [copy_back(to, of) for to, of in zip(tensors, used)]  # noqa: E731
    return _broadcast(used, full, root_rank, process_set, finish)


def _broadcast(used: List[Tensor], names: List[str], root_rank: int, process_set: ProcessSet,
               finish: Callable[[], Any], needs_all_ranks: bool = True) -> int:  # fmt: skip
    send, root = engine_of(process_set).broadcast_group, root_in(process_set, root_rank)
    works = started("BROADCAST", names, send, names, used, root, needs_all_ranks=needs_all_ranks) if used else []
    return _handles.add(works, finish)


def alltoall_async(tensor: Tensor, splits: Splits = None, name: Optional[str] = None,
                   process_set: ProcessSet = global_process_set) -> int:  # fmt: skip
    """Starts sending rows of a tensor to all ranks; `synchronize` gives (rows received, in the order of ranks; how many
    from each, a tensor of int32 or of the type of `splits`).

    splits  rows for each rank; those beyond their sum are not sent. None: equal parts
    """
    if not isinstance(splits, Tensor):
        require_world("alltoall")
    used = dense(tensor, "alltoall")
    counts: Optional[List[int]] = None
    kind = torch.int32
    if isinstance(splits, Tensor):
        if splits.dim() != 1 or splits.is_floating_point() or splits.is_complex() or splits.dtype is torch.bool:
            raise ValueError("alltoall: splits have to be integers, one for each rank")
        kind = splits.dtype
    if splits is not None:
        counts = [int(count) for count in (splits.tolist() if isinstance(splits, Tensor) else splits)]
        if used.dim() > 0 and min(counts, default=0) >= 0 and sum(counts) < used.size(0):
            used = used[: sum(counts)]
    full = named("alltoall", name, process_set)
    works = started("ALLTOALL", [full], engine_of(process_set).all_to_all, full, used, counts)
    device = splits.device if isinstance(splits, Tensor) else None

    def finish() -> Tuple[Tensor, Tensor]:
        return result_of(works[0]), torch.tensor(works[0].received_splits, dtype=kind, device=device)

    return _handles.add(works, finish)


def reducescatter_async(tensor: Tensor, name: Optional[str] = None, op: int = Average,
                        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                        postscale_factor: float = 1.0) -> int:  # fmt: skip
    """Starts reducing a tensor and giving each rank its rows of the result. Where dimension 0 does not divide, the first
    ranks get one row more. op: hvd.Average or hvd.Sum, others are a NotImplementedError that is a HorovodInternalError
    too; for the factors see `allreduce_async`."""
    names = [named("reducescatter", name, process_set)]
    return _scatter([tensor], names, op, process_set, prescale_factor, postscale_factor, lambda results: results[0])


def grouped_reducescatter_async(tensors: Sequence[Tensor], name: Optional[str] = None, op: int = Average,
                                process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                                postscale_factor: float = 1.0) -> int:  # fmt: skip
    """As `reducescatter_async` for several tensors: none is carried out before all ranks have asked for all."""
    tensors = check_list(tensors, "grouped_reducescatter")
    names = group_names("reducescatter", name, process_set, len(tensors))
    return _scatter(tensors, names, op, process_set, prescale_factor, postscale_factor, lambda results: results)


def _scatter(tensors: List[Tensor], names: List[str], op: int, process_set: ProcessSet, prescale: float,
             postscale: float, pick: Callable[[List[Tensor]], Any]) -> int:  # fmt: skip
    require_scattering(op)
    used = [dense(tensor, "reducescatter") for tensor in tensors]
    if any(tensor.dim() == 0 for tensor in used):
        raise ValueError("reducescatter: a tensor without dimensions cannot be scattered")
    scatter, scales = engine_of(process_set).reduce_scatter_group, {"prescale": prescale, "postscale": postscale}
    works = started("REDUCESCATTER", names, scatter, names, used, op=ENGINE_OPS[op], **scales) if used else []
    return _handles.add(works, lambda: pick([result_of(work) for work in works]))
