"""DistributedDataParallel on the ranks of `cohort run -np N`: averages, buckets and where gradients lie, accumulation. What
goes wrong is in test_nn_errors.py."""

import unittest

from support import needs_torch, torch
from support_nn import Ranks, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort

if torch is not None:
    from nn_models import Mlp, batch_of, copies, gradients, loss_of, with_values

    from cohort.nn import DistributedDataParallel

def rows(x, *_):
    """How many samples a forward is of."""
    return x.shape[0]


SMALL = {"bucket_cap_mb": 1200 / 2**20, "first_bucket_bytes": 300}  # of about two tensors, so that small models have several


@needs_torch
@unittest.skipUnless(hasattr(getattr(torch, "amp", None), "GradScaler"), "this torch has no torch.amp.GradScaler")
class MixedPrecision(Ranks):
    def test_all_ranks_leave_out_the_same_steps_of_a_grad_scaler(self):
        net = with_values(Mlp()).float()
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step in range(4):
            x, y = batch_of(step + self.rank, 4)
            before = copies(net)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x.float())
            loss = loss_of(out.to(y.dtype), y)
            if step == 2 and self.rank == self.size - 1:
                loss = loss * float("inf")  # of one rank alone
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            same = all(torch.equal(a, b) for a, b in zip(before, copies(net)))
            self.assertEqual(same, step == 2)
            self.assertEqual(scaler.get_scale(), 1024.0 if step < 2 else 512.0)
            self.assert_same_bits_on_all_ranks(copies(net))


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
        model = DistributedDataParallel(net, samples=rows, **SMALL)
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

    def test_gradients_in_other_formats_between_hosts(self):
        samples = [3] * self.size
        # Each host's sum is rounded, and the result perhaps once more; of int4 by a seventh of the largest of a block.
        for wire_format, tolerance in ((torch.bfloat16, 2e-2), ("int8", 2e-2), ("int4", None)):
            net = with_values(Mlp(hidden=17)).float()
            model = DistributedDataParallel(net, wire_format=wire_format, **SMALL)
            reference = with_values(Mlp(hidden=17)).float()
            x, y = (part.float() if part.is_floating_point() else part for part in batch_of(0, sum(samples)))
            loss_of(reference(x), y).backward()
            loss_of(model(self.mine(x, samples)), self.mine(y, samples)).backward()
            if tolerance is not None:
                self.assert_close(gradients(net), gradients(reference), tolerance)
            self.assert_same_bits_on_all_ranks(gradients(net))
            residuals = model.residuals()
            self.assertEqual(set(residuals), {f"residual.{n}" for n, _ in net.named_parameters()} if tolerance is None else set())
        with self.assertRaisesRegex(cohort.InvalidArgument, "float16 -- it knows none, bfloat16, int8, int4"):
            DistributedDataParallel(Mlp(), wire_format="float16")
        with self.assertRaisesRegex(cohort.InvalidArgument, "error_feedback goes with"):
            DistributedDataParallel(Mlp(), wire_format="bfloat16", error_feedback=True)

    def test_error_feedback_and_its_checkpoint(self):
        def train(parts):
            net = with_values(Mlp(hidden=17)).float()
            kept: dict = {}
            for steps in parts:
                values, net = net.state_dict(), Mlp(hidden=17).float()
                net.load_state_dict(values)
                model = DistributedDataParallel(net, wire_format="int8", error_feedback=True, **SMALL)
                model.load_residuals({**kept, "something.else": torch.zeros(1)})
                for step in steps:
                    x, y = batch_of(step * self.size + self.rank, 3)
                    model.zero_grad()
                    loss_of(model(x.float()), y.float() if y.is_floating_point() else y).backward()
                    with torch.no_grad():
                        for parameter in net.parameters():
                            parameter -= 0.01 * parameter.grad
                kept = model.residuals()
            return copies(net), kept, model

        whole, residuals, model = train([range(5)])
        self.assert_same_bits_on_all_ranks(whole)
        resumed = train([range(2), range(2, 5)])[0]
        if self.world.local_size() == 1:
            self.assertTrue(all(torch.equal(one, other) for one, other in zip(whole, resumed)))
        name = next(iter(residuals))
        with self.assertRaisesRegex(cohort.InvalidArgument, "has 3 elements"):
            model.load_residuals({name: torch.zeros(3)})

    def test_mixed_types(self):
        class Mixed(torch.nn.Module):
            def __init__(self):
                super().__init__()
                kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
                self.parts = torch.nn.ParameterList([torch.ones(4, dtype=kind) for kind in kinds for _ in range(3)])

            def forward(self, x):
                return sum((x.to(part.dtype) * part).double().mean() for part in self.parts)

        model = DistributedDataParallel(Mixed(), samples=rows, bucket_cap_mb=20 / 2**20, first_bucket_bytes=8)
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
                with_values(Mlp(hidden=64)), bucket_cap_mb=1 / 64, first_bucket_bytes=1 << 12,
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

        model = DistributedDataParallel(Backwards(), bucket_cap_mb=32 / 2**20, first_bucket_bytes=32)
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
            model = DistributedDataParallel(net, samples=rows, **SMALL)
            each = [2 * (rank + 1) for rank in range(self.size)]  # of 3 micro-batches
            samples = [3 * count for count in each]
            for step in range(3):
                x, y = batch_of(step, sum(samples))
                reference.zero_grad(set_to_none=True)
                loss_of(reference(x), y).backward()
                model.zero_grad(set_to_none=how)
                mine = list(zip(self.mine(x, samples).split(each[self.rank]), self.mine(y, samples).split(each[self.rank])))
                with model.no_sync():
                    with model.no_sync():
                        (loss_of(model(mine[0][0]), mine[0][1]) / 3).backward()
                    (loss_of(model(mine[1][0]), mine[1][1]) / 3).backward()
                self.assertEqual(model.stats().steps, step)
                (loss_of(model(mine[2][0]), mine[2][1]) / 3).backward()
                self.assert_close(gradients(net), gradients(reference), 1e-11 if hidden < 100 else 1e-10)

    def test_an_empty_micro_batch_does_no_harm(self):
        net, reference = with_values(Mlp()), with_values(Mlp())
        model = DistributedDataParallel(net, samples=rows, **SMALL)
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


if __name__ == "__main__":
    unittest.main()
