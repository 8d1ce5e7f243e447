"""Iterators whose batches are the same on all ranks, for models that are distributed over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cohort.chainermn.communicators import CommunicatorBase
from cohort.errors import InvalidArgument

__all__ = ["create_multi_node_iterator", "create_synchronized_iterator"]

# Attributes by which Chainer's iterators tell their position.
_POSITION = ("epoch", "epoch_detail", "previous_epoch_detail", "current_position", "is_new_epoch")


def create_multi_node_iterator(
    actual_iterator: Any, communicator: CommunicatorBase, rank_master: int = 0
) -> MultiNodeIterator:
    """Returns an iterator over rank_master's batches, for every rank. Creation and each step are collective.

    actual_iterator  a DataLoader or another iterable; used on rank_master only

    Batches are pickled: tensors, arrays and their containers keep their types. An error of the master's iterator is
    raised there, and InvalidArgument with its text on the others.
    """
    return MultiNodeIterator(actual_iterator, communicator, rank_master)


class MultiNodeIterator:
    """Created by create_multi_node_iterator. `len()` is the master's. So are epoch, epoch_detail,
    previous_epoch_detail, current_position and is_new_epoch, as of the last batch, if its iterator has them."""

    def __init__(self, actual_iterator: Any, communicator: CommunicatorBase, rank_master: int) -> None:
        self._communicator, self._master = communicator, rank_master
        self._is_master = communicator.rank == rank_master
        communicator._require_rank(rank_master, "create_multi_node_iterator")
        self._actual: Any = actual_iterator if self._is_master else None
        self._batches: Any = None
        looked = communicator._bcast_object(self._look, rank_master, "create_multi_node_iterator")
        self._length, self._position = looked

    def _look(self) -> tuple[Any, dict[str, Any]]:
        try:
            length = len(self._actual)
        except TypeError:
            length = None
        return length, {name: getattr(self._actual, name) for name in _POSITION if hasattr(self._actual, name)}

    def __iter__(self) -> Iterator[Any]:
        """Begins a pass over the master's batches."""
        self._batches = iter(self._actual) if self._is_master else self
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            iter(self)

        def bring() -> Any:
            try:
                batch: Any = (next(self._batches),)
            except StopIteration:
                batch = None
            return batch, self._look()[1]

        batch, self._position = self._communicator._bcast_object(bring, self._master, "create_multi_node_iterator")
        if batch is None:
            self._batches = None
            raise StopIteration
        return batch[0]

    next = __next__

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the master's iterator has no length")
        return int(self._length)

    def __getattr__(self, name: str) -> Any:
        position = self.__dict__.get("_position", {})
        if name in position:
            return position[name]
        raise AttributeError(f"the multi-node iterator has no {name!r}")


def create_synchronized_iterator(actual_iterator: Any, communicator: CommunicatorBase) -> Any:
    """Returns the iterator itself, which from then on shuffles like the iterators of all ranks, with a common seed drawn from
    torch's generator of rank 0. Collective; its steps do not communicate.

    actual_iterator  a DataLoader over the same data on all ranks. Its sampler has a `generator`, like torch's, or
                     does not shuffle

    Raises ValueError for an iterator without such a sampler.
    """
    seed = communicator._seed()
    # With a batch_sampler, the loader's own `sampler` is not used.
    sampler = getattr(getattr(actual_iterator, "batch_sampler", None), "sampler", None)
    if sampler is None:
        sampler = getattr(actual_iterator, "sampler", None)
    if isinstance(sampler, torch.utils.data.SequentialSampler):
        return actual_iterator
    if sampler is None or not hasattr(sampler, "generator"):
        raise InvalidArgument(
            f"create_synchronized_iterator: a {type(actual_iterator).__name__} with a sampler that has a generator is needed, such "
            "as a DataLoader with shuffle=True -- create_multi_node_iterator takes any"
        )
    sampler.generator = torch.Generator()
    sampler.generator.manual_seed(seed)
    return actual_iterator
