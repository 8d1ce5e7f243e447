"""Asks torch's autograd about the backward under way: whether it is a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

# Which nodes the backward under way will run.
_will_run: Optional[Callable[[Any], bool]] = getattr(torch._C, "_will_engine_execute_node", None)
# The one that it runs: torch 2.1 and later.
_running: Optional[Callable[[], Any]] = getattr(torch._C, "_current_autograd_node", None)


def accumulates(outputs: Sequence[Any], nodes: Sequence[Any], renew: Callable[[], bool] = lambda: False) -> bool:
    """False if this is an autograd.grad() for other tensors: it asks for nothing of ours, and is no step.

    outputs: references to the tensors of a forward, to one of which the backward under way has come
    nodes: what accumulates our parameters' gradients
    renew: looks whether there are other nodes by now, puts them into `nodes`, and says so
    """
    if _will_run is None:
        return True
    try:
        # If none of them is run, there may be new nodes.
        if any(map(_will_run, nodes)) or (renew() and any(map(_will_run, nodes))):
            return True
    except RuntimeError:
        return False  # an autograd.grad() for a parameter
    # Either that, or a backward whose graph has none of our parameters. Seldom, so the graph may be searched.
    ours = set(nodes)
    living = (entry() for entry in outputs)
    found = [output.grad_fn for output in living if output is not None and output.grad_fn is not None]
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
