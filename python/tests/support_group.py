"""For modules whose tests run in the world of init_process_group("cohort"): they import setUpModule and tearDownModule."""

import datetime

from support import SECONDS, torch

import cohort  # noqa: F401 -- makes the backend known

if torch is not None:
    import torch.distributed as dist


def setUpModule():
    if torch is not None:
        dist.init_process_group("cohort", timeout=datetime.timedelta(seconds=SECONDS))


def tearDownModule():
    if torch is not None:
        dist.destroy_process_group()
