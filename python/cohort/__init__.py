"""Cohort: N processes that train as if they were one.

    import cohort
    cohort.init()                       # under `cohort run -np 4 train.py`, torchrun, or alone
    world = cohort.world()
    world.all_reduce(tensor, op="average")

Arrays are torch tensors, NumPy arrays, or anything with the buffer protocol or DLPack, in the host's memory; they are
used in place, never copied. This package imports neither torch nor NumPy.
"""

from __future__ import annotations

from cohort.errors import (
    Aborted,
    Corrupt,
    Error,
    Internal,
    InvalidArgument,
    Io,
    Mismatch,
    NonFinite,
    PeerLost,
    RankFailed,
    Timeout,
    Unavailable,
)

try:
    from cohort._core import (
        ClusterSpec,
        Communicator,
        Memory,
        ReduceOp,
        Work,
        __version__,
        announce_server,
        num_servers,
        num_workers,
        role,
        role_number,
        server_addresses,
        supports,
    )
except ModuleNotFoundError as missing:
    if missing.name != "cohort._core":
        raise
    import sys as _sys

    raise ImportError(
        f"cohort's compiled module is not there for this Python -- {_sys.implementation.cache_tag}, looked in "
        f"{__path__[0]} -- wheels hold those of CPython 3.9 to 3.14 (not of its free-threaded builds); `pip install .` in "
        "a clone of Cohort builds it; in a build folder, put build/PRESET/python on PYTHONPATH"
    ) from missing

from cohort._early_stopping import EarlyStopping
from cohort._process.preemption import REQUEUE_STATUS, Preemption
from cohort._torch_backend import monitored_barrier, wait_for_torch as _wait_for_torch
from cohort._process.world import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    new_world,
    rank,
    shutdown,
    size,
    world,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cohort._launch.functions import run
    from cohort._spark.rows import Rows
    from cohort._process.threads import run_on_threads
    from cohort.distributor import Distributor

# Modules that are imported when first used, because importing those that start processes takes milliseconds, and some
# of them import torch.
_LATER = {
    "Distributor": "cohort.distributor",
    "Rows": "cohort._spark.rows",
    "run": "cohort._launch.functions",
    "run_on_threads": "cohort._process.threads",
}
_MODULES = {"chainermn", "checkpoint", "data", "distributed", "elastic", "horovod", "jax", "keras", "metrics", "nn", "optim", "ps",
            "ray", "tensorflow", "track"}  # fmt: skip


def __getattr__(name: str) -> object:
    import importlib

    try:
        if name in _MODULES:
            return importlib.import_module(f"cohort.{name}")
        if name in _LATER:
            value = getattr(importlib.import_module(_LATER[name]), name)
            globals()[name] = value
            return value
    except ImportError as error:  # for `hasattr` and `help`, which look up names; importing the module shows the cause
        raise AttributeError(f"cohort.{name} cannot be used here -- {error}") from error
    raise AttributeError(f"module 'cohort' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_MODULES})


__all__ = [
    "Aborted",
    "ClusterSpec",
    "Communicator",
    "Corrupt",
    "Distributor",
    "EarlyStopping",
    "Error",
    "Internal",
    "InvalidArgument",
    "Io",
    "Memory",
    "Mismatch",
    "NonFinite",
    "PeerLost",
    "Preemption",
    "REQUEUE_STATUS",
    "RankFailed",
    "ReduceOp",
    "Rows",
    "Timeout",
    "Unavailable",
    "Work",
    "__version__",
    "announce_server",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "monitored_barrier",
    "new_world",
    "num_servers",
    "num_workers",
    "rank",
    "role",
    "role_number",
    "run",
    "run_on_threads",
    "server_addresses",
    "shutdown",
    "size",
    "supports",
    "world",
]

_wait_for_torch()


def _look_after_mlflow() -> None:
    import os

    if os.environ.get("COHORT_MLFLOW", "0").lower() in ("1", "true", "yes", "on") and "RANK" in os.environ:
        from cohort._launch.mlflow_rank import install

        install()


_look_after_mlflow()
