"""A step's communication if Keras uses torch: all operations are eager, in the program's order."""

from __future__ import annotations

from typing import Any, List, Sequence

import torch
from cohort.horovod.process_sets import ProcessSet
from cohort.horovod.operations import Call, Min, Sum
from cohort.horovod.torch._collectives import run
from cohort.horovod.torch.compression import Compression

OVERLAPS = False  # all gradients are computed before the reduction is called


def reduce_gradients(gradients: Sequence[Any], names: Sequence[str], *, op: int, prescale: float, postscale: float,
                     process_set: ProcessSet, compression: Any = Compression.none,
                     sparse_as_dense: bool = False) -> List[Any]:  # fmt: skip
    """Returns the gradients reduced over all ranks, in place unless they are sent in a different format."""
    compressed = [compression.compress(gradient.detach()) for gradient in gradients]
    full = [f"allreduce.{name}" for name in names]
    call = Call("allreduce", full, process_set, op, prescale, postscale,
                wire_format=getattr(compression, "wire_format", None))  # fmt: skip
    reduced, _ = run(call, [sent for sent, _ in compressed], True)
    return [compression.decompress(one, context) for one, (_, context) in zip(reduced, compressed)]


def total(count: Any, name: str, process_set: ProcessSet) -> float:
    """Returns the sum of a number over ranks."""
    return float(_reduced(torch.tensor([float(count)], dtype=torch.float64), name, process_set, Sum))


def all_true(flag: Any, name: str, process_set: ProcessSet) -> Any:
    """Returns whether a flag is set on all ranks."""
    return _reduced(torch.as_tensor(flag).reshape(1).to(torch.uint8), name, process_set, Min).reshape(()).bool()


def _reduced(tensor: torch.Tensor, name: str, process_set: ProcessSet, op: int) -> torch.Tensor:
    return run(Call("allreduce", [f"allreduce.{name}"], process_set, op), [tensor], in_place=True)[0][0]


def factor_of(count: Any, ranks: int, samples: Any) -> Any:
    """Returns this rank's fraction of all samples, times the number of ranks."""
    return float(count) * ranks / samples if samples else 0.0


def times(value: Any, factor: Any) -> Any:
    """Returns a loss or a gradient, multiplied by that factor."""
    return value if isinstance(factor, float) and factor == 1 else value * factor


def samples_in(leaf: Any) -> Any:
    """Returns the number of samples of a batch."""
    return int(leaf.shape[0])


def zeros(variable: Any, type_of_indices: Any) -> Any:
    """Returns the contribution of a rank without a gradient."""
    tensor = variable.value
    return torch.zeros_like(tensor, requires_grad=False)


def type_of_indices(gradient: Any) -> None:
    """Returns None: no gradients are sparse."""
