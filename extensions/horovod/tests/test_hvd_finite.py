"""hvd.DistributedOptimizer(non_finite="raise") on all ranks of `cohort run -np N`: each rank runs this."""

import unittest

from support import torch
from support_hvd import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

if torch is not None:
    import cohort
    import cohort.horovod.torch as hvd
    from cohort.nn import NonFiniteError

NAN, INF = float("nan"), float("inf")


class Finite(unittest.TestCase):
    def setUp(self):
        self.rank, self.size = hvd.rank(), hvd.size()
        self.last = self.size - 1

    def tearDown(self):
        hvd.barrier()

    def make(self, **options):
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        options = {"named_parameters": net.named_parameters(), "non_finite": "raise", **options}
        return net, hvd.DistributedOptimizer(optimizer, **options)

    def backward(self, net, poison=None):
        """poison: the value that element 5 of the first weight's gradient gets."""

        def spoil(gradient):
            changed = gradient.clone()
            changed[1, 2] = poison
            return changed

        hook = net[0].weight.register_hook(spoil) if poison is not None else None
        net(torch.arange(6.0).view(2, 3) + self.rank).sum().backward()
        if hook is not None:
            hook.remove()

    def values(self, net):
        return torch.cat([tensor.detach().reshape(-1) for tensor in net.parameters()])

    def test_is_named_on_all_ranks_and_training_goes_on(self):
        for options in ({}, {"groups": 1}, {"compression": hvd.Compression.fp16}, {"backward_passes_per_step": 2}):
            with self.subTest(**options):
                net, optimizer = self.make(**options)
                for step, poison in enumerate((None, NAN, None, -INF, None)):
                    before = self.values(net)
                    optimizer.zero_grad()
                    for _ in range(optimizer.backward_passes_per_step):
                        self.backward(net, poison if self.rank == self.last else None)
                    if poison is None:
                        optimizer.step()
                        self.assertFalse(torch.equal(before, self.values(net)))
                        continue
                    with self.assertRaises(NonFiniteError) as caught:
                        optimizer.step()
                    found = caught.exception.gradient
                    self.assertEqual((found.rank, found.parameter, found.step), (self.last, "0.weight", step))
                    self.assertEqual((found.element.index, found.element.position), (5, (1, 2)))
                    self.assertEqual(str(found.element.value), str(poison))
                    self.assertEqual(found.host, cohort.world().host())
                    self.assertTrue(torch.equal(before, self.values(net)))
                    self.assertTrue(all(parameter.grad is None for parameter in net.parameters()))
                every = hvd.allgather(self.values(net).unsqueeze(0))
                self.assertTrue(every.isfinite().all() and all(torch.equal(one, every[0]) for one in every))

    def test_of_several_the_lowest_rank(self):
        net, optimizer = self.make()
        self.backward(net, INF)
        with self.assertRaisesRegex(NonFiniteError, "rank 0 .*'0.weight' of \\[4, 3\\], element 5 at \\[1, 2\\] -- it is inf"):
            optimizer.synchronize()
        optimizer.zero_grad()
        self.backward(net)
        optimizer.step()

    def test_what_compression_makes_infinite(self):
        net, optimizer = self.make(compression=hvd.Compression.fp16)
        self.backward(net, 1e5 if self.rank == self.last else None)
        with self.assertRaisesRegex(NonFiniteError, "100000, which is infinite as the type that it is sent as") as caught:
            optimizer.step()
        self.assertEqual(caught.exception.gradient.element.value, 1e5)

    def test_sparse_gradients(self):
        table = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, table.named_parameters(), non_finite="raise")
        scale = torch.tensor([1.0, NAN if self.rank == 0 else 1.0])
        (table(torch.tensor([3, 1])) * scale).sum().backward()
        with self.assertRaisesRegex(NonFiniteError, "rank 0 .*'weight' of \\[5, 2\\], element 3 at \\[1, 1\\]"):
            optimizer.step()

    def test_unless_asked_it_spreads(self):
        net, optimizer = self.make(non_finite="ignore")
        self.backward(net, NAN if self.rank == 0 else None)
        optimizer.step()
        self.assertTrue(net[0].weight[1, 2].isnan())

    def test_what_it_does_not_go_with(self):
        for options in ({"non_finite": "drop"}, {"op": hvd.Adasum}):
            with self.assertRaisesRegex(ValueError, "non_finite"):
                self.make(**options)


if __name__ == "__main__":
    unittest.main()
