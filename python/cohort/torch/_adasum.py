"""Adasum: a reduction that adds gradients where they are orthogonal and averages them where they are parallel.

Of two vectors: (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b. Ranks are combined as neighbours, then neighbours of those, and
so on; who has no neighbour goes up alone, so any number of ranks will do. Every rank gathers all vectors and combines
them itself, on the tensors' device, so all have the same bits where their devices are alike. That takes memory for as many
tensors as there are ranks.
"""

from __future__ import annotations

from typing import List, Optional

import torch
from cohort._horovod.process_sets import ProcessSet, engine_of, require_world
from cohort._horovod.submit import started
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
            combined = combine(list(result_of(work).unbind(0)), prescale) * postscale
            result = combined.to(used[i].dtype).reshape(used[i].shape)
            results.append(result if outputs is None else copy_back(outputs[i], result))
        return results[0] if single else results

    return _handles.add(works, finish)


def combine(vectors: List[Tensor], prescale: float = 1.0) -> Tensor:
    """The Adasum of vectors of equal length, in float32 or, of float64, in that."""
    wide = torch.promote_types(vectors[0].dtype, torch.float32)
    level = [vector.to(wide) * prescale for vector in vectors]
    while len(level) > 1:
        pairs = [_pair(a, b) for a, b in zip(level[::2], level[1::2])]
        level = pairs + level[2 * len(pairs) :]
    return level[0]


def _pair(a: Tensor, b: Tensor) -> Tensor:
    # In double: the products of long vectors would lose what decides here.
    dot, aa, bb = (float(torch.dot(x.double(), y.double())) for x, y in ((a, b), (a, a), (b, b)))
    return a * (1.0 - dot / (2.0 * aa) if aa > 0 else 1.0) + b * (1.0 - dot / (2.0 * bb) if bb > 0 else 1.0)
