"""Common to the tests of `cohort.jax`: JAX, from build/jax (tools/setup --for all) or COHORT_TEST_JAX or as
installed, and the world (`from support_jax import setUpModule, tearDownModule`)."""

import os
import pathlib
import sys
import unittest

JAX = os.environ.get("COHORT_TEST_JAX", str(pathlib.Path(__file__).resolve().parents[3] / "build" / "jax"))
if os.path.isdir(JAX):
    sys.path.insert(0, JAX)  # before NumPy is imported, because JAX's folder has its own

from support import SECONDS  # noqa: E402

os.environ.setdefault("JAX_PLATFORMS", "cpu")

try:
    import jax
    import numpy as np
except ImportError:
    jax = np = hvd = None
else:
    import cohort.jax as hvd

NEEDED = "needs jax: tools/setup --for all"


def setUpModule():
    if jax is None:
        raise unittest.SkipTest(NEEDED)
    os.environ["COHORT_TIMEOUT"] = str(int(SECONDS))
    hvd.init()


def tearDownModule():
    hvd.shutdown()


class Case(unittest.TestCase):
    def setUp(self):
        self.rank, self.size = hvd.rank(), hvd.size()

    def same(self, array, expected):
        """Asserts the same shape, type and bits."""
        expected = np.asarray(expected)
        array = np.asarray(array)
        self.assertEqual(array.shape, expected.shape)
        self.assertEqual(array.dtype, expected.dtype)
        self.assertEqual(array.tobytes(), expected.tobytes(), f"{array} is not {expected}")

    def close(self, array, expected, tolerance=1e-5):
        np.testing.assert_allclose(np.asarray(array), np.asarray(expected), rtol=tolerance, atol=tolerance)

    def of_rank(self, rank, shape, dtype="float32"):
        """Returns the input of that rank, which any rank can compute. The values use all their bits."""
        values = np.random.default_rng(17 * rank + sum(shape)).normal(size=shape) * 100
        return values.astype(dtype)

    def own(self, shape, dtype="float32"):
        return self.of_rank(self.rank, shape, dtype)

    def of_all(self, shape, dtype="float32"):
        return [self.of_rank(rank, shape, dtype) for rank in range(self.size)]
