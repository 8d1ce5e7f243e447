"""The memory of gradients of hvd.DistributedOptimizer, on all ranks of `cohort run -np N`: each rank runs this."""

import copy
import gc
import unittest
import warnings
import weakref

from support import torch
from support_hvd import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

if torch is not None:
    import cohort.horovod.torch as hvd
    from cohort.errors import Unavailable
    from cohort.horovod.torch import _places

WIDTH = 130  # the weights take 132 KiB


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)).double()


def in_communicator_memory(tensor):
    address = tensor.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            if begin <= address < end:
                return "memfd:cohort" in line
    return False


class Case(unittest.TestCase):
    def setUp(self):
        self.rank, self.size = hvd.rank(), hvd.size()
        self.steps = 0

    def tearDown(self):
        hvd.barrier()

    def wrap(self, model, prefix="", **options):
        named = [(prefix + name, parameter) for name, parameter in model.named_parameters()]
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), named, **options)

    def backward(self, *models, passes=1):
        """Adds the same gradients to all of these models; they differ by rank and by call."""
        for _ in range(passes):
            self.steps += 1
            generator = torch.Generator().manual_seed(100 * self.steps + self.rank)
            x = torch.randn(4, WIDTH, generator=generator).double()
            for model in models:
                model(x).square().sum().backward()

    def reduced(self, model, op=None, process_set=None, prescale=1.0, postscale=1.0):
        """Returns the results of plain allreduces for the gradients of a model without an optimizer."""
        return [
            hvd.allreduce(
                parameter.grad,
                op=op,
                prescale_factor=prescale,
                postscale_factor=postscale,
                process_set=process_set or hvd.global_process_set,
            )
            for parameter in model.parameters()
        ]

    def same_bits(self, model, expected):
        for (name, parameter), value in zip(model.named_parameters(), expected):
            self.assertTrue(torch.equal(parameter.grad, value), name)

    def train(self, optimizer, model, steps, set_to_none=False, passes=1, reduce=None):
        """Yields the model's first parameter after each step's reduction, whose bits have been compared."""
        for _ in range(steps):
            twin = copy.deepcopy(model)
            twin.zero_grad(set_to_none=True)
            optimizer.zero_grad(set_to_none=set_to_none)
            self.backward(model, twin, passes=passes)
            optimizer.synchronize()
            self.same_bits(model, self.reduced(twin, **(reduce or {})))
            with optimizer.skip_synchronize():
                optimizer.step()
            yield model[0].weight

    def settle(self, optimizer, model):
        """Trains until the gradients are in their buffers."""
        for weight in self.train(optimizer, model, 2):
            pass
        self.assertTrue(in_communicator_memory(weight.grad))


class Places(Case):
    def test_gradients_that_are_kept(self):
        model = network()
        optimizer = self.wrap(model)
        where = [(weight.grad.data_ptr(), id(weight.grad)) for weight in self.train(optimizer, model, 5)]
        self.assertNotEqual(where[0][0], where[1][0])
        self.assertEqual(len(set(where[1:])), 1)
        self.assertEqual(len({one for _, one in where}), 1)
        for name, parameter in model.named_parameters():
            self.assertEqual(in_communicator_memory(parameter.grad), "weight" in name)
            self.assertEqual(parameter.grad.stride(), parameter.stride())
            parameter.grad.detach_()
        optimizer.zero_grad(set_to_none=False)
        self.assertEqual(float(model[0].weight.grad.abs().sum()), 0.0)

    def test_gradients_that_are_made_anew(self):
        model = network()
        optimizer = self.wrap(model)
        for weight in self.train(optimizer, model, 4, set_to_none=True):
            self.assertFalse(in_communicator_memory(weight.grad))
        self.assertEqual(optimizer._reducer._places._places, {})

    def test_gradients_that_are_never_zeroed(self):
        model = network()
        optimizer = self.wrap(model)
        twin = copy.deepcopy(model)
        for step in range(4):
            self.backward(model, twin)
            optimizer.synchronize()
            expected = self.reduced(twin)
            self.same_bits(model, expected)
            for parameter, value in zip(twin.parameters(), expected):
                parameter.grad.copy_(value)
            self.assertEqual(in_communicator_memory(model[0].weight.grad), step > 0)
        self.assertIs(optimizer._reducer.synchronized, True)

    def test_options(self):
        cases = [
            ({"groups": 1}, {}),
            ({"groups": [[0, 2], [3]]}, {}),
            ({"op": hvd.Sum}, {"reduce": {"op": hvd.Sum}}),
            ({"op": hvd.Max}, {"reduce": {"op": hvd.Max}}),
            ({"backward_passes_per_step": 3}, {"passes": 3}),
            ({"gradient_predivide_factor": 4.0}, {"reduce": {"prescale": 0.25, "postscale": 4.0}}),
        ]
        for options, how in cases:
            with self.subTest(**options):
                model = network()
                parameters = list(model.parameters())
                if isinstance(options.get("groups"), list):
                    options = {"groups": [[parameters[i] for i in group] for group in options["groups"]]}
                optimizer = self.wrap(model, **options)
                where = [weight.grad.data_ptr() for weight in self.train(optimizer, model, 4, **how)]
                self.assertEqual(len(set(where[1:])), 1)
                self.assertTrue(in_communicator_memory(model[2].weight.grad))

    def test_compressed_gradients_stay(self):
        model = network()
        optimizer = self.wrap(model, compression=hvd.Compression.fp16)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            self.backward(model)
            optimizer.step()
        self.assertFalse(in_communicator_memory(model[0].weight.grad))

    def test_set(self):
        ours = hvd.add_process_set([0, 1]) if self.size > 2 else hvd.global_process_set
        model = network()
        optimizer = self.wrap(model, process_set=ours)
        if self.rank < 2:
            where = [w.grad.data_ptr() for w in self.train(optimizer, model, 4, reduce={"process_set": ours})]
            self.assertEqual(len(set(where[1:])), 1)
            self.assertTrue(in_communicator_memory(model[0].weight.grad))
        if self.size > 2:
            hvd.remove_process_set(ours)

    def test_more_parameters_later(self):
        model = network()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.01))
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            self.backward(model)
            optimizer.step()
        optimizer.add_param_group({"params": list(model[2].parameters())})
        model.zero_grad()
        self.settle(optimizer, model)
        self.assertTrue(in_communicator_memory(model[2].weight.grad))
        places = [optimizer._reducer._places._places[model[i].weight] for i in (0, 2)]
        self.assertIsNot(places[0]._bytes.obj, places[1]._bytes.obj)

    def test_types(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            weight = torch.nn.Parameter(torch.zeros(300, 300, dtype=dtype))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [(f"w.{dtype}", weight)], op=hvd.Sum)
            for _ in range(3):
                optimizer.zero_grad(set_to_none=False)
                (weight * (self.rank + 1)).sum().backward()
                optimizer.synchronize()
                self.assertTrue(bool((weight.grad == sum(range(1, self.size + 1))).all()))
            self.assertTrue(in_communicator_memory(weight.grad))

    def test_a_type_that_changes(self):
        weight = torch.nn.Parameter(torch.zeros(40000).double())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("changes", weight)], op=hvd.Sum)
        for step in range(6):
            if step == 3:
                weight.grad = None
                weight.data = weight.data.float()
            optimizer.zero_grad(set_to_none=False)
            (weight * (self.rank + 1)).sum().backward()
            optimizer.synchronize()
            self.assertEqual(weight.grad.dtype, torch.float64 if step < 3 else torch.float32)
            self.assertTrue(bool((weight.grad == sum(range(1, self.size + 1))).all()))


class Sharing(Case):
    def test_who_holds_a_gradient_sees_what_becomes_of_it(self):
        model = network()
        optimizer = self.wrap(model)
        for step in range(3):
            optimizer.zero_grad(set_to_none=False)
            self.backward(model)
            held = model[0].weight.grad
            optimizer.step()
            self.assertIs(model[0].weight.grad, held)

    def test_who_holds_an_old_gradient_keeps_it(self):
        for hold in (lambda gradient: gradient, lambda gradient: gradient.view(-1)[5:], lambda gradient: gradient.numpy()):
            model = network()
            optimizer = self.wrap(model)
            self.settle(optimizer, model)
            held = hold(model[0].weight.grad)
            before = copy.deepcopy(held)
            optimizer.zero_grad(set_to_none=True)
            for weight in self.train(optimizer, model, 3):
                self.assertFalse(in_communicator_memory(weight.grad))
            self.assertTrue(bool((held == before).all()))
            self.assertTrue(in_communicator_memory(model[2].weight.grad))
            del held
            for weight in self.train(optimizer, model, 2):
                pass
            self.assertTrue(in_communicator_memory(weight.grad))

    def test_gradients_that_are_replaced(self):
        def transposed(gradient):
            return gradient.t().contiguous().t()

        for replace in (torch.clone, transposed):
            model = network()
            optimizer = self.wrap(model)
            for settled in (False, True):
                if settled:
                    optimizer.zero_grad(set_to_none=True)
                    self.settle(optimizer, model)
                for _ in range(3):
                    weight = model[0].weight
                    if weight.grad is not None:
                        weight.grad = replace(weight.grad)
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # torch says that transposed gradients are slow
                        for _ in self.train(optimizer, model, 2):
                            pass

    def test_gradients_that_are_exchanged(self):
        model = network()
        optimizer = self.wrap(model)
        self.settle(optimizer, model)
        one, two = model[0].weight, model[2].weight
        one.grad, two.grad = two.grad, one.grad
        for _ in self.train(optimizer, model, 3):
            pass
        self.assertNotEqual(one.grad.data_ptr(), two.grad.data_ptr())

    def test_gradients_that_are_shared(self):
        def whole(model):
            model[2].weight.grad = model[0].weight.grad

        def alias(model):
            model[2].weight.grad = model[0].weight.grad.detach()

        def parts(model):
            both = torch.zeros(2, WIDTH, WIDTH).double()
            model[0].weight.grad, model[2].weight.grad = both[0], both[1]

        for settled in (False, True):
            for share in (whole, alias, parts):
                with self.subTest(settled=settled, share=share.__name__):
                    # Also in cases where places make little sense, the results are those without places.
                    pair = network(), network()
                    both = [self.wrap(model, prefix, op=hvd.Sum, groups=1) for model, prefix in zip(pair, "ab")]
                    both[1]._reducer._places = None
                    for step in range(6):
                        if step == (3 if settled else 1):
                            for model in pair:
                                share(model)
                        for model, optimizer in zip(pair, both):
                            optimizer.zero_grad(set_to_none=False)
                        self.backward(*pair)
                        for optimizer in both:
                            optimizer.synchronize()
                        self.same_bits(pair[0], [parameter.grad for parameter in pair[1].parameters()])
                    self.assertEqual(in_communicator_memory(pair[0][2].weight.grad), settled and share is not parts)

    def test_replaced_while_it_is_reduced(self):
        model = network()
        optimizer = self.wrap(model)
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            twin = copy.deepcopy(model)
            self.backward(model, twin)
            mine = torch.empty_like(model[0].weight)
            model[0].weight.grad = mine
            model[2].weight.grad = None
            with self.assertRaisesRegex(ValueError, r"gradient of '\d.weight' was changed"):
                optimizer.synchronize()
            self.assertIs(model[0].weight.grad, mine)  # gradients under way have arrived nevertheless
            self.same_bits(model, self.reduced(twin))

    def test_unused_and_frozen(self):
        for groups in (None, 1):
            model = network()
            optimizer = self.wrap(model, groups=groups)
            self.settle(optimizer, model)
            x = torch.ones(1, WIDTH).double()
            for _ in range(3):
                optimizer.zero_grad(set_to_none=True)
                (model[0] if self.rank == 0 else model[2])(x).sum().backward()
                optimizer.synchronize()
                self.assertTrue(torch.equal(model[0].weight.grad, torch.full_like(model[0].weight, 1 / self.size)))
                share = (self.size - 1) / self.size
                self.assertTrue(torch.allclose(model[2].weight.grad, torch.full_like(model[2].weight, share)))
            model[0].weight.requires_grad_(False)
            for _ in range(3):
                optimizer.zero_grad(set_to_none=False)
                model[2](x).sum().backward()
                optimizer.synchronize()
                self.assertEqual(float(model[0].weight.grad.abs().sum()), 0.0)
                self.assertTrue(torch.equal(model[2].weight.grad, torch.ones_like(model[2].weight)))

    def test_sparse(self):
        for as_dense in (False, True):
            table = torch.nn.Embedding(200, WIDTH, sparse=True)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(table.parameters(), lr=0.5), table.named_parameters(), sparse_as_dense=as_dense
            )
            for step in range(4):
                optimizer.zero_grad(set_to_none=step < 2)
                table(torch.tensor([0, self.rank + 1])).sum().backward()
                optimizer.synchronize()
                gradient = table.weight.grad
                self.assertTrue(gradient.is_sparse)
                expected = torch.zeros(200, WIDTH)
                expected[0], expected[1 : self.size + 1] = 1.0, 1 / self.size
                torch.testing.assert_close(gradient.to_dense(), expected)


class Ends(Case):
    def test_a_reduction_that_fails_leaves_the_gradient(self):
        size = 40000 if self.rank == 0 else 30000  # ranks have different sizes
        weight = torch.nn.Parameter(torch.zeros(size))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("differs", weight)])
        for step in range(3):
            optimizer.zero_grad(set_to_none=False)
            (weight * (self.rank + 5)).sum().backward()
            gradient = weight.grad
            with self.assertRaises(hvd.HorovodInternalError):
                optimizer.synchronize()
            self.assertIs(weight.grad, gradient)
            self.assertTrue(bool((gradient == self.rank + 5).all()))

    def test_memory_ends_with_optimizer_and_gradients(self):
        model = network()
        optimizer = self.wrap(model)
        self.settle(optimizer, model)
        memory = weakref.ref(optimizer._reducer._places._places[model[0].weight]._bytes.obj)
        self.assertIsNotNone(memory())
        value = model[0].weight.grad.clone()
        del optimizer
        gc.collect()
        self.assertTrue(torch.equal(model[0].weight.grad, value))
        self.assertIsNotNone(memory())
        model.zero_grad(set_to_none=True)
        gc.collect()
        self.assertIsNone(memory())

    def test_no_memory(self):
        class Poor:
            def allocate(self, size):
                raise Unavailable(f"cannot get {size} bytes")

        model = network()
        optimizer = self.wrap(model)
        make = _places._make_places
        _places._make_places = lambda engine, parameters: make(Poor(), parameters)
        try:
            with self.assertWarnsRegex(UserWarning, "cannot get"):
                for weight in self.train(optimizer, model, 2):
                    pass
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # the warning is not repeated
                for weight in self.train(optimizer, model, 2):
                    pass
        finally:
            _places._make_places = make
        self.assertFalse(in_communicator_memory(weight.grad))

    def test_given_up(self):
        weight = torch.nn.Parameter(torch.zeros(40000))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0), [("given up", weight)], op=hvd.Sum)
        state = optimizer.state_dict()

        def step(value):
            optimizer.zero_grad(set_to_none=False)
            (weight * value).sum().backward()

        step(1.0)
        optimizer.step()
        if self.rank == 0:
            step(2.0)  # into its place
            optimizer.load_state_dict(state)
            hvd.barrier()
        else:
            hvd.barrier()
            step(2.0)
            optimizer.step()
        hvd.barrier()
        gc.collect()
        for value in (3.0, 4.0, 5.0):
            step(value)
            optimizer.step()
            self.assertTrue(bool((weight.grad == value * self.size).all()))

    def test_join(self):
        model = network()
        optimizer = self.wrap(model)
        self.settle(optimizer, model)
        if self.rank == 0:
            for _ in range(2):
                optimizer.zero_grad(set_to_none=False)
                self.backward(model)
                optimizer.step()
                self.assertTrue(in_communicator_memory(model[0].weight.grad))
            twin = copy.deepcopy(model)
            twin.zero_grad(set_to_none=True)
            optimizer.zero_grad(set_to_none=False)
            self.backward(model, twin)
            optimizer.synchronize()
            for parameter, other in zip(model.parameters(), twin.parameters()):
                torch.testing.assert_close(parameter.grad, other.grad / self.size)
        hvd.join()

    def test_the_world_ends_and_begins_anew(self):
        model = network()
        optimizer = self.wrap(model)
        self.settle(optimizer, model)
        value, where = model[0].weight.grad.clone(), model[0].weight.grad.data_ptr()
        hvd.shutdown()
        self.assertTrue(torch.equal(model[0].weight.grad, value))
        model[0].weight.grad.zero_()
        hvd.init()
        for weight in self.train(optimizer, model, 2):
            self.assertTrue(in_communicator_memory(weight.grad))
        self.assertNotEqual(weight.grad.data_ptr(), where)


if __name__ == "__main__":
    unittest.main()
