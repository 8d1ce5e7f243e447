"""cohort.nn with a model on cuda: the same gradients and models as on the CPU. 2 ranks, which share a GPU."""

import cuda_support  # isort: skip
import time
import unittest
import weakref

import torch

import cohort
import cohort.nn


def setUpModule():
    cohort.init()


def tearDownModule():
    cohort.shutdown()


def model_of(device, wide=False):
    torch.manual_seed(cohort.rank())  # rank 0's is everybody's, then
    layers = [torch.nn.Linear(6, 2100 if wide else 16), torch.nn.Tanh(), torch.nn.Linear(2100 if wide else 16, 1000 if wide else 3)]
    return torch.nn.Sequential(*layers[:1], torch.nn.BatchNorm1d(layers[0].out_features), *layers[1:]).to(device)


def train(device, steps=4, samples=None, wide=False, moves=False, **options):
    model = model_of(device, wide)
    if samples is not None:
        options["samples"] = len
    parallel = cohort.nn.DistributedDataParallel(model, bucket_cap_mb=600 / 2**20, first_bucket_bytes=100, **options)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(10 + cohort.rank())
    count = 8 if samples is None else samples[cohort.rank()]
    for _ in range(steps):
        x = torch.randn(count, 6, generator=generator).to(device)
        optimizer.zero_grad()
        parallel(x).pow(2).mean().backward()
        optimizer.step()
        if moves:  # as for a checkpoint
            model.cpu()
            model.to(device)
    return model, parallel


class OnGpus(unittest.TestCase):
    def assert_alike(self, one, other):
        for name, value in one.state_dict().items():
            within = 1e-6 if cuda_support.FAKE else 1e-5  # kernels of a real GPU sum in other orders
            torch.testing.assert_close(value.cpu(), other.state_dict()[name].cpu(), rtol=10 * within, atol=within, msg=name)

    def test_training_is_that_of_the_cpu(self):
        before = cuda_support.operations_of_nccl()
        model, parallel = train("cuda")
        if cuda_support.WITH_NCCL:
            self.assertGreater(cuda_support.operations_of_nccl() - before, 4)
        self.assertTrue(all(parameter.grad.is_cuda for parameter in model.parameters()))
        self.assert_alike(model, train("cpu")[0])
        parallel.sync_buffers()
        parallel.require_same_parameters()

    def test_a_model_that_is_moved_there_and_back(self):
        self.assert_alike(train("cuda", moves=True)[0], train("cpu")[0])

    def test_weights_are_samples(self):
        before = cuda_support.operations_of_nccl()
        model, _ = train("cuda", samples=(3, 9))
        if cuda_support.WITH_NCCL:
            self.assertGreater(cuda_support.operations_of_nccl() - before, 4)
        self.assert_alike(model, train("cpu", samples=(3, 9))[0])

    def test_large_gradients_are_read_where_they_are(self):
        # 8 MiB and more are a reduction of their own.
        model, _ = train("cuda", steps=2, wide=True)
        self.assert_alike(model, train("cpu", steps=2, wide=True)[0])

    @unittest.skipUnless(cuda_support.WITH_NCCL, "the host waits for what goes by its memory")
    def test_backward_does_not_wait_for_the_gpu(self):
        gradients = []
        for device in ("cpu", "cuda"):
            model = model_of(device)
            parallel = cohort.nn.DistributedDataParallel(model)
            parallel(torch.ones(2, 6, device=device)).sum().backward()
            model.zero_grad(set_to_none=True)
            loss = parallel(torch.arange(12.0).reshape(2, 6).to(device) * (cohort.rank() + 1)).sum()
            cohort.world().barrier()
            with cuda_support.delay_of_nccl(6000):
                begun = time.monotonic()
                loss.backward()
                self.assertLess(time.monotonic() - begun, 5)
                gradients.append([parameter.grad.cpu() for parameter in model.parameters()])
        for one, other in zip(*gradients):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

    @unittest.skipUnless(cuda_support.WITH_NCCL, "the host waits for what goes by its memory")
    def test_large_gradients_go_in_the_order_of_the_stream(self):
        # The host runs ahead of the GPU: no gradient is kept until it is reduced.
        model = torch.nn.Linear(2100, 1000, bias=False).to("cuda")
        parallel = cohort.nn.DistributedDataParallel(model)
        x = torch.ones(2, 2100, device="cuda")
        parallel(x).sum().backward()
        gradients = []
        model.weight.register_hook(lambda gradient: gradients.append(weakref.ref(gradient)))
        model.zero_grad(set_to_none=True)
        loss = parallel(x).sum()
        cohort.world().barrier()
        with cuda_support.delay_of_nccl(6000):
            begun = time.monotonic()
            loss.backward()
            self.assertEqual([one() is None for one in gradients], [True])
            self.assertLess(time.monotonic() - begun, 5)

    def test_no_gradient_of_earlier_steps_is_kept(self):
        model = torch.nn.Linear(2100, 1000, bias=False).to("cuda")
        parallel = cohort.nn.DistributedDataParallel(model)
        x = torch.ones(2, 2100, device="cuda")
        gradients = []
        model.weight.register_hook(lambda gradient: gradients.append(weakref.ref(gradient)))
        for _ in range(5):
            model.zero_grad(set_to_none=True)
            parallel(x).sum().backward()
        model.zero_grad(set_to_none=True)
        until = time.monotonic() + 10
        while any(one() is not None for one in gradients) and time.monotonic() < until:
            time.sleep(0.001)
        self.assertEqual([one() for one in gradients], [None] * 5)

    def test_a_rank_without_samples(self):
        model = model_of("cuda")
        parallel = cohort.nn.DistributedDataParallel(model)
        if cohort.rank() == 0:
            parallel(torch.ones(2, 6, device="cuda")).sum().backward()
        else:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float("nan"))
            self.assertTrue(parallel.step_without_samples())
        for parameter in model.parameters():
            self.assertTrue(bool(torch.isfinite(parameter.grad).all()))

    def test_parameters_that_nobody_uses_keep_their_gradients(self):
        model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "unused": torch.nn.Linear(2, 2)}).to("cuda")
        parallel = cohort.nn.DistributedDataParallel(_First(model))
        kept = torch.tensor([0.1, 0.7], device="cuda")
        model["unused"].bias.grad = kept.clone()
        parallel(torch.ones(1, 2, device="cuda")).sum().backward()
        self.assertTrue(torch.equal(model["unused"].bias.grad.cpu(), kept.cpu()))
        self.assertIsNone(model["unused"].weight.grad)

    def test_accumulation(self):
        gradients = []
        for device in ("cuda", "cpu"):
            model = model_of(device)
            parallel = cohort.nn.DistributedDataParallel(model)
            x = torch.arange(12.0).reshape(2, 6).to(device) * (cohort.rank() + 1) / 10
            with parallel.no_sync():
                parallel(x).sum().backward()
            parallel(x + 1).sum().backward()
            gradients.append([parameter.grad.cpu() for parameter in model.parameters()])
        for one, other in zip(*gradients):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

    def test_what_is_not_finite_is_named(self):
        model = model_of("cuda")
        parallel = cohort.nn.DistributedDataParallel(model, non_finite="raise")
        parallel(torch.ones(2, 6, device="cuda")).sum().backward()
        x = torch.ones(2, 6, device="cuda")
        if cohort.rank() == 1:
            x[1, 2] = float("nan")
        # torch 1.13 loses what is raised at the end of a backward on another thread.
        with self.assertRaises(SystemError if torch.__version__ < "2" else cohort.nn.NonFiniteError) as raised:
            parallel(x).sum().backward()
        if torch.__version__ >= "2":
            self.assertEqual(raised.exception.gradient.rank, 1)
            self.assertEqual(raised.exception.gradient.step, 1)
        self.assertTrue(all(parameter.grad is None for parameter in model.parameters()))

    def test_models_on_other_devices_are_refused(self):
        with self.assertRaisesRegex(cohort.Mismatch, "on cuda"):
            cohort.nn.DistributedDataParallel(torch.nn.Linear(2, 2).to("cuda" if cohort.rank() == 1 else "cpu"))

    def test_models_that_differ_are_found(self):
        model, parallel = train("cuda", steps=1)
        with torch.no_grad():
            if cohort.rank() == 1:
                model[0].bias[3] += 1
        with self.assertRaisesRegex(cohort.Mismatch, "0.bias"):
            parallel.require_same_parameters()


class _First(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers["used"](x)
