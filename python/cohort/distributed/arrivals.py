"""Names exactly the ranks that have reached a monitored_barrier. Rank 0 of the group receives a message from each rank,
answers that it has arrived itself, and at the end whether all have arrived. Ordinary barriers between hosts report a
host's ranks only together.
"""

from __future__ import annotations

import time
from typing import Any, Optional, Sequence

import torch

import cohort

# Tag of these messages, so high that no program uses it.
_TAG = (1 << 31) - 1729
_MARK = "monitored_barrier: "
_HERE, _ALL = 1, 2


def wait_for_all(world: cohort.Communicator, ranks: Sequence[int], seconds: float) -> None:
    """Returns on every rank when all have arrived. If some have not after `seconds`, ends the world on all ranks, and
    raises cohort.Timeout with all missing ranks on those that have arrived; the others' operations raise Aborted.

    world    the group's world
    ranks    the group's ranks as the program numbers them: in torch's world
    """
    if world.size() == 1:
        return
    try:
        if world.rank() == 0:
            _hear(world, ranks, seconds)
        else:
            _report(world, ranks, seconds)
    except cohort.Aborted as error:
        before, mark, reason = (error.cause or str(error)).partition(_MARK)
        if not mark:
            raise
        raise cohort.Timeout(_MARK + reason) from error


def _byte(value: int = 0) -> torch.Tensor:
    return torch.full((1,), value, dtype=torch.uint8)


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())


def _give_up(world: cohort.Communicator, ranks: Sequence[int], missing: Sequence[int], seconds: float) -> None:
    names = ", ".join(str(ranks[rank]) for rank in missing)
    names = f"rank {names}" if len(missing) == 1 else f"ranks {names}"
    whole = "" if len(ranks) == ranks[-1] + 1 else f" of the group's ranks {', '.join(map(str, ranks))}"
    reason = (
        f"{_MARK}{names}{whole} did not come within {seconds:g} s -- stopped, slow, or in another branch of the program? "
        "give a longer timeout if only slow; form a new group"
    )
    world.abort(reason)
    raise cohort.Timeout(reason)


def _hear(world: Any, ranks: Sequence[int], seconds: float) -> None:
    until = time.monotonic() + seconds
    others = range(1, world.size())
    # The messages' own deadline, which expires only if this process is kept from checking `until`.
    how = {"tag": _TAG, "timeout": 2 * seconds + 60, "async_op": True}
    heard = [world.recv(_byte(), rank, **how) for rank in others]
    said = [world.send(_byte(_HERE), rank, **how) for rank in others]
    missing = [rank for rank, one in zip(others, heard) if not one.wait(_left(until))]
    if missing:
        _give_up(world, ranks, missing, seconds)
    said += [world.send(_byte(_ALL), rank, **how) for rank in others]
    for one in said:
        one.wait()


def _report(world: Any, ranks: Sequence[int], seconds: float) -> None:
    how = {"tag": _TAG, "timeout": 2 * seconds + 60, "async_op": True}
    said = world.send(_byte(), 0, **how)
    if not world.recv(_byte(), 0, **how).wait(seconds):
        _give_up(world, ranks, [0], seconds)
    # Rank 0 checks its own deadline, and then names the missing ranks, or ends.
    world.recv(_byte(), 0, **how).wait()
    said.wait()


def seconds_of(timeout: Any, otherwise: Optional[float]) -> float:
    """Converts a timedelta, seconds, or None to seconds. 0: ranks that have not arrived already are missing."""
    if timeout is None:
        return 1800.0 if otherwise is None else otherwise
    seconds = float(timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout)
    if not 0 <= seconds <= 31_536_000:
        raise cohort.InvalidArgument(f"monitored_barrier: a timeout of {timeout} has no meaning -- give 0 s to a year")
    return max(0.001, seconds)
