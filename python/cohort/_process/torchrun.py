"""Lets ranks that torchrun has started on several hosts meet through torch's store, which its agent keeps at MASTER_PORT.

Anyone who reaches that port can read and write the store, so the world is only as safe as the store; with
COHORT_SECRET_FILE no secret goes through it.
"""

from __future__ import annotations

import datetime
import os
import time
from typing import Any, Callable, Optional

Share = Callable[[str, Optional[str], float], str]


def meeting(init_timeout: Any) -> tuple[Share, str, int, int]:
    """Returns the function for `share`, its name, and this process's rank and world size, for `cohort.new_world`.
    Imports torch."""
    import torch.distributed as dist

    given = 300.0 if init_timeout is None else getattr(init_timeout, "total_seconds", lambda: float(init_timeout))()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def store(seconds: float) -> Any:
        found, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=max(1.0, seconds))))
        return dist.PrefixStore(f"cohort/init/{attempt}", found)

    share = through(store(given), rank) if rank == 0 else _persistent(store, rank)
    return share, f"torch's store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", rank, size


def _persistent(connect: Callable[[float], Any], rank: int) -> Share:
    """Like `through`, for a rank above 0. Without an agent's store, rank 0 keeps the store, and may be closing an
    earlier one (of a group being destroyed), so a lost store is looked for again until the time is over."""

    def share(key: str, mine: Optional[str], seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                return through(connect(left), rank)(key, mine, max(left, 0.1))
            except RuntimeError:  # torch's errors of stores, including timeouts
                if deadline - time.monotonic() < 1:
                    raise
                time.sleep(0.1)

    return share


def through(store: Any, rank: int) -> Share:
    """Returns a function for `cohort.new_world(share=...)`: every rank receives rank 0's text through torch's store."""

    def share(key: str, mine: Optional[str], seconds: float) -> str:
        if rank == 0:
            assert mine is not None
            store.set(key, mine.encode())
            return mine
        store.wait([key], datetime.timedelta(seconds=seconds))
        return bytes(store.get(key)).decode()

    return share
