"""DistributedDataParallel on the ranks of `cohort run -np N`: unused parameters, uneven ends, the module as a module."""

import copy
import io
import pickle
import unittest

from support import needs_torch, torch
from support_nn import Ranks, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

if torch is not None:
    from nn_models import Mlp, batch_of, copies, gradients, loss_of, pattern, with_values

    from cohort.errors import InvalidArgument
    from cohort.nn import DistributedDataParallel

SMALL = {"bucket_cap_mb": 1200 / 2**20, "first_bucket_bytes": 300}  # of about two tensors, so that small models have several


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
        model = DistributedDataParallel(net, bucket_cap_mb=16 / 2**20, first_bucket_bytes=16, samples=lambda x, left: x.shape[0])
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
        with model.join():
            for number in range(1 if self.rank == 0 else 5 - self.rank):
                step(number)
                optimizer.step()
        self.assert_same_bits_on_all_ranks(model.state_dict().values())
        self.assertEqual(norm.num_batches_tracked.item(), 4)
        with model.join():
            for number in range(2):  # training goes on together: same buckets, same model
                step(number)
            self.assert_same_bits_on_all_ranks([norm.weight.grad])

    def test_join_holds_all_models_of_a_loop(self):
        one, other = (DistributedDataParallel(torch.nn.Linear(3, 1)) for _ in range(2))
        optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
        with one.join():
            with self.assertRaisesRegex(InvalidArgument, "with one.join"):
                other(torch.ones(2, 3))
        with one.join(), other.join():
            for number in range(1 if self.rank == 0 else 4):
                optimizer.zero_grad()
                x = pattern((6, 3), number + self.rank * 0.3, torch.float32)
                (one(x) * other(x)).mean().backward()
                optimizer.step()
        self.assert_same_bits_on_all_ranks([*one.state_dict().values(), *other.state_dict().values()])


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
