"""A step's communication if Keras uses JAX: operations of a compiled program, or eager ones."""

from __future__ import annotations

from typing import Any, List, Sequence

import jax
import jax.numpy as jnp
from cohort.horovod.process_sets import ProcessSet
from cohort.horovod.operations import Min, Sum

from cohort.jax import _gradients
from cohort.jax.compression import Compression


def reduce_gradients(gradients: Sequence[Any], names: Sequence[str], *, op: int, prescale: float, postscale: float,
                     process_set: ProcessSet, compression: Any = Compression.none,
                     sparse_as_dense: bool = False) -> List[Any]:  # fmt: skip
    """Returns the gradients reduced over all ranks. JAX has no sparse gradients."""
    return _gradients.reduce_gradients(gradients, names, op=op, prescale=prescale, postscale=postscale,
                                       process_set=process_set, compression=compression)  # fmt: skip


def _reduced(value: Any, name: str, op: int, process_set: ProcessSet) -> Any:
    value = jax.lax.stop_gradient(value)
    return jax.lax.stop_gradient(_gradients.reduce_gradients([value], [name], op=op, process_set=process_set)[0])


OVERLAPS = False  # XLA runs external calls one at a time


def total(count: Any, name: str, process_set: ProcessSet) -> Any:
    """Returns the sum of a number over ranks."""
    return _reduced(jnp.asarray(count, jnp.float32), name, Sum, process_set)


def all_true(flag: Any, name: str, process_set: ProcessSet) -> Any:
    """Returns whether a flag is set on all ranks."""
    return _reduced(jnp.asarray(flag, jnp.int32), name, Min, process_set).astype(bool)


def factor_of(count: Any, ranks: int, samples: Any) -> Any:
    """Returns this rank's fraction of all samples, times the number of ranks."""
    return jnp.where(samples > 0, count * ranks / jnp.maximum(samples, 1), 0)


def times(value: Any, factor: Any) -> Any:
    """Returns a loss or a gradient, multiplied by that factor."""
    return value * factor.astype(value.dtype)


def samples_in(leaf: Any) -> Any:
    """Returns the number of samples of a batch."""
    return leaf.shape[0]


def zeros(variable: Any, type_of_indices: Any) -> Any:
    """Returns the contribution of a rank without a gradient."""
    return jnp.zeros(variable.shape, variable.dtype)


def type_of_indices(gradient: Any) -> None:
    """Returns None: no gradients are sparse."""
