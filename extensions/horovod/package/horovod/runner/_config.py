"""Options of `horovodrun` from a YAML file, by the names of Horovod's sections."""

from __future__ import annotations

from typing import Any

from horovod.runner._launching import AUTOTUNE

_PARAMS = ("fusion_threshold_mb", "cycle_time_ms", "cache_capacity", "hierarchical_allreduce", "hierarchical_allgather",
           "torus_allreduce")  # fmt: skip
_LIBRARIES = ("mpi_threads_disable", "num_nccl_streams", "thread_affinity", "gloo_timeout_seconds")
# section -> key -> the option's name
_SECTIONS = {
    "params": {name: name for name in _PARAMS},
    "autotune": {"enabled": "autotune", **{name: f"autotune_{name}" for name in AUTOTUNE}},
    "timeline": {name: f"timeline_{name}" for name in ("filename", "mark_cycles")},
    "stall_check": {
        "enabled": "stall_check",
        **{name: f"stall_check_{name}" for name in ("warning_time_seconds", "shutdown_time_seconds")},
    },
    "library_options": {name: name for name in _LIBRARIES},
    "logging": {"level": "log_level", "with_timestamp": "log_with_timestamp"},
}
_CONTROLLERS = ("gloo", "mpi", "jsrun")


def read(path: str) -> dict[str, Any]:
    """Returns the file's options. Raises ValueError, which names the file and what is wrong in it."""
    try:
        import yaml
    except ImportError:
        raise ValueError(
            f"--config-file {path}: it is YAML, and no Python package here reads that -- `pip install PyYAML` (Debian: "
            "python3-yaml), or give its options on the command line"
        ) from None
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise ValueError(f"--config-file {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"--config-file {path}: {error}") from error
    return wishes_of(content or {}, f"--config-file {path}")


def wishes_of(content: Any, where: str) -> dict[str, Any]:
    """Returns the options in a file's content."""
    if not isinstance(content, dict):
        raise ValueError(f"{where}: sections are wanted ({', '.join(_SECTIONS)})")
    wishes: dict[str, Any] = {}
    for section, values in content.items():
        if section == "controller":
            if values not in _CONTROLLERS:
                raise ValueError(f"{where}: controller: {values!r} is none of {', '.join(_CONTROLLERS)}")
            wishes[values] = True
            continue
        keys = _SECTIONS.get(section)
        if keys is None:
            raise ValueError(f"{where}: there is no section {section!r}; known are controller, {', '.join(_SECTIONS)}")
        for key, value in (values or {}).items():
            if key not in keys:
                raise ValueError(f"{where}: there is no {section}.{key}; known are {', '.join(keys)}")
            wishes[keys[key]] = value
    return wishes
