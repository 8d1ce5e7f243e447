"""Types that gradients travel as: less is sent, with less precision."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


class Compression:
    """For `compression=`: a type that arrays of floating-point numbers are sent as, or None. Others stay as they are."""

    none = None
    fp16 = jnp.float16
    bf16 = jnp.bfloat16


def compressed(array: Any, compression: Any) -> Any:
    """The array as it is sent."""
    if compression is None or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(compression)
