"""Asks torch's autograd whether the backward under way is a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

# Tells whether the backward under way will run a node.
_will_run: Optional[Callable[[Any], bool]] = getattr(torch._C, "_will_engine_execute_node", None)
# Returns the node that the backward is running: torch 2.1 and later.
_running: Optional[Callable[[], Any]] = getattr(torch._C, "_current_autograd_node", None)


def accumulates(outputs: Sequence[Any], nodes: Sequence[Any], renew: Callable[[], bool] = lambda: False) -> bool:
    """Returns False if the backward is an autograd.grad() for other tensors, which makes none of our gradients and is no step.

    outputs: references to the tensors of a forward, one of which the backward under way has reached
    nodes: the nodes that accumulate our parameters' gradients
    renew: checks whether there are new nodes; if so, puts them into `nodes` and returns True
    """
    if _will_run is None:
        return True
    try:
        # If none of the nodes is run, they may have been replaced.
        if any(map(_will_run, nodes)) or (renew() and any(map(_will_run, nodes))):
            return True
    except RuntimeError:
        return False  # an autograd.grad() for a parameter
    # Either an autograd.grad(), or a graph without our parameters. Rare, so searching the graph is fine.
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
