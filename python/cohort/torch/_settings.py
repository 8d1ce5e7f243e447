"""What HOROVOD_* variables ask of the engine. Those that have no meaning here are listed in the docs and ignored."""

from __future__ import annotations

import os
from typing import Any, Dict, Optional


def _number(name: str) -> Optional[float]:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r}: not a number -- correct it or unset it") from None


def is_on(name: str) -> bool:
    """Whether a variable is set to something that means yes."""
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def engine_options() -> Dict[str, Any]:
    """Arguments for `NamedEngine`. Raises ValueError for a variable that is no number."""
    options: Dict[str, Any] = {}
    threshold = _number("HOROVOD_FUSION_THRESHOLD")
    if threshold is not None:
        options["fusion_threshold"] = max(int(threshold), 0)
    capacity = _number("HOROVOD_CACHE_CAPACITY")
    if capacity is not None:
        options["cache_capacity"] = max(int(capacity), 0)
    stall = _number("HOROVOD_STALL_CHECK_TIME_SECONDS")
    if is_on("HOROVOD_STALL_CHECK_DISABLE"):
        options["stall_after"] = None
    elif stall is not None and stall > 0:
        options["stall_after"] = stall
    limit = _number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    if limit is not None and limit > 0:
        options["timeout"] = limit
    return options


def timeline_file() -> Optional[str]:
    """The file of HOROVOD_TIMELINE, or None where there is none yet."""
    path = os.environ.get("HOROVOD_TIMELINE", "").strip()
    return None if path in ("", "DYNAMIC") else path
