"""Converts torch's ReduceOp to the core's reductions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import cohort

_Kind = dist.ReduceOp.RedOpType

_NAMES = {
    _Kind.SUM: "sum",
    _Kind.AVG: "average",
    _Kind.PRODUCT: "product",
    _Kind.MIN: "min",
    _Kind.MAX: "max",
    _Kind.BAND: "bit_and",
    _Kind.BOR: "bit_or",
    _Kind.BXOR: "bit_xor",
}


class Reduction(NamedTuple):
    """The name of the core's operation, and the factor by which every value is multiplied beforehand."""

    op: str
    prescale: float = 1.0


_known: dict[tuple[Any, torch.dtype], Reduction] = {}


def reduction_of(op: Any, dtype: torch.dtype, operation: str) -> Reduction:
    """Raises InvalidArgument for a reduction that has no meaning for such elements."""
    kind = getattr(op, "op", op)
    known = _known.get((kind, dtype))
    if known is not None:
        return known
    if kind == _Kind.PREMUL_SUM:
        factor = getattr(op, "factor", None)
        if factor is None:
            raise cohort.InvalidArgument(
                f"{operation}: this torch ({torch.__version__}) does not tell the factor of PREMUL_SUM -- multiply the "
                "tensor, then use SUM"
            )
        return Reduction("sum", float(factor))
    name = _NAMES.get(kind)
    if name is None:
        raise cohort.InvalidArgument(f"{operation}: {op} is no reduction that torch.distributed defines")
    if not cohort.supports(dtype, name):
        raise cohort.InvalidArgument(
            f"{operation}: there is no {name} of {str(dtype).replace('torch.', '')} -- convert the tensor, or reduce "
            "with another ReduceOp"
        )
    return _known.setdefault((kind, dtype), Reduction(name))
