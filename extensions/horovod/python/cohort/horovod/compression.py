"""Compression of tensors. A custom compressor derives from `Compressor` and is given as `compression=`."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple


class Compressor:
    """Makes a tensor smaller for sending. Subclasses have these two static methods."""

    # The wire format of float32 sums and averages between hosts, in addition to `compress`.
    wire_format: Optional[str] = None

    @staticmethod
    def compress(tensor: Any) -> Tuple[Any, Any]:
        """Returns the tensor to send, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor that arrived in the form that it had before `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> Tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class Int8Compressor(NoneCompressor):
    """Sums and averages of float32 travel between hosts as 8 bits and a scale for each 256 elements; results are float32,
    and on one host nothing is rounded. Other types and reductions travel as they are."""

    wire_format = "int8"


class Int4Compressor(NoneCompressor):
    """Like Int8Compressor, with 4 bits and a scale for each 128 elements."""

    wire_format = "int4"


def compressed(tensors: Sequence[Any], compression: Any) -> List[Tuple[Any, Any]]:
    """Compresses each tensor, in a framework's graph. Raises ValueError for wire formats, which graphs do not have."""
    if getattr(compression, "wire_format", None) is not None:
        raise ValueError(
            f"compression={getattr(compression, '__name__', compression)}: wire formats are for horovod.torch -- none, fp16 "
            "or bf16"
        )
    return [compression.compress(tensor) for tensor in tensors]


class FloatCompressor(Compressor):
    """Sends floating-point tensors as `dtype`; each framework converts them."""

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
