"""Horovod's module of this name: its names are those of `cohort.tensorflow.sync_batch_norm`."""

from __future__ import annotations

from cohort.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
