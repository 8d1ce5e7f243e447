"""What tensors travel as. A compressor of one's own derives from `Compressor` and is given as `compression=`."""

from __future__ import annotations

from typing import Any, Tuple


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


class FloatCompressor(Compressor):
    """Sends floating-point tensors as `dtype`; a framework says how."""

    dtype: Any
    is_floating: Any
    cast: Any

    @classmethod
    def compress(cls, tensor: Any) -> Tuple[Any, Any]:
        if tensor.dtype == cls.dtype or not cls.is_floating(tensor):
            return tensor, None
        return cls.cast(tensor, cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else cls.cast(tensor, ctx)
