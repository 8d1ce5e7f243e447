"""Compression of tensors. A custom compressor derives from `Compressor` and is given as `compression=`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from cohort.horovod.compression import Compressor, FloatCompressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _OfTensorFlow(FloatCompressor):
    cast = tf.cast

    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return bool(tensor.dtype.is_floating)


class FP16Compressor(_OfTensorFlow):
    """Sends floating-point tensors as float16, which has half the size of float32 and values up to 65504."""

    dtype = tf.float16


class BF16Compressor(_OfTensorFlow):
    """Sends floating-point tensors as bfloat16, which has half the size of float32, its range and 8 bits of precision."""

    dtype = tf.bfloat16


class Compression:
    """The available compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
