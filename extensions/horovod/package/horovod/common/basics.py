"""`HorovodBasics`: the life cycle, the topology and the queries of `cohort.horovod.torch`, as methods."""

from __future__ import annotations

from typing import Any

import cohort.horovod.torch as _hvd


class HorovodBasics:
    """For programs that make their own object. Horovod's arguments, the names of its libraries, have no effect."""

    def __init__(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(_hvd, name)
