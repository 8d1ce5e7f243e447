"""The sampler: the C++ one's order, every sample once, positions that any world can go on from. One process."""

import os
import random
import subprocess
import unittest

from support import SECONDS, needs_torch, torch

import cohort
from cohort.data import DistributedSampler, EmptyBatches, Remainder, SamplerState, permutation


def epoch_of(samplers):
    """Steps of all ranks' lists, until all have ended together."""
    steps = []
    while True:
        parts = [sampler.next_batch() for sampler in samplers]
        if any(part is None for part in parts):
            assert all(part is None for part in parts)
            return steps
        steps.append(parts)


def ranks(size, world, **options):
    return [DistributedSampler(size, world, rank, **options) for rank in range(world)]


class Order(unittest.TestCase):
    def test_the_permutation_is_defined_to_the_bit(self):
        # The same figures as in the C++ sampler's tests.
        self.assertEqual(list(permutation(10, 0, 0)), [5, 2, 9, 6, 1, 8, 7, 3, 0, 4])
        self.assertEqual(list(permutation(10, 42, 7)), [4, 9, 2, 1, 6, 3, 0, 8, 5, 7])
        self.assertEqual(sorted(permutation(1000, 2**64 - 1, 3)), list(range(1000)))
        self.assertEqual(list(permutation(0)), [])

    def test_every_sample_once_whatever_the_world(self):
        dice = random.Random(7)
        for _ in range(150):
            size, world, batch = dice.randrange(0, 60), dice.randrange(1, 6), dice.randrange(1, 7)
            shuffle, remainder = dice.random() < 0.7, dice.choice(list(Remainder))
            with self.subTest(size=size, world=world, batch=batch, shuffle=shuffle, remainder=remainder):
                samplers = ranks(size, world, shuffle=shuffle, seed=5, batch_size=batch, remainder=remainder)
                for sampler in samplers:
                    sampler.set_epoch(3)
                steps = epoch_of(samplers)
                self.assertEqual(len(steps), samplers[0].steps_per_epoch())
                self.assertEqual(len(steps), len(samplers[0]))
                order = list(permutation(size, 5, 3)) if shuffle else list(range(size))
                got = [index for parts in steps for part in parts for index in part]
                full = batch * world
                expected = {
                    Remainder.KEEP: order,
                    Remainder.DROP: order[: size // full * full],
                    Remainder.PAD: [order[i % size] for i in range(-(-size // full) * full)] if size else [],
                }[remainder]
                self.assertEqual(got, expected)
                for parts in steps:
                    sizes = [len(part) for part in parts]
                    self.assertLessEqual(max(sizes) - min(sizes), 1)

    def test_in_the_place_of_torch_s_sampler(self):
        for drop in (False, True):
            lists = [list(sampler) for sampler in ranks(23, 4, drop_last=drop)]
            self.assertEqual({len(one) for one in lists}, {5 if drop else 6})
            self.assertEqual(len(ranks(23, 4, drop_last=drop)[0]), len(lists[0]))
            self.assertEqual(len({index for one in lists for index in one}), 20 if drop else 23)
        self.assertEqual([list(s) for s in ranks(5, 2, shuffle=False)], [[0, 2, 4], [1, 3, 0]])
        by_position = DistributedSampler(range(7), 2, 1, False, 0, True)
        self.assertEqual(list(by_position), [1, 3, 5])
        kept = ranks(5, 2, shuffle=False, remainder="keep")
        self.assertEqual([(len(s), list(s)) for s in kept], [(3, [0, 2, 4]), (2, [1, 3])])

    def test_epochs_follow_each_other(self):
        sampler = DistributedSampler(11, seed=3)
        for epoch in range(3):
            self.assertEqual(list(sampler), list(permutation(11, 3, epoch)))
        for epoch in (5, 0):
            sampler.set_epoch(epoch)
            self.assertEqual(list(sampler), list(permutation(11, 3, epoch)))

    def test_what_has_no_meaning_is_refused(self):
        for arguments in ((-1,), (3, 2, 2), (3, 2, -1), (3, 0)):
            with self.assertRaises(cohort.InvalidArgument):
                DistributedSampler(*arguments)
        for options in ({"batch_size": 0}, {"seed": -1}, {"seed": 2**64}):
            with self.assertRaises(cohort.InvalidArgument):
                DistributedSampler(3, **options)
        with self.assertRaises(ValueError):
            DistributedSampler(3, remainder="sometimes")


class Positions(unittest.TestCase):
    def test_a_position_is_gone_on_from_by_another_world(self):
        before = ranks(50, 4, seed=9, batch_size=3)
        for sampler in before:
            sampler.set_epoch(2)
        used = []
        for _ in range(2):
            parts = [sampler.next_batch() for sampler in before]
            self.assertEqual(before[0].global_batch(), 12)
            used += [index for part in parts for index in part]
            for sampler in before:
                sampler.step()
        for sampler in before:  # drawn, but not stepped over
            sampler.next_batch()
        state = before[1].state()
        self.assertEqual(state, SamplerState(9, 2, 24, 50))
        after = ranks(50, 3, batch_size=5)
        for sampler in after:
            sampler.load_state(state)
        self.assertEqual(after[0].steps_left(), 2)
        used += [index for parts in epoch_of(after) for part in parts for index in part]
        self.assertEqual(used, list(permutation(50, 9, 2)))

    def test_a_virtual_rank_gets_what_a_rank_of_as_many_would(self):
        for size, remainder in ((50, "keep"), (50, "drop"), (50, "pad"), (2, "keep"), (0, "keep")):
            options = {"batch_size": 3, "seed": 2, "remainder": remainder}
            expected = epoch_of(ranks(size, 4, **options))
            for world in (1, 2, 3, 4):
                with self.subTest(size=size, remainder=remainder, world=world):
                    samplers = ranks(size, world, virtual_ranks=4, **options)
                    blocks = [sampler._block[1] - sampler._block[0] for sampler in samplers]
                    self.assertEqual([len(sampler) for sampler in samplers], [len(expected) * block for block in blocks])
                    for step, parts in enumerate(expected):
                        drawn = []
                        for sampler, block in zip(samplers, blocks):
                            for _ in range(block):
                                self.assertEqual(sampler.cursor, step * 12)
                                drawn.append(sampler.next_batch())
                                self.assertEqual(sampler._virtual_rank(), len(drawn) - 1)
                                sampler.step()
                            self.assertEqual(sampler.cursor, min(step * 12 + 12, size))
                        self.assertEqual(drawn, parts)
                    self.assertEqual({str(sampler.next_batch()) for sampler in samplers}, {"None"})
        seeds = {cohort.data.sample_seed(index, epoch, seed) for index in range(9) for epoch in range(3) for seed in (0, 2**64 - 1)}
        self.assertEqual(len(seeds), 54)

    def test_a_position_that_does_not_fit_is_refused(self):
        sampler = DistributedSampler(10)
        for state in (SamplerState(size=9), SamplerState(size=10, cursor=11), SamplerState(size=10, epoch=-1)):
            with self.assertRaises(cohort.InvalidArgument):
                sampler.load_state(state)
        with self.assertRaisesRegex(cohort.InvalidArgument, r"step\(1\) where 0 batches are drawn"):
            sampler.step()
        sampler.next_batch()
        for steps in (0, -3, 5):
            with self.assertRaisesRegex(cohort.InvalidArgument, rf"step\({steps}\) where 1 batches are drawn"):
                sampler.step(steps)
        self.assertEqual(DistributedSampler(10, seed=4).state_dict(), {"seed": 4, "epoch": 0, "cursor": 0, "size": 10})

    def test_after_step_the_next_epoch_begins_by_itself(self):
        sampler = DistributedSampler(10, batch_size=4, seed=1)
        seen = []
        for _ in sampler:
            sampler.step()
        self.assertEqual((sampler.epoch, sampler.cursor), (0, 10))
        for batch in sampler:
            seen += batch
        self.assertEqual(seen, list(permutation(10, 1, 1)))


class Worlds(unittest.TestCase):
    """set_world: the same samplers in one world after another."""

    def test_every_sample_once_however_the_world_changes(self):
        dice = random.Random(11)
        for _ in range(100):
            size, batch, keep = dice.randrange(1, 200), dice.randrange(1, 9), dice.random() < 0.5
            first = dice.randrange(1, 6)
            samplers = ranks(size, first, seed=3, batch_size=batch)
            steps, used = [], []
            while samplers[0].epoch == 0:
                world = dice.randrange(1, 6)
                state = samplers[0].state()  # a remaining rank's; others are new
                samplers = (samplers + ranks(size, 8, batch_size=batch))[:world]
                for rank, sampler in enumerate(samplers):
                    sampler.load_state(state)
                    sampler.set_world(rank, world, batch * first if keep else None)
                drawn = [[sampler.next_batch() for sampler in samplers] for _ in range(dice.randrange(0, 6))]
                for parts in drawn[: dice.randrange(0, len(drawn) + 1)]:  # the others are drawn again
                    for sampler in samplers:
                        sampler.next_epoch() if parts[0] is None else sampler.step()
                    if parts[0] is None:
                        break
                    steps.append(sum(map(len, parts)))
                    used += [index for part in parts for index in part]
            self.assertEqual(used, list(permutation(size, 3, 0)))
            if keep:
                self.assertEqual(set(steps[:-1]) - {batch * first}, set())

    def test_loops_go_on_within_the_epoch(self):
        def by_position(sampler):
            while sampler.epoch < 3:
                yield from ((sampler.epoch, batch) for batch in sampler)
                yield sampler.epoch, "end"
                sampler.next_epoch()

        def by_set_epoch(sampler):
            for epoch in range(sampler.epoch, 3):
                sampler.set_epoch(epoch)
                yield from ((epoch, batch) for batch in sampler)
                yield epoch, "end"

        def by_itself(sampler):
            for epoch in range(sampler.epoch, 3):
                yield from ((epoch, batch) for batch in sampler)
                yield epoch, "end"

        for loop in (by_position, by_set_epoch, by_itself):
            whole = []
            sampler = DistributedSampler(10, batch_size=3, seed=1)
            sampler.set_world(0, 1)
            for epoch, batch in loop(sampler):
                whole.append((epoch, batch))
                if batch != "end":
                    sampler.step()
            self.assertEqual(len(whole), 3 * 5)
            for cut in range(len(whole) + 1):  # before an end: that epoch's samples are used, and its end is done again
                with self.subTest(loop=loop.__name__, cut=cut):
                    sampler = DistributedSampler(10, batch_size=3, seed=1)
                    sampler.set_world(0, 1)
                    seen = []
                    for epoch, batch in loop(sampler):
                        if len(seen) == cut:
                            break
                        seen.append((epoch, batch))
                        if batch != "end":
                            sampler.step()
                    sampler.set_world(0, 1)
                    again = []
                    for epoch, batch in loop(sampler):
                        again.append((epoch, batch))
                        if batch != "end":
                            sampler.step()
                    if seen and seen[-1][1] == "end" and (cut == len(whole) or loop is not by_position):
                        again = again[1:] if again and again[0] == seen[-1] else again  # the end, once more
                    self.assertEqual(seen + again, whole)

    def test_a_loop_that_goes_back_is_refused(self):
        sampler = DistributedSampler(10, 1, 0, batch_size=3)
        sampler.set_epoch(4)
        sampler.set_world(0, 2, 6)
        with self.assertRaisesRegex(cohort.InvalidArgument, r"training stands in epoch 4 .* range\(sampler.epoch"):
            sampler.set_epoch(0)
        for arguments in ((2, 2), (-1, 2), (0, 2, 0)):
            with self.assertRaises(cohort.InvalidArgument):
                sampler.set_world(*arguments)
        with self.assertRaisesRegex(cohort.InvalidArgument, "with a batch_size"):
            DistributedSampler(10).set_world(0, 2, 6)


class Lives(unittest.TestCase):
    """Trainings that are killed and go on from their last checkpoint, with other ranks and other batches each time."""

    REMAINDERS = (Remainder.KEEP, Remainder.DROP, Remainder.PAD)

    @staticmethod
    def draw(dice):
        """(size, seed, shuffle, remainder, [(world, batch, steps saved, steps lost)])"""
        lives = [
            (dice.randrange(1, 9), dice.randrange(1, 12), dice.randrange(0, 20), dice.randrange(0, 6))
            for _ in range(dice.randrange(1, 7))
        ]
        return dice.randrange(1, 150), dice.randrange(2**64), dice.random() < 0.8, dice.randrange(3), lives

    def steps(self, size, seed, shuffle, remainder, lives):
        """For each step taken: (saved, epoch, cursor after it, [samples of each rank]); None where an epoch ended."""
        checkpoint = SamplerState(seed=seed, size=size)
        for world, batch, saved, lost in lives:
            samplers = ranks(size, world, shuffle=shuffle, batch_size=batch, remainder=self.REMAINDERS[remainder])
            for sampler in samplers:
                sampler.load_state(checkpoint)
            for number in range(saved + lost):
                if number == saved:
                    checkpoint = samplers[-1].state()
                epoch = samplers[0].epoch
                parts = [sampler.next_batch() for sampler in samplers]
                for sampler in samplers:
                    if parts[0] is None:
                        sampler.next_epoch()
                    else:
                        sampler.step()
                yield number < saved, epoch, samplers[0].cursor, parts
            if not lost:
                checkpoint = samplers[-1].state()

    def test_every_sample_once_per_epoch(self):
        dice = random.Random(11)
        for _ in range(200):
            size, seed, shuffle, _, lives = self.draw(dice)
            with self.subTest(size=size, seed=seed, shuffle=shuffle, lives=lives):
                used = {}
                for saved, epoch, _, parts in self.steps(size, seed, shuffle, 0, lives):
                    if saved and parts[0] is not None:
                        used.setdefault(epoch, []).extend(sample for part in parts for sample in part)
                for epoch, samples in used.items():
                    order = list(permutation(size, seed, epoch)) if shuffle else list(range(size))
                    self.assertEqual(samples, order if epoch < max(used) else order[: len(samples)])

    @unittest.skipUnless("COHORT_SAMPLER_PEER" in os.environ, "the C++ sampler's program is not built")
    def test_the_cpp_sampler_draws_the_same(self):
        dice = random.Random(12)
        for _ in range(8):  # each starts a process that loads libtorch
            size, seed, shuffle, remainder, lives = self.draw(dice)
            with self.subTest(size=size, seed=seed, shuffle=shuffle, remainder=remainder, lives=lives):
                said = []
                for _, epoch, cursor, parts in self.steps(size, seed, shuffle, remainder, lives):
                    ranks_ = " |".join("".join(f" {sample}" for sample in part) for part in parts if part is not None)
                    said.append(f"end of {epoch}" if parts[0] is None else f"{epoch} {cursor}:{ranks_}")
                words = [f"{size} {seed} {int(shuffle)} {remainder}", *(" ".join(map(str, life)) for life in lives)]
                done = subprocess.run(
                    [os.environ["COHORT_SAMPLER_PEER"]], input="\n".join(words), capture_output=True, text=True, timeout=SECONDS
                )
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(done.stdout.splitlines(), said)


@needs_torch
class WithDataLoader(unittest.TestCase):
    def test_batches_and_workers(self):
        data = torch.utils.data.TensorDataset(torch.arange(23), torch.arange(23) * 2)
        for workers in (0, 2):
            parts = []
            for rank in range(4):
                sampler = DistributedSampler(data, 4, rank, batch_size=5)
                loader = torch.utils.data.DataLoader(
                    data, batch_sampler=sampler, num_workers=workers, collate_fn=EmptyBatches(data)
                )
                self.assertEqual(len(loader), 2)
                got = list(loader)
                self.assertEqual(len(got), 2)
                self.assertEqual(got[1][0].shape, (1 if rank < 3 else 0,))
                self.assertEqual(got[1][1].dtype, torch.int64)
                parts += [index for batch in got for index in batch[0].tolist()]
            self.assertEqual(sorted(parts), list(range(23)))

    def test_single_samples(self):
        data = list(range(12))
        loader = torch.utils.data.DataLoader(data, batch_size=3, sampler=DistributedSampler(data, 2, 1, seed=4))
        self.assertEqual([batch.tolist() for batch in loader], [list(permutation(12, 4, 0))[1::2][i : i + 3] for i in (0, 3)])


if __name__ == "__main__":
    unittest.main()
