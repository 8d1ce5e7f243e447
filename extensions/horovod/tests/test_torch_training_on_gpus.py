"""Training by cohort.horovod.torch, and by horovod.torch, on "cuda" tensors, with the results of the CPU."""

import pathlib
import sys
import unittest
import unittest.mock

import cuda_support  # first: before torch
from support_torch_on_gpus import Gpus

import cohort
import cohort.horovod.torch as hvd
import torch
from cohort._launch import command as _command
from support_hvd import setUpModule, tearDownModule  # noqa: F401


def data(rank, device):
    generator = torch.Generator().manual_seed(100 + rank)
    images = torch.rand(4, 8, 1, 8, 8, generator=generator)
    labels = torch.randint(0, 4, (4, 8), generator=generator)
    return [(image.to(device), label.to(device)) for image, label in zip(images, labels)]


def model_on(device, seed=3):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(72, 300), torch.nn.Linear(300, 4)
    ).to(device)


class Training(Gpus):
    def train(self, device, optimizer_of=None, passes=1, **options):
        model = model_on(device)
        make = optimizer_of or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        optimizer = hvd.DistributedOptimizer(
            make(model.parameters()), model.named_parameters(), backward_passes_per_step=passes, **options
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        batches = data(self.rank, device)
        for i in range(0, len(batches), passes):
            optimizer.zero_grad()
            for images, labels in batches[i : i + passes]:
                torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        self.assertTrue(all(one.grad is None or one.grad.device.type == device for one in model.parameters()))
        return list(model.parameters())

    def test_gives_what_it_gives_on_the_cpu(self):
        parameters = self.on_both(self.train, within=1e-6)
        for one in parameters:
            every = hvd.allgather(one.detach().reshape(1, -1))
            self.assertTrue(torch.equal(every[0].cpu(), every[1].cpu()))

    def test_with_several_passes_and_groups(self):
        self.on_both(lambda device: self.train(device, passes=2, groups=2), within=1e-6)

    def test_with_compression(self):
        self.on_both(lambda device: self.train(device, compression=hvd.Compression.fp16), within=1e-3)

    def test_with_samples(self):
        def program(device):
            model = model_on(device)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), average_by="samples"
            )
            for images, labels in data(self.rank, device)[:2]:
                count = 8 - 3 * self.rank
                optimizer.set_sample_count(count)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images[:count]), labels[:count]).backward()
                optimizer.step()
            return list(model.parameters())

        self.on_both(program, within=1e-6)

    def test_with_adasum(self):
        self.on_both(lambda device: self.train(device, op=hvd.Adasum), within=1e-5)

    def test_gradients_go_by_nccl_and_stay_on_the_gpu(self):
        model = model_on("cuda")
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        images, labels = data(self.rank, "cuda")[0]
        for _ in range(3):  # gradients are kept; on the CPU large ones would move
            optimizer.zero_grad(set_to_none=False)
            before = cuda_support.operations_of_nccl()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            given = cuda_support.operations_of_nccl() - before
            self.assertIn(given, range(1, 7) if cuda_support.WITH_NCCL else [0])

    def test_a_gradient_that_is_not_finite(self):
        model = torch.nn.Linear(3, 2, bias=False).cuda()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), non_finite="raise"
        )
        for bad in (False, True):
            optimizer.zero_grad()
            batch = torch.ones(1, 3)
            if bad and self.rank == 1:
                batch[0, 2] = float("inf")
            model(batch.cuda()).sum().backward()
            if not bad:
                optimizer.step()
                continue
            with self.assertRaisesRegex(cohort.NonFinite, "rank 1"):
                optimizer.step()

    def test_batch_normalization(self):
        def program(device):
            torch.manual_seed(1)
            layer = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm2d(3)).to(device)
            generator = torch.Generator().manual_seed(self.rank)
            batch = torch.rand(2 + self.rank, 3, 4, 4, generator=generator).to(device).requires_grad_()
            result = layer(batch)
            result.square().sum().backward()
            return result, batch.grad, layer.weight.grad, layer.running_mean, layer.running_var

        self.on_both(program, within=1e-5)

    def test_optimizers_are_made_alike(self):
        def program(device):
            model = model_on(device, seed=self.rank)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + self.rank))
            if self.rank == 0:
                model(data(0, device)[0][0]).sum().backward()
                optimizer.step()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            self.assertEqual(optimizer.param_groups[0]["lr"], 0.1)
            states = [optimizer.state[one] for one in model.parameters()]
            self.assertEqual({float(state["step"]) for state in states}, {1.0})
            self.assertEqual({state["step"].device.type for state in states}, {"cpu"})
            return [*model.parameters(), *(state["exp_avg"] for state in states)]

        self.on_both(program, within=1e-6)

    def test_elastic_states(self):
        model = model_on("cuda", seed=self.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = hvd.elastic.TorchState(model, optimizer, batch=self.rank)
        state.sync()
        expected = [one.detach().cpu() for one in model_on("cpu", seed=0).parameters()]

        def holds_them():
            got = [one.detach() for one in model.parameters()]
            self.assertEqual({one.device.type for one in got}, {"cuda"})
            return all(torch.equal(a.cpu(), b) for a, b in zip(got, expected))

        self.assertTrue(holds_them())
        self.assertEqual(state.batch, 0)
        with torch.no_grad():
            next(model.parameters()).add_(1)
        self.assertFalse(holds_them())
        state.restore()
        self.assertTrue(holds_them())


# Horovod's example with its .cuda() lines, and with images of noise.
PROGRAM = """
import torch
import torch.nn.functional as F
import horovod.torch as hvd
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(42)
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())

dataset = TensorDataset(torch.rand(32, 1, 12, 12), torch.randint(0, 4, (32,)))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=8, sampler=sampler)

model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 4, 3), torch.nn.MaxPool2d(2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(100, 4))
if torch.cuda.is_available():
    model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average)

def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()

losses = []
for epoch in range(2):
    model.train()
    sampler.set_epoch(epoch)
    for data, target in loader:
        if torch.cuda.is_available():
            data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        loss = F.nll_loss(F.log_softmax(model(data), dim=1), target)
        loss.backward()
        optimizer.step()
    losses.append(metric_average(loss.item(), "avg_loss"))
weights = [parameter.detach() for parameter in model.parameters()]
"""


class Horovod(Gpus):
    @unittest.skipIf(torch.cuda.device_count() < 2, "it takes a GPU of its own for each rank")
    def test_a_program_keeps_its_cuda_lines(self):
        folder = str(pathlib.Path(_command.find()).parent.parent / "share" / "cohort" / "as-horovod")
        sys.path.insert(0, folder)
        self.addCleanup(sys.path.remove, folder)

        def program(device):
            with unittest.mock.patch("torch.cuda.is_available", lambda: device == "cuda"):
                names = {}
                exec(compile(PROGRAM, "program", "exec"), names)
            self.assertEqual(len(names["losses"]), 2)
            return names["weights"]

        self.on_both(program, within=1e-6)
