"""ChainerMN's extensions of a trainer, as functions to call in a loop: evaluation, statistics of batch normalizations,
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cohort.chainermn._checkpointer import MultiNodeCheckpointer, create_multi_node_checkpointer
from cohort.chainermn.communicators import CommunicatorBase
from cohort.metrics import average

__all__ = [
    "AllreducePersistent",
    "MultiNodeCheckpointer",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
]


def create_multi_node_evaluator(actual_evaluator: Any, communicator: CommunicatorBase) -> Any:
    """Returns the evaluator; from now on its calls, which are collective, return means over all ranks, on all ranks.

    actual_evaluator  an object with a method `evaluate`, which is replaced, or a function. Either returns a dict of
                      numbers, averaged with each rank counted once as in ChainerMN, or of cohort.metrics.Mean (from
                      Averages.local()), which are weighted by their samples and exact for uneven parts

    Its calls raise Mismatch on every rank if the ranks' dicts have different names.
    """

    def over_ranks(evaluate: Callable[..., Mapping[str, Any]]) -> Callable[..., dict[str, Any]]:
        def of_all(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return average(evaluate(*args, **kwargs), comm=communicator.communicator)

        return of_all

    if hasattr(actual_evaluator, "evaluate"):
        actual_evaluator.evaluate = over_ranks(actual_evaluator.evaluate)
        return actual_evaluator
    if not callable(actual_evaluator):
        raise TypeError(
            f"create_multi_node_evaluator: what has a method evaluate, or a function, is needed, not {actual_evaluator!r}"
        )
    return over_ranks(actual_evaluator)


class AllreducePersistent:
    """Replaces a model's buffers of floating type (the running statistics of batch normalizations) by their means over
    all ranks.

    average = AllreducePersistent(model, comm)
    ...  average()      # before an evaluation, for example; collective
    """

    def __init__(self, model: torch.nn.Module, comm: CommunicatorBase) -> None:
        self.model, self.comm = model, comm

    def __call__(self, trainer: Any = None) -> None:
        """trainer: has no effect."""
        buffers = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        means = [buffer.detach().contiguous() for buffer in buffers]
        if means:
            self.comm.communicator.all_reduce(means, op="average")
        for buffer, mean in zip(buffers, means):
            if mean.data_ptr() != buffer.data_ptr():
                buffer.detach().copy_(mean)
