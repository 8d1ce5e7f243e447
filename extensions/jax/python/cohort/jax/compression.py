"""Types in which gradients travel, with less data and less precision."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


class Compression:
    """For `compression=`: a type in which floating-point arrays are sent, or None. Other arrays are not changed."""

    none = None
    fp16 = jnp.float16
    bf16 = jnp.bfloat16


def compressed(array: Any, compression: Any) -> Any:
    """Returns the array to send."""
    if compression is None or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(compression)
