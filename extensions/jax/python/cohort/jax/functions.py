"""Functions that make ranks equal: trees of arrays, such as parameters and the states of optimizers."""

from __future__ import annotations

from typing import Any, List

import jax
from cohort.horovod.operations import Call
from cohort.horovod.process_sets import ProcessSet, global_process_set
from cohort.jax._arrays import checked, is_traced
from cohort.jax._gradients import named_leaves
from cohort.jax._operations import at_once


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Returns, on every rank, the tree of arrays of rank `root_rank` (of the world): parameters, or the state of an
    optimizer of optax. Ranks match leaves by path; shapes and types have to be the same.

    Numbers in the tree are returned as arrays; leaves without values to send (None, functions, strings) are unchanged.
    Raises ValueError under `jit`: call it once, before.
    """
    names, leaves, structure = named_leaves(params)
    if is_traced(leaves):
        raise ValueError("broadcast_parameters: it cannot be part of a compiled program -- call it once, before those")
    sent = [i for i, leaf in enumerate(leaves) if _travels(leaf)]
    arrays = [checked(leaves[i], "broadcast_parameters") for i in sent]
    full = tuple(f"parameter.{names[i]}" for i in sent)
    results: List[Any] = list(leaves)
    call = Call("broadcast", full, process_set, root=root_rank)
    for i, result in zip(sent, at_once(call, arrays)[0]):
        results[i] = result
    return jax.tree_util.tree_unflatten(structure, results)


def _travels(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, complex)) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
