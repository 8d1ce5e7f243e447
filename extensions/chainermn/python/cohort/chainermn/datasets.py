"""Data sets that are distributed over the ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch

from cohort.chainermn.communicators import CommunicatorBase
from cohort.data import permutation
from cohort.errors import InvalidArgument

__all__ = ["DataSizeError", "SubDataset", "create_empty_dataset", "scatter_dataset", "scatter_index"]


class DataSizeError(RuntimeError):
    """ChainerMN's error for data sets too large for an MPI message. Never raised here, since there is no size limit.
    """


class SubDataset(torch.utils.data.Dataset):
    """A part of a data set: the samples `order[begin:finish]`, or without an order the samples `begin` to `finish` - 1."""

    def __init__(self, dataset: Any, begin: int, finish: int, order: Optional[Sequence[int]] = None) -> None:
        self.dataset = dataset
        self._indices: Sequence[int] = range(begin, finish) if order is None else list(order[begin:finish])

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Union[int, slice]) -> Any:
        """Returns one sample; for a slice a list of samples."""
        if isinstance(index, slice):
            return [self.dataset[one] for one in self._indices[index]]
        return self.dataset[self._indices[index]]


def scatter_dataset(dataset: Any, comm: CommunicatorBase, root: int = 0, shuffle: bool = False,
                    seed: Optional[int] = None, max_buf_len: Optional[int] = None, *,
                    force_equal_length: bool = True) -> SubDataset:  # fmt: skip
    """Returns this rank's part of the root's data set, which is pickled and sent to all. Collective.

    dataset             used on the root only
    shuffle             use parts of a permutation instead of consecutive samples
    seed                seed of the permutation, from 0 to 2**64 - 1; default: a new one each time
    max_buf_len         has no effect: there is no size limit
    force_equal_length  all ranks get equally many samples, so some are on two ranks if the number does not divide evenly;
                        otherwise each is on one rank
    """

    def bring() -> Any:
        size = len(dataset)
        if seed is not None and not 0 <= seed < 2**64:
            raise InvalidArgument(f"scatter_dataset: seed {seed} is no unsigned 64-bit integer")
        drawn = random.SystemRandom().getrandbits(64) if seed is None else seed
        return dataset, size, drawn if shuffle else None

    whole, size, chosen = comm._bcast_object(bring, root, "scatter_dataset")
    begin, finish = _bounds(size, comm, force_equal_length)
    return SubDataset(whole, begin, finish, None if chosen is None else permutation(size, chosen))


def scatter_index(
    n_total_samples: Optional[int], comm: CommunicatorBase, root: int = 0, *, force_equal_length: bool = True
) -> tuple[int, int]:
    """Returns begin and end of this rank's part of n_total_samples, of which the root's value is used. Collective.

    force_equal_length  parts are equally long, and neighbours share samples if the number does not divide evenly;
                        otherwise no two parts share one
    """

    def bring() -> int:
        if not isinstance(n_total_samples, int) or n_total_samples < 0:
            raise InvalidArgument(f"scatter_index: {n_total_samples!r} samples")
        return n_total_samples

    return _bounds(comm._bcast_object(bring, root, "scatter_index"), comm, force_equal_length)


def _bounds(size: int, comm: CommunicatorBase, equal: bool) -> tuple[int, int]:
    if equal:
        begin = size * comm.rank // comm.size
        return begin, begin + -(-size // comm.size)
    each, more = divmod(size, comm.size)
    begin = each * comm.rank + min(comm.rank, more)
    return begin, begin + each + (comm.rank < more)


def create_empty_dataset(dataset: Any) -> list[tuple[()]]:
    """Returns as many empty samples as the data set has samples, for ranks whose part of a model has no input."""
    return [()] * len(dataset)
