"""all_reduce of sparse (COO) tensors, as in DDP with Embedding(sparse=True): gathers every rank's indices and values,
then sums equal indices by ascending rank."""

from __future__ import annotations

from typing import Any

import torch

import cohort
from cohort.distributed import profiler
from cohort.distributed.reductions import reduction_of
from cohort.distributed.tensors import DEVICES, arrive, as_moved
from cohort.distributed.work import All, Work

# Makes torch 2 skip its check, since tensors made of the ranks' valid tensors are valid.
_UNCHECKED: Any = {"check_invariants": False} if hasattr(torch.sparse, "check_sparse_tensor_invariants") else {}


def all_reduce(group: Any, tensor: torch.Tensor, options: Any) -> Work:
    """Blocks until the operation has ended."""
    name = "all_reduce of a sparse tensor"
    if tensor.layout != torch.sparse_coo or tensor.device.type not in DEVICES:
        raise cohort.InvalidArgument(
            f"{name}: it is of the layout {tensor.layout} on {tensor.device} -- pass a COO tensor of the CPU or of CUDA"
        )
    op, prescale = reduction_of(options.reduceOp, tensor.dtype, name)
    if op not in ("sum", "average"):
        raise cohort.InvalidArgument(f"{name}: {op} is not possible -- use SUM or AVG, or pass tensor.to_dense()")
    event = profiler.begin("sparse_all_reduce", [tensor]) if profiler.flag._is_profiler_enabled else None
    own = tensor.detach().coalesce()
    world, size, limit = group.communicator, group._size, group._limit(options)
    shape = torch.tensor([own.sparse_dim(), *own.shape])
    shapes = torch.empty(size, shape.numel(), dtype=torch.int64)
    try:
        world.all_gather(shape, shapes, timeout=limit)
    except cohort.Mismatch as error:
        raise cohort.Mismatch(
            f"{name}, here of the shape {list(tensor.shape)} and the type {tensor.dtype}: another rank brings a dense tensor, "
            f"another number of dimensions, or another operation -- bring sparse ones on all ranks, or tensor.to_dense() -- {error}"
        ) from error
    if not bool((shapes == shape).all()):
        raise cohort.InvalidArgument(f"{name}: the ranks bring different shapes: {shapes[:, 1:].tolist()}")
    counts = torch.empty(size, dtype=torch.int64)
    world.all_gather(torch.tensor([own._nnz()]), counts, timeout=limit)
    numbers, values = counts.tolist(), own.values().contiguous()
    # Stores all indices of one element together, so that each rank's indices are contiguous.
    places = own.indices().t().contiguous()
    all_places = torch.empty(sum(numbers), places.size(1), dtype=torch.int64, device=tensor.device)
    all_values = torch.empty(sum(numbers), *values.shape[1:], dtype=values.dtype, device=tensor.device)
    for source, result in ((places, all_places), (values, all_values)):
        row = result[:1].numel() if sum(numbers) else 0
        world.all_gather_v(as_moved(source), as_moved(result), [number * row for number in numbers], timeout=limit)
    total = torch.sparse_coo_tensor(all_places.t(), all_values, tensor.shape, **_UNCHECKED).coalesce()
    if op == "average":
        total = total / size
    elif prescale != 1.0:
        total = total * prescale
    with torch.no_grad():
        tensor.copy_(total)
    arrive(tensor)
    core = All() if event is None else profiler.Seen(All(), event, group._line)
    return group._work(name, core, [tensor])
