"""Common to the tests of `cohort.horovod.torch`: their world (`from support_hvd import setUpModule, tearDownModule`), and
comparisons."""

import os
import unittest

from support import SECONDS, torch

if torch is not None:
    import cohort.horovod.torch as hvd


def setUpModule():
    if torch is None:
        raise unittest.SkipTest("torch is not installed")
    os.environ["COHORT_TIMEOUT"] = str(int(SECONDS))
    torch.set_num_threads(1)
    hvd.init()


def tearDownModule():
    hvd.shutdown()


class Case(unittest.TestCase):
    def setUp(self):
        self.rank, self.size = hvd.rank(), hvd.size()

    def same(self, tensor, expected):
        expected = torch.as_tensor(expected, dtype=tensor.dtype)
        self.assertEqual(tuple(tensor.shape), tuple(expected.shape))
        self.assertTrue(torch.equal(tensor, expected), f"{tensor} is not {expected}")

    def close(self, tensor, expected):
        torch.testing.assert_close(tensor, torch.as_tensor(expected, dtype=tensor.dtype))
