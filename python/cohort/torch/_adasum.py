"""Adasum, on the tensors' device: it takes memory for as many tensors as there are ranks. See `cohort.hvd.operations`."""

from __future__ import annotations

from typing import List, Optional

import torch
from cohort.hvd.operations import adasum, started
from cohort.hvd.process_sets import ProcessSet, engine_of, require_world
from cohort.torch import _handles
from cohort.torch._tensors import copy_back, dense, result_of
from torch import Tensor


def start(tensors: List[Tensor], outputs: Optional[List[Tensor]], names: List[str], prescale: float, postscale: float,
          process_set: ProcessSet, single: bool = False) -> int:  # fmt: skip
    """A handle for the Adasum of each tensor, in `outputs` (None: new tensors). Raises ValueError unless they are
    floating."""
    require_world("op=hvd.Adasum")
    used = [dense(tensor, "Adasum") for tensor in tensors]
    for tensor in used:
        if not tensor.is_floating_point():
            raise ValueError(f"op=hvd.Adasum needs floating-point tensors, not {tensor.dtype}")
    rows = [tensor.detach().reshape(1, -1) for tensor in used]
    engine = engine_of(process_set)
    works = started("ADASUM", names, engine.all_gather_group, names, rows) if rows else []

    def finish() -> object:
        results = []
        for i, work in enumerate(works):
            result = (_combined(result_of(work), prescale) * postscale).to(used[i].dtype).reshape(used[i].shape)
            results.append(result if outputs is None else copy_back(outputs[i], result))
        return results[0] if single else results

    return _handles.add(works, finish)


def _combined(rows: Tensor, prescale: float) -> Tensor:
    """In float32 or, of float64, in that."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    vectors = [row.to(wide) * prescale for row in rows.unbind(0)]
    result: Tensor = adasum(vectors, lambda a, b: float(torch.dot(a.double(), b.double())))
    return result
