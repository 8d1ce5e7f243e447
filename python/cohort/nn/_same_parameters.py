"""Checks that all ranks hold the same parameters, to the bit. A memory error, a nondeterministic library or a step that
only one rank took lets replicas drift apart, and nothing else detects that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Optional

import torch

from cohort import Communicator, _core
from cohort.nn._groups import default_world
from cohort.nn._tensors import flat_on_host


def require_same_parameters(
    tensors: Iterable[tuple[str, torch.Tensor]], comm: Optional[Communicator] = None, *, step: Optional[int] = None
) -> None:
    """Compares dense tensors of any type over all ranks by 128-bit digests. Collective; waits.

    tensors  pairs of a name and a tensor, as model.named_parameters(): the same shapes and types in the same order on all
             ranks. Each tensor is read once, and 64 bytes are sent
    comm     the ranks; default: the world. Ranks that have called join are left out
    step     for the message: synchronised steps so far

    Uses Poly1305 with a key drawn for each call: a difference of one bit is missed with a probability below 2**-66.
    Raises Mismatch on every rank, with the same text, if there is a difference. The text names the first tensor that differs,
    the ranks that differ from the majority, and for the lowest of them host, first element and both sides' values. If
    there is no majority, both sides are named. `peer` is that lowest rank. The communicator can still be used. One
    thread at a time per communicator.
    """
    comm = comm if comm is not None else default_world()
    described = []
    for name, tensor in tensors:
        flat = flat_on_host(tensor, name, "require_same_parameters")

        def text(index: int, flat: torch.Tensor = flat) -> str:
            return "" if flat.is_complex() else str(flat[index].item())

        described.append((name, list(tensor.shape), flat.element_size(), flat.view(torch.uint8), text))
    _core.require_same_parameters(comm, described, -1 if step is None else step)
