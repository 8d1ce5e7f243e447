"""Learning rates of N ranks, as the C++ scheduler sets them. One process."""

import math
import unittest

from support import needs_torch, torch

import cohort

if torch is not None:
    from cohort.optim import Scaling, WarmupScheduler, scale_factor


@needs_torch
class Rates(unittest.TestCase):
    def optimizer(self, *rates):
        groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
        optimizer = torch.optim.SGD(groups, lr=0.5)
        return optimizer, lambda: [group["lr"] for group in optimizer.param_groups]

    def test_factors(self):
        self.assertEqual([scale_factor(kind, 4) for kind in Scaling], [4.0, 2.0, 1.0])
        self.assertEqual(scale_factor("square_root", 3), math.sqrt(3))
        with self.assertRaises(cohort.InvalidArgument):
            scale_factor("linear", 0)

    def test_warm_up_and_decay(self):
        optimizer, rates = self.optimizer(0.1, 0.2)
        schedule = WarmupScheduler(optimizer, world_size=4, warmup_steps=3, decay=lambda step: 0.5 if step >= 5 else 1.0)
        seen = []
        for _ in range(7):
            seen.append(rates()[0] / 0.1)
            self.assertAlmostEqual(rates()[1], 2 * rates()[0])
            optimizer.step()
            schedule.step()
        for one, expected in zip(seen, [1, 2, 3, 4, 4, 2, 2]):
            self.assertAlmostEqual(one, expected)
        self.assertEqual(schedule.steps, 7)
        schedule.set_step(2)
        self.assertAlmostEqual(rates()[0], 0.3)
        self.assertAlmostEqual(schedule.rate_at(0), 0.1)
        optimizer.step()
        schedule.step()
        self.assertAlmostEqual(rates()[0], 0.4)

    def test_state(self):
        optimizer, rates = self.optimizer(0.1)
        schedule = WarmupScheduler(optimizer, world_size=2, warmup_steps=4)
        optimizer.step()
        schedule.step()
        other, others = self.optimizer(0.1)
        again = WarmupScheduler(other, world_size=2, warmup_steps=4)
        again.load_state_dict(schedule.state_dict())
        other.step()
        again.step()
        self.assertAlmostEqual(others()[0], 0.15)
        self.assertAlmostEqual(rates()[0], 0.125)

    def test_misuse(self):
        optimizer, _ = self.optimizer(0.1)
        for wrong in ({"world_size": 0}, {"warmup_steps": -1}):
            with self.assertRaises(cohort.InvalidArgument):
                WarmupScheduler(optimizer, **wrong)
        with self.assertRaises(cohort.InvalidArgument):
            WarmupScheduler(optimizer).set_step(-1)


if __name__ == "__main__":
    unittest.main()
