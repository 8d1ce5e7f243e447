"""Support for tests of training with torch: one world for a module's tests (`from support_nn import setUpModule,
tearDownModule`), and comparisons between ranks."""

import unittest

from support import SECONDS, torch

import cohort


def setUpModule():
    if torch is not None:
        torch.set_num_threads(1)
        cohort.init(timeout=SECONDS)


def tearDownModule():
    if torch is not None:
        cohort.shutdown()


class Ranks(unittest.TestCase):
    def setUp(self):
        self.world = cohort.world()
        self.rank, self.size = self.world.rank(), self.world.size()

    def assert_close(self, ours, theirs, tolerance=1e-11):
        self.assertEqual(len(ours), len(theirs))
        for one, other in zip(ours, theirs):
            self.assertTrue(torch.allclose(one, other, tolerance, tolerance), (one - other).abs().max())

    def assert_same_bits_on_all_ranks(self, tensors):
        for tensor in tensors:
            others = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
            self.world.all_gather(tensor.contiguous(), others)
            for other in others:
                self.assertTrue(torch.equal(tensor, other))

    def mine(self, tensor, samples):
        """This rank's rows of the global batch; samples: of each rank."""
        begin = sum(samples[: self.rank])
        return tensor[begin : begin + samples[self.rank]]
