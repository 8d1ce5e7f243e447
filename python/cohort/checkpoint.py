"""Checkpoints that are either complete and checked or absent. Each holds model, optimizer, sampler position, step and
epoch, and every rank's random state and own tensors, in a folder of safetensors and JSON that C++ programs read and
write as well (docs/reference/checkpoint-format.md). Weights can also be saved alone.

    checkpoints = cohort.checkpoint.CheckpointFolder("run/checkpoints")
    resumed = checkpoints.load_latest(model, optimizer)          # None: no checkpoint yet
    if resumed:
        sampler.load_state(resumed.progress.sampler)
    ...  checkpoints.save_async(model, optimizer, step=step, epoch=epoch, sampler=sampler)
    checkpoints.close()

Saving and loading are collective; a save may run in the background. One thread per rank. Needs torch. The generators of
Python and NumPy are not saved, since no other program can read their state; seed them by epoch.
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

from cohort import Communicator, _core
from cohort._process import world as _world
from cohort._checkpoint.optimizer import restore, snapshot
from cohort._checkpoint.random import random_states, restored_random_states
from cohort._checkpoint.tensors import Assignment, module_entries, named_tensors, plain_name, to_entry, to_tensor
from cohort._checkpoint.weights import LoadedWeights, Path, load_weights, save_weights
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
    """The position of a training, without its tensors."""

    step: int = 0  # optimizer steps taken
    epoch: int = 0  # epochs begun before this one
    sampler: Optional[SamplerState] = None
    values: Mapping[str, Value] = field(default_factory=dict)  # the program's own: a scheduler's count, best loss, ...


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on the disk."""

    folder: str  # its path, e.g. "run/checkpoints/checkpoint-000007-step-1200"
    generation: int  # 7; grows with every save in the same folder
    world_size: int  # ranks that saved it
    created: str  # "2026-11-21T09:00:00Z"
    program: str  # "cohort, torch 2.13.0"
    progress: TrainingProgress


def _info_of(stored: Any) -> CheckpointInfo:
    sampler = SamplerState(*stored.sampler) if stored.sampler is not None else None
    progress = TrainingProgress(stored.step, stored.epoch, sampler, stored.values)
    return CheckpointInfo(stored.folder, stored.generation, stored.world_size, stored.created, stored.program, progress)


def _plain_values(values: Mapping[str, Any]) -> dict[str, Value]:
    """Converts numbers of NumPy and torch to Python's own types."""
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
    """A part of a tensor: a box of the whole, and a range of the box's elements, row-major (count None: all)."""

    sizes: Sequence[int]  # sizes of the whole tensor
    start: Sequence[int]  # the box's first index in each dimension
    extent: Sequence[int]  # the box's size in each dimension
    begin: int = 0
    count: Optional[int] = None

    def _plain(self) -> tuple[list[int], list[int], list[int], int, int]:
        count = math.prod(self.extent) - self.begin if self.count is None else self.count
        return list(self.sizes), list(self.start), list(self.extent), self.begin, count


class CheckpointSave:
    """A save in the background. Any thread may call its methods."""

    def __init__(self, pending: Any) -> None:
        self._pending = pending

    def done(self) -> bool:
        """Returns True if the save has ended on this rank, with or without an error."""
        return self._pending.done()

    def wait(self) -> CheckpointInfo:
        """Waits until the checkpoint is on the disk. Returns its description, or raises the save's error."""
        return _info_of(self._pending.wait())


class CheckpointFolder:
    """The checkpoints of one training run. `module` is the module or its data-parallel wrapper; `optimizer` is one of
    torch's SGD, Adam, AdamW, Adagrad, RMSprop, LBFGS, or None, and all its parameters have to be the module's. The
    state of such an optimizer in a cohort.optim.Sharded is saved by all ranks, each its own part, and can be loaded on
    any number of ranks and without sharding (while loading, each rank has the whole state in memory).

    Errors on any rank reach every rank: all raise, disk errors (Io, Unavailable) and damage (Corrupt) included. After
    an error the folder's contents stay unchanged until the next save.
    """

    def __init__(self, folder: Path, keep: int = 3, comm: Optional[Communicator] = None, *, place: str = "rank0",
                 copies: int = 2, best_by: str = "", keep_best: int = 0, best_mode: str = "min") -> None:  # fmt: skip
        """Not collective; touches no file.

        folder  created if it does not exist
        keep    complete checkpoints to keep, at least 1; older ones are removed when a newer one is on the disk
        comm    the ranks that save and load together; None: the default world, or this process alone
        place   which ranks write, and on which disks; the same on all ranks.
                "rank0": rank 0's disk; other ranks send their data to rank 0 and need not see the folder.
                "shared": all ranks see it (NFS, Lustre, one host): every rank writes and reads its own part.
                "local": a folder of this path on every host's own disk. It holds the parts of that host's ranks, and
                copies of another host's parts; loading gathers them from all hosts
        copies  for "local": number of hosts that store each file, at least 1, at most all. 2:
                each host's files are also on the next host. 1: a checkpoint is lost with any host's disk. The same
                on all ranks
        best_by     a name in `values`: the checkpoints with the best numbers of this name stay as well, also across
                    restarts. Checkpoints without a finite number of this name are never kept for it; of equal ones, the
                    older is better. "": only `keep` counts. The same on all ranks
        keep_best   number of best checkpoints that stay; 0 means 1 if there is a best_by
        best_mode   "min": lower is better, as for a loss; "max": higher, as for an accuracy
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
        """Saves the training; collective. Returns on every rank when the checkpoint is on the disk.

        Model, optimizer and progress (or step, epoch, sampler and values) are saved from rank 0. Every rank saves its
        random state (of torch's CPU generator and of the GPUs that the module is on) and `state`, its own tensors by any
        names. A GPU's tensors are copied to the host after the work queued on torch's current stream. Files
        are written to a hidden folder and synced, then a manifest with their digests, then the folder is renamed, so that a
        process killed at any moment leaves the checkpoints unchanged and at most a hidden remainder, which the next
        save removes. Waits first for a save in the background; if its error was not raised by its handle, raises it
        here and saves nothing. Raises InvalidArgument for place "shared" if some hosts see another folder, and names
        them.

        `shards`, given by every rank: parts of tensors that no single rank holds, by the name of the whole tensor:
        "model/fc.weight", "optimizer/state/fc.weight/exp_avg". They replace rank 0's tensors of that name. Each element
        has to come from exactly one rank; otherwise all ranks raise InvalidArgument, which names the tensor, and
        nothing is saved.
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
        """Like save, but returns when all tensors have been copied into host memory. The next save uses that memory
        again. In all, twice the state's size is needed (for state on a GPU, its size in host memory).

        A thread of low priority writes the files, without the GIL, over a communicator that the first call splits off.
        One save at a time: a second call waits for the first. An error is logged immediately (subsystem "checkpoint"),
        and raised by the handle's wait, or else by the next save, save_async, load_latest or close. A process that ends
        waits for its saves.
        """
        comm = self._comm
        self._checkpoints.settle(comm)
        bundle = self._bundle(comm, module, optimizer, progress or _progress(step, epoch, sampler, values), state, shards)
        _saving.add(self._checkpoints)
        return CheckpointSave(self._checkpoints.save_async(comm, bundle))

    def close(self) -> None:
        """Waits for the save in the background; raises its error unless its handle has raised it. Not collective."""
        self._checkpoints.close()

    def _bundle(self, comm: Optional[Communicator], module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer],
                progress: TrainingProgress, state: Optional[Mapping[str, torch.Tensor]],
                shards: Optional[Mapping[str, tuple[torch.Tensor, Shard]]]) -> Any:  # fmt: skip
        """Returns this rank's contribution; if a rank cannot contribute, all ranks raise."""
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
        """Loads the newest undamaged checkpoint; collective.

        Every file's digest is checked by a rank that can read the file, and model and optimizer are sent to all ranks.
        A damaged checkpoint is skipped with a warning (logger "cohort.checkpoint") that names the damage, and the
        previous checkpoint is loaded. Returns None if there is no checkpoint. Raises Corrupt if all checkpoints are
        damaged, and InvalidArgument if a newer Cohort saved the newest, or if it does not fit the model (missing,
        unexpected and misshapen tensors are listed) or the optimizer. After these errors module, optimizer and random
        state are as before, on every rank. If `optimizer` is None, the saved optimizer is not loaded. Hyperparameters
        become the saved ones. Tensors are loaded to the module's devices, and an optimizer's to their parameters'
        devices, wherever they were saved. Rank r gets rank r's random state and `state`; ranks that the saved world
        did not have keep their random state, and so do GPUs without one in the checkpoint. `place` need not be the one
        used for saving.
        """
        return self._load(module, optimizer, None)

    def load_best(
        self, module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer] = None
    ) -> Optional[CheckpointInfo]:
        """Like load_latest, for the best checkpoint by `best_by`; if it is damaged, the next best. Raises
        InvalidArgument if there are checkpoints but none has a finite number of this name."""
        return self._load(module, optimizer, None, best=True)

    def _load(
        self, module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer], latest: Optional[int], best: bool = False
    ) -> Optional[CheckpointInfo]:
        """`latest`: the last generation to consider, the same on all ranks; None: no limit."""
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
        if written is not None:  # if the optimizer is sharded
            written()
            if optimizer is not None and hasattr(optimizer, "_masters_written"):  # has its masters already
                optimizer._masters_written()
        self._loaded, self._rank_state = stored, state
        return _info_of(stored)

    def load_shards(
        self, wanted: Mapping[str, Shard]
    ) -> Optional[tuple[CheckpointInfo, dict[str, torch.Tensor]]]:
        """Loads this rank's parts of tensors from the newest undamaged checkpoint, by the same names as `shards` of
        `save`, to the CPU: in the box's shape, or 1-D for a range. Returns None if there is no checkpoint. Collective;
        each rank asks for its own parts, whether and however the tensors were divided when saved. Random state and
        module are not changed. Raises InvalidArgument on all ranks if a tensor was not saved or has other sizes;
        otherwise the errors of load_latest.
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
            # "rank/3" is the state of the CPU generator, "rank/3/cuda/0" the state of a GPU's generator.
            for entry in parse(_RANDOM)[0]:
                _, of, generator = (entry[0] + "//").split("/", 2)
                if of == str(rank):
                    random[generator.rstrip("/") or "cpu"] = to_tensor(entry)
        # The only step that may still fail (if the CPU generator's state is from another torch) comes first.
        steps.insert(0, restored_random_states(module, random, stored.folder))
        if not random:
            _log.info("%s: saved by %d ranks; rank %d keeps its own random state", stored.folder, stored.world_size, rank)
        return steps

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Returns the `state` that the rank with this rank's number saved in the checkpoint loaded by load_latest, on
        the CPU; empty if that world had no such rank. Not collective. Raises InvalidArgument before a load."""
        if self._loaded is None:
            raise InvalidArgument("rank_state: no checkpoint has been loaded -- load_latest first")
        return self._rank_state

    def parts(self, saved_ranks: Optional[Iterable[int]] = None) -> dict[int, dict[str, torch.Tensor]]:
        """Returns the `state` of other saved ranks, by saved rank, for worlds of another size. Numbers in `saved_ranks`
        that were not saved are left out (None: all ranks). Collective; each rank may ask for others. Raises Corrupt if
        a part is damaged or missing."""
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
        """Returns the checkpoints with a valid manifest, oldest first. Their files are not read and may be damaged.

        Not collective; each rank lists what it can read on the disk.
        """
        return [_info_of(stored) for stored in _core.list_checkpoints(self.folder)]


def _report(comm: Optional[Communicator], passed_over: Iterable[str], all_damaged: Optional[Exception]) -> None:
    """Reports the checkpoints that a load has skipped; raises if all are damaged."""
    if rank_of(comm) == 0:
        for reason in passed_over:
            _log.warning("passed over: %s", reason)
    if all_damaged is not None:
        raise all_damaged


def _whole(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """For an optimizer of pieces (cohort.optim.Sharded), returns an optimizer of the module's whole parameters."""
    return optimizer._whole() if hasattr(optimizer, "_whole") else optimizer


def _shards_of(optimizer: Optional[torch.optim.Optimizer]) -> dict[str, tuple[torch.Tensor, Shard]]:
    if optimizer is None or not hasattr(optimizer, "_shards"):
        return {}
    prefix = "optimizer/state/"
    return {
        prefix + plain_name(name[len(prefix) :]): (tensor, Shard(sizes, [0] * len(sizes), sizes, begin, tensor.numel()))
        for name, (tensor, (sizes, begin)) in optimizer._shards().items()
    }


# Saves under way, for which the process waits before it ends.
_saving: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _finish_saves() -> None:
    for checkpoints in list(_saving):
        try:
            checkpoints.close()
        except Error:
            pass  # the error has been logged


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
    """Returns the tensors in a part whose names begin with `prefix`, by the rest of their names."""
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
    """Loads the newest undamaged checkpoint, with any sampler position; None if there is no checkpoint. Collective."""
    info = CheckpointFolder(folder, comm=comm, place=place).load_latest(module, optimizer)
    if info is not None and sampler is not None and info.progress.sampler is not None:
        sampler.load_state(info.progress.sampler)
    return info


def latest(folder: Path) -> Optional[CheckpointInfo]:
    """Returns the newest checkpoint with a valid manifest, or None. Not collective; does not read its files."""
    infos = CheckpointFolder(folder).list()
    return infos[-1] if infos else None


# Seconds between checks for a signal or Ctrl-C.
_SLICE = 0.2


def follow(
    folder: Path, *, after_generation: int = 0, look_every: float = 1.0, timeout: Optional[float] = None
) -> Iterator[CheckpointInfo]:
    """Yields a training's checkpoints to a separate process as they appear, until the training ends. Not collective.

        checkpoints = cohort.checkpoint.CheckpointFolder("run/checkpoints")
        for info in cohort.checkpoint.follow("run/checkpoints"):
            info = checkpoints.load_latest(model) or info         # may be an even newer one
            ...  evaluate

    Each is the newest one with a valid manifest, so a caller slower than the training skips some, but never the last.
    SIGTERM means that the training has ended (`cohort run` sends it to an evaluator after the ranks have ended); from
    the first wait on, SIGTERM does not end the process. Call from the main thread or any other, one call at a time.

    folder            the checkpoints' folder; need not exist yet
    after_generation  checkpoints up to this one are left out
    look_every        seconds between reads of the folder
    timeout           seconds to wait for the next checkpoint before Timeout is raised; None: no limit
    """
    follower = _core.CheckpointFollower(os.fspath(folder), after_generation, look_every, timeout)
    while True:
        came, generation = follower.next_within(_SLICE)
        if not came:
            continue
        if generation is None:
            return
        # (The checkpoint may have been removed already if the training saves fast; then there is a newer one.)
        for stored in _core.list_checkpoints(os.fspath(folder)):
            if stored.generation == generation:
                yield _info_of(stored)
