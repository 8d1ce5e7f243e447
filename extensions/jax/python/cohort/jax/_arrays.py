"""Arrays of JAX in the form the engine needs: on one device, in host memory, viewed without a copy."""

from __future__ import annotations

from typing import Any, List, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from cohort.horovod.arrays import LEAST_TO_HAND_OVER


def checked(value: Any, what: str) -> jax.Array:
    """Returns the array, converted from a number or NumPy array if need be. Raises ValueError for others."""
    array = value if isinstance(value, jax.Array) else jnp.asarray(value)
    if not isinstance(array, jax.core.Tracer):
        _check_place(array, what)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise ValueError(f"{what}: an array of {array.dtype} cannot travel -- pass jax.random.key_data(key)")
    return array


def checked_list(values: Any, what: str) -> List[jax.Array]:
    """Returns the arrays of a group."""
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{what}: a list of arrays is needed, not {type(values).__name__}")
    return [checked(value, what) for value in values]


def _check_place(array: jax.Array, what: str) -> None:
    devices = array.devices()
    if len(devices) > 1:
        raise ValueError(
            f"{what}: the array is spread over {len(devices)} devices of this process -- an operation takes one array of "
            "each process -- start a process for each device, or reduce over the devices first (jax.lax.psum)"
        )
    device = next(iter(devices))
    if device.platform != "cpu":
        raise ValueError(
            f"{what}: the array is on {device} -- these operations work in the host's memory -- pass "
            'jax.device_put(x, jax.devices("cpu")[0]), and put the result back'
        )


def is_traced(arrays: Sequence[Any]) -> bool:
    """Returns True if some arrays are placeholders for values not computed yet, as within jit, grad, vmap, scan."""
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


def view(array: Any) -> np.ndarray:
    """Returns a read-only view of the elements. Waits until they have been computed."""
    host = np.asarray(array)
    return host if host.flags.c_contiguous else np.ascontiguousarray(host)


def handed_over(array: np.ndarray) -> jax.Array:
    """Returns an array of JAX over the memory, to which nobody writes any more."""
    return jax.device_put(array) if array.nbytes >= LEAST_TO_HAND_OVER else jnp.asarray(array)
