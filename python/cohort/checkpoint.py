"""Checkpoints that are complete and checked, or not there: model, optimizer, sampler position, random state of every
rank, step and epoch, in a folder of safetensors and JSON that C++ programs read and write as well
(docs/reference/checkpoint-format.md). Also: weights alone.

    checkpoints = cohort.checkpoint.CheckpointFolder("run/checkpoints")
    resumed = checkpoints.load_latest(model, optimizer)          # None: there is none yet
    if resumed:
        sampler.load_state(resumed.progress.sampler)
    ...  checkpoints.save(model, optimizer, step=step, epoch=epoch, sampler=sampler)

Rank 0 alone touches the disk; saving and loading are collective. One thread per rank. Needs torch. Python's and NumPy's
generators are not saved: what they drew last is not known to any other program; seed them by epoch.
"""

from __future__ import annotations

import logging
import numbers
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import torch

from cohort import Communicator, _core, _world
from cohort._checkpoint_optimizer import restore, snapshot
from cohort._checkpoint_tensors import Assignment, named_tensors, to_entry, to_tensor
from cohort._collective import agree, all_gather_bytes, attempt, rank_of, share
from cohort.data import DistributedSampler, SamplerState
from cohort.errors import Corrupt, Error, InvalidArgument

__all__ = [
    "CheckpointFolder",
    "CheckpointInfo",
    "LoadedWeights",
    "TrainingProgress",
    "latest",
    "load_weights",
    "resume",
    "save",
    "save_weights",
]

Path = Union[str, "os.PathLike[str]"]
Value = Union[bool, int, float, str]

_log = logging.getLogger("cohort.checkpoint")
# The files of a checkpoint.
_MODEL = "model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_RANDOM = "random.safetensors"


@dataclass(frozen=True)
class TrainingProgress:
    """Where training stands, apart from tensors."""

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


class CheckpointFolder:
    """The checkpoints of one training run. `module` is the module or its data-parallel wrapper; `optimizer` one of
    torch's SGD, Adam, AdamW, Adagrad, RMSprop, LBFGS, or None. All its parameters have to be the module's.

    Errors on any rank reach every rank: all raise, rank 0's disk errors (Io, Unavailable) and damage (Corrupt) included.
    Between an error and the next save the folder holds what it held before.
    """

    def __init__(self, folder: Path, keep: int = 3, comm: Optional[Communicator] = None) -> None:
        """Not collective, touches nothing.

        folder  made if it does not exist; for rank 0's eyes only, other hosts need not see it
        keep    complete checkpoints to keep, at least 1; older ones go once a newer one is on the disk
        comm    the ranks that save and load together; None: the default world, or this process alone
        """
        self.folder = os.fspath(folder)
        self.keep = keep
        if not self.folder:
            raise InvalidArgument("a CheckpointFolder needs the name of a folder")
        if keep < 1:
            raise InvalidArgument(f"a CheckpointFolder keeps at least 1 checkpoint, not {keep}")
        self._given = comm

    @property
    def _comm(self) -> Optional[Communicator]:
        if self._given is not None:
            return self._given
        return _world.world() if _world.is_initialized() else None

    def save(
        self,
        module: torch.nn.Module,
        optimizer: Optional[torch.optim.Optimizer] = None,
        progress: Optional[TrainingProgress] = None,
        *,
        step: int = 0,
        epoch: int = 0,
        sampler: Union[DistributedSampler, SamplerState, None] = None,
        values: Optional[Mapping[str, Any]] = None,
    ) -> CheckpointInfo:
        """Saves; collective, and returns on every rank once the checkpoint is on rank 0's disk.

        Model, optimizer and progress (or step, epoch, sampler and values) are rank 0's; the random state, of torch's CPU
        generator, is every rank's. Written aside, synced, its digests in a manifest that comes last, then renamed:
        killed at any moment, it leaves the folder as it was but for a hidden remainder, which the next save removes.
        """
        comm = self._comm
        random_states = all_gather_bytes(comm, bytes(torch.get_rng_state().tolist()))
        stored: Any = None
        error = None
        if rank_of(comm) == 0:
            state = sampler.state() if isinstance(sampler, DistributedSampler) else sampler
            standing = progress if progress is not None else TrainingProgress(step, epoch, state, values or {})

            def write() -> None:
                nonlocal stored
                stored = self._write(module, optimizer, standing, random_states)

            error = attempt(write)
        text = share(comm, stored.text().encode() if stored else b"", error)
        folder = share(comm, stored.folder.encode() if stored else b"")
        return _info_of(_core.StoredCheckpoint.parse(text.decode(), folder.decode()))

    def _write(
        self,
        module: torch.nn.Module,
        optimizer: Optional[torch.optim.Optimizer],
        progress: TrainingProgress,
        random_states: list[bytes],
    ) -> Any:
        if progress.step < 0 or progress.epoch < 0:
            raise InvalidArgument(
                f"cannot save the checkpoint -- step {progress.step} and epoch {progress.epoch} must not be negative"
            )
        sampler = progress.sampler
        if sampler is not None and min(sampler.epoch, sampler.cursor, sampler.size) < 0:
            raise InvalidArgument("cannot save the checkpoint -- the sampler's position must not be negative")
        # Before anything is written: what cannot be saved should not cost a disk full of bytes.
        model = [to_entry(name, tensor) for name, tensor in named_tensors(module).items()]
        state = snapshot(optimizer, module) if optimizer is not None else None
        random = [(f"rank/{rank}", "uint8", [len(state)], state) for rank, state in enumerate(random_states)]
        writer = _core.CheckpointWriter(
            self.folder,
            int(progress.step),
            int(progress.epoch),
            len(random_states),
            f"cohort, torch {torch.__version__}",
            (sampler.seed, sampler.epoch, sampler.cursor, sampler.size) if sampler is not None else None,
            _plain_values(progress.values),
        )
        writer.add(_MODEL, model, {"format": "pt"})
        if state is not None:
            writer.add(_OPTIMIZER, *state)
        writer.add(_RANDOM, random, {})
        return writer.commit(self.keep)

    def load_latest(
        self, module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer] = None
    ) -> Optional[CheckpointInfo]:
        """Loads the newest checkpoint that is whole; collective.

        Rank 0 reads it, compares every file's digest and sends it to all. A damaged one is passed over with a warning
        (logger "cohort.checkpoint") that says what is wrong, and the one before is taken. None if there is none at all;
        raises Corrupt if there are some and all are damaged, InvalidArgument if it does not fit the model (missing,
        unexpected and misshapen tensors are listed) or the optimizer. After these errors module, optimizer and random
        state are as before, on every rank. With `optimizer` None its state in the checkpoint is left alone.
        Hyperparameters become the saved ones. Rank r gets rank r's random state; ranks that the saved world did not have
        keep theirs.
        """
        comm = self._comm
        found: Optional[tuple[Any, dict[str, Any]]] = None
        error = None
        reads = rank_of(comm) == 0
        if reads:

            def read() -> None:
                nonlocal found
                found = _read_newest(self.folder)

            error = attempt(read)
        text = share(comm, found[0].text().encode() if found else b"", error)
        if not text:
            return None
        folder = share(comm, found[0].folder.encode() if found else b"").decode()

        # The same bytes go to every rank: no other rank needs to see the disk, and none can see other bytes.
        stored: Any = None
        files: dict[str, Any] = {}

        def make_room() -> None:
            nonlocal stored
            stored = _core.StoredCheckpoint.parse(text.decode(), folder)
            for name, size in sorted(stored.files.items()):
                if name != _OPTIMIZER or optimizer is not None:
                    files[name] = found[1][name] if found else _core.Bytes(size)

        agree(comm, attempt(make_room))
        if comm is not None and comm.size() > 1:
            for data in files.values():
                if len(data):
                    comm.broadcast(data)

        # Everything is looked at before anything is changed, and nothing is changed before all ranks have looked.
        steps: list[Callable[[], None]] = []
        agree(comm, attempt(lambda: steps.extend(self._prepared(stored, files, module, optimizer))))
        agree(comm, attempt(lambda: [step() for step in steps] and None))
        return _info_of(stored)

    def _prepared(
        self, stored: Any, files: Mapping[str, Any], module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer]
    ) -> list[Callable[[], None]]:
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
            steps.append(restore(optimizer, module, *parse(_OPTIMIZER), source=f"{stored.folder}/{_OPTIMIZER}"))
        states = {entry[0]: entry for entry in parse(_RANDOM)[0]}
        rank = rank_of(self._comm)
        if f"rank/{rank}" in states:
            random = to_tensor(states[f"rank/{rank}"])
            # The one step that may yet fail (a generator's state of another torch) comes first.
            steps.insert(0, lambda: torch.set_rng_state(random))
        else:
            _log.info("%s: saved by %d ranks; rank %d keeps its own random state", stored.folder, stored.world_size, rank)
        return steps

    def list(self) -> list[CheckpointInfo]:
        """The checkpoints that have a sound manifest, oldest first; files are not read, so they may yet prove damaged.

        Not collective; on other ranks than 0 only as good as their view of the disk.
        """
        return [_info_of(stored) for stored in _core.list_checkpoints(self.folder)[0]]


def _read_newest(folder: str) -> Optional[tuple[Any, dict[str, Any]]]:
    """Rank 0's work of a load: the newest checkpoint that is whole, and its files."""
    sound, damaged = _core.list_checkpoints(folder)
    reasons: list[str] = []

    def pass_over(error: Exception) -> None:
        _log.warning("passed over: %s", error)
        reasons.append(str(error))

    for error in damaged:
        pass_over(error)
    for stored in reversed(sound):
        try:
            return stored, {name: stored.read(name) for name in stored.files}
        except Error as error:
            pass_over(error)
    if not reasons:
        return None
    raise Corrupt(
        f"cannot load a checkpoint from {folder} -- all of them are damaged: {'; '.join(reasons)} -- restore one from a "
        "copy, or start anew in another folder"
    )


def save(
    folder: Path,
    module: torch.nn.Module,
    optimizer: Optional[torch.optim.Optimizer] = None,
    progress: Optional[TrainingProgress] = None,
    *,
    keep: int = 3,
    comm: Optional[Communicator] = None,
    **standing: Any,
) -> CheckpointInfo:
    """CheckpointFolder(folder, keep, comm).save(module, optimizer, progress, **standing)."""
    return CheckpointFolder(folder, keep, comm).save(module, optimizer, progress, **standing)


def resume(
    folder: Path,
    module: torch.nn.Module,
    optimizer: Optional[torch.optim.Optimizer] = None,
    sampler: Optional[DistributedSampler] = None,
    *,
    comm: Optional[Communicator] = None,
) -> Optional[CheckpointInfo]:
    """Loads the newest whole checkpoint, the sampler's position too if it has one; None if there is none. Collective."""
    info = CheckpointFolder(folder, comm=comm).load_latest(module, optimizer)
    if info is not None and sampler is not None and info.progress.sampler is not None:
        sampler.load_state(info.progress.sampler)
    return info


def latest(folder: Path) -> Optional[CheckpointInfo]:
    """The newest checkpoint with a sound manifest; None if there is none. Not collective; its files are not read."""
    infos = CheckpointFolder(folder).list()
    return infos[-1] if infos else None


@dataclass(frozen=True)
class LoadedWeights:
    """What load_weights did."""

    missing: list[str]  # in the module only (match="subset")
    unexpected: list[str]  # in the file only (match="subset")


def load_weights(
    module: torch.nn.Module, path: Path, *, match: str = "strict", convert: str = "exact", key: str = ""
) -> LoadedWeights:
    """Copies weights from a safetensors file or a .pt, told apart by content, into parameters and buffers. Not collective.

    match    "strict": the file has to hold exactly the module's; "subset": names that only one side has are passed over
    convert  "exact": only where no value can change, as from bfloat16 to float32; "any": rounding allowed
    key      in a .pt whose top level is not the weights: the key that they are under ("model"); nested: "a/b"

    A prefix "module." on all names is removed. Nothing in the file is executed. Raises Unavailable or Io if the file
    cannot be read, Corrupt if it is damaged or holds anything else, InvalidArgument with all differences in one message
    if it does not fit; the module is then as before.
    """
    _one_of("match", match, ("strict", "subset"))
    _one_of("convert", convert, ("exact", "any"))
    weights, _ = _core.read_weights(os.fspath(path), key)
    assignment = Assignment(
        named_tensors(module), weights, os.fspath(path), strict=match == "strict", exact=convert == "exact"
    )
    assignment.prepared()()
    return LoadedWeights(assignment.missing, assignment.unexpected)


def save_weights(module: torch.nn.Module, path: Path, format: str = "safetensors") -> None:
    """Writes parameters and buffers under their names; replaces the file as a whole. Not collective: one rank calls it.

    format  "safetensors", or "pt": what torch.load(path, weights_only=True) opens
    """
    _one_of("format", format, ("safetensors", "pt"))
    entries = [to_entry(name, tensor) for name, tensor in named_tensors(module).items()]
    _core.write_weights(os.fspath(path), entries, format == "pt")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidArgument(f"{name} is {value!r} -- it is one of {', '.join(map(repr, known))}")
