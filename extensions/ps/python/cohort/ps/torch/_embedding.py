"""Embeddings whose rows are on a parameter server, with torch's arguments and results.

The rows are not parameters of the module: the table's optimizer, on the server, steps them. Backward pushes their
gradients, which take effect with `client.clock()`; under a HybridOptimizer backward keeps them, and the optimizer's
step pushes them. Without gradients (torch.no_grad) nothing is pushed, and no row is created. A forward gives the same
bits as torch's own module over the same rows, since it calls torch's function.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional

from cohort.ps import Table
from cohort.ps._checks import integer, refuse, shown

Gradients = list[tuple[torch.Tensor, torch.Tensor]]  # keys [n] without duplicates, and rows [n, dim]


class Rows(torch.nn.Module):
    """The rows of ids. Each row is fetched once, and its gradient is pushed once."""

    def __init__(self, table: Table, padding_idx: Optional[int] = None) -> None:
        what = type(self).__name__
        if not isinstance(table, Table):
            refuse(what, "table", table, "pass a table, which has the rows and their length: client.table(\"users\", 64)")
        super().__init__()
        self.padding_idx = None if padding_idx is None else integer(what, "padding_idx", padding_idx, -(2**63))
        self.table = table
        self.embedding_dim = table.dim
        #: Gradients of backward passes since the last step, for an optimizer; None: backward pushes them.
        self.kept: Optional[Gradients] = None

    def extra_repr(self) -> str:
        return f"embedding_dim={self.embedding_dim}, on parameter servers"

    def fetch(self, ids: torch.Tensor, padding_idx: Optional[int]) -> tuple[torch.Tensor, torch.Tensor, Optional[int]]:
        """Returns the rows of the unique ids, the ids' indices among them, and the index of `padding_idx`."""
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64):
            given = f"a tensor of {ids.dtype}" if isinstance(ids, torch.Tensor) else shown(ids)
            raise TypeError(f"{type(self).__name__}: ids are {given} -- pass a tensor of int32 or int64")
        keys, places = torch.unique(ids.to(torch.int64), return_inverse=True)
        rows = torch.empty(keys.numel(), self.embedding_dim)
        self.table.pull(keys, rows)
        padding = None
        if padding_idx is not None:
            found = (keys == padding_idx).nonzero()
            padding = int(found[0]) if found.numel() else None
        if torch.is_grad_enabled():
            rows.requires_grad_()
            rows.register_hook(lambda gradient: self._push(keys, gradient, padding))
        return rows, places, padding

    def _push(self, keys: torch.Tensor, gradient: torch.Tensor, padding: Optional[int]) -> None:
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if padding is not None:  # that row is not trained
            kept = torch.arange(keys.numel()) != padding
            keys, gradient = keys[kept], gradient[kept]
        gradient = gradient.detach().to(torch.float32).contiguous()
        if self.kept is None:
            self.table.push(keys, gradient)
        else:
            self.kept.append((keys, gradient))


class Embedding(Rows):
    """Like torch.nn.Embedding, over any 64-bit ids, without `num_embeddings`. The row of `padding_idx` keeps its
    initial value and is never trained. Raises the errors of `Table.pull` and, in backward, of `Table.push`."""

    def __init__(self, table: Table, padding_idx: Optional[int] = None) -> None:
        super().__init__(table, padding_idx)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows, places, padding = self.fetch(input, self.padding_idx)
        return torch.nn.functional.embedding(places, rows, padding)


class EmbeddingBag(Rows):
    """Like torch.nn.EmbeddingBag, over any 64-bit ids: sums, means or maxima of the rows of each bag."""

    def __init__(self, table: Table, mode: str = "mean", include_last_offset: bool = False,
                 padding_idx: Optional[int] = None) -> None:  # fmt: skip
        super().__init__(table, padding_idx)
        if mode not in ("sum", "mean", "max"):
            refuse("EmbeddingBag", "mode", mode, 'pass "sum", "mean" or "max"')
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(self, input: torch.Tensor, offsets: Optional[torch.Tensor] = None,
                per_sample_weights: Optional[torch.Tensor] = None) -> torch.Tensor:  # fmt: skip
        rows, places, padding = self.fetch(input, self.padding_idx)
        options: dict[str, Any] = {} if padding is None else {"padding_idx": padding}
        return torch.nn.functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            **options,
        )
