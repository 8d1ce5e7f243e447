"""Common to the tests of operations by name: the engine, and values of every kind."""

import unittest

from support import KINDS, SECONDS

import cohort
from cohort import _core


def setUpModule():
    cohort.init(timeout=SECONDS)


def tearDownModule():
    cohort.shutdown()


def number(value, dtype):
    return complex(value, -value) if dtype.startswith("complex") else value


class WithEngine(unittest.TestCase):
    options = {}

    def setUp(self):
        self.engine = _core.NamedEngine(cohort.world().split(), **self.options)
        self.rank, self.size = self.engine.rank(), self.engine.size()

    def tearDown(self):
        # A failed rank must not leave the others waiting, and a rank that is done must not end the others' engines.
        self.engine.barrier("the test is over").wait(timeout=SECONDS)
        self.engine.shutdown()

    def each(self, unless=()):
        for kind in KINDS:
            for dtype in kind.dtypes:
                if dtype not in unless:
                    with self.subTest(kind=kind.name, dtype=dtype):
                        yield kind, dtype

    def make(self, kind, dtype, *values):
        return kind.make([number(value, dtype) for value in values], dtype)

    def expect(self, kind, dtype, array, *values):
        self.assertEqual(kind.values(array), [number(value, dtype) for value in values])

    def seen(self, result):
        return memoryview(result).tolist()
