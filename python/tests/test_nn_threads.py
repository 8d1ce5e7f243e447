"""DataParallel: replicas on threads of one process give what the module alone gives."""

import copy
import pickle
import threading
import unittest

from support import needs_torch, torch

import cohort

if torch is not None:
    from nn_models import Mlp, batch_of, gradients, loss_of, with_values

    from cohort.nn import DataParallel

    class Structured(torch.nn.Module):
        """Takes and gives nested things, and notes which threads it runs on."""

        def __init__(self):
            super().__init__()
            self.net = with_values(Mlp())
            self.threads = set()

        def forward(self, inputs, *, factor, flag):
            self.threads.add(threading.get_ident())
            out = self.net(inputs["x"][0]) * factor
            return {"out": (out, [out.sum()]), "flag": flag}


@needs_torch
class Threads(unittest.TestCase):
    def test_the_same_as_the_module_alone(self):
        alone, net = with_values(Mlp()), with_values(Mlp())
        model = DataParallel(net, replicas=3)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (alone, model)]
        for step, samples in enumerate((6, 7, 3, 2, 1, 0)):
            x, y = batch_of(step, samples)
            inputs = [x.clone().requires_grad_() for _ in range(2)]
            for module, optimizer, mine in zip((alone, model), optimizers, inputs):
                optimizer.zero_grad()
                out = module(mine)
                self.assertEqual(out.shape, (samples, 3))
                loss_of(out, y).backward()
                if samples:
                    optimizer.step()
            if samples:
                for one, other in zip([*gradients(alone), inputs[0].grad], [*gradients(net), inputs[1].grad]):
                    self.assertTrue(torch.allclose(one, other, 1e-11, 1e-11))

    def test_structures_and_threads(self):
        module = Structured()
        x, _ = batch_of(0, 5)
        factor = torch.tensor(2.0, dtype=torch.float64)
        expected = module({"x": [x]}, factor=factor, flag="f")
        module.threads.clear()
        result = DataParallel(module, 2)({"x": [x]}, factor=factor, flag="f")
        self.assertEqual(len(module.threads), 2)  # one set, shared by the replicas
        self.assertNotIn(threading.get_ident(), module.threads)
        self.assertEqual(result["flag"], "f")
        self.assertTrue(torch.allclose(result["out"][0], expected["out"][0], 1e-12))
        self.assertEqual(result["out"][1][0].shape, (2,))
        self.assertTrue(torch.allclose(result["out"][1][0].sum(), expected["out"][1][0], 1e-12))

    def test_two_runs_are_equal_to_the_bit(self):
        results = []
        for _ in range(2):
            model = DataParallel(with_values(Mlp(torch.float32)), 4)
            x, y = batch_of(1, 9, torch.float32)
            loss_of(model(x), y).backward()
            results.append(gradients(model))
        for one, other in zip(*results):
            self.assertTrue(torch.equal(one, other))

    def test_modes_reach_the_threads(self):
        model = DataParallel(with_values(Mlp(torch.float32)), 2)
        x, _ = batch_of(0, 4, torch.float32)
        with torch.no_grad():
            self.assertFalse(model(x).requires_grad)
        with torch.inference_mode():
            self.assertTrue(model(x).is_inference())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            self.assertEqual(model(x).dtype, torch.bfloat16)
        self.assertTrue(model(x).requires_grad)

    def test_running_statistics_are_replica_zero_s(self):
        norm = torch.nn.BatchNorm1d(2, momentum=0.5)
        model = DataParallel(norm, 2)
        model(torch.tensor([[2.0, 4.0], [2.0, 4.0], [100.0, 100.0], [100.0, 100.0]]))
        self.assertEqual(norm.running_mean.tolist(), [1.0, 2.0])
        self.assertEqual(norm.num_batches_tracked.item(), 1)
        model.eval()
        self.assertFalse(norm.training)

    def test_errors_and_copies(self):
        model = DataParallel(with_values(Mlp()), 2)
        with self.assertRaises(RuntimeError):
            model(torch.ones(4, 7, dtype=torch.float64))
        x, _ = batch_of(0, 4)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            self.assertTrue(torch.equal(other(x), model(x)))
        for wrong in (0, [0, 1]):
            with self.assertRaises(cohort.InvalidArgument):
                DataParallel(Mlp(), wrong)

        class Two(torch.nn.Module):
            def forward(self, one, other):
                return one

        with self.assertRaisesRegex(cohort.InvalidArgument, "3, 4"):
            DataParallel(Two(), 2)(torch.ones(3), torch.ones(4))


if __name__ == "__main__":
    unittest.main()
