"""Assigns samples to ranks in the same order, to the bit, as the C++ sampler; for torch's DataLoader or without it.

Pure arithmetic: no communication, and no torch. One thread at a time per sampler.
"""

from __future__ import annotations

import array
import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional, Union

from cohort import Communicator, _core
from cohort._process import world as _world
from cohort.errors import InvalidArgument

__all__ = ["DistributedSampler", "EmptyBatches", "Remainder", "SamplerState", "permutation", "sample_seed"]


def permutation(size: int, seed: int = 0, epoch: int = 0) -> array.array:
    """Returns the order of an epoch's samples as an array of 64-bit integers, the same as in C++ on every platform."""
    order = array.array("q", bytes(8 * size))
    if size:
        _core.permute(order, seed % 2**64, epoch)
    return order


def sample_seed(index: int, epoch: int, seed: int = 0) -> int:
    """Returns a seed for a sample's own random numbers (augmentation in a DataLoader's worker), the same on any
    rank, in any batch, and in C++."""
    return _core.virtual_seed(seed % 2**64, epoch, index, 0)


class Remainder(enum.Enum):
    """How to treat the last samples of an epoch when they do not fill a global batch."""

    KEEP = "keep"  # the last samples make a smaller step, spread over the ranks; some ranks may get none
    DROP = "drop"  # the last samples are left out in this epoch
    PAD = "pad"  # the step is filled up with the first samples of the epoch's permutation


@dataclass(frozen=True)
class SamplerState:
    """The state to continue from, with any number of ranks and any batch size. Plain numbers, for checkpoints."""

    seed: int = 0
    epoch: int = 0
    cursor: int = 0  # samples of this epoch that optimizer steps have used, over all ranks
    size: int = 0  # size of the data set


class DistributedSampler:
    """This rank's part of a data set, epoch by epoch.

    With a batch_size it yields batches, like the C++ sampler. The last step of an epoch is spread over the ranks, and a
    DistributedDataParallel that is given the sampler weights each rank by its number of samples:

        sampler = DistributedSampler(data, batch_size=32)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
        model = cohort.nn.DistributedDataParallel(Net(), sampler=sampler)
        for epoch in range(3):
            for x, y in loader:
                ...; optimizer.step(); sampler.step()

    step() is needed if the model is given the sampler, or if the sampler's position is to be saved. Call it once after
    each batch, also while gradients of several batches are accumulated.

    Without a batch_size it yields single samples, like torch's sampler and with its arguments; each rank gets equally many.

        loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=DistributedSampler(data))

    dataset        a data set, of which only the length is used, or its length
    num_replicas   default: the default world's size (1 without a world)
    rank           default: the default world's rank (0)
    shuffle        True: a new permutation in every epoch; False: the samples in order
    seed           seed of the permutation; an unsigned 64-bit integer
    drop_last      without batch_size: drop the samples that do not divide evenly, instead of padding
    batch_size     samples per rank and step; with it, iterating gives lists
    remainder      "keep", "drop" or "pad"; default: "keep" with a batch_size, else "pad", or "drop" with drop_last
    shares         how each step's samples, batch_size times the number of ranks, are divided: a number for each rank, as
                   (2, 1), for its part; "measured": by each rank's speed, measured during training by a
                   DistributedDataParallel that has been given the sampler (step() is collective then); "even". Default:
                   COHORT_SHARES if a DistributedDataParallel has been given the sampler, else even. Uneven shares need
                   averages weighted by samples, as DistributedDataParallel with a sampler computes
    comm           a Communicator that rank and size are taken from instead
    virtual_ranks  V, the same as the DistributedDataParallel's: a step has batch_size * V samples, and iterating gives
                   those of this rank's virtual ranks in order, each like a rank's in a world of V ranks. Call step()
                   after each; the cursor moves with the last of a step. len() is the batches of this rank, steps_left()
                   and steps_per_epoch() count steps. Needs a batch_size; not with shares

    Iterating begins an epoch at the cursor. If that epoch was used up, or drawn to its end without any `step`, the next
    epoch begins, as after set_epoch(epoch + 1). Calling set_epoch as for torch's sampler has the same effect.

    With "keep", a rank may get an empty list in the last step of an epoch; see EmptyBatches.
    """

    def __init__(self, dataset: Any, num_replicas: Optional[int] = None, rank: Optional[int] = None,
                 shuffle: bool = True, seed: int = 0, drop_last: bool = False, *, batch_size: Optional[int] = None,
                 remainder: Union[Remainder, str, None] = None, shares: Union[str, Sequence[float], None] = None,
                 comm: Optional[Communicator] = None, virtual_ranks: int = 0) -> None:  # fmt: skip
        """Raises InvalidArgument for negative sizes, batch sizes below 1, and a rank outside the world."""
        size = dataset if isinstance(dataset, int) else len(dataset)
        if comm is None and _world.is_initialized():
            comm = _world.world()
        if comm is not None:
            num_replicas = comm.size() if num_replicas is None else num_replicas
            rank = comm.rank() if rank is None else rank
        self.num_replicas = 1 if num_replicas is None else num_replicas
        self.rank = 0 if rank is None else rank
        if size < 0:
            raise InvalidArgument(f"DistributedSampler: a data set of {size} samples")
        if batch_size is not None and batch_size < 1:
            raise InvalidArgument(f"DistributedSampler: batch_size is {batch_size}")
        if not 0 <= self.rank < self.num_replicas:
            raise InvalidArgument(f"DistributedSampler: rank {self.rank} in a world of {self.num_replicas}")
        self.virtual_ranks = virtual_ranks
        self._require_virtual_ranks(self.num_replicas)
        if virtual_ranks and batch_size is None:
            raise InvalidArgument("DistributedSampler: virtual_ranks have batches -- they take a batch_size")
        if not 0 <= seed < 2**64:
            raise InvalidArgument(f"DistributedSampler: seed {seed} is no unsigned 64-bit integer")
        if remainder is None:
            remainder = Remainder.DROP if drop_last else Remainder.KEEP if batch_size is not None else Remainder.PAD
        self.remainder = Remainder(remainder)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self._full = (batch_size or 1) * self._parts  # samples of a whole step
        self._goes_on = False  # a new world was set, and the loop has not begun again
        self._calls_of_step = 0
        self._share_text = _share_text(shares)
        self._own_shares = shares is not None
        self._weighted = False  # a DistributedDataParallel weights by it
        # Without a batch_size all ranks have equally many.
        self._shares = None if batch_size is None or self._share_text == "even" else _core.SampleShares(self._share_text)
        if virtual_ranks and self._shares is not None:
            raise InvalidArgument(
                f"DistributedSampler: virtual_ranks with shares '{self._share_text}', which depend on ranks -- leave one out "
                "(COHORT_SHARES)"
            )
        if self._own_shares and self._share_text != "even":
            if self._shares is None:
                raise InvalidArgument("DistributedSampler: shares are parts of a batch -- they take a batch_size")
            self._shares.require_world(self.num_replicas)
        self._state = SamplerState(seed=seed, size=size)
        self._drawn = 0  # samples of this epoch's steps that were handed out, over all ranks
        self._drawn_parts = 0  # virtual ranks of this rank that were handed out of the next step
        # Steps drawn, for which `step` was not called yet: (cursor after the step, samples of all ranks, samples of this rank,
        # virtual rank or -1).
        self._steps: deque[tuple[int, int, int, int]] = deque()
        # Batches that a DataLoader's loop has received before their `step` (None: not counted), and this rank's number of
        # samples in the batch of the last `step`. A DataLoader draws ahead, so `_steps` does not tell these.
        self._received: Optional[int] = None
        self._own_of_last = -1
        self._order: Sequence[int] = ()  # the permutation
        self._ordered: Optional[tuple[int, int]] = None  # seed and epoch of `_order`

    def _require_virtual_ranks(self, size: int) -> None:
        if self.virtual_ranks < 0 or 0 < self.virtual_ranks < size:
            raise InvalidArgument(f"DistributedSampler: virtual_ranks={self.virtual_ranks} in a world of {size}")

    @property
    def _parts(self) -> int:
        return self.virtual_ranks or self.num_replicas

    @property
    def _block(self) -> tuple[int, int]:
        """This rank's virtual ranks, from the first to before the second; without them, the rank itself."""
        if not self.virtual_ranks:
            return self.rank, self.rank + 1
        return _core.block_of(self.virtual_ranks, self.num_replicas, self.rank)

    def _virtual_rank(self) -> int:
        """Returns the virtual rank of the oldest batch drawn; -1 if there is none."""
        return self._steps[0][3] if self._steps else -1

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles keep the shares that were asked for, and measure speeds again."""
        return {**self.__dict__, "_shares": self._shares is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shares = _core.SampleShares(self._share_text) if self._shares else None

    def __iter__(self) -> Iterator[Any]:
        """Yields lists of indices with a batch_size, else indices."""
        self.reset()
        while (batch := self.next_batch()) is not None:
            if self.batch_size is not None:
                yield batch
            else:
                yield from batch

    def __len__(self) -> int:
        """Returns the number of items that iterating over a whole epoch gives on this rank."""
        if self.batch_size is not None or self.remainder is not Remainder.KEEP:
            begin, end = self._block
            return self.steps_per_epoch() * (end - begin)
        return (self.size - self.rank + self.num_replicas - 1) // self.num_replicas

    def next_batch(self) -> Optional[list[int]]:
        """Returns this rank's samples of the next step, possibly none; None at the end of the epoch.

        Draws ahead of `step`: samples drawn for which `step` was not called are drawn again after `reset` or a restored
        state.
        """
        left = self.size - self._drawn
        if left <= 0 or (self.remainder is Remainder.DROP and left < self._full):
            return None
        self._permute()
        fresh = min(self._full, left)
        together = self._full if self.remainder is Remainder.PAD else fresh
        first, last = self._block
        part = first + self._drawn_parts
        if self._shares is not None and (self._weighted or self._own_shares):
            before, count = self._shares.part(together, self.rank, self.num_replicas, (self.epoch, self._drawn))
            begin = self._drawn + before
        else:  # the first ranks get one sample more if the number does not divide evenly
            each, more = divmod(together, self._parts)
            begin = self._drawn + part * each + min(part, more)
            count = each + (part < more)
        self._drawn_parts += 1
        if self._drawn_parts == last - first:
            self._drawn_parts = 0
            self._drawn += fresh
        self._steps.append((self._drawn, together, count, part if self.virtual_ranks else -1))
        if begin + count <= self.size:
            return list(self._order[begin : begin + count])
        return [self._order[at % self.size] for at in range(begin, begin + count)]

    def step(self, steps: int = 1) -> None:
        """Call it when the optimizer has used the oldest step drawn; advances the cursor. Raises InvalidArgument if fewer
        steps were drawn, or steps < 1. Without a batch_size a step is one sample per rank: pass the batch's samples."""
        if not 1 <= steps <= len(self._steps):
            raise InvalidArgument(
                f"DistributedSampler.step({steps}) where {len(self._steps)} batches are drawn -- call it once after each "
                "optimizer step, with the number of batches that it was of"
            )
        self._calls_of_step += 1
        if self._received is not None:
            self._received = max(self._received - steps, 0)
        for _ in range(steps):
            cursor, _, own, _ = self._steps.popleft()
            self._own_of_last = own
            self._state = SamplerState(self._state.seed, self._state.epoch, cursor, self._state.size)
            if self._shares is not None and self._weighted:
                self._shares.end_step(own)
        asked = self._share_text == "measured" or (self._share_text != "even" and not self._own_shares)
        if asked and self.rank == 0 and not (self._shares is not None and self._weighted):
            _core.warn_of_unused_shares()

    def _bind(self, comm: Communicator) -> None:
        """Called by DistributedDataParallel, which weights each rank's samples."""
        if self._shares is None:
            return
        self._shares.require_world(comm.size())
        if not self._weighted and self._steps:
            raise InvalidArgument(
                "DistributedSampler: a batch has been drawn before DistributedDataParallel was given the sampler, and its "
                "shares are not even -- make the model first"
            )
        self._shares.bind(comm)
        self._weighted = True

    def _begin_step(self) -> None:
        """Called by synchronising forwards: the ranks exchange their speeds, collectively, if shares are measured."""
        if self._shares is not None:
            self._shares.begin_step(self._full, (self.epoch, self._drawn))

    def _receive(self) -> None:
        """Called when the loop over a DataLoader has received a batch."""
        self._received = (self._received or 0) + 1

    def global_batch(self) -> int:
        """Returns the number of samples, over all ranks, of the oldest step drawn; 0 if there is none."""
        return self._steps[0][1] if self._steps else 0

    def _samples_of_batch(self, trained_at: Optional[int]) -> int:
        """Returns this rank's number of samples in the batch that a forward is for. That is the oldest batch drawn for
        which `step` was not called (a DataLoader with workers draws ahead); -1 if there is none.

        trained_at: the cursor at which the model may already have been trained on that batch. Irrelevant while all
        batches drawn have equally many samples.
        """
        if self._received == 0:  # the same batch again, for the second of two optimizers
            return self._own_of_last
        if not self._steps:
            return -1
        first, last = self._steps[0], self._steps[-1]
        # Only the last batch of an epoch is smaller.
        if trained_at == self.cursor and first[1:3] != last[1:3]:
            raise InvalidArgument(
                f"DistributedSampler: {len(self._steps)} batches are drawn, the first of {first[2]} samples of this rank and "
                f"the last of {last[2]}, and nothing says which one is trained on -- call step once after each batch"
            )
        return first[2]

    def steps_left(self) -> int:
        """Returns the number of steps from the cursor to the end of the epoch."""
        return self._steps_from(self.cursor)

    def steps_per_epoch(self) -> int:
        return self._steps_from(0)

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def cursor(self) -> int:
        """The samples of this epoch that optimizer steps have used, over all ranks."""
        return self._state.cursor

    @property
    def size(self) -> int:
        """The number of samples of the data set."""
        return self._state.size

    @property
    def seed(self) -> int:
        return self._state.seed

    def set_epoch(self, epoch: int) -> None:
        """Moves to the beginning of an epoch. The first call in a new world (see `set_world`) keeps the position within
        the epoch, and raises InvalidArgument for an earlier epoch, whose samples have been used."""
        if epoch < 0:
            raise InvalidArgument(f"DistributedSampler: epoch {epoch}")
        if self._goes_on and epoch < self.epoch:
            raise InvalidArgument(
                f"DistributedSampler: set_epoch({epoch}) where training stands in epoch {self.epoch} -- begin the loop over "
                "epochs there, with range(sampler.epoch, ...)"
            )
        if self._goes_on and epoch == self.epoch:
            return
        self._goes_on = False
        self._state = SamplerState(self._state.seed, epoch, 0, self._state.size)
        self._rewind()

    def next_epoch(self) -> None:
        self.set_epoch(self.epoch + 1)

    def reset(self) -> None:
        """Begins an iteration; see the class. In a new world an epoch that was used up is iterated once more and yields
        nothing, so that the loop ends the epoch normally."""
        goes_on, self._goes_on = self._goes_on, False
        # A loop that never calls step() has no position worth keeping, so each iteration is the next epoch.
        used_up = self.steps_left() == 0 and self.cursor > 0
        if goes_on:
            self._rewind()
        elif used_up or (self.cursor == 0 and self._drawn > 0 and self._steps_from(self._drawn) == 0):
            self.next_epoch()
        else:
            self._rewind()

    def set_world(self, rank: int, size: int, global_batch: Optional[int] = None) -> None:
        """Continues in another world from this position. Samples drawn before their `step` are drawn again, by any rank.

        global_batch  samples of a step over all ranks, spread evenly; default: batch_size on each

        Virtual ranks and a step's samples keep their numbers. Raises InvalidArgument for a rank outside the world, a global
        batch below 1, or one for a sampler without a batch_size, and for more ranks than virtual ranks.
        """
        if not 0 <= rank < size:
            raise InvalidArgument(f"DistributedSampler: rank {rank} in a world of {size}")
        if global_batch is not None and (global_batch < 1 or self.batch_size is None):
            raise InvalidArgument(
                f"DistributedSampler: a global batch of {global_batch} for batch_size={self.batch_size} -- it takes a sampler "
                "with a batch_size, and at least 1 sample"
            )
        self._require_virtual_ranks(size)
        if self.virtual_ranks and global_batch not in (None, self._full):
            raise InvalidArgument(
                f"DistributedSampler: a global batch of {global_batch} samples, and {self._full} of virtual_ranks"
            )
        self.rank, self.num_replicas = rank, size
        self._full = (self.batch_size or 1) * self._parts if global_batch is None else global_batch
        self._goes_on = True
        if self._shares is not None:
            if self._weighted or self._own_shares:
                self._shares.require_world(size)
            self._shares.reset()
            self._weighted = False
        self._rewind()

    def state(self) -> SamplerState:
        return self._state

    def load_state(self, state: SamplerState) -> None:
        """Continues from `state`. Raises InvalidArgument if the state is of a data set of another size."""
        if state.size != self.size:
            raise InvalidArgument(
                f"a sampler's position in a data set of {state.size} samples cannot be used for one of {self.size} -- "
                "give the data it was saved with, or start at an epoch with set_epoch"
            )
        if state.epoch < 0 or not 0 <= state.cursor <= state.size:
            raise InvalidArgument(
                f"a sampler's position is damaged: epoch {state.epoch}, cursor {state.cursor} of {state.size}"
            )
        self._state = SamplerState(**asdict(state))
        self._rewind()

    def state_dict(self) -> dict[str, int]:
        """Returns `state` as a dict of numbers, and with virtual ranks their number."""
        return {**asdict(self._state), **({"virtual_ranks": self.virtual_ranks} if self.virtual_ranks else {})}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Raises InvalidArgument also for a state of another number of virtual ranks, if it has one."""
        position = dict(state)
        virtual_ranks = position.pop("virtual_ranks", self.virtual_ranks)
        if virtual_ranks != self.virtual_ranks:
            raise InvalidArgument(
                f"a sampler's position of virtual_ranks={virtual_ranks} cannot be used with {self.virtual_ranks}, whose steps "
                "are others -- give the same"
            )
        self.load_state(SamplerState(**position))

    def _steps_from(self, cursor: int) -> int:
        left = max(self.size - cursor, 0)
        return left // self._full if self.remainder is Remainder.DROP else -(-left // self._full)

    def _permute(self) -> None:
        wanted = (self.seed, self.epoch)
        if self._ordered == wanted:
            return
        self._order = permutation(self.size, *wanted) if self.shuffle else range(self.size)
        self._ordered = wanted

    def _rewind(self) -> None:
        self._drawn = self.cursor
        self._drawn_parts = 0
        self._steps.clear()
        self._received = None


def _share_text(shares: Union[str, Sequence[float], None]) -> str:
    if shares is None:
        return str(_core.environment_value("COHORT_SHARES") or "even")
    return shares if isinstance(shares, str) else ",".join(str(share) for share in shares)


class EmptyBatches:
    """A collate_fn for DataLoader that can also make a batch of no samples, shaped like one with samples:

        DataLoader(data, batch_sampler=sampler, collate_fn=cohort.data.EmptyBatches(data))

    A rank gets no sample in the last step of an epoch if that has fewer samples than there are ranks, and remainder is
    "keep". A model that cannot run an empty batch calls step_without_samples instead.
    """

    def __init__(self, dataset: Any, collate_fn: Optional[Callable[[list], Any]] = None) -> None:
        """collate_fn: makes a batch of one or more samples; default: torch's."""
        self._dataset = dataset
        self._collate = collate_fn

    def __call__(self, samples: list) -> Any:
        if self._collate is None:
            from torch.utils.data import default_collate

            self._collate = default_collate
        if samples:
            return self._collate(samples)
        return _first(self._collate([self._dataset[0]]), 0)


def _first(batch: Any, count: int) -> Any:
    """Returns the first samples of a batch, which may be nested."""
    if isinstance(batch, dict):
        return type(batch)({key: _first(value, count) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_first(value, count) for value in batch))
    if isinstance(batch, (list, tuple)) and not any(isinstance(value, (str, bytes)) for value in batch):
        return type(batch)(_first(value, count) for value in batch)
    return batch[:count]
