"""The reductions, as the numbers that Horovod's programs pass around."""

from __future__ import annotations

import warnings
from typing import Optional

from cohort._core import ReduceOp

Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

ENGINE_OPS = {
    Average: ReduceOp.Average,
    Sum: ReduceOp.Sum,
    Min: ReduceOp.Min,
    Max: ReduceOp.Max,
    Product: ReduceOp.Product,
}


def resolve(op: Optional[int], average: Optional[bool]) -> int:
    """The reduction that is asked for by `op` or, as programs did long ago, by `average`. Neither: Average."""
    if op is None and average is None:
        return Average
    if average is not None:
        if op is not None:
            raise ValueError("op and average were both given -- average is deprecated: give op alone")
        warnings.warn("average is deprecated -- give op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    if op not in ENGINE_OPS and op != Adasum:
        raise ValueError(f"op={op!r} is none of hvd.Average, Sum, Adasum, Min, Max, Product")
    return op
