"""Where the ranks that torchrun has started on several hosts meet: torch's store, which its agent keeps at MASTER_PORT.

Anybody who reaches that port can read and write it, so the world is as safe as the store; with COHORT_SECRET_FILE no
secret goes through it.
"""

from __future__ import annotations

import datetime
import os
from typing import Any, Callable, Optional

Share = Callable[[str, Optional[str], float], str]


def meeting(join_timeout: Any) -> tuple[Share, str, int, int]:
    """How to share, what it is called, and this process's rank and world size, for `cohort.join`. Imports torch."""
    import torch.distributed as dist

    seconds = 300.0 if join_timeout is None else getattr(join_timeout, "total_seconds", lambda: float(join_timeout))()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=max(1.0, seconds))))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    share = through(dist.PrefixStore(f"cohort/init/{attempt}", store), rank)
    return share, f"torch's store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", rank, size


def through(store: Any, rank: int) -> Share:
    """For `cohort.join(share=...)`: what rank 0 puts into a store of torch's, every rank takes from it."""

    def share(key: str, mine: Optional[str], seconds: float) -> str:
        if rank == 0:
            assert mine is not None
            store.set(key, mine.encode())
            return mine
        store.wait([key], datetime.timedelta(seconds=seconds))
        return bytes(store.get(key)).decode()

    return share
