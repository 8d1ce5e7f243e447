"""Makes the workers of Ray Train, and the actors of `RayExecutor`, ranks of Cohort.

    from ray.train.torch import TorchTrainer
    TorchTrainer(train_loop, torch_config=cohort.ray.CohortConfig(), scaling_config=ScalingConfig(num_workers=4)).fit()

In `train_loop` torch's process group exists, of the backend "cohort" on CPUs, and `cohort.init()` and
`cohort.horovod.torch.init()` form worlds of the same ranks. Needs ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import tempfile
from typing import Any, Optional

from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

__all__ = ["CohortConfig"]

_VARIABLE = "COHORT_SECRET_FILE"


def keep_secret(digits: str) -> None:
    """Called in a worker; stores the secret where ranks look for it, in a file that only this user can read."""
    descriptor, path = tempfile.mkstemp(prefix="cohort-secret-")  # 0600
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(digits + "\n")
    os.environ[_VARIABLE] = path


def forget_secret() -> None:
    path = os.environ.pop(_VARIABLE, None)
    if path is not None:
        with contextlib.suppress(OSError):
            os.unlink(path)


class _CohortBackend(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        # The secret goes by Ray's own calls, because torch's store has no authentication.
        worker_group.execute(keep_secret, secrets.token_hex(32))
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        try:
            super().on_shutdown(worker_group, backend_config)
        finally:
            worker_group.execute(forget_secret)


@dataclasses.dataclass
class CohortConfig(TorchConfig):
    """A TorchConfig whose process group is Cohort's, with a new secret for each run.

    backend    for init_process_group: "cohort", or "cpu:cohort,cuda:nccl" if the ranks have GPUs
    timeout_s  timeout of the process group, as in TorchConfig
    """

    backend: Optional[str] = "cohort"

    @property
    def backend_cls(self) -> Any:
        return _CohortBackend
