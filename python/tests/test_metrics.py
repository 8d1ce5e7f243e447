"""Averages over the ranks of `cohort run -np N`."""

import math
import unittest

from support import SECONDS

import cohort
from cohort import metrics


def setUpModule():
    cohort.init(timeout=SECONDS)


def tearDownModule():
    cohort.shutdown()


class Averages(unittest.TestCase):
    def test_uneven_parts_are_averaged_exactly(self):
        rank, size = cohort.rank(), cohort.size()
        averages = metrics.Averages(["loss", "accuracy", "nothing"])
        averages.add("loss", rank + 1.0, 10 * rank)  # rank 0 has none
        averages.add("loss", 0.5, 2)
        averages.add("accuracy", 0.25)
        averages.add("nothing", math.nan, 0)
        count = 10 * sum(range(size)) + 2 * size
        result = averages.reduce()
        self.assertEqual(result["loss"].count, count)
        self.assertAlmostEqual(result["loss"].value, (sum((r + 1) * 10 * r for r in range(size)) + size) / count, 12)
        self.assertEqual(result["accuracy"], metrics.Mean(0.25, size))
        self.assertEqual(result["nothing"], (0.0, 0.0))
        self.assertEqual(averages.local()["loss"].count, 10 * rank + 2)
        self.assertEqual(averages.reduce(cohort.world()), result)  # the sums stay
        averages.clear()
        self.assertEqual(averages.local()["loss"], (0.0, 0.0))

    def test_one_number(self):
        size = cohort.size()
        mean = metrics.average(float(cohort.rank()), samples=cohort.rank() + 1)
        total = size * (size + 1) / 2
        self.assertEqual(mean.count, total)
        self.assertAlmostEqual(mean.value, sum(r * (r + 1) for r in range(size)) / total, 12)

    def test_results_of_an_evaluation(self):
        rank, size = cohort.rank(), cohort.size()
        self.assertEqual(metrics.average({"b": rank, "a": 2.0 * rank}), {"b": (size - 1) / 2, "a": size - 1.0})
        mixed = metrics.average({"a": metrics.Mean(rank, rank), "b": 1, "c": metrics.Mean(math.nan, 0)}, comm=cohort.world())
        count = sum(range(size))
        self.assertEqual(mixed["a"], (sum(r * r for r in range(size)) / count if count else 0.0, count))
        self.assertEqual((mixed["b"], mixed["c"]), (1.0, (0.0, 0.0)))
        self.assertEqual(metrics.average({}), {})
        if size > 1:
            with self.assertRaisesRegex(cohort.Mismatch, r"rank 0 has \['loss'\], rank 1 \['accuracy'\]"):
                metrics.average({"accuracy" if rank == 1 else "loss": 1.0})
            with self.assertRaisesRegex(cohort.Mismatch, r"rank 0 has \['loss'\], rank 1 \['loss \(Mean\)'\]"):
                metrics.average({"loss": metrics.Mean(1.0, 1) if rank == 1 else 1.0})

    def test_names_in_another_order(self):
        if cohort.size() > 1:
            averages = metrics.Averages(["loss", "accuracy"] if cohort.rank() > 0 else ["accuracy", "loss"])
            with self.assertRaises(cohort.Mismatch):
                averages.reduce()

    def test_misuse(self):
        with self.assertRaises(cohort.InvalidArgument):
            metrics.Averages(["a", "a"])
        averages = metrics.Averages(["a"])
        with self.assertRaisesRegex(cohort.InvalidArgument, "'b'"):
            averages.add("b", 1.0)
        with self.assertRaises(cohort.InvalidArgument):
            averages.add("a", 1.0, -1)


if __name__ == "__main__":
    unittest.main()
