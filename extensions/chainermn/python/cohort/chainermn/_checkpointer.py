"""ChainerMN's checkpointer over Cohort's folder of checkpoints. It saves every rank's own state, and loads the newest set
that all ranks have.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

import torch

from cohort._checkpoint import optimizer_state as _optimizer_state
from cohort._collective import agree, attempt
from cohort.chainermn import _state
from cohort.chainermn.communicators import CommunicatorBase
from cohort.checkpoint import CheckpointFolder
from cohort.errors import InvalidArgument

_OUTLINE = "outline"


def create_multi_node_checkpointer(name: str, comm: CommunicatorBase, cp_interval: int = 5, gc_interval: int = 5,
                                   path: Union[str, os.PathLike[str], None] = None, *,
                                   place: str = "rank0") -> MultiNodeCheckpointer:  # fmt: skip
    """Returns a checkpointer: it saves every rank's state, and finds the newest set that is complete on all ranks.

    name         name of the folder for its checkpoints, within `path`
    cp_interval  complete sets to keep, at least 1
    gc_interval  has no effect, since each save removes older sets
    path         default: "result", as in Chainer's trainer
    place        the disks to use: "rank0": other ranks send their state to rank 0. "shared": all ranks see one folder, and
                 each writes its own state. "local": each host has its own folder, with copies on the next host. See
                 cohort.checkpoint.CheckpointFolder
    """
    return MultiNodeCheckpointer(name, comm, cp_interval, gc_interval, path, place)


class MultiNodeCheckpointer:
    """Created by create_multi_node_checkpointer.

    Checkpoints are folders of cohort.checkpoint, with digests, so a damaged or incomplete one is skipped, and the previous
    one is used. The random state, of torch's CPU generator, is saved and restored, too. One thread per rank.
    """

    def __init__(self, name: str, comm: CommunicatorBase, cp_interval: int, gc_interval: int,
                 path: Union[str, os.PathLike[str], None], place: str) -> None:  # fmt: skip
        if cp_interval < 1 or gc_interval < 1:
            raise InvalidArgument(
                f"create_multi_node_checkpointer: cp_interval {cp_interval}, gc_interval {gc_interval}: at least 1 each"
            )
        if not name or "/" in name:
            raise InvalidArgument(
                f"create_multi_node_checkpointer: {name!r} is no name of a folder -- `path` says where it is"
            )
        self.comm, self._name, self._keep, self._place = comm, name, cp_interval, place
        self._folder = self._open("result" if path is None else path)
        self._seconds: list[float] = []

    def _open(self, path: Union[str, os.PathLike[str]]) -> CheckpointFolder:
        return CheckpointFolder(Path(path) / self._name, self._keep, self.comm.communicator, place=self._place)

    def save(self, target: Any, iteration: int) -> None:
        """Saves a set; collective. Returns on every rank when the set is on the disk.

        target     this rank's state: any object with state_dict(), or a dict of such objects by name. Ranks may have
                   different ones
        iteration  number of the set

        Raises InvalidArgument on every rank if one rank's state cannot be saved; see CheckpointFolder.save for more.
        """
        began = time.perf_counter()
        state: dict[str, torch.Tensor] = {}

        def bring() -> None:
            texts = {name: one.state_dict() for name, one in _parts(target).items()}
            text = _state.outline(texts, "state", state)
            state[_OUTLINE] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

        agree(self.comm.communicator, attempt(bring))
        # The model's file, common to all ranks, is empty, since ranks may have different parts of a
        # model.
        self._folder.save(torch.nn.Module(), step=iteration, state=state)
        self._seconds.append(time.perf_counter() - began)

    def __call__(self, target: Any, iteration: int) -> None:
        self.save(target, iteration)

    def maybe_load(self, target: Any, optimizer: Any = None, path: Union[str, os.PathLike[str], None] = None) -> int:
        """Loads the newest set that is complete over all ranks into `target`, of the same kind as saved; collective.

        optimizer  has no effect, because nothing has to be sent again afterwards
        path       a folder to search instead of the checkpointer's own

        Returns the set's iteration; 0 if there is no set, and then nothing is changed. Raises InvalidArgument on every
        rank if another number of ranks saved it, or if it does not fit one rank's target; modules are checked before
        any is changed.
        """
        folder = self._folder if path is None else self._open(path)
        found = folder.load_latest(torch.nn.Module())
        if found is None:
            return 0
        parts: dict[str, Any] = {}
        states: dict[str, Any] = {}

        def look() -> None:
            if found.world_size != self.comm.size:
                raise InvalidArgument(
                    f"{found.folder}: saved by {found.world_size} ranks, and this job has {self.comm.size} -- each rank goes on with "
                    "its own state; cohort.checkpoint.CheckpointFolder resumes data-parallel training on any number"
                )
            tensors = folder.rank_state()
            if _OUTLINE not in tensors:
                raise InvalidArgument(
                    f"{found.folder}: not saved by a multi-node checkpointer -- CheckpointFolder loads it"
                )
            states.update(_state.filled(bytes(tensors[_OUTLINE].tolist()).decode(), tensors))
            parts.update(_parts(target))
            if sorted(states) != sorted(parts):
                raise InvalidArgument(
                    f"{found.folder}: it has the state of {sorted(states)}, and {sorted(parts)} is to be loaded"
                )
            for name, one in parts.items():
                if isinstance(one, torch.nn.Module):
                    _require_fitting(one, states[name], f"{found.folder}: {name}")

        agree(self.comm.communicator, attempt(look))
        def load() -> None:
            for name, one in parts.items():
                if isinstance(one, torch.optim.Optimizer):
                    _optimizer_state.load(one, states[name])
                else:
                    one.load_state_dict(states[name])

        agree(self.comm.communicator, attempt(load))
        return int(found.progress.step)

    def get_stats(self) -> dict[str, float]:
        """Returns times of this rank's saves, in seconds: 'avg', 'min' and 'max', and their number: 'count'."""
        taken = self._seconds
        if not taken:
            return {"avg": 0.0, "min": 0.0, "max": 0.0, "count": 0}
        return {"avg": sum(taken) / len(taken), "min": min(taken), "max": max(taken), "count": len(taken)}

    def finalize(self) -> None:
        """Removes all sets that it has saved. For the end of a training that no longer needs them. Collective."""
        self._folder.close()
        self.comm.communicator.barrier()
        if self.comm.rank == 0 or (self._place == "local" and self.comm.intra_rank == 0):
            shutil.rmtree(self._folder.folder, ignore_errors=True)
        self.comm.communicator.barrier()


def _parts(target: Any) -> dict[str, Any]:
    parts = dict(target) if isinstance(target, Mapping) else {"target": target}
    for name, one in parts.items():
        if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
            raise InvalidArgument(
                f"checkpointer: {name} is a {type(one).__name__}, which has no state_dict and load_state_dict"
            )
    return parts


def _require_fitting(module: torch.nn.Module, state: Mapping[str, Any], where: str) -> None:
    own = module.state_dict()
    wrong = [
        name
        for name in sorted({*own, *state})
        if name not in own or name not in state or _shape(own[name]) != _shape(state[name])
    ]
    if wrong:
        raise InvalidArgument(f"{where} does not fit the module -- different or missing: {', '.join(wrong[:20])}")


def _shape(value: Any) -> Optional[tuple[Any, ...]]:
    return (value.dtype, *value.shape) if isinstance(value, torch.Tensor) else None
