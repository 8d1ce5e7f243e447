"""torch modules that communicate."""

from __future__ import annotations

from cohort.chainermn._batch_normalization import MultiNodeBatchNormalization, create_mnbn_model
from cohort.chainermn._chain_list import MultiNodeChainList

__all__ = ["MultiNodeBatchNormalization", "MultiNodeChainList", "create_mnbn_model"]
