"""Common to the tests of `cohort.tensorflow`: their world (`from support_tensorflow import setUpModule, tearDownModule`),
and comparisons. with_tensorflow.py runs them."""

import os
import unittest

import numpy as np
import tensorflow as tf
from support import SECONDS

import cohort.tensorflow as hvd


def setUpModule():
    tf.get_logger().setLevel("ERROR")  # it warns of many small graphs, which tests make
    os.environ["COHORT_TIMEOUT"] = str(int(SECONDS))
    hvd.init()


def tearDownModule():
    hvd.shutdown()


class Case(unittest.TestCase):
    def setUp(self):
        self.rank, self.size = hvd.rank(), hvd.size()

    def same(self, tensor, expected):
        np.testing.assert_array_equal(np.asarray(tensor), np.asarray(expected))

    def close(self, tensor, expected):
        np.testing.assert_allclose(np.asarray(tensor, np.float64), np.asarray(expected, np.float64), rtol=1e-5)

    def both(self, function, *args):
        """Yields the result of `function(*args)` in eager mode, and that of its second run as a graph."""
        yield function(*args)
        whole = tf.function(function)
        whole(*args)
        yield whole(*args)
