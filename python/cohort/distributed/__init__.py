"""The backend "cohort" of torch.distributed.

    import torch.distributed as dist
    import cohort                              # torch 1.13 to 2.4; later ones find it by themselves
    dist.init_process_group("cohort")          # instead of "gloo"

Importing this package imports torch; `import cohort` does not.
"""

from __future__ import annotations

from cohort._torch_backend import register
from cohort.distributed.group import ProcessGroup
from cohort.distributed.monitored import abort, is_over, members_changed, monitored_barrier

register()

__all__ = ["ProcessGroup", "abort", "is_over", "members_changed", "monitored_barrier", "register"]
