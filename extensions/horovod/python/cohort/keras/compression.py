"""Compression of gradients."""

from __future__ import annotations


class Compression:
    """The available compressors, which select the backend's own. A compressor of `cohort.horovod.torch`, `cohort.tensorflow` or
    `cohort.jax`, or a custom one, can be given instead."""

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"
    int8 = "int8"  # int8 and int4 need Keras with torch
    int4 = "int4"
