"""Arrays of JAX as the engine wants them: on one device, in the host's memory, viewed without a copy."""

from __future__ import annotations

from typing import Any, List, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from cohort.hvd.arrays import LEAST_TO_HAND_OVER


def checked(value: Any, what: str) -> jax.Array:
    """The array, or that of a number or of NumPy's array. Raises ValueError for what the operations cannot take."""
    array = value if isinstance(value, jax.Array) else jnp.asarray(value)
    if not isinstance(array, jax.core.Tracer):
        _check_place(array, what)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise ValueError(f"{what}: an array of {array.dtype} cannot travel -- pass jax.random.key_data(key)")
    return array


def checked_list(values: Any, what: str) -> List[jax.Array]:
    """The arrays of a group."""
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
    """True if some stand for values that are not there yet: within jit, grad, vmap, scan."""
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


def view(array: Any) -> np.ndarray:
    """The elements where they lie; read only. Waits until they have been computed."""
    host = np.asarray(array)
    return host if host.flags.c_contiguous else np.ascontiguousarray(host)


def handed_over(array: np.ndarray) -> jax.Array:
    """An array of JAX over the memory, which nobody writes to any more."""
    return jax.device_put(array) if array.nbytes >= LEAST_TO_HAND_OVER else jnp.asarray(array)
