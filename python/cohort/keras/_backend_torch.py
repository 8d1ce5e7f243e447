"""What a step asks of the ranks, where Keras works with torch: everything is done at once, in the program's order."""

from __future__ import annotations

from typing import Any, List, Sequence

import torch
from cohort._core import ReduceOp
from cohort.hvd.process_sets import ProcessSet, engine_of
from cohort.hvd.operations import ENGINE_OPS, finished, named
from cohort.torch._tensors import copy_back, dense
from cohort.torch.compression import Compression

_WHAT = "DistributedOptimizer"
OVERLAPS = False  # all gradients are there when they are asked for


def reduce_gradients(gradients: Sequence[Any], names: Sequence[str], *, op: int, prescale: float, postscale: float,
                     process_set: ProcessSet, compression: Any = Compression.none,
                     sparse_as_dense: bool = False) -> List[Any]:  # fmt: skip
    """The gradients of all ranks: in place, unless they travel as something else."""
    compressed = [compression.compress(gradient.detach()) for gradient in gradients]
    used = [dense(sent, _WHAT) for sent, _ in compressed]
    full = [named("allreduce", name, process_set) for name in names]
    engine = engine_of(process_set)
    finished("ALLREDUCE", full, engine.all_reduce_group, full, used, op=ENGINE_OPS[op], prescale=prescale,
             postscale=postscale)  # fmt: skip
    return [
        compression.decompress(copy_back(sent, tensor), context) for (sent, context), tensor in zip(compressed, used)
    ]


def total(count: Any, name: str, process_set: ProcessSet) -> float:
    """The sum of a number over ranks."""
    return float(_reduced(torch.tensor([float(count)], dtype=torch.float64), name, process_set, ReduceOp.Sum))


def all_true(flag: Any, name: str, process_set: ProcessSet) -> Any:
    """Whether a flag is set on all ranks."""
    return _reduced(torch.as_tensor(flag).reshape(1).to(torch.uint8), name, process_set, ReduceOp.Min).reshape(()).bool()


def _reduced(tensor: torch.Tensor, name: str, process_set: ProcessSet, op: Any) -> torch.Tensor:
    full = named("allreduce", name, process_set)
    finished("ALLREDUCE", [full], engine_of(process_set).all_reduce, full, tensor, op=op)
    return tensor


def factor_of(count: Any, ranks: int, samples: Any) -> Any:
    """This rank's part of all samples, times the ranks."""
    return float(count) * ranks / samples if samples else 0.0


def times(value: Any, factor: Any) -> Any:
    """A loss or a gradient, times such a factor."""
    return value if isinstance(factor, float) and factor == 1 else value * factor


def samples_in(leaf: Any) -> Any:
    """The number of samples of a batch."""
    return int(leaf.shape[0])


def zeros(variable: Any, type_of_indices: Any) -> Any:
    """What a rank without a gradient brings."""
    tensor = variable.value
    return torch.zeros_like(tensor, requires_grad=False)


def type_of_indices(gradient: Any) -> None:
    """None: no gradients are sparse."""
