"""Gradients that are not finite and parameters that drift apart are named on all ranks of `cohort run -np N`."""

import os
import unittest

from support import needs_torch, ranks_of_hosts, torch
from support_nn import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort
from cohort._collective import all_gather_bytes

if torch is not None:
    from nn_models import Mlp, batch_of, copies, loss_of, pattern, with_values

    from cohort.nn import DistributedDataParallel, NonFiniteError, first_non_finite, require_same_parameters

NAN, INF = float("nan"), float("inf")


class Case(unittest.TestCase):
    def setUp(self):
        self.rank, self.size = cohort.rank(), cohort.size()

    def tearDown(self):
        cohort.world().barrier()

    def same_text(self, error):
        texts = [bytes(one) for one in all_gather_bytes(cohort.world(), str(error).encode())]
        self.assertEqual(set(texts), {str(error).encode()})


class Spoiler:
    """Puts values into gradients as autograd makes them: {name: (index, value)} of the next backward."""

    def __init__(self, module):
        self.next = {}
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self.spoil(name, gradient))

    def spoil(self, name, gradient):
        if name not in self.next:
            return gradient
        index, value = self.next.pop(name)
        changed = gradient.clone()
        changed.view(-1)[index] = value
        return changed


@needs_torch
class NonFinite(Case):
    def model(self, dtype=None, hidden=17, **options):
        net = with_values(Mlp(dtype or torch.float64, hidden))
        options = {"bucket_cap_mb": 1200 / 2**20, "first_bucket_bytes": 300, "non_finite": "raise", **options}
        model = DistributedDataParallel(net, **options)
        return model, Spoiler(net)

    def backward(self, model, step=0, dtype=None, samples=4):
        x, y = batch_of(step, samples * self.size, dtype or torch.float64)
        mine = slice(self.rank * samples, (self.rank + 1) * samples)
        loss_of(model(x[mine]), y[mine]).backward()

    def test_the_first_is_named_on_every_rank_and_training_goes_on(self):
        model, spoiler = self.model()
        net = with_values(Mlp())  # one process that leaves out the same steps
        ours = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        alone = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
        bad = {2: ("second.weight", 57, NAN), 3: ("last.bias", 2, -INF), 5: ("first.weight", 84, INF)}
        for step in range(8):
            ours.zero_grad()
            culprit = (step * 7 + 1) % self.size
            if step not in bad:
                self.backward(model, step)
                ours.step()
                alone.zero_grad()
                x, y = batch_of(step, 4 * self.size)
                loss_of(net(x), y).backward()
                alone.step()
                continue
            name, index, value = bad[step]
            if self.rank == culprit:
                spoiler.next = {name: (index, value)}
            with self.assertRaises(NonFiniteError) as caught:
                self.backward(model, step)
            error, found = caught.exception, caught.exception.gradient
            self.assertIsInstance(error, cohort.NonFinite)
            self.assertEqual((found.rank, found.parameter, found.element.index), (culprit, name, index))
            self.assertEqual(str(found.element.value), str(value))
            shape = dict(net.named_parameters())[name].shape
            self.assertEqual(torch.arange(shape.numel()).view(shape)[found.element.position].item(), index)
            self.assertEqual((found.step, error.rank, error.peer), (step, self.rank, culprit))
            for part in (f"rank {culprit} ({found.host})", f"'{name}'", f"step {step} ", str(list(shape)), str(value)):
                self.assertIn(part, str(error))
            self.same_text(error)
            self.assertTrue(all(parameter.grad is None for parameter in model.parameters()))
            ours.step()  # changes nothing
        for one, two in zip(copies(model), copies(net)):
            torch.testing.assert_close(one, two)
        self.assertEqual((model.stats().steps, model.stats().non_finite_steps), (8, 3))
        model.require_same_parameters()

    def test_of_several_the_first_bucket_wins_then_the_lowest_rank(self):
        model, spoiler = self.model()
        for _ in range(2):
            self.backward(model)  # the second has the order in which gradients come: last, second, first
            model.zero_grad()
        last = self.size - 1
        spoiler.next = {"first.weight": (0, NAN), "last.weight" if self.rank == last else "second.weight": (1, INF)}
        with self.assertRaises(NonFiniteError) as caught:
            self.backward(model)
        found = caught.exception.gradient
        self.assertEqual((found.rank, found.parameter, found.element.index), (last, "last.weight", 1))
        self.same_text(caught.exception)
        spoiler.next = {"second.weight": (9 - self.rank, NAN)}
        with self.assertRaises(NonFiniteError) as caught:
            self.backward(model)
        found = caught.exception.gradient
        self.assertEqual((found.rank, found.parameter, found.element.index), (0, "second.weight", 9))

    def test_all_types_and_gradients_that_are_read_where_they_are(self):
        for dtype, hidden in (
            (torch.float64, 17),
            (torch.float32, 17),
            (torch.bfloat16, 17),
            (torch.float32, 1500),  # 9 MB: never copied to its bucket
        ):
            if dtype == torch.bfloat16 and torch.__version__ < "2":
                continue  # it has no loss for them
            with self.subTest(dtype=dtype, hidden=hidden):
                model, spoiler = self.model(dtype, hidden)
                self.backward(model, dtype=dtype)
                model.zero_grad()
                index = hidden * hidden - 3
                if self.rank == self.size - 1:
                    spoiler.next = {"second.weight": (index, NAN)}
                with self.assertRaises(NonFiniteError) as caught:
                    self.backward(model, dtype=dtype)
                element = caught.exception.gradient.element
                self.assertEqual((element.index, element.position), (index, (hidden - 1, hidden - 3)))
                self.backward(model, dtype=dtype)

    def test_large_gradients_are_known_by_their_averages(self):
        hidden, last = 1500, self.size - 1
        model, spoiler = self.model(torch.float32, hidden)
        self.backward(model, dtype=torch.float32)
        model.zero_grad()
        whole = hidden * hidden

        def expect(rank, parameter, index):
            with self.assertRaises(NonFiniteError) as caught:
                self.backward(model, dtype=torch.float32)
            found = caught.exception.gradient
            self.assertEqual((found.rank, found.parameter, found.element.index), (rank, parameter, index))
            self.same_text(caught.exception)
            self.assertTrue(all(parameter.grad is None for parameter in model.parameters()))

        for culprit in (0, last):
            for index in (0, whole // 2, whole - 1):
                if self.rank == culprit:
                    spoiler.next = {"second.weight": (index, -INF)}
                expect(culprit, "second.weight", index)
        # The bucket that is reduced first, though it is small and another rank's.
        spoiler.next = {"last.bias" if self.rank == last else "second.weight": (0, NAN)}
        expect(last, "last.bias", 0)
        # On one rank the gradient is accumulated, and so lies at its place.
        for culprit in {0, last}:
            if self.rank == last:
                with model.no_sync():
                    self.backward(model, dtype=torch.float32)
            if self.rank == culprit:
                spoiler.next = {"second.weight": (7, INF)}
            expect(culprit, "second.weight", 7)
        # Finite gradients whose sum is not: nobody's fault.
        if self.size > 1:
            raised = model.stats().non_finite_steps
            spoiler.next = {"second.weight": (5, 3e38)}
            self.backward(model, dtype=torch.float32)
            self.assertEqual(model.stats().non_finite_steps, raised)
            model.zero_grad()
        self.backward(model, dtype=torch.float32)

    def test_a_refused_step_moves_no_frozen_layer_either(self):
        for attached_anew in (False, True):
            net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
            model = DistributedDataParallel(net, non_finite="raise")
            optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            net[0].requires_grad_(False)
            if attached_anew:
                net[1].bias = torch.nn.Parameter(torch.zeros(1))
            before = net[0].weight.clone()
            with self.assertRaises(NonFiniteError):
                model(torch.full((1, 2), NAN if self.rank == 0 else 1.0)).sum().backward()
            optimizer.step()
            self.assertTrue(torch.equal(net[0].weight, before))

    def test_half_precision_that_overflows(self):
        parameter = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(3, dtype=torch.float16))])
        model = DistributedDataParallel(Scaled(parameter), non_finite="raise")
        model(torch.ones(1)).backward()
        model.zero_grad()
        with self.assertRaises(NonFiniteError) as caught:
            model(torch.full((1,), 7e4 if self.rank == 0 else 1.0)).backward()
        self.assertEqual((caught.exception.gradient.rank, caught.exception.gradient.element.value), (0, INF))

    def test_accumulated_gradients_are_looked_at_when_they_are_reduced(self):
        model, spoiler = self.model()
        last = self.size - 1
        for zero in (True, False):
            with model.no_sync():
                if self.rank == last:
                    spoiler.next = {"first.bias": (3, INF)}
                self.backward(model)  # says nothing: it concerns nobody yet
            with self.assertRaises(NonFiniteError) as caught:
                self.backward(model)
            self.assertEqual((caught.exception.peer, caught.exception.gradient.parameter), (last, "first.bias"))
            model.zero_grad(set_to_none=zero)
            self.backward(model)
            model.zero_grad(set_to_none=zero)

    def test_what_is_no_number_of_samples(self):
        model, _ = self.model()
        for samples in (-1, 0.5, NAN, True, "3", None, torch.tensor(1.5), 2**70):
            with self.assertRaisesRegex(cohort.errors.InvalidArgument, "set_sample_count: .* is no number of samples"):
                model.set_sample_count(samples)
        model.set_sample_count(torch.tensor(3))
        self.backward(model)

    def test_ranks_without_samples(self):
        model, spoiler = self.model()
        last = self.size - 1
        if self.rank == last:  # whatever it yields is dropped
            model.set_sample_count(0)
            spoiler.next = {"first.bias": (0, NAN)}
        self.backward(model)
        model.zero_grad()
        if self.rank == 0:
            spoiler.next = {"first.bias": (1, NAN)}
        with self.assertRaises(NonFiniteError) as caught:
            model.step_without_samples() if self.rank == last else self.backward(model)
        self.assertEqual((caught.exception.peer, caught.exception.gradient.element.index), (0, 1))
        self.same_text(caught.exception)

    def test_ranks_that_have_joined(self):
        model, spoiler = self.model()
        with model.join():
            for step in range(3 if self.rank == 0 else 0):
                spoiler.next = {"last.weight": (4, NAN)} if step == 1 else {}
                if step == 1:
                    with self.assertRaises(NonFiniteError) as caught:
                        self.backward(model)
                    self.assertEqual(caught.exception.peer, 0)
                else:
                    self.backward(model)

    def test_parameters_that_a_rank_does_not_use(self):
        net = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])

        class Either(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = net

            def forward(self, x, which):
                return self.layers[which](x)

        model = DistributedDataParallel(Either(), non_finite="raise")
        for which in (0, 1):
            model(torch.ones(2, 2), which if self.rank == 0 else 1 - which).sum().backward()
            model.zero_grad()
            x = torch.full((2, 2), INF if self.rank == 0 else 1.0)
            with self.assertRaises(NonFiniteError) as caught:
                model(x, which if self.rank == 0 else 1 - which).sum().backward()
            self.assertEqual(caught.exception.gradient.parameter, f"layers.{which}.weight")

    def test_a_float32_that_bfloat16_cannot_hold(self):
        hosts = len(ranks_of_hosts(self.size)) if os.environ.get("COHORT_PRETEND_HOSTS") else 1
        model, spoiler = self.model(torch.float32, wire_format=torch.bfloat16)
        if self.rank == self.size - 1:
            spoiler.next = {"second.bias": (5, 3.4e38)}
        if hosts == 1:  # it does not travel
            self.backward(model, dtype=torch.float32)
            return
        with self.assertRaisesRegex(NonFiniteError, r"3\.4e\+38, which is infinite as the type that it is sent as") as caught:
            self.backward(model, dtype=torch.float32)
        self.assertEqual((caught.exception.peer, caught.exception.gradient.element.index), (self.size - 1, 5))

    def test_unless_asked_it_spreads(self):
        model, spoiler = self.model(non_finite="ignore")
        if self.rank == 0:
            spoiler.next = {"last.bias": (0, NAN)}
        self.backward(model)
        self.assertTrue(model.module.last.bias.grad[0].isnan())

    def test_options_are_the_same_on_all_ranks(self):
        with self.assertRaisesRegex(cohort.Mismatch, "non_finite = raise"):
            DistributedDataParallel(Mlp(), non_finite="raise" if self.rank == 0 else "ignore")
        for options in ({"non_finite": True}, {"compare_parameters_every": -1}):
            with self.assertRaises(cohort.InvalidArgument):
                DistributedDataParallel(Mlp(), **options)


if torch is not None:

    class Scaled(torch.nn.Module):
        """Its gradient is what it is given."""

        def __init__(self, parameters):
            super().__init__()
            self.parameters_ = parameters

        def forward(self, x):
            return (self.parameters_[0].float() * x).sum()


@needs_torch
class OfATensor(unittest.TestCase):
    def test_is_found_in_the_order_of_the_dimensions(self):
        plain = pattern((4, 5, 6), 0)
        self.assertIsNone(first_non_finite(plain))
        for tensor in (plain, plain.permute(2, 0, 1), plain[:, 1::2]):
            tensor = tensor.clone(memory_format=torch.preserve_format)
            tensor[1, 0, 1] = NAN
            tensor[1, 1, 0] = INF
            found = first_non_finite(tensor)
            self.assertEqual(found.position, (1, 0, 1))
            self.assertEqual(found.index, tensor.shape[1] * tensor.shape[2] + 1)
        self.assertEqual(first_non_finite(torch.tensor(-INF)).position, ())
        self.assertEqual(first_non_finite(torch.tensor([1, complex(2, INF)])).value, INF)
        self.assertIsNone(first_non_finite(torch.arange(3)))
        self.assertIsNone(first_non_finite(torch.empty(0)))
        self.assertIsNone(first_non_finite(torch.full((3,), 3.4e38)))
        self.assertEqual(first_non_finite(torch.full((3,), 3.4e38), torch.bfloat16).index, 0)
        with self.assertRaisesRegex(cohort.InvalidArgument, "to_dense"):
            first_non_finite(torch.eye(2).to_sparse())


def flip(tensor, element, bit):
    """Flips a bit of an element, as a memory error would."""
    size = tensor.element_size()
    with torch.no_grad():
        tensor.data.view(-1).view(torch.uint8)[element * size + bit // 8] ^= 1 << (bit % 8)


@needs_torch
class SameParameters(Case):
    TYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "complex64")

    def named(self):
        tensors = [(name, pattern((3, 40), 1).mul(50).to(getattr(torch, name))) for name in self.TYPES]
        return [*tensors, ("bool", torch.ones(7, dtype=torch.bool)), ("none", torch.empty(0)), ("one", torch.ones(()))]

    def test_one_flipped_bit_is_found_in_every_type(self):
        require_same_parameters(self.named())
        for at, dtype in enumerate(self.TYPES):
            for odd in range(self.size):
                tensors = self.named()
                tensor = tensors[at][1]
                bit = (13 * at + odd) % (8 * tensor.element_size())
                if self.rank == odd:
                    flip(tensor, 47, bit)
                with self.subTest(dtype=dtype, odd=odd, bit=bit), self.assertRaises(cohort.Mismatch) as caught:
                    require_same_parameters(tensors, step=12)
                text = str(caught.exception)
                self.same_text(caught.exception)
                self.assertIn(f"{dtype} of [3, 40], element 47 at [1, 7]", text)
                self.assertIn("after 12 steps", text)
                if self.size == 2:
                    self.assertRegex(text, "rank 0 .* has .*, rank 1 .* has .* nobody can tell")
                else:
                    self.assertTrue(text.startswith(f"rank {odd} differs from the others"), text)
                    self.assertEqual(caught.exception.peer, odd)
        require_same_parameters(self.named())

    def test_several_ranks_and_the_first_tensor(self):
        tensors = self.named()
        if self.rank > 0:
            flip(tensors[2][1], 3 + self.rank, 0)
            flip(tensors[5][1], 0, 0)
        with self.assertRaisesRegex(cohort.Mismatch, r"float16 of \[3, 40\], element 3 at") as caught:
            if self.rank == 0:
                flip(tensors[2][1], 3, 0)
            require_same_parameters(tensors)
        self.same_text(caught.exception)

    def test_a_model_is_compared_every_so_many_steps(self):
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        for broadcast_buffers in (True, False):
            model = DistributedDataParallel(
                net, broadcast_buffers=broadcast_buffers, compare_parameters_every=3, non_finite="raise"
            )

            def step(number, model=model):
                model.zero_grad()
                model(pattern((4, 3), number + self.rank, torch.float32)).sum().backward()

            for number in range(7):  # buffers differ between the ranks meanwhile, as they may
                step(number)
            self.assertEqual(model.stats().parameter_comparisons, 2)
            odd = self.size - 1
            if self.rank == odd:
                flip(net[2].weight, 2, 9)
            step(7)
            step(8)
            with self.assertRaisesRegex(cohort.Mismatch, r"after 9 steps .*'2\.weight' of \[1, 4\], element 2") as caught:
                step(9)
            self.assertEqual(caught.exception.peer, odd)
            if self.rank == odd:
                flip(net[2].weight, 2, 9)
            step(9)
            del model, step
            torch.manual_seed(0)

    def test_buffers_are_compared_when_asked(self):
        net = torch.nn.BatchNorm1d(4)
        model = DistributedDataParallel(net)
        model.require_same_parameters()
        if self.rank == 0:
            flip(net.running_var, 1, 1)
        with self.assertRaisesRegex(cohort.Mismatch, r"buffer 'running_var' of \[4\], element 1"):
            model.require_same_parameters()
        model.sync_buffers()
        model.require_same_parameters()

    def test_ranks_that_have_joined_are_left_out(self):
        if self.size < 3:
            self.skipTest("two ranks have to be left")
        tensors = self.named()
        if self.rank == 0:  # of all ranks the one that broadcasts begin with
            cohort.world().join()
            return
        require_same_parameters(tensors)
        if self.rank == 1:
            flip(tensors[0][1], 0, 0)
        with self.assertRaisesRegex(cohort.Mismatch, "rank 1") as caught:
            require_same_parameters(tensors)
        self.assertEqual(caught.exception.rank, self.rank)
        cohort.world().join()


if __name__ == "__main__":
    unittest.main()
