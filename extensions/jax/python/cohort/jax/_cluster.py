"""Under `cohort run`, `jax.distributed.initialize()` without arguments finds the other processes, at MASTER_ADDR and
MASTER_PORT, as programs of torch do. This is for JAX's own communication, beside this package's."""

from __future__ import annotations

import os
from typing import Any, Optional

try:
    from jax._src.clusters.cluster import ClusterEnv
except ImportError:  # `initialize` then needs addresses as arguments, as usual
    ClusterEnv = None

_NEEDED = ("COHORT_JOB_ID", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def register() -> None:
    """Called once. JAX tries this class before its own, so that a job within a Slurm allocation uses the job's ranks."""
    if ClusterEnv is None:
        return

    class Cohort(ClusterEnv):  # type: ignore[misc, valid-type, unused-ignore]
        name = "cohort"

        @classmethod
        def is_env_present(cls) -> bool:
            return all(os.environ.get(name) for name in _NEEDED)

        @classmethod
        def get_coordinator_address(
            cls, timeout_secs: Optional[int] = None, override_coordinator_port: Any = None
        ) -> str:
            host, port = os.environ["MASTER_ADDR"], override_coordinator_port or os.environ["MASTER_PORT"]
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["WORLD_SIZE"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ["RANK"])

        @classmethod
        def get_local_process_id(cls) -> Optional[int]:
            local = os.environ.get("LOCAL_RANK")
            return None if local is None else int(local)

    known = getattr(ClusterEnv, "_cluster_types", None)
    if isinstance(known, list) and Cohort in known:
        known.remove(Cohort)
        known.insert(0, Cohort)
