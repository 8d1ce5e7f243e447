"""The operations that return handles, and those in place. They are not differentiable: see `_differentiable.py`.

Results have the tensors' shapes; a tensor that is not contiguous is copied (and copied back, in place). All functions
raise ValueError for arguments that have no meaning (nothing was done then), and HorovodInternalError if there is no
world. While a rank has joined, allgather, broadcast, reducescatter and alltoall fail with HorovodInternalError on ranks
that have not.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import torch
from cohort._core import NamedWork
from cohort.errors import Error
from cohort.horovod import timeline
from cohort.horovod.exceptions import translated
from cohort.horovod.operations import (ENGINE_OPS, Adasum, Average, Call, adasum, group_names, named, note_of, require_same_notes,
                                   require_scattering, resolve, started, wait_for)  # fmt: skip
from cohort.horovod.process_sets import ProcessSet, engine_of, global_process_set, require_world
from cohort.horovod.torch import _handles
from cohort.horovod.torch._handles import synchronize
from cohort.horovod.torch._tensors import check_list, copy_back, dense, result_of
from torch import Tensor

__all__ = ["allgather_async", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall_async", "broadcast_",
           "broadcast_async", "broadcast_async_", "grouped_allgather_async", "grouped_allreduce_",
           "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter_async", "reducescatter_async",
           "sparse_allreduce_async"]  # fmt: skip

# Makes torch 2.x skip its check, since tensors made of the ranks' valid tensors are valid.
UNCHECKED: Any = {"check_invariants": False} if hasattr(torch.sparse, "check_sparse_tensor_invariants") else {}

Splits = Union[None, Sequence[int], Tensor]


# --- calls: all operations except the fast path ---


def call_of(kind: str, name: Optional[str], process_set: ProcessSet, op: int = Average, prescale: float = 1.0,
            postscale: float = 1.0, *, group: Optional[List[Tensor]] = None, **how: Any) -> Call:  # fmt: skip
    """Returns a call for one tensor, or for a group of tensors."""
    shown = "adasum" if op == Adasum else kind
    names = [named(shown, name, process_set)] if group is None else group_names(shown, name, process_set, len(group))
    return Call(kind, names, process_set, op, prescale, postscale, **how)


def begin(
    call: Call, tensors: Sequence[Tensor], in_place: bool = False
) -> Tuple[List[NamedWork], Callable[[], List[Tensor]]]:
    """Starts operations. Returns them and a function that returns their results: new tensors, or the given ones."""
    if call.kind == "reducescatter":
        require_scattering(call.op)
    if call.op == Adasum:
        require_world("op=hvd.Adasum")
    used = [dense(tensor, call.kind) for tensor in tensors]
    if call.op == Adasum:
        for tensor in used:
            if not tensor.is_floating_point():
                raise ValueError(f"op=hvd.Adasum needs floating-point tensors, not {tensor.dtype}")
        works = call.start([_with_note(tensor.detach(), note_of(call)) for tensor in used])
        combined = lambda: [_combined(work, one, call) for work, one in zip(works, used)]  # noqa: E731
        return works, combined if not in_place else lambda: [copy_back(to, of) for to, of in zip(tensors, combined())]
    if call.kind in ("allreduce", "broadcast"):
        made = used
        if not in_place:
            empty = call.kind == "allreduce"
            made = [torch.empty_like(one, requires_grad=False) if empty else one.detach().clone() for one in used]
        works = call.start(used, made) if call.kind == "allreduce" and not in_place else call.start(made)
        return works, lambda: [copy_back(to, of) for to, of in zip(tensors, made)] if in_place else made
    if call.kind != "alltoall" and any(tensor.dim() == 0 for tensor in used):
        raise ValueError(f"{call.kind}: a tensor without dimensions has no rows -- pass tensor.reshape(1)")
    works = call.start(used)
    return works, lambda: [result_of(work) for work in works]


def _with_note(tensor: Tensor, note: bytes) -> Tensor:
    """Returns the tensor's elements, followed by elements that hold the note's bytes."""
    end = tensor.numel()
    row = tensor.new_empty(end + len(note) // tensor.element_size())
    row[:end] = tensor.reshape(-1)
    row[end:].view(torch.uint8).copy_(torch.tensor(list(note), dtype=torch.uint8))
    return row


def _combined(work: NamedWork, like: Tensor, call: Call) -> Tensor:
    """Computes Adasum on the tensors' device, in float64 for float64 and in float32 otherwise. Needs memory for as many
    tensors as ranks."""
    rows, end = result_of(work), like.numel()
    notes = [bytes(note.tolist()) for note in rows[:, end:].contiguous().view(torch.uint8).cpu()]
    require_same_notes(call, notes, work.received_splits)
    rows = rows[:, :end]
    wide = torch.promote_types(rows.dtype, torch.float32)
    vectors = [row.to(wide) * call.prescale for row in rows.unbind(0)]
    result: Tensor = adasum(vectors, lambda a, b: float(torch.dot(a.double(), b.double()))) * call.postscale
    return result.to(like.dtype).reshape(like.shape)


def run(call: Call, tensors: Sequence[Tensor], in_place: bool = False) -> Tuple[List[Tensor], List[List[int]]]:
    """Runs a call and waits. Returns the results and, for allgather and alltoall, the rows of each by rank."""
    works, results = begin(call, tensors, in_place)
    wait_for(works)
    counted = call.kind in ("allgather", "alltoall")
    return results(), [list(work.received_splits) for work in works] if counted else []


def _handle(call: Call, tensors: Sequence[Tensor], in_place: bool = False) -> int:
    works, results = begin(call, tensors, in_place)
    return _handles.add(works, results)


def _handle_of_one(call: Call, tensor: Tensor, in_place: bool = False) -> int:
    works, results = begin(call, [tensor], in_place)
    return _handles.add(works, lambda: results()[0])


# --- allreduce ---


def _reduce(tensor: Tensor, output: Optional[Tensor], name: str, op: int, prescale: float, postscale: float,
            process_set: ProcessSet, wire_format: Optional[str] = None) -> NamedWork:  # fmt: skip
    engine = process_set._engine or engine_of(process_set)
    if timeline.current is not None:
        return started("ALLREDUCE", [name], engine.all_reduce, name, tensor, output, op=ENGINE_OPS[op],
                       prescale=prescale, postscale=postscale, wire_format=wire_format)[0]  # fmt: skip
    try:  # the fast path: programs call this for each of thousands of tensors
        return engine.all_reduce(name, tensor, output, op=ENGINE_OPS[op], prescale=prescale, postscale=postscale,
                                 wire_format=wire_format)  # fmt: skip
    except Error as error:
        raise translated(error) from error


def allreduce_async(tensor: Tensor, average: Optional[bool] = None, name: Optional[str] = None, op: Optional[int] = None,
                    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                    process_set: ProcessSet = global_process_set) -> int:  # fmt: skip
    """Starts reducing a tensor over the set's ranks; `synchronize` gives the result, a new tensor.

    op                one of hvd.Average (default), Sum, Min, Max, Product, Adasum; averages of integers are truncated
    prescale_factor   each rank's values are multiplied by this factor before
    postscale_factor  the result is multiplied by this factor
    """
    op = resolve(op, average)
    if op == Adasum:
        return _handle_of_one(call_of("allreduce", name, process_set, op, prescale_factor, postscale_factor), tensor)
    used = dense(tensor, "allreduce")
    output = torch.empty_like(used, requires_grad=False)
    return allreduce_async_to(used, output, name, op, prescale_factor, postscale_factor, process_set)


def adasum_async(tensor: Tensor, name: str, step: int, process_set: ProcessSet) -> int:
    """Like `allreduce_async` with hvd.Adasum. step: the optimizer's step, which has to be the same on all ranks."""
    return _handle_of_one(call_of("allreduce", name, process_set, Adasum, step=step), tensor)


def allreduce_async_(tensor: Tensor, average: Optional[bool] = None, name: Optional[str] = None,
                     op: Optional[int] = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                     process_set: ProcessSet = global_process_set, *,
                     wire_format: Optional[str] = None) -> int:  # fmt: skip
    """Like `allreduce_async`, in place. Until `synchronize` the tensor's contents are undefined. wire_format: see
    hvd.Compression.int8, which uses one."""
    op = resolve(op, average)
    if op == Adasum:
        call = call_of("allreduce", name, process_set, op, prescale_factor, postscale_factor)
        return _handle_of_one(call, tensor, in_place=True)
    used = dense(tensor, "allreduce_")
    full = named("allreduce", name, process_set)
    work = _reduce(used, None, full, op, prescale_factor, postscale_factor, process_set, wire_format)
    return _handles.add_one(work, tensor, used)


def allreduce_async_to(tensor: Tensor, output: Tensor, name: Optional[str], op: int, prescale: float, postscale: float,
                       process_set: ProcessSet, wire_format: Optional[str] = None) -> int:  # fmt: skip
    """Like `allreduce_async`, into a given tensor. The engine can use both tensors without a copy; `op` is not
    Adasum."""
    full = named("allreduce", name, process_set)
    work = _reduce(tensor, output, full, op, prescale, postscale, process_set, wire_format)
    return _handles.add_one(work, output, output)


def allreduce_(tensor: Tensor, average: Optional[bool] = None, name: Optional[str] = None, op: Optional[int] = None,
               prescale_factor: float = 1.0, postscale_factor: float = 1.0,
               process_set: ProcessSet = global_process_set) -> Tensor:  # fmt: skip
    """Like `allreduce_async_`, but waits. Returns the tensor."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: Tensor = synchronize(handle)
    return result


def grouped_allreduce_async(tensors: Sequence[Tensor], average: Optional[bool] = None, name: Optional[str] = None,
                            op: Optional[int] = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> int:  # fmt: skip
    """Like `allreduce_async` for several tensors, none of which is reduced before all ranks have called for all."""
    given, op = check_list(tensors, "grouped_allreduce"), resolve(op, average)
    return _handle(call_of("allreduce", name, process_set, op, prescale_factor, postscale_factor, group=given), given)


def grouped_allreduce_async_(tensors: Sequence[Tensor], average: Optional[bool] = None, name: Optional[str] = None,
                             op: Optional[int] = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = global_process_set) -> int:  # fmt: skip
    """Like `grouped_allreduce_async`, in place."""
    given, op = check_list(tensors, "grouped_allreduce_"), resolve(op, average)
    call = call_of("allreduce", name, process_set, op, prescale_factor, postscale_factor, group=given)
    return _handle(call, given, in_place=True)


def grouped_allreduce_async_to(tensors: List[Tensor], outputs: List[Optional[Tensor]], name: str, op: int,
                               prescale: float, postscale: float, process_set: ProcessSet,
                               wire_format: Optional[str] = None) -> int:  # fmt: skip
    """Like `grouped_allreduce_async`, into given tensors (as `allreduce_async_to`), or in place for those that are
    None."""
    used = [dense(one, "grouped_allreduce_") if to is None else one for one, to in zip(tensors, outputs)]
    into = [one if to is None else to for one, to in zip(used, outputs)]
    call = call_of("allreduce", name, process_set, op, prescale, postscale, group=used, wire_format=wire_format)
    works = call.start(used, into)

    def finish() -> List[Tensor]:
        return [copy_back(one, to) if output is None else to for one, to, output in zip(tensors, into, outputs)]

    return _handles.add(works, finish)


def grouped_allreduce_(tensors: Sequence[Tensor], average: Optional[bool] = None, name: Optional[str] = None,
                       op: Optional[int] = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                       process_set: ProcessSet = global_process_set) -> List[Tensor]:  # fmt: skip
    """Like `grouped_allreduce_async_`, but waits. Returns the tensors."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    result: List[Tensor] = synchronize(handle)
    return result


def sparse_allreduce_async(tensor: Tensor, name: Optional[str], op: Optional[int],
                           process_set: ProcessSet = global_process_set) -> Callable[[], Tensor]:  # fmt: skip
    """Starts summing sparse COO tensors, with any number of entries on each rank. Returns a function that waits and
    returns the sum (or the average, if op is hvd.Average) as a sparse tensor that is not coalesced."""
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"sparse_allreduce: a sparse COO tensor is needed, not {tensor.layout}")
    base = named("sparse_allreduce", name, process_set)
    size = engine_of(process_set).size()
    tensor = tensor.detach()
    # Dimension 0 counts entries, since ranks may differ in it. Ranks that have joined contribute no entries.
    parts = [tensor._indices().t().contiguous(), dense(tensor._values(), "sparse_allreduce")]
    call = Call("allgather", [f"{base}.indices", f"{base}.values"], process_set, needs_all_ranks=False)
    handle = _handle(call, parts)

    def wait() -> Tensor:
        indices, values = synchronize(handle)
        if op is None or op == Average:
            exact = values.is_floating_point() or values.is_complex()
            values = values / size if exact else values.div(size, rounding_mode="trunc")
        return torch.sparse_coo_tensor(indices.t(), values, tensor.size(), **UNCHECKED)

    wait.handle = handle  # type: ignore[attr-defined]
    return wait


# --- the others ---


def allgather_async(tensor: Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts concatenating tensors along dimension 0, in the order of ranks. Dimension 0 may differ, others must not."""
    return _handle_of_one(call_of("allgather", name, process_set), tensor)


def grouped_allgather_async(tensors: Sequence[Tensor], name: Optional[str] = None,
                            process_set: ProcessSet = global_process_set) -> int:  # fmt: skip
    """Like `allgather_async` for several tensors, none of which is gathered before all ranks have called for all."""
    given = check_list(tensors, "grouped_allgather")
    return _handle(call_of("allgather", name, process_set, group=given), given)


def broadcast_async(tensor: Tensor, root_rank: int, name: Optional[str] = None,
                    process_set: ProcessSet = global_process_set) -> int:  # fmt: skip
    """Starts sending one rank's tensor to all; `synchronize` returns a new tensor.

    root_rank  a rank of the world, also for process sets
    """
    return _handle_of_one(call_of("broadcast", name, process_set, root=root_rank), tensor)


def broadcast_async_(tensor: Tensor, root_rank: int, name: Optional[str] = None,
                     process_set: ProcessSet = global_process_set) -> int:  # fmt: skip
    """Like `broadcast_async`, in place."""
    return _handle_of_one(call_of("broadcast", name, process_set, root=root_rank), tensor, in_place=True)


def broadcast_(tensor: Tensor, root_rank: int, name: Optional[str] = None,
               process_set: ProcessSet = global_process_set) -> Tensor:  # fmt: skip
    """Like `broadcast_async_`, but waits. Returns the tensor."""
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def alltoall_async(tensor: Tensor, splits: Splits = None, name: Optional[str] = None,
                   process_set: ProcessSet = global_process_set) -> int:  # fmt: skip
    """Starts sending rows of a tensor to all ranks; `synchronize` returns (rows received, in the order of ranks; number
    of rows by rank, a tensor of int32 or of the type of `splits`).

    splits  rows for each rank; rows beyond their sum are not sent. None: equal parts
    """
    if not isinstance(splits, Tensor):
        require_world("alltoall")
    used = dense(tensor, "alltoall")
    counts: Optional[Tuple[int, ...]] = None
    kind, device = torch.int32, None
    if isinstance(splits, Tensor):
        if splits.dim() != 1 or splits.is_floating_point() or splits.is_complex() or splits.dtype is torch.bool:
            raise ValueError("alltoall: splits have to be integers, one for each rank")
        kind, device = splits.dtype, splits.device
    if splits is not None:
        counts = tuple(int(count) for count in (splits.tolist() if isinstance(splits, Tensor) else splits))
        if used.dim() > 0 and min(counts, default=0) >= 0 and sum(counts) < used.size(0):
            used = used[: sum(counts)]
    works, results = begin(call_of("alltoall", name, process_set, splits=counts), [used])

    def finish() -> Tuple[Tensor, Tensor]:
        return results()[0], torch.tensor(works[0].received_splits, dtype=kind, device=device)

    return _handles.add(works, finish)


def reducescatter_async(tensor: Tensor, name: Optional[str] = None, op: int = Average,
                        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                        postscale_factor: float = 1.0) -> int:  # fmt: skip
    """Starts reducing a tensor and giving each rank its rows of the result. If dimension 0 does not divide evenly, the
    first ranks get one row more. op: hvd.Average or hvd.Sum; others raise a NotImplementedError that is also a
    HorovodInternalError. For the factors see `allreduce_async`."""
    return _handle_of_one(call_of("reducescatter", name, process_set, op, prescale_factor, postscale_factor), tensor)


def grouped_reducescatter_async(tensors: Sequence[Tensor], name: Optional[str] = None, op: int = Average,
                                process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                                postscale_factor: float = 1.0) -> int:  # fmt: skip
    """Like `reducescatter_async` for several tensors, none of which is reduced before all ranks have called for all."""
    given = check_list(tensors, "grouped_reducescatter")
    return _handle(call_of("reducescatter", name, process_set, op, prescale_factor, postscale_factor, group=given), given)
