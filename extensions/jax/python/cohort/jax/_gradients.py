"""Gradients reduced over all ranks: the basis of `value_and_grad` and optimizers."""

from __future__ import annotations

import functools
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import jax
from cohort.horovod.process_sets import ProcessSet, global_process_set
from cohort.horovod.operations import Average, Call
from cohort.jax._arrays import checked_list
from cohort.jax._collectives import _reduced
from cohort.jax.compression import Compression, compressed

__all__ = ["grad", "reduce_gradients", "reduce_tree", "value_and_grad"]


def reduce_gradients(gradients: Sequence[Any], names: Sequence[str], *, op: int = Average, prescale: float = 1.0,
                     postscale: float = 1.0, process_set: ProcessSet = global_process_set,
                     compression: Any = Compression.none) -> List[jax.Array]:  # fmt: skip
    """Reduces arrays under the given names in one operation, eagerly and under `jit`.

    gradients    arrays, the same shapes and types on all ranks
    names        one for each array, all different; ranks match arrays by name
    op           hvd.Average (default) or any other reduction of `allreduce`
    compression  hvd.Compression.fp16 or bf16: floating-point numbers are sent, and added, in this type; the same on all
                 ranks

    Returns the results, in that order. Raises ValueError for arguments that have no meaning, and the errors of `allreduce`.
    """
    arrays = checked_list(list(gradients), "reduce_gradients")
    if len(arrays) != len(names):
        raise ValueError(f"reduce_gradients: {len(arrays)} gradients and {len(names)} names -- give each a name")
    full = tuple(f"gradient.{name}" for name in names)
    sent = [compressed(array, compression) for array in arrays]
    results = _reduced(Call("allreduce", full, process_set, op, prescale, postscale), sent)
    return [result.astype(array.dtype) for result, array in zip(results, arrays)]


def named_leaves(tree: Any) -> Tuple[List[str], List[Any], Any]:
    """Returns the leaves of a tree of arrays with their paths (such as layers.0.w), and the tree's structure."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [path_of(path) for path, _ in pairs], [leaf for _, leaf in pairs], structure


def path_of(keys: Sequence[Any]) -> str:
    """Returns a path within a tree, in a form that does not depend on JAX's version."""
    parts = []
    for key in keys:
        for attribute in ("name", "key", "idx"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
        else:
            parts.append(str(key))
    return ".".join(parts)


def reduce_tree(gradients: Any, name: str = "", *, op: int = Average, prescale_factor: float = 1.0,
                postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
                compression: Any = Compression.none) -> Any:  # fmt: skip
    """Reduces all leaves of a tree of gradients together, each named by `name` and its path, and returns such a tree.

    For programs that compute the gradients themselves; for example, before an optimizer of optax:

        gradients = hvd.reduce_tree(gradients)
        updates, state = optimizer.update(gradients, state, parameters)
    """
    paths, leaves, structure = named_leaves(gradients)
    names = [f"{name}/{path}" for path in paths]
    reduced = reduce_gradients(leaves, names, op=op, prescale=prescale_factor, postscale=postscale_factor,
                               process_set=process_set, compression=compression)  # fmt: skip
    return jax.tree_util.tree_unflatten(structure, reduced)


def value_and_grad(fun: Callable[..., Any], argnums: Union[int, Sequence[int]] = 0, has_aux: bool = False, *,
                   name: Optional[str] = None, op: int = Average, prescale_factor: float = 1.0,
                   postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
                   compression: Any = Compression.none, **kwargs: Any) -> Callable[..., Any]:  # fmt: skip
    """Like `jax.value_and_grad`, with gradients reduced over the set's ranks. The value is this rank's own.

    name    prefix of the gradients' names, so that two such functions can be under way at the same time; default: the
            name of `fun`. The same on all ranks
    compression  as for `reduce_gradients`
    kwargs  further arguments of `jax.value_and_grad`
    """
    local = jax.value_and_grad(fun, argnums, has_aux, **kwargs)
    prefix = name if name is not None else getattr(fun, "__name__", type(fun).__name__)

    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        value, gradients = local(*args, **kwargs)
        return value, reduce_tree(gradients, prefix, op=op, prescale_factor=prescale_factor,
                                  postscale_factor=postscale_factor, process_set=process_set,
                                  compression=compression)  # fmt: skip

    return wrapper


def grad(fun: Callable[..., Any], argnums: Union[int, Sequence[int]] = 0, has_aux: bool = False,
         **kwargs: Any) -> Callable[..., Any]:  # fmt: skip
    """Like `jax.grad`, with gradients reduced over the set's ranks. For the rest see `value_and_grad`."""
    both = value_and_grad(fun, argnums, has_aux, **kwargs)

    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return wrapper
