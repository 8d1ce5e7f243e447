"""What a step asks of the ranks, where Keras works with JAX: operations of a compiled program, or done at once."""

from __future__ import annotations

from typing import Any, List, Sequence

import jax
import jax.numpy as jnp
from cohort._horovod.process_sets import ProcessSet
from cohort._horovod.reduce_ops import Min, Sum

try:
    from cohort.jax import Compression, allreduce
    from cohort.jax._gradients import reduce_gradients
except ImportError:
    from cohort.keras._shim import Compression, allreduce_jax as allreduce, reduce_jax as reduce_gradients

__all__ = ["Compression", "reduce_gradients"]


def total(count: Any, name: str, process_set: ProcessSet) -> Any:
    """The sum of a number over ranks."""
    return jax.lax.stop_gradient(allreduce(jnp.asarray(count, jnp.float32), op=Sum, name=name, process_set=process_set))


def all_true(flag: Any, name: str, process_set: ProcessSet) -> Any:
    """Whether a flag is set on all ranks."""
    return allreduce(jnp.asarray(flag, jnp.int32), op=Min, name=name, process_set=process_set).astype(bool)


def factor_of(count: Any, ranks: int, samples: Any) -> Any:
    """This rank's part of all samples, times the ranks."""
    return jnp.where(samples > 0, count * ranks / jnp.maximum(samples, 1), 0)


def times(value: Any, factor: Any) -> Any:
    return value * factor.astype(value.dtype)


def samples_in(leaf: Any) -> Any:
    """The number of samples of a batch."""
    return leaf.shape[0]


def zeros(variable: Any, is_sparse: bool) -> Any:
    """What a rank without a gradient brings."""
    return jnp.zeros(variable.shape, variable.dtype)


def is_sparse(gradient: Any) -> bool:
    return False
