"""The world of tests of `cohort.torch`: `from support_hvd import setUpModule, tearDownModule`."""

import os
import unittest

from support import SECONDS, torch

if torch is not None:
    import cohort.torch as hvd


def setUpModule():
    if torch is None:
        raise unittest.SkipTest("torch is not installed")
    os.environ["COHORT_TIMEOUT"] = str(int(SECONDS))
    torch.set_num_threads(1)
    hvd.init()


def tearDownModule():
    hvd.shutdown()
