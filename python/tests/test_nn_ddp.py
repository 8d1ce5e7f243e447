"""DistributedDataParallel on the ranks of `cohort run -np N`: averages, buckets, accumulation, unused parameters,
uneven ends, copies. What goes wrong is in test_nn_errors.py."""

import copy
import io
import pickle
import unittest

from support import SECONDS, needs_torch, torch

import cohort

if torch is not None:
    from nn_models import Mlp, batch_of, copies, gradients, loss_of, pattern, with_values

    from cohort.nn import DistributedDataParallel

SMALL = {"bucket_bytes": 1200, "first_bucket_bytes": 300}  # of about two tensors, so that small models have several


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


@needs_torch
class Averages(Ranks):
    def train(self, samples, how, steps=4, hidden=17):
        def step(net, optimizer, x, y):
            optimizer.zero_grad(set_to_none=how)
            loss_of(net(x), y).backward()
            optimizer.step()

        reference = with_values(Mlp(hidden=hidden))
        reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.2, momentum=0.9)
        net = with_values(Mlp(hidden=hidden), self.rank * 100.0)  # rank 0's values are to win
        model = DistributedDataParallel(net, **SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        for number in range(steps):
            x, y = batch_of(number, sum(samples))
            step(reference, reference_optimizer, x, y)
            step(model, optimizer, self.mine(x, samples), self.mine(y, samples))
        self.assert_close(copies(net), copies(reference), 1e-11 if hidden < 100 else 1e-10)
        self.assert_same_bits_on_all_ranks(copies(net))
        self.assertEqual(model.stats().steps, steps)
        self.assertGreater(model.stats().buckets, 1)

    def test_ranks_equal_one_process_even_and_uneven(self):
        for samples in ([6] * self.size, list(range(1, self.size + 1)), [0] + [7] * (self.size - 1), [5] + [0] * (self.size - 1)):
            for how in (True, False):
                with self.subTest(samples=samples, set_to_none=how):
                    self.train(samples, how)
        # 1100 x 1100 doubles: a large gradient, reduced where autograd made it. One step: with so many units, training
        # makes roundings grow fast.
        self.train(list(range(self.size)), how=True, steps=1, hidden=1100)
        self.train([3] * self.size, how=False, steps=1, hidden=1100)

    def test_two_runs_are_equal_to_the_bit(self):
        results = []
        for _ in range(2):
            model = DistributedDataParallel(with_values(Mlp(torch.float32)), **SMALL)
            optimizer = torch.optim.Adam(model.parameters())
            for number in range(4):
                x, y = batch_of(number + self.rank, 7, torch.float32)
                model.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()
            results.append(copies(model))
        for one, other in zip(*results):
            self.assertTrue(torch.equal(one, other))

    def test_gradients_as_bfloat16_between_hosts(self):
        samples = [3] * self.size
        net = with_values(Mlp(hidden=17)).float()
        model = DistributedDataParallel(net, wire_dtype=torch.bfloat16, **SMALL)
        reference = with_values(Mlp(hidden=17)).float()
        x, y = (part.float() if part.is_floating_point() else part for part in batch_of(0, sum(samples)))
        loss_of(reference(x), y).backward()
        loss_of(model(self.mine(x, samples)), self.mine(y, samples)).backward()
        # Each host's sum is rounded to 8 bits, and the result perhaps once more.
        self.assert_close(gradients(net), gradients(reference), 2e-2)
        self.assert_same_bits_on_all_ranks(gradients(net))
        with self.assertRaisesRegex(cohort.InvalidArgument, "only as bfloat16"):
            DistributedDataParallel(Mlp(), wire_dtype="float16")

    def test_mixed_types(self):
        class Mixed(torch.nn.Module):
            def __init__(self):
                super().__init__()
                kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
                self.parts = torch.nn.ParameterList([torch.ones(4, dtype=kind) for kind in kinds for _ in range(3)])

            def forward(self, x):
                return sum((x.to(part.dtype) * part).double().mean() for part in self.parts)

        model = DistributedDataParallel(Mixed(), bucket_bytes=20, first_bucket_bytes=8)
        self.assertGreaterEqual(model.stats().buckets, 8)
        weights = [3 ** (rank % 2) for rank in range(self.size)]
        expected = sum(w * (2.0 + 2 * (w == 3)) for w in weights) / sum(weights)
        for _ in range(3):
            model.zero_grad()
            value = 16.0 if weights[self.rank] == 3 else 8.0
            model(torch.full((weights[self.rank], 4), value)).backward()
            for part in model.parameters():
                self.assertEqual(part.grad.dtype, part.dtype)
                self.assertEqual(part.grad.tolist(), [expected] * 4)

    def test_sparse_gradients_become_dense(self):
        class Words(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.table = torch.nn.Embedding(6, 2, sparse=True)

            def forward(self, words):
                return self.table(words)

        model = DistributedDataParallel(Words())
        for how in (True, False):
            model.zero_grad(set_to_none=how)
            model(torch.tensor([self.rank, 5])).sum().backward()
            gradient = model.module.table.weight.grad
            self.assertEqual(gradient.layout, torch.strided)
            expected = torch.zeros(6, 2)
            expected[: self.size] = 1 / self.size
            expected[5] = 1
            self.assertTrue(torch.allclose(gradient, expected))

    def test_frozen_tied_and_channels_last_parameters(self):
        class Odd(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = torch.nn.Conv2d(3, 3, 2).to(memory_format=torch.channels_last)
                self.tied = self.conv
                self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)

            def forward(self, x):
                return self.tied(self.conv(x)).mean() + self.frozen.sum()

        model = DistributedDataParallel(Odd())
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(self.rank + 1, 3, 5, 5)).backward()
            weight = model.module.conv.weight
            self.assertEqual(weight.grad.stride(), weight.stride())
            self.assertIsNone(model.module.frozen.grad)
            self.assert_same_bits_on_all_ranks([weight.grad])


@needs_torch
class Places(Ranks):
    def test_each_gradient_is_written_once_and_stays(self):
        for how in (True, False):
            told = []
            model = DistributedDataParallel(
                with_values(Mlp(hidden=64)), bucket_bytes=1 << 14, first_bucket_bytes=1 << 12,
                observer=lambda number, nbytes: told.append((number, nbytes)),
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            places = {}
            for step in range(4):
                x, y = batch_of(step + self.rank, 4)
                loss = loss_of(model(x), y)
                optimizer.zero_grad(set_to_none=how)
                before = model.stats()
                told.clear()
                loss.backward()
                after = model.stats()
                fresh = how or step == 0
                self.assertEqual(after.gradients_written - before.gradients_written, 6 if fresh else 0)
                self.assertEqual(after.gradients_moved, before.gradients_moved)
                self.assertEqual(sorted(number for number, _ in told), list(range(after.buckets)))
                self.assertEqual(sum(nbytes for _, nbytes in told), after.bucket_bytes)
                optimizer.step()
                for name, parameter in model.named_parameters():
                    slot = model.slot_of(name)
                    self.assertEqual(parameter.grad.data_ptr(), slot.begin + slot.offset)
                    if step == 1:  # the order is rebuilt after the first backward
                        places[name] = slot
                    if step > 1:
                        self.assertEqual(places[name], slot)

    def test_buckets_are_rebuilt_in_the_order_in_which_gradients_come(self):
        class Backwards(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.parts = torch.nn.ParameterList([torch.ones(8) for _ in range(4)])

            def forward(self, x):  # the last registered is used first, so its gradient comes last
                for part in reversed(list(self.parts)):
                    x = x * part
                return x

        model = DistributedDataParallel(Backwards(), bucket_bytes=32, first_bucket_bytes=32)
        self.assertEqual(model.slot_of("parts.3").bucket, 0)
        for _ in range(2):
            model.zero_grad()
            model(torch.full((2, 8), self.rank + 1.0)).mean().backward()
        self.assertEqual([model.slot_of(f"parts.{i}").bucket for i in range(4)], [0, 1, 2, 3])
        for part in model.parameters():
            self.assertTrue(torch.allclose(part.grad, torch.full((8,), (self.size + 1) / 2 / 8)))

    def test_gradients_that_were_there_before_are_added_to(self):
        net, reference = with_values(Mlp()), with_values(Mlp())
        for parameter in [*net.parameters(), *reference.parameters()]:
            parameter.grad = torch.ones_like(parameter)
        model = DistributedDataParallel(net, **SMALL)
        samples = [3] * self.size
        for step in range(2):
            x, y = batch_of(step, 3 * self.size)
            loss_of(reference(x), y).backward()
            loss_of(model(self.mine(x, samples)), self.mine(y, samples)).backward()
            self.assert_close(gradients(net), gradients(reference))

    def test_the_user_s_hooks_run_once_in_both_ways(self):
        net = with_values(Mlp())
        calls = []
        net.last.bias.register_hook(lambda gradient: calls.append("hook") or gradient * 0 + 7)
        later = hasattr(net.last.bias, "register_post_accumulate_grad_hook")
        if later:
            net.first.bias.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.clone()))
        model = DistributedDataParallel(net)
        for step in range(3):
            if step == 1:
                net.last.bias.grad.zero_()
                net.first.bias.grad.zero_()
            if step == 2:
                model.zero_grad()
            x, y = batch_of(step, 4)
            calls.clear()
            loss_of(model(x), y).backward()
            self.assertEqual(len(calls), 1 + later)
            self.assertEqual(net.last.bias.grad.tolist(), [7.0] * 3)

    def test_create_graph(self):
        reference, net = with_values(Mlp()), with_values(Mlp())
        model = DistributedDataParallel(net, **SMALL)
        x, y = batch_of(0, 4)
        for _ in range(2):
            reference.zero_grad(set_to_none=True)
            model.zero_grad()
            loss_of(reference(x), y).backward()
            loss_of(model(x), y).backward(create_graph=True)
            self.assert_close(gradients(net), gradients(reference))


@needs_torch
class Accumulation(Ranks):
    def test_no_sync_equals_the_big_batch(self):
        for how, hidden in ((True, 17), (False, 17), (True, 1100)):
            net, reference = with_values(Mlp(hidden=hidden)), with_values(Mlp(hidden=hidden))
            model = DistributedDataParallel(net, **SMALL)
            rows = [2 * (rank + 1) for rank in range(self.size)]  # of each of 3 micro-batches
            samples = [3 * count for count in rows]
            for step in range(3):
                x, y = batch_of(step, sum(samples))
                reference.zero_grad(set_to_none=True)
                loss_of(reference(x), y).backward()
                model.zero_grad(set_to_none=how)
                mine = list(zip(self.mine(x, samples).split(rows[self.rank]), self.mine(y, samples).split(rows[self.rank])))
                with model.no_sync():
                    with model.no_sync():
                        (loss_of(model(mine[0][0]), mine[0][1]) / 3).backward()
                    (loss_of(model(mine[1][0]), mine[1][1]) / 3).backward()
                self.assertEqual(model.stats().steps, step)
                (loss_of(model(mine[2][0]), mine[2][1]) / 3).backward()
                self.assert_close(gradients(net), gradients(reference), 1e-11 if hidden < 100 else 1e-10)

    def test_an_empty_micro_batch_does_no_harm(self):
        net, reference = with_values(Mlp()), with_values(Mlp())
        model = DistributedDataParallel(net, **SMALL)
        samples = [4] * self.size
        x, y = batch_of(0, sum(samples))
        loss_of(reference(x), y).backward()
        with model.no_sync():
            loss_of(model(self.mine(x, samples)), self.mine(y, samples)).backward()
        loss_of(model(x[:0]), y[:0]).backward()  # NaN
        self.assert_close(gradients(net), gradients(reference))

    def test_sample_counts_can_be_given(self):
        net = with_values(Mlp())
        model = DistributedDataParallel(net)
        weights = [3] + [1] * (self.size - 1)
        model.set_sample_count(weights[self.rank])
        out = model(torch.ones(2, 5, dtype=torch.float64))
        (out.sum() * 0 + net.last.bias.sum() * (self.rank + 1)).backward()
        expected = sum(w * (rank + 1) for rank, w in enumerate(weights)) / sum(weights)
        self.assertTrue(torch.allclose(net.last.bias.grad, torch.full((3,), expected, dtype=torch.float64)))
        with self.assertRaises(cohort.InvalidArgument):
            model.set_sample_count(-1)

    def test_only_forwards_that_take_part_count(self):
        net = with_values(Mlp())
        model = DistributedDataParallel(net)

        def rows(count):
            return torch.ones(count, 5, dtype=torch.float64)

        model(rows(100 * (self.rank + 1)))  # a batch that is thrown away
        kept = model(rows(1000 * (self.rank + 1)))  # and one that is looked at only
        mine = [(2, 4) if rank == 0 else (1, 1) for rank in range(self.size)]
        one, two = (model(rows(count)) for count in mine[self.rank])
        ((one.sum() + two.sum()) * 0 + net.last.bias.sum() * (self.rank + 1)).backward()
        expected = sum(sum(w) * (rank + 1) for rank, w in enumerate(mine)) / sum(map(sum, mine))
        self.assertTrue(torch.allclose(net.last.bias.grad, torch.full((3,), expected, dtype=torch.float64)))
        del kept

    def test_a_gradient_penalty(self):
        """autograd.grad() for the input is no step; the backward through its result is one."""
        net, reference = with_values(Mlp()), with_values(Mlp())
        model = DistributedDataParallel(net, **SMALL)

        def loss(module, x):
            x = x.clone().requires_grad_()
            out = module(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return (out**2).mean() + (slope**2).mean()

        samples = [3] * self.size
        for step in range(2):
            x, _ = batch_of(step, sum(samples))
            reference.zero_grad(set_to_none=True)
            model.zero_grad()
            loss(reference, x).backward()
            loss(model, self.mine(x, samples)).backward()
            self.assertEqual(model.stats().steps, step + 1)
            self.assert_close(gradients(net), gradients(reference))

    def test_non_reentrant_checkpointing(self):
        from torch.utils.checkpoint import checkpoint

        class Saving(Mlp):
            def forward(self, x):
                return self.last(checkpoint(lambda v: torch.tanh(self.second(torch.tanh(self.first(v)))), x, use_reentrant=False))

        reference, net = with_values(Mlp()), with_values(Saving())
        model = DistributedDataParallel(net, **SMALL)
        samples = [2] * self.size
        x, y = batch_of(0, sum(samples))
        loss_of(reference(x), y).backward()
        loss_of(model(self.mine(x, samples)), self.mine(y, samples)).backward()
        self.assert_close(gradients(net), gradients(reference))


@needs_torch
class Unused(Ranks):
    def test_unused_parameters(self):
        class Branches(torch.nn.Module):
            def __init__(self):
                super().__init__()
                for name in ("common", "left", "right", "never"):
                    setattr(self, name, torch.nn.Parameter(torch.ones(3)))

            def forward(self, x, left):
                return x * self.common * (self.left if left else self.right)

        net = Branches()
        model = DistributedDataParallel(net, bucket_bytes=16, first_bucket_bytes=16)
        x = torch.full((2, 3), 6.0)

        def expect(name, value):
            self.assertTrue(torch.allclose(getattr(net, name).grad, torch.full((3,), value)), name)

        for how in (True, True, False, True):
            model.zero_grad(set_to_none=how)
            model(x, self.rank == 1).mean().backward()  # left on rank 1 only
            expect("common", 2.0)
            expect("left", 2.0 / self.size)
            expect("right", 2.0 * (self.size - 1) / self.size)
            self.assertIsNone(net.never.grad)
        # Unused everywhere, but with a gradient from before: that stays, to the bit.
        kept = torch.tensor([0.1, 0.2, 0.3])
        model.zero_grad()
        net.never.grad = kept.clone()
        model(x, True).mean().backward()
        self.assertTrue(torch.equal(net.never.grad, kept))
        self.assertIsNone(net.right.grad)
        expect("left", 2.0)
        # The only rank that uses it has no samples: nobody does.
        model.zero_grad()
        model(x[:0] if self.rank == 1 else x, self.rank == 1).mean().backward()
        self.assertIsNone(net.left.grad)
        expect("right", 2.0)

    def test_a_backward_that_touches_no_parameter_takes_part(self):
        class Passing(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(2))

            def forward(self, x, use):
                return x * self.weight if use else x * 2

        model = DistributedDataParallel(Passing())
        x = torch.full((1, 2), 4.0, requires_grad=True)
        model(x, self.rank == 0).sum().backward()
        self.assertEqual(model.module.weight.grad.tolist(), [4.0 / self.size] * 2)

    def test_outputs_of_any_kind(self):
        class Wrapped:  # nothing that tensors are looked for in
            def __init__(self, value):
                self.value = value

        class Kinds(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(2))

            def forward(self, *, inputs, kind):
                return kind(inputs["x"] * self.weight)

        model = DistributedDataParallel(Kinds())
        kinds = {
            "dict": (lambda v: {"a": [v]}, lambda out: out["a"][0]),
            "tuple": (lambda v: (3, (v, None)), lambda out: out[1][0]),
            "object": (Wrapped, lambda out: out.value),
        }
        for name, (kind, value) in kinds.items():
            with self.subTest(kind=name):
                model.zero_grad()
                out = model(inputs={"x": torch.full((1, 2), self.rank + 1.0)}, kind=kind)
                value(out).sum().backward()
                self.assertEqual(model.module.weight.grad.tolist(), [(self.size + 1) / 2] * 2)


@needs_torch
class UnevenEnds(Ranks):
    def test_steps_without_samples_keep_ranks_in_step(self):
        net, reference = with_values(Mlp()), with_values(Mlp())
        model = DistributedDataParallel(net, **SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(2 + 2 * self.rank):
            model.zero_grad()
            x, y = batch_of(step, self.size)
            loss_of(model(x[self.rank : self.rank + 1]), y[self.rank : self.rank + 1]).backward()
            optimizer.step()
        model.zero_grad()
        while model.step_without_samples():
            optimizer.step()
            model.zero_grad()
        self.assertTrue(all(parameter.grad is None for parameter in model.parameters()))
        self.assertEqual(model.stats().steps, 2 * self.size + 1)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        for step in range(2 * self.size):
            x, y = batch_of(step, self.size)
            first = step // 2  # of the ranks still active
            reference.zero_grad(set_to_none=True)
            loss_of(reference(x[first:]), y[first:]).backward()
            optimizer.step()
        self.assert_close(copies(net), copies(reference))
        self.assert_same_bits_on_all_ranks(copies(net))

    def test_join_serves_the_others_and_takes_their_model(self):
        norm = torch.nn.BatchNorm1d(5)
        model = DistributedDataParallel(norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number):
            model.zero_grad()
            (model(pattern((6, 5), number + self.rank * 0.3, torch.float32)) ** 3).mean().backward()

        # Rank 0 ends first: buffers come from rank 1 then.
        for number in range(1 if self.rank == 0 else 5 - self.rank):
            step(number)
            optimizer.step()
        self.assertEqual(model.join(), 1)
        self.assert_same_bits_on_all_ranks(model.state_dict().values())
        self.assertEqual(norm.num_batches_tracked.item(), 4)
        for number in range(2):  # training goes on together: same buckets, same model
            step(number)
        self.assert_same_bits_on_all_ranks([norm.weight.grad])
        self.assertEqual(model.join(), 0)  # nothing is missing now


@needs_torch
class TheModule(Ranks):
    def test_buffers_are_rank_zero_s_in_synchronising_forwards(self):
        norm = torch.nn.BatchNorm1d(5, momentum=0.5)
        norm.running_mean.fill_(self.rank * 10.0)
        model = DistributedDataParallel(norm)
        self.assertEqual(norm.running_mean.tolist(), [0.0] * 5)  # at construction
        x = torch.full((4, 5), 2.0 if self.rank == 0 else 100.0)
        # Two forwards before one backward: the second one's broadcast must not invalidate the first.
        (model(x).sum() + model(x).sum()).backward()
        self.assertEqual(norm.running_mean.tolist(), [1.5 if self.rank == 0 else 50.5] * 5)
        with torch.no_grad():  # does not communicate: one rank alone may evaluate
            if self.rank == 1:
                model(x)
        with model.no_sync():
            if self.rank == 1:
                model(x)
        model.sync_buffers()
        self.assertEqual(norm.running_mean.tolist(), [1.5] * 5)
        self.assertEqual(norm.num_batches_tracked.item(), 2)

    def test_names_have_no_prefix(self):
        model = DistributedDataParallel(with_values(Mlp()))
        names = list(Mlp().state_dict())
        self.assertEqual(list(model.state_dict()), names)
        self.assertEqual([name for name, _ in model.named_parameters()], names)
        theirs = {f"module.{name}": value + 1 for name, value in model.state_dict().items()}
        self.assertFalse(any(model.load_state_dict(theirs)))
        self.assertTrue(torch.equal(model.module.last.bias, theirs["module.last.bias"]))
        with self.assertRaisesRegex(RuntimeError, "last.bias"):
            model.load_state_dict({name: theirs["module." + name] for name in names[:-1]})
        # Inside another module, whose names are those that it has without the wrapper.
        outer = torch.nn.Sequential(torch.nn.Linear(5, 5).double(), model)
        self.assertIn("1.first.weight", outer.state_dict())
        plain = torch.nn.Sequential(torch.nn.Linear(5, 5).double(), Mlp())
        self.assertFalse(any(plain.load_state_dict(outer.state_dict())))
        self.assertFalse(any(outer.load_state_dict(plain.state_dict())))
        model.eval()
        self.assertFalse(model.module.first.training)

    def test_copies_and_pickles_train_by_themselves(self):
        model = DistributedDataParallel(with_values(Mlp()), **SMALL)
        x, y = batch_of(self.rank, 3)
        loss_of(model(x), y).backward()
        steps = model.stats().steps
        file = io.BytesIO()
        pickle.dump(model, file)
        for other in (copy.deepcopy(model), pickle.loads(file.getvalue())):
            with torch.no_grad():
                self.assertTrue(torch.equal(other(x), model(x)))
                other.module.last.bias.add_(self.rank + 1)  # rank 0's values win again
            for _ in range(2):
                other.zero_grad()
                loss_of(other(x), y).backward()
            self.assertEqual(other.options, model.options)
            self.assert_same_bits_on_all_ranks([*copies(other), *gradients(other.module)])
            self.assertFalse(torch.equal(other.module.last.bias, model.module.last.bias))
        self.assertEqual(model.stats().steps, steps)

    def test_several_models_and_communicators(self):
        pair = self.world.split(self.rank % 2)
        one, two = DistributedDataParallel(with_values(Mlp()), **SMALL), DistributedDataParallel(with_values(Mlp(), 3), pair)
        x, y = batch_of(self.rank, 3)
        for step in range(3):
            one.zero_grad()
            two.zero_grad()
            (loss_of(one(x), y) + loss_of(two(x), y)).backward()  # in one graph
            self.assertEqual((one.stats().steps, two.stats().steps), (step + 1, step + 1))
        self.assert_same_bits_on_all_ranks(gradients(one.module))
        reference = with_values(Mlp(), 3)
        for rank in range(self.rank % 2, self.size, 2):
            rx, ry = batch_of(rank, 3)
            (loss_of(reference(rx), ry) / pair.size()).backward()
        self.assert_close(gradients(two.module), gradients(reference))
        two.communicator.leave()

    def test_gradients_outlive_the_model(self):
        net = with_values(Mlp())
        model = DistributedDataParallel(net)
        x, y = batch_of(self.rank, 3)
        loss_of(model(x), y).backward()
        before = gradients(net)
        del model
        for parameter, gradient in zip(net.parameters(), before):
            self.assertTrue(torch.equal(parameter.grad, gradient))
        loss_of(net(x), y).backward()  # autograd's business again


if __name__ == "__main__":
    unittest.main()
