"""Adasum: see cohort.torch, whose rules these are. Every rank combines all ranks' vectors itself: all have the same bits."""

from __future__ import annotations

from typing import Any, List

import numpy as np


def combine(vectors: List[Any], prescale: float = 1.0) -> Any:
    """The Adasum of NumPy vectors of equal length, in float32 or, of float64, in that."""
    wide = np.float64 if vectors[0].dtype == np.float64 else np.float32
    level = [vector.astype(wide) * wide(prescale) for vector in vectors]
    while len(level) > 1:
        pairs = [_pair(a, b) for a, b in zip(level[::2], level[1::2])]
        level = pairs + level[2 * len(pairs) :]
    return level[0]


def _pair(a: Any, b: Any) -> Any:
    # In double: the products of long vectors would lose what decides here.
    x, y = a.astype(np.float64), b.astype(np.float64)
    dot, aa, bb = float(x @ y), float(x @ x), float(y @ y)
    of_a = 1.0 - dot / (2.0 * aa) if aa > 0 else 1.0
    of_b = 1.0 - dot / (2.0 * bb) if bb > 0 else 1.0
    return a * a.dtype.type(of_a) + b * b.dtype.type(of_b)
