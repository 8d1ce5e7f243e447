"""What ChainerMN hangs on a trainer, to be called from a loop: evaluation, statistics of batch normalizations,
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cohort.chainermn._checkpointer import MultiNodeCheckpointer, create_multi_node_checkpointer
from cohort.chainermn.communicators import CommunicatorBase
from cohort.errors import Mismatch
from cohort.metrics import Mean

__all__ = [
    "AllreducePersistent",
    "MultiNodeCheckpointer",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
]


def create_multi_node_evaluator(actual_evaluator: Any, communicator: CommunicatorBase) -> Any:
    """The evaluator, whose results are from now on the means over all ranks, on all ranks. Collective: its calls.

    actual_evaluator  an object with a method `evaluate`, which is replaced, or a function. Either returns a dict: of
                      numbers, whose mean is taken rank by rank as in ChainerMN, or of cohort.metrics.Mean (what
                      Averages.local() gives), which are weighted by their samples and are exact for uneven parts

    Its calls raise Mismatch on every rank if the ranks' dicts have different names.
    """

    def over_ranks(evaluate: Callable[..., Mapping[str, Any]]) -> Callable[..., dict[str, Any]]:
        def of_all(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return _mean_of(evaluate(*args, **kwargs), communicator)

        return of_all

    if hasattr(actual_evaluator, "evaluate"):
        actual_evaluator.evaluate = over_ranks(actual_evaluator.evaluate)
        return actual_evaluator
    if not callable(actual_evaluator):
        raise TypeError(
            f"create_multi_node_evaluator: what has a method evaluate, or a function, is needed, not {actual_evaluator!r}"
        )
    return over_ranks(actual_evaluator)


def _mean_of(local: Mapping[str, Any], communicator: CommunicatorBase) -> dict[str, Any]:
    mine = {name: tuple(value) if isinstance(value, Mean) else float(value) for name, value in local.items()}
    everybody = communicator.allgather_obj(mine)
    for rank, theirs in enumerate(everybody):
        if {name: type(value) for name, value in theirs.items()} != {
            name: type(value) for name, value in everybody[0].items()
        }:
            raise Mismatch(
                f"multi-node evaluator: the ranks' results differ -- rank 0 has {sorted(everybody[0])}, rank {rank} {sorted(theirs)} "
                "-- report the same names on all ranks, and of the same kind"
            )
    results: dict[str, Any] = {}
    for name, value in mine.items():
        values = [theirs[name] for theirs in everybody]
        if isinstance(value, tuple):
            count = sum(samples for _, samples in values)
            total = sum(mean * samples for mean, samples in values if samples)
            results[name] = Mean(total / count if count else 0.0, count)
        else:
            results[name] = sum(values) / len(values)
    return results


class AllreducePersistent:
    """Makes a model's buffers of floating type (the running statistics of batch normalizations) their means over all
    ranks.

    average = AllreducePersistent(model, comm)
    ...  average()      # before an evaluation, say; collective
    """

    def __init__(self, model: torch.nn.Module, comm: CommunicatorBase) -> None:
        self.model, self.comm = model, comm

    def __call__(self, trainer: Any = None) -> None:
        """trainer: of no effect."""
        buffers = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        means = [buffer.detach().contiguous() for buffer in buffers]
        if means:
            self.comm.communicator.all_reduce(means, op="average")
        for buffer, mean in zip(buffers, means):
            if mean.data_ptr() != buffer.data_ptr():
                buffer.detach().copy_(mean)
