"""Virtual ranks on the ranks of `cohort run -np N`: the same bits in this world, in parts of it, and on one rank alone."""

import copy
import hashlib
import io
import random
import unittest

from support import needs_torch, torch
from support_nn import Ranks, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort
from cohort.data import DistributedSampler, EmptyBatches, sample_seed

if torch is not None:
    from nn_models import Mlp, batch_of, loss_of, pattern, with_values

    from cohort.errors import InvalidArgument, Mismatch
    from cohort.nn import DistributedDataParallel

    class Net(torch.nn.Module):
        """Draws random numbers, has running statistics, and a parameter that some batches use."""

        def __init__(self, dtype):
            super().__init__()
            self.first = torch.nn.Linear(5, 12)
            self.norm = torch.nn.BatchNorm1d(4)
            self.drop = torch.nn.Dropout(0.3)
            self.last = torch.nn.Linear(12, 3)
            self.sometimes = torch.nn.Parameter(torch.ones(3))
            self.to(dtype)

        def forward(self, x):
            y = self.norm(self.first(x).view(-1, 4, 3)).flatten(1)
            y = self.last(self.drop(torch.relu(y)))
            return y * self.sometimes if x[0, 0] > 0 else y

    class Data:
        """Augments each sample by random numbers of its own."""

        def __init__(self, dtype):
            self.dtype, self.epoch = dtype, 0

        def __len__(self):
            return 38  # the last of four steps has 2, fewer than there are virtual ranks

        def __getitem__(self, index):
            own = torch.Generator().manual_seed(sample_seed(index, self.epoch))
            noise = torch.randn(5, generator=own) * 0.1
            return (pattern((5,), index, torch.float32) + noise).to(self.dtype), pattern((3,), index + 0.5, self.dtype)


VIRTUAL = 4


class Training:
    def __init__(self, comm, dtype, **options):
        self.net = with_values(Net(dtype), comm.rank())  # all get rank 0's
        self.data = Data(dtype)
        self.sampler = DistributedSampler(self.data, batch_size=3, seed=3, comm=comm, virtual_ranks=VIRTUAL)
        self.options = options
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.02, weight_decay=0.1)
        self.losses = []
        self.drawn = []  # random numbers of Python
        self.bind(comm)

    def bind(self, comm):
        self.comm = comm
        self.model = None  # no two at a time
        self.model = DistributedDataParallel(self.net, comm, sampler=self.sampler, virtual_ranks=VIRTUAL,
                                             bucket_cap_mb=400 / 2**20, first_bucket_bytes=100, **self.options)  # fmt: skip

    def train(self, steps, workers=0):
        """Trains so many steps, over ends of epochs."""
        begun = len(self.losses)
        while True:
            if self.sampler.steps_left() == 0:
                self.sampler.next_epoch()
            self.data.epoch = self.sampler.epoch
            loader = torch.utils.data.DataLoader(self.data, batch_sampler=self.sampler, num_workers=workers,
                                                 collate_fn=EmptyBatches(self.data))  # fmt: skip
            for x, y in loader:
                self.one(x, y)
                if len(self.losses) - begun == steps:
                    return self

    def one(self, x, y):
        loss = float("nan")
        if len(x) == 0:
            self.model.step_without_samples()
        else:
            parts = list(zip(x.split(2), y.split(2)))
            loss = 0.0
            for number, (inputs, targets) in enumerate(parts):
                if number + 1 < len(parts):
                    with self.model.no_sync():
                        loss += self.backward(inputs, targets, len(x))
                else:
                    loss += self.backward(inputs, targets, len(x))
        mean = self.model.mean_loss(loss)
        if self.model.step_complete():
            self.losses.append(mean)
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=len(self.losses) % 2 == 0)
        self.sampler.step()

    def backward(self, inputs, targets, samples):
        loss = loss_of(self.model(inputs), targets) * (len(inputs) / samples)
        if self.options.get("seed_python"):
            self.drawn.append(random.random())
        loss.backward()
        return loss.item()

    def save(self):
        file = io.BytesIO()
        torch.save((self.net.state_dict(), self.optimizer.state_dict(), self.sampler.state_dict()), file)
        return file.getvalue()

    def load(self, saved):
        net, optimizer, sampler = torch.load(io.BytesIO(saved))
        self.net.load_state_dict(net)
        self.optimizer.load_state_dict(optimizer)
        self.sampler.load_state_dict(sampler)
        return self

    def digest(self):
        """Returns a digest of weights, moments, buffers and losses."""
        own = hashlib.sha256(repr(self.losses).encode())
        moments = [value for state in self.optimizer.state_dict()["state"].values() for value in state.values()]
        for tensor in (*self.net.state_dict().values(), *moments):
            own.update(bytes(torch.as_tensor(tensor).contiguous().flatten().view(torch.uint8).tolist()))
        return own.hexdigest()


@needs_torch
class SameBits(Ranks):
    def worlds(self):
        """This world, each rank alone, and with more than two the first two and the others."""
        yield self.world
        yield self.world.split(color=self.rank)
        if self.size > 2:
            yield self.world.split(color=min(self.rank, 2) // 2)

    def expect_one(self, digests):
        """All digests, of all ranks, are the same."""
        self.assertEqual(len(set(digests)), 1)
        mine = torch.tensor(list(bytes.fromhex(digests[0])), dtype=torch.uint8)
        self.assert_same_bits_on_all_ranks([mine])

    def test_of_weights_moments_buffers_and_losses(self):
        for dtype in (torch.float32, torch.bfloat16):
            with self.subTest(dtype=dtype):
                self.expect_one([Training(comm, dtype).train(6).digest() for comm in self.worlds()])

    def test_of_random_numbers_of_python_and_with_workers_that_draw_ahead(self):
        digests = []
        for comm in self.worlds():
            training = Training(comm, torch.float32, seed_python=True).train(5, workers=1 if comm.size() == self.size else 0)
            self.assertEqual(len(set(training.drawn)), len(training.drawn))
            digests.append(training.digest())
        self.expect_one(digests)

    def test_when_training_is_resumed_on_other_ranks_or_goes_on_with_them(self):
        alone = self.world.split(color=self.rank)
        digests = [Training(self.world, torch.float32).train(6).digest()]
        first = Training(self.world, torch.float32).train(2)
        resumed = Training(alone, torch.float32).load(first.save())
        resumed.losses = list(first.losses)
        digests.append(resumed.train(4).digest())
        # In another world, after a step that was given up, as an elastic job goes on.
        saved = first.save()
        if 2 * self.size <= VIRTUAL:
            first.one(*next(iter(torch.utils.data.DataLoader(first.data, batch_sampler=first.sampler))))
        first.sampler.set_world(0, 1)
        first.bind(alone)
        digests.append(first.load(saved).train(4).digest())
        self.expect_one(digests)

    def test_without_a_sampler(self):
        x, y = batch_of(0, 8)
        grads = []
        for comm in self.worlds():
            net = with_values(Mlp())
            model = DistributedDataParallel(net, comm, virtual_ranks=4, samples=lambda rows: len(rows))
            begin, end = cohort._core.block_of(4, comm.size(), comm.rank())
            for part in range(begin, end):
                loss = loss_of(model(x[2 * part : 2 * part + 2]), y[2 * part : 2 * part + 2])
                mean = model.mean_loss(loss)
                loss.backward()
                self.assertEqual(model.step_complete(), part + 1 == end)
                self.assertEqual(net.last.bias.grad is None, part + 1 < end)
            grads.append([parameter.grad.clone() for parameter in net.parameters()])
        whole = with_values(Mlp())
        loss = loss_of(whole(x), y)
        loss.backward()
        self.assertAlmostEqual(mean, loss.item())
        self.assert_close(grads[0], [parameter.grad for parameter in whole.parameters()])
        for others in grads[1:]:
            for one, other in zip(grads[0], others):
                self.assertTrue(torch.equal(one, other))
        self.assert_same_bits_on_all_ranks(grads[0])


@needs_torch
class Refusals(Ranks):
    def refused(self, why):
        return self.assertRaisesRegex(InvalidArgument, why)

    def test_by_name(self):
        sampler = DistributedSampler(8, batch_size=1, comm=self.world)
        for given, why in (
            ({"sharding": "optimizer"}, "virtual_ranks with sharding"),
            ({"wire_format": "int8"}, "virtual_ranks with wire_format"),
            ({"error_feedback": False}, "virtual_ranks with error_feedback"),
            ({"broadcast_buffers": False}, "leave broadcast_buffers on"),
            ({"virtual_ranks": self.size - 1}, f"virtual_ranks={self.size - 1} on {self.size} ranks"),
            ({"virtual_ranks": -1}, "virtual_ranks=-1"),
            ({"sampler": sampler}, "virtual_ranks=4, and 0 of its sampler"),
            ({"compute_threads": -2}, "compute_threads=-2"),
        ):
            with self.subTest(why), self.refused(why):
                DistributedDataParallel(torch.nn.BatchNorm1d(5), **{"virtual_ranks": 4, **given})
        with self.refused("SyncBatchNorm, which sums over ranks"):
            DistributedDataParallel(torch.nn.Sequential(torch.nn.SyncBatchNorm(5)), virtual_ranks=4)
        model = DistributedDataParallel(Mlp(), virtual_ranks=4)
        with self.refused("virtual_ranks"):
            model.register_comm_hook(None, lambda state, bucket: None)
        with self.refused("virtual_ranks"), model.join():
            pass
        with self.refused("for virtual_ranks"):
            DistributedDataParallel(Mlp()).mean_loss(1.0)
        for given, why in (({"shares": (2,) * self.size}, "with shares"), ({"virtual_ranks": 1}, "in a world of"),
                           ({"batch_size": None}, "batch_size")):  # fmt: skip
            with self.refused(why):
                DistributedSampler(8, comm=self.world, **{"batch_size": 1, "virtual_ranks": 4, **given})
        virtual = DistributedSampler(8, batch_size=1, comm=self.world, virtual_ranks=4)
        for arguments in ((0, 5), (0, 1, 3)):
            with self.refused("virtual_ranks"):
                virtual.set_world(*arguments)
        with self.refused("virtual_ranks=4 cannot be used with 0"):
            sampler.load_state_dict(virtual.state_dict())
        virtual.load_state_dict(sampler.state_dict())  # says nothing of virtual ranks

    def test_options_that_differ(self):
        for given in ({"virtual_ranks": 4 + self.rank}, {"compute_threads": 1 + self.rank}, {"seed_python": self.rank > 0}):
            with self.assertRaisesRegex(Mismatch, *given):
                DistributedDataParallel(Mlp(), **{"virtual_ranks": 4, **given})
        torch.set_num_threads(1)

    def test_a_virtual_rank_that_is_forgotten_and_a_step_too_early(self):
        alone = self.world.split(color=self.rank)
        training = Training(alone, torch.float32)
        x, y = batch_of(0, 3, torch.float32)
        training.sampler.next_batch()
        training.one(x, y)
        training.sampler.next_batch()
        training.sampler.step()
        training.sampler.next_batch()
        with self.refused("oldest batch is of virtual rank 2, and virtual rank 1 is due"):
            training.model(x)
        training = Training(alone, torch.float32)
        training.sampler.next_batch()
        training.one(x, y)
        training.sampler.next_batch()
        with torch.no_grad():
            training.net.last.bias.add_(1)
        with self.refused("parameter 'last.bias' was changed, or frozen, within a step, before virtual rank 1"):
            training.model(x)
        model = DistributedDataParallel(Mlp(torch.float32), alone, virtual_ranks=2)
        loss = loss_of(model(x), y)
        loss.backward(retain_graph=True)
        with self.refused("a backward without a new forward"):
            loss.backward()

    def test_parameters_that_are_moved_frozen_or_a_frozen_one_that_is_changed_within_a_step(self):
        def move(net):
            net.last.bias.data = net.last.bias.data * 2

        def change(net):
            with torch.no_grad():
                net.second.bias.mul_(2)

        alone = self.world.split(color=self.rank)
        x, y = batch_of(0, 3, torch.float32)
        for within, name in (
            (move, "parameter 'last.bias'"),
            (lambda net: net.last.bias.requires_grad_(False), "parameter 'last.bias'"),
            (change, "a frozen parameter"),
        ):
            net = Mlp(torch.float32)
            net.second.bias.requires_grad_(False)
            model = DistributedDataParallel(net, alone, virtual_ranks=2)
            loss_of(model(x), y).backward()
            within(net)
            with self.refused(f"{name} was changed, or frozen, within a step"):
                model(x)

    def test_a_sampler_that_does_not_go_on_or_goes_on_within_a_virtual_rank(self):
        alone = self.world.split(color=self.rank)
        x, y = batch_of(0, 3, torch.float32)

        def made():
            sampler = DistributedSampler(12, batch_size=3, comm=alone, virtual_ranks=1)
            model = DistributedDataParallel(Mlp(torch.float32), alone, sampler=sampler, virtual_ranks=1)
            sampler.next_batch()
            return sampler, model

        sampler, model = made()
        loss_of(model(x), y).backward()
        sampler.next_batch()
        with self.refused("the sampler's position is that of the last step"):
            model(x)
        sampler.step()
        loss_of(model(x), y).backward()
        sampler, model = made()
        with model.no_sync():
            loss_of(model(x), y).backward()
        sampler.step()
        sampler.next_batch()
        with self.refused("the sampler has moved on within a step"):
            model(x)

    def test_other_threads_and_copies(self):
        alone = self.world.split(color=self.rank)
        model = DistributedDataParallel(Mlp(torch.float32), alone, virtual_ranks=1)
        x = batch_of(0, 3, torch.float32)[0]
        torch.set_num_threads(2)
        with self.refused("torch has 2 threads now, and had 1"):
            model(x)
        copy.deepcopy(model)
        self.assertEqual(torch.get_num_threads(), 1)

    def test_dropout_on_threads(self):
        def rank(comm):
            with self.refused("ranks that are threads share torch's random numbers"):
                DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout()), comm, virtual_ranks=2)

        cohort.run_on_threads(rank, 2)

    def test_a_backward_that_fails_is_trained_again(self):
        class Failing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                raise RuntimeError("a layer fails")

        alone = self.world.split(color=self.rank)
        results = []
        for fails in (False, True):
            net = with_values(Mlp())
            model = DistributedDataParallel(net, alone, virtual_ranks=3)
            for part in range(3):
                x, y = batch_of(part, 2)
                if fails and part < 2:
                    hidden = torch.tanh(net.second(Failing.apply(torch.tanh(net.first(x)))))
                    with self.assertRaisesRegex(RuntimeError, "a layer fails"):
                        (model(x).sum() + net.last(hidden).sum()).backward()
                loss_of(model(x), y).backward()
            results.append([parameter.grad.clone() for parameter in net.parameters()])
        for one, other in zip(*results):
            self.assertTrue(torch.equal(one, other))


if __name__ == "__main__":
    unittest.main()
