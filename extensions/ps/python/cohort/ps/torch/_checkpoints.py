"""One checkpoint for both a dense model and its tables on parameter servers."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import shutil
import uuid
from collections.abc import Mapping
from typing import Any, Optional

import torch

from cohort import Communicator, _core, checkpoint
from cohort._checkpoint.weights import Path
from cohort._collective import agree, attempt, rank_of, share, size_of
from cohort.checkpoint import CheckpointInfo, CheckpointSave, TrainingProgress
from cohort.errors import Corrupt, Error, InvalidArgument
from cohort.ps import Client
from cohort.ps._checks import refuse
from cohort.ps.torch._hybrid import HybridOptimizer

# Keys in a checkpoint's values: the folder of its tables, and their learning rates.
_SNAPSHOT = "parameter servers"
_RATE = "parameter servers, lr of "
# Subfolder of the checkpoints' folder.
_TABLES = "tables"
# Prefix of a checkpoint's folder of tables in that subfolder.
_NAME = "step-"


class CheckpointFolder(checkpoint.CheckpointFolder):
    """Like cohort.checkpoint.CheckpointFolder, with all tables and variables of the servers in each checkpoint.

    client   this rank's client; each rank of `comm` has one. All servers have to see the folder at the same path
    place    "rank0" or "shared"

    A save first writes the tables, below FOLDER/tables, and then the dense part, which names them. The checkpoint
    exists only with that second part, so a save killed at any moment leaves a complete checkpoint or none. It contains
    only pushes of ended clocks (save after a step). The optimizer may be a HybridOptimizer.
    """

    def __init__(self, folder: Path, client: Client, keep: int = 3, comm: Optional[Communicator] = None, *,
                 place: str = "rank0") -> None:  # fmt: skip
        if not isinstance(client, Client):
            refuse("CheckpointFolder", "client", client, "pass this rank's, as ps.connect() returns it, after the folder")
        if place == "local":
            raise InvalidArgument("a CheckpointFolder with tables cannot be \"local\": all servers have to see it")
        super().__init__(folder, keep, comm, place=place)
        self._client = client
        self._lock: Optional[int] = None

    def save(self, module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer] = None,
             progress: Optional[TrainingProgress] = None, *, state: Optional[Mapping[str, torch.Tensor]] = None,
             **standing: Any) -> CheckpointInfo:  # fmt: skip
        """Saves as the base class does; collective. Servers continue serving while they write."""
        try:
            dense, progress = self._with_tables(optimizer, progress, standing)
            info = super().save(module, dense, progress, state=state)
        finally:
            self._unlock()
        self._remove_old()
        return info

    def save_async(self, module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer] = None,
                   progress: Optional[TrainingProgress] = None, *, state: Optional[Mapping[str, torch.Tensor]] = None,
                   **standing: Any) -> CheckpointSave:  # fmt: skip
        """Returns after the tables are written; the dense part is written in the background."""
        self._checkpoints.settle(self._comm)
        self._unlock()
        self._remove_old()
        try:
            dense, progress = self._with_tables(optimizer, progress, standing)
            return super().save_async(module, dense, progress, state=state)
        except BaseException:
            self._unlock()
            raise

    def close(self) -> None:
        super().close()
        self._unlock()

    def load_latest(
        self, module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer] = None
    ) -> Optional[CheckpointInfo]:
        """Loads the newest checkpoint whose parts are both undamaged; collective, before any pushes. None if there is
        none.

        Like the base class, but also raises InvalidArgument if a table of this client has rows already, since rows that
        are not in the checkpoint would stay. Servers restart with the ranks (`cohort run` ensures that).
        """
        comm = self._comm
        self._demand_ranks()
        agree(comm, attempt(self._demand_empty))
        found: list[int] = []
        failed = attempt(lambda: found.append(self._newest_whole())) if rank_of(comm) == 0 else None
        newest = int(share(comm, str(found[0]).encode() if found else b"", failed))
        if newest == 0:
            return None
        info = self._load(module, _dense_of(optimizer), newest)
        if info is None:
            return None

        def restore() -> None:
            # If the dense part of the newest checkpoint is damaged, this is an older checkpoint.
            self._require_whole(info)
            self._client.restore(self._path(info))

        share(comm, b"", attempt(restore) if rank_of(comm) == 0 else None)
        if isinstance(optimizer, HybridOptimizer):
            values = info.progress.values
            rates = {name[len(_RATE) :]: float(rate) for name, rate in values.items() if name.startswith(_RATE)}
            optimizer.set_table_rates(rates)
        return info

    def _with_tables(
        self, optimizer: Optional[torch.optim.Optimizer], progress: Optional[TrainingProgress], standing: dict[str, Any]
    ) -> tuple[Optional[torch.optim.Optimizer], TrainingProgress]:
        comm = self._comm
        self._demand_ranks()
        if progress is None:
            progress = checkpoint._progress(
                standing.pop("step", 0), standing.pop("epoch", 0), standing.pop("sampler", None), standing.pop("values", None)
            )
        if standing:
            raise TypeError(f"save() got an unexpected argument {next(iter(standing))!r}")
        agree(comm, None)  # every rank has ended its clock
        name = f"{_NAME}{progress.step}-{uuid.uuid4().hex[:8]}"

        def write() -> None:
            self._hold_tables()
            self._client.snapshot(os.path.join(self.folder, _TABLES, name))

        made = attempt(write) if rank_of(comm) == 0 else None
        name = share(comm, name.encode(), made).decode()
        values = {**progress.values, _SNAPSHOT: name}
        if isinstance(optimizer, HybridOptimizer):
            values.update({_RATE + table: rate for table, rate in optimizer.table_rates().items()})
        return _dense_of(optimizer), dataclasses.replace(progress, values=values)

    def _demand_ranks(self) -> None:
        ranks = size_of(self._comm)
        if ranks != self._client.workers:
            raise InvalidArgument(
                f"a checkpoint with tables is saved and loaded by all workers together, and there are "
                f"{self._client.workers} of them on {ranks} rank{'s' if ranks > 1 else ''} -- cohort.init() first"
            )

    def _demand_empty(self) -> None:
        for table in self._client.tables:
            rows = table.stats()["rows"]
            if rows:
                raise InvalidArgument(f"load_latest: table {table.name!r} has {rows} rows already -- start the servers anew")

    def _path(self, info: CheckpointInfo) -> str:
        return os.path.join(self.folder, _TABLES, str(info.progress.values.get(_SNAPSHOT, "")))

    def _require_whole(self, info: CheckpointInfo) -> None:
        if _SNAPSHOT not in info.progress.values:
            raise Corrupt(f"{info.folder}: it was saved without tables")
        stored = _core.list_checkpoints(self._path(info))
        if not stored:
            raise Corrupt(f"{info.folder}: its tables are not whole, or not there, in {self._path(info)}")
        stored[-1].require_whole()

    def _newest_whole(self) -> int:
        """Returns the newest generation on this rank's disk whose tables are undamaged, or the newest of all if there is
        none, because the base class reports problems of the dense parts. 0: there are no checkpoints."""
        infos = self.list()
        for info in reversed(infos):
            try:
                self._require_whole(info)
                return info.generation
            except Error as error:
                checkpoint._log.warning("passed over: %s", error)
        return infos[-1].generation if infos else 0

    def _hold_tables(self) -> None:
        """Keeps others from removing these tables until both parts exist, since no checkpoint names the tables yet."""
        if self._lock is None:
            os.makedirs(os.path.join(self.folder, _TABLES), exist_ok=True)
            self._lock = _locked(os.path.join(self.folder, _TABLES), fcntl.LOCK_SH)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _remove_old(self) -> None:
        """Removes tables that no checkpoint names: those of removed checkpoints and killed saves. Does nothing during a
        save, and keeps tables that a manifest unreadable here may name."""
        if rank_of(self._comm) != 0:
            return
        tables = os.path.join(self.folder, _TABLES)
        try:
            lock = _locked(tables, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # there are none, or a save is running
            return
        try:
            manifests = []
            for entry in os.listdir(self.folder):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    manifests.append(pathlib.Path(self.folder, entry, "manifest.json").read_bytes())
            for name in os.listdir(tables):
                if name.startswith(_NAME) and not any(name.encode() in manifest for manifest in manifests):
                    shutil.rmtree(os.path.join(tables, name), ignore_errors=True)
        except OSError as error:
            checkpoint._log.warning("tables of earlier checkpoints stay in %s for now: %s", tables, error)
        finally:
            os.close(lock)


def _locked(folder: str, how: int) -> int:
    """Returns a descriptor that holds the folder's lock while open; without a lock if the file system does not support any."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError as error:
        checkpoint._log.info("%s: no lock, %s; make sure that one job at a time saves there", folder, error)
    return descriptor


def _dense_of(optimizer: Optional[torch.optim.Optimizer]) -> Optional[torch.optim.Optimizer]:
    return optimizer.dense if isinstance(optimizer, HybridOptimizer) else optimizer
