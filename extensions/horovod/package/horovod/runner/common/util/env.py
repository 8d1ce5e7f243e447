"""Looks up environment variables for programs, by functions with Horovod's names and meanings."""

from __future__ import annotations

import os
import re

# Variables of Horovod, which `--as-horovod` sets, and of the launchers of Open MPI and MPICH.
_RANK_AND_SIZE = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
)

# Variables and functions of the shell that starts ranks.
_OWN = re.compile(r"BASH_FUNC_.*|OLDPWD")


def get_env_rank_and_size() -> tuple[int, int]:
    """Returns this process's rank and the number of ranks, as set by the launcher; (0, 1) without one. Needs no `init`."""
    for rank, size in _RANK_AND_SIZE:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def is_exportable(variable: str) -> bool:
    """Returns True if a variable of this name is given to ranks."""
    return not _OWN.fullmatch(variable)
