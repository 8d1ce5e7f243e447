"""What tensors travel as. A compressor of one's own derives from `Compressor` and is given as `compression=`."""

from __future__ import annotations

from typing import Any, Tuple

import tensorflow as tf


class Compressor:
    """Makes a tensor smaller for the journey. Subclasses have these two static methods."""

    @staticmethod
    def compress(tensor: Any) -> Tuple[Any, Any]:
        """The tensor to send, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """What arrived, as it was before `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> Tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class _FloatCompressor(Compressor):
    dtype: Any

    @classmethod
    def compress(cls, tensor: Any) -> Tuple[Any, Any]:
        if not tensor.dtype.is_floating or tensor.dtype == cls.dtype:
            return tensor, None
        return tf.cast(tensor, cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_FloatCompressor):
    """Sends floating-point tensors as float16: half of float32, up to 65504."""

    dtype = tf.float16


class BF16Compressor(_FloatCompressor):
    """Sends floating-point tensors as bfloat16: half of float32 with its range, 8 bits of precision."""

    dtype = tf.bfloat16


class Compression:
    """The compressors there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
