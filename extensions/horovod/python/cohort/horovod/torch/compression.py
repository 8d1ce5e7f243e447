"""Compression of tensors. A custom compressor derives from `Compressor` and is given as `compression=`."""

from __future__ import annotations

import torch
from cohort.horovod.compression import Compressor, FloatCompressor, Int4Compressor, Int8Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "Int4Compressor", "Int8Compressor",
           "NoneCompressor"]  # fmt: skip


class _OfTorch(FloatCompressor):
    is_floating = torch.is_floating_point
    cast = torch.Tensor.to


class FP16Compressor(_OfTorch):
    """Sends floating-point tensors as float16, which has half the size of float32 and values up to 65504."""

    dtype = torch.float16


class BF16Compressor(_OfTorch):
    """Sends floating-point tensors as bfloat16, which has half the size of float32, its range and 8 bits of precision."""

    dtype = torch.bfloat16


class Compression:
    """The available compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    int4 = Int4Compressor
