"""What HOROVOD_* variables ask of the engine. Those that have no meaning here are listed in the docs and ignored."""

from __future__ import annotations

from typing import Any, Dict, Optional

from cohort._core import environment_value


def is_on(name: str) -> bool:
    """Whether a variable is set to something that means yes."""
    return environment_value(name) is True


def engine_options() -> Dict[str, Any]:
    """Arguments for `NamedEngine`. Raises InvalidArgument for a variable whose value has no meaning."""
    stall = environment_value("HOROVOD_STALL_CHECK_TIME_SECONDS")
    options: Dict[str, Any] = {
        "fusion_threshold": environment_value("HOROVOD_FUSION_THRESHOLD"),
        "cache_capacity": environment_value("HOROVOD_CACHE_CAPACITY"),
    }
    if is_on("HOROVOD_STALL_CHECK_DISABLE"):
        options["stall_after"] = None
    elif stall:
        options["stall_after"] = stall
    limit = environment_value("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    if limit:
        options["timeout"] = limit
    return options


def timeline_file() -> Optional[str]:
    """The file of HOROVOD_TIMELINE, or None where there is none yet."""
    path = str(environment_value("HOROVOD_TIMELINE") or "")
    return None if path in ("", "DYNAMIC") else path
