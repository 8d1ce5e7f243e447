"""What tensors travel as. A compressor of one's own derives from `Compressor` and is given as `compression=`."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor


class Compressor:
    """Makes a tensor smaller for the journey. Subclasses have these two static methods."""

    @staticmethod
    def compress(tensor: Tensor) -> Tuple[Tensor, Any]:
        """The tensor to send, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """What arrived, as it was before `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> Tuple[Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _FloatCompressor(Compressor):
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> Tuple[Tensor, Optional[torch.dtype]]:
        if not tensor.is_floating_point() or tensor.dtype == cls.dtype:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Optional[torch.dtype]) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_FloatCompressor):
    """Sends floating-point tensors as float16: half of float32, up to 65504."""

    dtype = torch.float16


class BF16Compressor(_FloatCompressor):
    """Sends floating-point tensors as bfloat16: half of float32 with its range, 8 bits of precision."""

    dtype = torch.bfloat16


class Compression:
    """The compressors there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
