"""What torch's autograd says of the backward under way: whether it is a step, and which forwards it is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from cohort._core import Forward

# Which nodes the backward under way will run: who takes part in it is then known, and not guessed.
_will_run: Optional[Callable[[Any], bool]] = getattr(torch._C, "_will_engine_execute_node", None)
# The one that it runs: torch 2.1 and later.
_running: Optional[Callable[[], Any]] = getattr(torch._C, "_current_autograd_node", None)


def accumulates(record: Forward, nodes: Sequence[Any]) -> bool:
    """False if this is an autograd.grad() for other tensors: it asks for nothing of ours, and is no step.

    nodes: what accumulates our parameters' gradients. To be asked inside a backward that has come to the record.
    """
    if _will_run is None:
        return True
    for node in nodes:
        try:
            if _will_run(node):
                return True
        except RuntimeError:
            return False  # an autograd.grad() for a parameter
    # Either that, or a backward whose graph has none of our parameters. Seldom, so the graph may be searched.
    ours = set(nodes)
    outputs = (entry() for entry in record.outputs)
    found = [output.grad_fn for output in outputs if output is not None and output.grad_fn is not None]
    if not found and _running is not None:
        found = [_running()]
    seen = set(found)
    while found:
        node = found.pop()
        if node in ours:
            return False
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                found.append(below)
    return True


def takes_part(record: Forward) -> Optional[bool]:
    """Whether the backward under way will come to the record's outputs; None where only time will tell, since nobody holds
    them any more. What gets a gradient through them gets it after that."""
    outputs = [entry() for entry in getattr(record, "outputs", [])]
    if _will_run is None or not outputs:
        return None
    if any(output is not None and output.grad_fn is not None and _will_run(output.grad_fn) for output in outputs):
        return True
    return None if any(output is None for output in outputs) else False
