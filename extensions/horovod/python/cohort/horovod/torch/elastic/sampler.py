"""A sampler that tracks which samples of an epoch are done, and distributes the rest over the current ranks."""

from __future__ import annotations

import random
from typing import Any, Dict, Iterator, List, Sized

from torch.utils.data import Sampler

from cohort.horovod import basics


class ElasticSampler(Sampler):
    """This rank's remaining indices of the epoch; all ranks have equally many, and some indices may occur twice.

    shuffle  use a new order each epoch, the same on all ranks
    seed     seed of that order

    Call `record_batch` after each batch, `set_epoch` at the end of each epoch, and keep the sampler in a TorchState.
    Needs `init`.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, with no samples done."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that this rank has done a batch of `batch_size` samples, and each other rank one of the same size."""
        self.processed_num += batch_size * self.num_replicas

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Continues from the position at which `state_dict` was taken."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def state_dict(self) -> Dict[str, Any]:
        """Returns {"epoch", "processed_num"}: the samples done by all ranks together."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Distributes the remaining samples over the current ranks."""
        self.num_replicas = basics.size()
        self.rank = basics.rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        padded: List[int] = [left[i % len(left)] for i in range(self.total_size)]
        return iter(padded[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
