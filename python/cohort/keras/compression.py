"""Compression of gradients."""

from __future__ import annotations


class Compression:
    """The compressors there are; the backend's own are meant. A compressor of `cohort.torch`, `cohort.tensorflow` or
    `cohort.jax`, or one of one's own, can be given in their place."""

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"
    int8 = "int8"  # this and what follows: where Keras works with torch
    int4 = "int4"
    fp8 = "fp8"
