"""Checkpoints that are complete and checked, or not there: model, optimizer, sampler position, step and epoch, and of every
rank its random state and whatever tensors it alone has, in a folder of safetensors and JSON that C++ programs read and
write as well (docs/reference/checkpoint-format.md). Also: weights alone.

    checkpoints = cohort.checkpoint.CheckpointFolder("run/checkpoints")
    resumed = checkpoints.load_latest(model, optimizer)          # None: there is none yet
    if resumed:
        sampler.load_state(resumed.progress.sampler)
    ...  checkpoints.save_async(model, optimizer, step=step, epoch=epoch, sampler=sampler)
    checkpoints.close()

Saving and loading are collective; a save may go on in the background. One thread per rank. Needs torch. Python's and
NumPy's generators are not saved: what they drew last is not known to any other program; seed them by epoch.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import numbers
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import torch

from cohort import Communicator, _core, _world
from cohort._checkpoint_optimizer import restore, snapshot
from cohort._checkpoint_random import random_states, restored_random_states
from cohort._checkpoint_tensors import Assignment, module_entries, named_tensors, plain_name, to_entry, to_tensor
from cohort._checkpoint_weights import LoadedWeights, Path, load_weights, save_weights
from cohort._collective import agree, attempt, rank_of
from cohort.data import DistributedSampler, SamplerState
from cohort.errors import Error, InvalidArgument

__all__ = [
    "CheckpointFolder",
    "CheckpointInfo",
    "CheckpointSave",
    "LoadedWeights",
    "Shard",
    "TrainingProgress",
    "follow",
    "latest",
    "load_weights",
    "resume",
    "save",
    "save_weights",
]

Value = Union[bool, int, float, str]

_log = logging.getLogger("cohort.checkpoint")
# The files of a checkpoint.
_MODEL = "model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_RANDOM = "random.safetensors"
_PART = "rank-{:05}.safetensors"
# Prefixes of names within a part.
_STATE_PREFIX = "state/"
_RANDOM_PREFIX = "random/"


@dataclass(frozen=True)
class TrainingProgress:
    """A training's position, apart from tensors."""

    step: int = 0  # optimizer steps taken
    epoch: int = 0  # epochs begun before this one
    sampler: Optional[SamplerState] = None
    values: Mapping[str, Value] = field(default_factory=dict)  # the program's own: a scheduler's count, the best loss, ...


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on the disk."""

    folder: str  # its path, e.g. "run/checkpoints/checkpoint-000007-step-1200"
    generation: int  # 7: numbers grow with every save in the same folder
    world_size: int  # ranks that saved it
    created: str  # "2026-11-21T09:00:00Z"
    program: str  # "cohort, torch 2.13.0"
    progress: TrainingProgress


def _info_of(stored: Any) -> CheckpointInfo:
    sampler = SamplerState(*stored.sampler) if stored.sampler is not None else None
    progress = TrainingProgress(stored.step, stored.epoch, sampler, stored.values)
    return CheckpointInfo(stored.folder, stored.generation, stored.world_size, stored.created, stored.program, progress)


def _plain_values(values: Mapping[str, Any]) -> dict[str, Value]:
    """Python's own types for what NumPy and torch call a number."""
    plain: dict[str, Value] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) or type(value).__name__ == "bool_":
            value = value.item()
        if isinstance(value, (bool, str)):
            plain[name] = value
        elif isinstance(value, numbers.Integral):
            if not -(2**63) <= int(value) < 2**63:
                raise InvalidArgument(f"cannot save the value '{name}' -- {value} has more than 64 bits -- save it as text")
            plain[name] = int(value)
        elif isinstance(value, numbers.Real):
            plain[name] = float(value)
        else:
            raise InvalidArgument(
                f"cannot save the value '{name}' -- a {type(value).__name__} is no number, text or bool -- save it as "
                "text (json.dumps), tensors in the module's buffers"
            )
    return plain


@dataclass(frozen=True)
class Shard:
    """A part of a tensor: a box of the whole, and of the box's elements in row-major order a range (None: all of them)."""

    sizes: Sequence[int]  # the whole tensor's
    start: Sequence[int]  # the box's
    extent: Sequence[int]  # the box's
    begin: int = 0
    count: Optional[int] = None

    def _plain(self) -> tuple[list[int], list[int], list[int], int, int]:
        count = math.prod(self.extent) - self.begin if self.count is None else self.count
        return list(self.sizes), list(self.start), list(self.extent), self.begin, count


class CheckpointSave:
    """A save in the background. Any thread may ask."""

    def __init__(self, pending: Any) -> None:
        self._pending = pending

    def done(self) -> bool:
        """True once it is over on this rank, with or without an error."""
        return self._pending.done()

    def wait(self) -> CheckpointInfo:
        """Waits until the checkpoint is on the disk; raises the error of the save, which the folder then does not raise again."""
        return _info_of(self._pending.wait())


class CheckpointFolder:
    """The checkpoints of one training run. `module` is the module or its data-parallel wrapper; `optimizer` one of
    torch's SGD, Adam, AdamW, Adagrad, RMSprop, LBFGS, or None. All its parameters have to be the module's. One of these in
    a cohort.optim.Sharded is saved by all ranks, each its part, and loads on any number of ranks and without sharding
    (on its way each rank has the whole state in memory).

    Errors on any rank reach every rank: all raise, disk errors (Io, Unavailable) and damage (Corrupt) included. Between an
    error and the next save the folder holds what it held before.
    """

    def __init__(self, folder: Path, keep: int = 3, comm: Optional[Communicator] = None, *, place: str = "rank0",
                 copies: int = 2, best_by: str = "", keep_best: int = 0, best_mode: str = "min") -> None:  # fmt: skip
        """Not collective, touches nothing.

        folder  made if it does not exist
        keep    complete checkpoints to keep, at least 1; older ones go once a newer one is on the disk
        comm    the ranks that save and load together; None: the default world, or this process alone
        place   who writes, and whose disk the folder is on; the same on all ranks.
                "rank0": rank 0's, and what belongs to other ranks travels there: no other rank needs to see the folder.
                "shared": all ranks see it (NFS, Lustre, one host): every rank writes and reads its own part.
                "local": a folder of this path on every host's own disk, with the parts of that host's ranks and copies
                of another's; loading gathers them from whichever hosts have them
        copies  for "local": on how many hosts' disks each file is, at least 1; on all of them if there are fewer. 2:
                whatever one host had is also on the next one's. 1: a checkpoint is lost with any host's disk. The same
                on all ranks
        best_by     the checkpoints with the best number of this name among their `values` stay as well, across restarts
                    too. One that has none, or NaN or an infinity there, is never among them; of equal ones the older is
                    better. "": only `keep` counts. The same on all ranks
        keep_best   so many of them; 0: 1 if there is a best_by
        best_mode   "min": lower is better, as of a loss; "max": higher, as of an accuracy
        """
        self.folder = os.fspath(folder)
        self.keep = keep
        self.place = place
        self.copies = copies
        self._given = comm
        self._checkpoints = _core.Checkpoints(self.folder, keep, place, copies, best_by, keep_best, best_mode)
        self._loaded: Any = None
        self._rank_state: dict[str, torch.Tensor] = {}

    @property
    def _comm(self) -> Optional[Communicator]:
        if self._given is not None:
            return self._given
        return _world.world() if _world.is_initialized() else None

    def save(self, module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer] = None,
             progress: Optional[TrainingProgress] = None, *, step: int = 0, epoch: int = 0,
             sampler: Union[DistributedSampler, SamplerState, None] = None, values: Optional[Mapping[str, Any]] = None,
             state: Optional[Mapping[str, torch.Tensor]] = None,
             shards: Optional[Mapping[str, tuple[torch.Tensor, Shard]]] = None) -> CheckpointInfo:  # fmt: skip
        """Saves; collective, and returns on every rank once the checkpoint is on the disk.

        Model, optimizer and progress (or step, epoch, sampler and values) are rank 0's; the random state, of torch's CPU
        generator and those of the GPUs that the module is on, and `state` (tensors of this rank alone, by any name) are
        every rank's. A GPU's tensors are copied to the host, after what torch's current stream has. Written aside,
        synced, its digests in a manifest that comes last, then renamed: killed at any moment, it leaves the folder as it
        was but for a hidden remainder, which the next save removes. A save in the background ends first; its error,
        unless its handle has raised it, is raised here, and nothing is saved. Raises InvalidArgument for place "shared"
        where some hosts see another folder: they are named.

        `shards`, of every rank: parts of tensors of which no rank has all, by the name of the whole: "model/fc.weight",
        "optimizer/state/fc.weight/exp_avg". They take the place of what rank 0's `module` and `optimizer` have by that name.
        One rank contributes each element: else InvalidArgument on all ranks, which names the tensor, and nothing is
        saved.
        """
        comm = self._comm
        self._checkpoints.settle(comm)
        bundle = self._bundle(comm, module, optimizer, progress or _progress(step, epoch, sampler, values), state, shards)
        return _info_of(self._checkpoints.save(comm, bundle))

    def save_async(self, module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer] = None,
                   progress: Optional[TrainingProgress] = None, *, step: int = 0, epoch: int = 0,
                   sampler: Union[DistributedSampler, SamplerState, None] = None,
                   values: Optional[Mapping[str, Any]] = None,
                   state: Optional[Mapping[str, torch.Tensor]] = None,
                   shards: Optional[Mapping[str, tuple[torch.Tensor, Shard]]] = None) -> CheckpointSave:  # fmt: skip
        """As save, but returns once everything has been copied (into the host's memory that the next save uses again: twice
        the state's size is needed in all; for state on a GPU that much of the host's memory).

        The rest is done by a thread of low priority, without the GIL, over a communicator that the first call splits
        off. One save at a time: a second call waits for the first. An error is logged at once (subsystem "checkpoint"),
        and raised by the handle's wait, or else by the next save, save_async, load_latest or close. A process that
        ends waits for its saves.
        """
        comm = self._comm
        self._checkpoints.settle(comm)
        bundle = self._bundle(comm, module, optimizer, progress or _progress(step, epoch, sampler, values), state, shards)
        _saving.add(self._checkpoints)
        return CheckpointSave(self._checkpoints.save_async(comm, bundle))

    def close(self) -> None:
        """Waits for the save in the background, and raises its error unless its handle has. Not collective."""
        self._checkpoints.close()

    def _bundle(self, comm: Optional[Communicator], module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer],
                progress: TrainingProgress, state: Optional[Mapping[str, torch.Tensor]],
                shards: Optional[Mapping[str, tuple[torch.Tensor, Shard]]]) -> Any:  # fmt: skip
        """Returns this rank's contribution; raises on all ranks if one cannot."""
        brought: list[Any] = []
        parts = dict(sorted({**_shards_of(optimizer), **(shards or {})}.items()))

        def bring() -> None:
            files = []
            values: dict[str, Value] = {}
            if rank_of(comm) == 0:
                _check(progress)
                values = _plain_values(progress.values)
                model = module_entries(module)
                files.append((_MODEL, [entry for entry in model if f"model/{entry[0]}" not in parts], {"format": "pt"}))
                if optimizer is not None:
                    moments, metadata = snapshot(_whole(optimizer), module)
                    files.append((_OPTIMIZER, [e for e in moments if f"optimizer/{e[0]}" not in parts], metadata))
            sampler = progress.sampler
            brought.append(
                _core.CheckpointBundle(
                    step=int(progress.step),
                    epoch=int(progress.epoch),
                    program=f"cohort, torch {torch.__version__}",
                    sampler=(sampler.seed, sampler.epoch, sampler.cursor, sampler.size) if sampler is not None else None,
                    values=values,
                    files=files,
                    random=[to_entry(name, state) for name, state in random_states(module).items()],
                    state=[to_entry(name, tensor) for name, tensor in sorted((state or {}).items())],
                    shards=[to_entry(name, tensor) for name, (tensor, _) in parts.items()],
                    parts=[shard._plain() for _, shard in parts.values()],
                )
            )

        agree(comm, attempt(bring))
        return brought[0]

    def load_latest(
        self, module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer] = None
    ) -> Optional[CheckpointInfo]:
        """Loads the newest checkpoint that is whole; collective.

        Every file's digest is compared by a rank that sees it, and model and optimizer are sent to all. A damaged
        checkpoint is passed over with a warning (logger "cohort.checkpoint") that says what is wrong, and the one before
        is taken. None if there is none at all; raises Corrupt if there are some and all are damaged, InvalidArgument if a
        newer Cohort saved the newest, or if it does not fit the model (missing, unexpected and misshapen tensors are
        listed) or the optimizer. After these errors module, optimizer and random state are as before, on every rank.
        With `optimizer` None its state in the checkpoint is left alone. Hyperparameters become the saved ones. Tensors
        come to be on the device where the module has them, whichever they were saved from; an optimizer's on that of
        their parameter. Rank r gets rank r's random state and state; ranks that the saved world did not have keep their
        random state, and so do GPUs without one in the checkpoint. The place need not be the one it was saved with.
        """
        return self._load(module, optimizer, None)

    def load_best(
        self, module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer] = None
    ) -> Optional[CheckpointInfo]:
        """As load_latest, of the best by `best_by`; where it is damaged, the next best. Raises InvalidArgument if there are
        checkpoints and none has a finite number of this name."""
        return self._load(module, optimizer, None, best=True)

    def _load(
        self, module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer], latest: Optional[int], best: bool = False
    ) -> Optional[CheckpointInfo]:
        """`latest`: the last generation to consider, the same on all ranks; None: there is no such bound."""
        comm = self._comm
        self._checkpoints.settle(comm)
        stored, files, part, passed_over, all_damaged = self._checkpoints.load_newest(
            comm, {_OPTIMIZER} if optimizer is None else set(), latest, best
        )
        _report(comm, passed_over, all_damaged)
        if stored is None:
            return None

        # Everything is checked before anything is changed, and nothing is changed before all ranks have checked.
        steps: list[Callable[[], None]] = []
        state: dict[str, torch.Tensor] = {}
        agree(comm, attempt(lambda: steps.extend(self._prepared(stored, files, part, module, optimizer, state))))
        model = getattr(optimizer, "_model", module)
        with getattr(model, "_writing", contextlib.nullcontext)():
            applied = attempt(lambda: [step() for step in steps])
        agree(comm, applied)
        written = getattr(model, "parameters_written", None)
        if written is not None:  # with sharding
            written()
            if optimizer is not None and hasattr(optimizer, "_masters_written"):  # it has them already
                optimizer._masters_written()
        self._loaded, self._rank_state = stored, state
        return _info_of(stored)

    def load_shards(
        self, wanted: Mapping[str, Shard]
    ) -> Optional[tuple[CheckpointInfo, dict[str, torch.Tensor]]]:
        """Loads this rank's parts of tensors from the newest checkpoint that is whole, by the names that `save` has for
        `shards`, to the CPU: in the box's shape, or 1-D for a range. None if there is no checkpoint. Collective; each
        rank asks for parts of its own, whether and however the tensors were divided when saved. Random state and module
        stay as they are. Raises InvalidArgument on all ranks if a tensor was not saved or has other sizes; else as
        load_latest.
        """
        comm = self._comm
        self._checkpoints.settle(comm)
        stored, tensors, part, passed_over, all_damaged = self._checkpoints.load_shards(
            comm, [(name, shard._plain()) for name, shard in wanted.items()]
        )
        _report(comm, passed_over, all_damaged)
        if stored is None:
            return None
        path = f"{stored.folder}/{_PART.format(rank_of(comm))}"
        self._loaded, self._rank_state = stored, {} if part is None else _tensors_of(part, path, _STATE_PREFIX)
        return _info_of(stored), {entry[0]: to_tensor(entry) for entry in tensors}

    def _prepared(self, stored: Any, files: Mapping[str, Any], part: Any, module: torch.nn.Module,
                  optimizer: Optional[torch.optim.Optimizer],
                  state: dict[str, torch.Tensor]) -> list[Callable[[], None]]:  # fmt: skip
        def parse(name: str) -> Any:
            path = f"{stored.folder}/{name}"
            if name not in files:
                raise InvalidArgument(f"{path}: the checkpoint was saved without it -- pass None for the optimizer")
            return _core.parse_safetensors(files[name], path)

        source = f"{stored.folder}/{_MODEL}"
        weights = Assignment(named_tensors(module), parse(_MODEL)[0], source, strict=True, exact=True)
        weights.require_same_types(stored.folder)
        steps = [weights.prepared()]
        if optimizer is not None:
            entries, metadata = parse(_OPTIMIZER)
            whole = _whole(optimizer)
            path = f"{stored.folder}/{_OPTIMIZER}"
            steps.append(restore(whole, module, entries, metadata, path, masters=whole is not optimizer))
            if whole is not optimizer:
                saved = {
                    plain_name(entry[0][len("state/") : -len("/master")]): to_tensor(entry)
                    for entry in entries
                    if entry[0].endswith("/master")
                }
                names = {piece.parameter for piece in optimizer.pieces}
                masters = {name: saved[plain_name(name)] for name in names if plain_name(name) in saved}
                steps.append(lambda: optimizer._take(whole, masters))
        rank = rank_of(self._comm)
        random: dict[str, torch.Tensor] = {}
        if part is not None:
            path = f"{stored.folder}/{_PART.format(rank)}"
            state.update(_tensors_of(part, path, _STATE_PREFIX))
            random = _tensors_of(part, path, _RANDOM_PREFIX)
        elif _RANDOM in files:
            # "rank/3" is the CPU generator's, "rank/3/cuda/0" that of a GPU.
            for entry in parse(_RANDOM)[0]:
                _, of, generator = (entry[0] + "//").split("/", 2)
                if of == str(rank):
                    random[generator.rstrip("/") or "cpu"] = to_tensor(entry)
        # The one step that may yet fail (the CPU generator's state of another torch) comes first.
        steps.insert(0, restored_random_states(module, random, stored.folder))
        if not random:
            _log.info("%s: saved by %d ranks; rank %d keeps its own random state", stored.folder, stored.world_size, rank)
        return steps

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Returns the `state` saved by the rank of this rank's number, in the checkpoint that load_latest has loaded;
        empty if that world had no such rank. On the CPU. Not collective. Raises InvalidArgument before a load."""
        if self._loaded is None:
            raise InvalidArgument("rank_state: no checkpoint has been loaded -- load_latest first")
        return self._rank_state

    def parts(self, saved_ranks: Optional[Iterable[int]] = None) -> dict[int, dict[str, torch.Tensor]]:
        """Returns the `state` of other saved ranks, for worlds of another size: those that exist of the numbers given
        (None: all of them), by saved rank. Collective; each rank may ask for others. Raises Corrupt if a part is
        damaged or gone."""
        comm = self._comm
        wanted: set[int] = set()
        parts: dict[int, dict[str, torch.Tensor]] = {}

        def ask() -> None:
            self.rank_state()
            wanted.update(range(self._loaded.world_size) if saved_ranks is None else saved_ranks)

        agree(comm, attempt(ask))
        found = self._checkpoints.load_parts(comm, self._loaded, wanted)

        def parse() -> None:
            for rank, data in sorted(found.items()):
                parts[rank] = _tensors_of(data, f"{self._loaded.folder}/{_PART.format(rank)}", _STATE_PREFIX)

        agree(comm, attempt(parse))
        return parts

    def list(self) -> list[CheckpointInfo]:
        """The checkpoints that have a sound manifest, oldest first; files are not read, so they may yet prove damaged.

        Not collective; only as good as this rank's view of the disk.
        """
        return [_info_of(stored) for stored in _core.list_checkpoints(self.folder)]


def _report(comm: Optional[Communicator], passed_over: Iterable[str], all_damaged: Optional[Exception]) -> None:
    """Reports the checkpoints that a load has passed over; raises if all are damaged."""
    if rank_of(comm) == 0:
        for reason in passed_over:
            _log.warning("passed over: %s", reason)
    if all_damaged is not None:
        raise all_damaged


def _whole(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer of the module's parameters, where this one is of pieces (cohort.optim.Sharded)."""
    return optimizer._whole() if hasattr(optimizer, "_whole") else optimizer


def _shards_of(optimizer: Optional[torch.optim.Optimizer]) -> dict[str, tuple[torch.Tensor, Shard]]:
    if optimizer is None or not hasattr(optimizer, "_shards"):
        return {}
    prefix = "optimizer/state/"
    return {
        prefix + plain_name(name[len(prefix) :]): (tensor, Shard(sizes, [0] * len(sizes), sizes, begin, tensor.numel()))
        for name, (tensor, (sizes, begin)) in optimizer._shards().items()
    }


# A process does not end in the midst of a save.
_saving: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _finish_saves() -> None:
    for checkpoints in list(_saving):
        try:
            checkpoints.close()
        except Error:
            pass  # it has been logged


def _progress(
    step: int, epoch: int, sampler: Union[DistributedSampler, SamplerState, None], values: Optional[Mapping[str, Any]]
) -> TrainingProgress:
    state = sampler.state() if isinstance(sampler, DistributedSampler) else sampler
    return TrainingProgress(step, epoch, state, values or {})


def _check(progress: TrainingProgress) -> None:
    if progress.step < 0 or progress.epoch < 0:
        raise InvalidArgument(
            f"cannot save the checkpoint -- step {progress.step} and epoch {progress.epoch} must not be negative"
        )
    sampler = progress.sampler
    if sampler is not None and min(sampler.epoch, sampler.cursor, sampler.size) < 0:
        raise InvalidArgument("cannot save the checkpoint -- the sampler's position must not be negative")


def _tensors_of(part: Any, path: str, prefix: str) -> dict[str, torch.Tensor]:
    """Returns the tensors in a part whose names begin so, by the rest of their names."""
    entries = _core.parse_safetensors(part, path)[0]
    return {entry[0][len(prefix) :]: to_tensor(entry) for entry in entries if entry[0].startswith(prefix)}


def save(folder: Path, module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer] = None,
         progress: Optional[TrainingProgress] = None, *, keep: int = 3, comm: Optional[Communicator] = None,
         place: str = "rank0", copies: int = 2, **standing: Any) -> CheckpointInfo:  # fmt: skip
    """CheckpointFolder(folder, keep, comm, place=place, copies=copies).save(module, optimizer, progress, **standing)."""
    checkpoints = CheckpointFolder(folder, keep, comm, place=place, copies=copies)
    return checkpoints.save(module, optimizer, progress, **standing)


def resume(folder: Path, module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer] = None,
           sampler: Optional[DistributedSampler] = None, *, comm: Optional[Communicator] = None,
           place: str = "rank0") -> Optional[CheckpointInfo]:  # fmt: skip
    """Loads the newest whole checkpoint, the sampler's position too if it has one; None if there is none. Collective."""
    info = CheckpointFolder(folder, comm=comm, place=place).load_latest(module, optimizer)
    if info is not None and sampler is not None and info.progress.sampler is not None:
        sampler.load_state(info.progress.sampler)
    return info


def latest(folder: Path) -> Optional[CheckpointInfo]:
    """The newest checkpoint with a sound manifest; None if there is none. Not collective; its files are not read."""
    infos = CheckpointFolder(folder).list()
    return infos[-1] if infos else None


# A signal, or Ctrl-C, is noticed as often.
_SLICE = 0.2


def follow(
    folder: Path, *, after_generation: int = 0, look_every: float = 1.0, timeout: Optional[float] = None
) -> Iterator[CheckpointInfo]:
    """The training's checkpoints as they come, for a process beside it; ends once training is over. Not collective.

        checkpoints = cohort.checkpoint.CheckpointFolder("run/checkpoints")
        for info in cohort.checkpoint.follow("run/checkpoints"):
            info = checkpoints.load_latest(model) or info         # may be a newer one yet
            ...  evaluate

    Each is the newest that has a sound manifest: a caller slower than the training skips some, and never the last.
    SIGTERM means that training is over, as `cohort run` tells an evaluator once the ranks have ended; once the first
    checkpoint is waited for, it does not end the process. Call it in the main thread or any other, one at a time.

    folder            of the checkpoints; it need not be there yet
    after_generation  checkpoints up to this one are left out
    look_every        seconds between reads of the folder
    timeout           seconds for the next checkpoint to come, before Timeout is raised; None: without end
    """
    follower = _core.CheckpointFollower(os.fspath(folder), after_generation, look_every, timeout)
    while True:
        came, generation = follower.next_within(_SLICE)
        if not came:
            continue
        if generation is None:
            return
        # (It may be gone already, where the training saves fast; then there is a newer one.)
        for stored in _core.list_checkpoints(os.fspath(folder)):
            if stored.generation == generation:
                yield _info_of(stored)
