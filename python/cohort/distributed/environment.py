"""RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for programs that read them, where no launcher has set them.

They are set with the default group, and go with it: a process started afterwards is no rank of it.
"""

from __future__ import annotations

import os

import cohort


def fill(communicator: cohort.Communicator) -> list[tuple[str, str]]:
    """Sets what is missing; returns that."""
    values = {
        "RANK": communicator.rank(),
        "WORLD_SIZE": communicator.size(),
        "LOCAL_RANK": communicator.local_rank(),
        "LOCAL_WORLD_SIZE": communicator.local_size(),
    }
    filled = [(name, str(value)) for name, value in values.items() if not os.environ.get(name)]
    os.environ.update(filled)
    return filled


def take_back(filled: list[tuple[str, str]]) -> None:
    while filled:
        name, value = filled.pop()
        if os.environ.get(name) == value:
            del os.environ[name]
