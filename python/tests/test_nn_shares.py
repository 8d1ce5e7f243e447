"""Shares of a step by speed, or as given, on the ranks of `cohort run -np 2`."""

import copy
import os
import pickle
import subprocess
import sys
import time
import unittest
from unittest import mock

from support import SECONDS, needs_torch, torch
from support_nn import Ranks, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

from cohort import errors
from cohort.data import DistributedSampler

if torch is not None:
    from cohort.nn import DistributedDataParallel

SIZE, BATCH = 320, 16
SECONDS_OF_A_SAMPLE = (0.001, 0.003)  # of rank 0 and 1: 24 and 8 of 32 samples take 24 ms, 16 and 16 take 48


@needs_torch
class Shares(Ranks):
    def train(self, epochs, **options):
        """(times that each sample was used, this rank's samples of each full step); gradients are those of the whole step's
        samples."""
        sampler = DistributedSampler(SIZE, batch_size=BATCH, seed=3, **options)
        model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False).double(), sampler=sampler)
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(SIZE, 4, generator=generator, dtype=torch.double)
        used = torch.zeros(epochs, SIZE, dtype=torch.double)
        counts = []
        for epoch in range(epochs):
            for batch in sampler:
                before = used[epoch].clone()
                used[epoch, batch] += 1
                model.zero_grad()
                model(data[batch]).mean().backward()
                time.sleep(SECONDS_OF_A_SAMPLE[self.rank] * len(batch))
                step = used[epoch] - before  # of both ranks, below
                self.world.all_reduce(step)
                expected = (data * step[:, None]).sum(0) / step.sum()
                self.assert_close([model.module.weight.grad[0]], [expected], 1e-12)
                counts.append(len(batch))
                sampler.step()
        self.world.all_reduce(used)
        self.assert_same_bits_on_all_ranks([model.module.weight.grad])
        return used, counts

    def test_measured_shares_balance_what_ranks_compute(self):
        used, counts = self.train(8, shares="measured")
        self.assertTrue(torch.equal(used, torch.ones_like(used)))
        self.assertEqual(counts[0], BATCH)
        steps = SECONDS_OF_A_SAMPLE[self.rank] * torch.tensor(counts, dtype=torch.double)
        self.world.all_reduce(steps, op="max")
        # Other time of a step, on a busy machine, counts for both ranks and moves the shares away from the best.
        self.assertLess(steps.min().item(), 0.036, counts)

    def test_given_shares(self):
        used, counts = self.train(1, shares=(3, 1))
        self.assertTrue(torch.equal(used, torch.ones_like(used)))
        self.assertEqual(counts, [(24, 8)[self.rank]] * (SIZE // (2 * BATCH)))

    def test_the_environment_counts_where_averages_go_by_samples(self):
        with mock.patch.dict(os.environ, COHORT_SHARES="3,1"):
            alone = DistributedSampler(SIZE, batch_size=BATCH)
            self.assertEqual(len(alone.next_batch()), BATCH)
            with self.assertRaisesRegex(errors.InvalidArgument, "make the model first"):
                DistributedDataParallel(torch.nn.Linear(4, 1), sampler=alone)
            self.assertEqual(len(DistributedSampler(SIZE).next_batch()), 1)  # single samples: all the same
            _, counts = self.train(1)
            self.assertEqual(counts[0], (24, 8)[self.rank])

    def test_what_cannot_be_is_refused(self):
        for shares in ((1, 2, 3), "fast", "2,"):
            with self.assertRaises(errors.InvalidArgument):
                DistributedSampler(SIZE, batch_size=BATCH, shares=shares)
        with self.assertRaisesRegex(errors.InvalidArgument, "batch_size"):
            DistributedSampler(SIZE, shares="measured")
        given = DistributedSampler(SIZE, batch_size=BATCH, shares=(3, 1))
        with self.assertRaisesRegex(errors.InvalidArgument, "shares for 2 ranks in a world of 3"):
            given.set_world(0, 3)

    def test_copies_have_the_shares_that_were_asked_for(self):
        sampler = DistributedSampler(SIZE, batch_size=BATCH, shares=(3, 1))
        model = DistributedDataParallel(torch.nn.Linear(4, 1), sampler=sampler)
        other = pickle.loads(pickle.dumps(model))  # takes the sampler along
        for one in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler)), other._weights.sampler):
            self.assertEqual(len(one.next_batch()), (24, 8)[self.rank])
        other(torch.ones((24, 8)[self.rank], 4)).mean().backward()
        self.assertIs(copy.deepcopy(model)._weights.sampler, sampler)

    def test_shares_that_have_no_effect_are_said(self):
        if self.rank != 0:
            return
        program = """
from cohort.data import DistributedSampler
sampler = DistributedSampler(8, batch_size=2{})
for _ in sampler:
    sampler.step()
"""
        model = """
import torch
from cohort import _core, nn
nn.DistributedDataParallel(torch.nn.Linear(1, 1), _core.form_thread_world(1, None, None)[0])
"""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("COHORT_")}
        for source, shares, warnings in (
            (program.format(", shares='measured'"), "even", 1),
            (program.format(""), "1", 1),
            (program.format(", shares=(1,)"), "even", 0),
            (program.format(""), "even", 0),
            (model, "measured", 1),
        ):
            said = subprocess.run([sys.executable, "-c", source], env={**environment, "COHORT_SHARES": shares}, check=True,
                                  capture_output=True, text=True, timeout=SECONDS).stderr  # fmt: skip
            self.assertEqual(said.count("have no effect"), warnings, (source, shares, said))

    def test_another_world_begins_with_even_shares(self):
        sampler = DistributedSampler(SIZE, batch_size=BATCH, shares="measured")
        sampler.set_world(0, 3)
        self.assertEqual(len(sampler.next_batch()), BATCH)
        self.assertEqual(sampler.state().size, SIZE)


if __name__ == "__main__":
    unittest.main()
