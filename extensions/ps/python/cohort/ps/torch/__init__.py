"""torch with a parameter server (cohort.ps): embeddings and dense parameters whose values are on servers, and a step
and a checkpoint for models with both kinds of parts.

    client = cohort.ps.connect()
    users = client.table("users", 64, optimizer=cohort.ps.RowAdagrad(lr=0.02), initializer=cohort.ps.normal(0, 0.1))
    embedding = cohort.ps.torch.Embedding(users)               # any 64-bit id; the table may have any size
    model = DistributedDataParallel(Dense())                   # the rest, on every rank
    optimizer = cohort.ps.torch.HybridOptimizer(torch.optim.Adam(model.parameters()), [embedding])
    loss = model(embedding(ids)).sum()
    loss.backward()
    optimizer.step()                                           # steps both parts, or neither

Embedding, EmbeddingBag   torch's modules over tables
HybridOptimizer           one step for the dense part (DDP) and the tables
CheckpointFolder          one checkpoint of both
DistributedOptimizer      all parameters of a module on the servers: asynchronous training
"""

from __future__ import annotations

from cohort.ps.torch._checkpoints import CheckpointFolder
from cohort.ps.torch._dense import DistributedOptimizer
from cohort.ps.torch._embedding import Embedding, EmbeddingBag
from cohort.ps.torch._hybrid import HybridOptimizer

__all__ = ["CheckpointFolder", "DistributedOptimizer", "Embedding", "EmbeddingBag", "HybridOptimizer"]
