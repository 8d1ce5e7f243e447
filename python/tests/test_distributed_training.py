"""Trainings that torch builds on process groups, over the backend "cohort": DDP in its variants, ZeRO, FSDP2, DTensor,
on all ranks of `cohort run -np N`. The measure is the same training in one process, on all ranks' data."""

import copy
import unittest
import unittest.mock
import weakref

from support import needs_torch, torch
from support_group import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort

if torch is not None:
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    from cohort.distributed import work

TORCH_2 = torch is not None and int(torch.__version__.split(".")[0]) >= 2
needs_torch_2 = unittest.skipUnless(TORCH_2, "torch 1.13 does not have it, or cannot import it under Python 3.11")
SAMPLES = 6


def make_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


@needs_torch
class Case(unittest.TestCase):
    def setUp(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def data(self, step, rank=None):
        """One rank's batch, or all ranks'."""
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(SAMPLES * self.size, 8, generator=generator)
        labels = torch.randint(0, 4, (SAMPLES * self.size,), generator=generator)
        if rank is None:
            return inputs, labels
        return inputs[rank * SAMPLES : (rank + 1) * SAMPLES], labels[rank * SAMPLES : (rank + 1) * SAMPLES]

    def train(self, model, optimizer, steps=4, rank=None, loss_of=None):
        for step in range(steps):
            inputs, labels = self.data(step, rank)
            optimizer.zero_grad()
            loss = loss_of(model, inputs, labels) if loss_of else F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()

    def alone(self, optimizer_of, steps=4):
        net = make_net()
        self.train(net, optimizer_of(net.parameters()), steps)
        return net

    def close(self, one, other, places=1e-5):
        for (name, a), b in zip(one.named_parameters(), other.parameters()):
            self.assertTrue(torch.allclose(a, b, atol=places), f"{name}: {(a - b).abs().max()}")

    def the_same_everywhere(self, net):
        for parameter in net.parameters():
            first = parameter.detach().clone()
            dist.broadcast(first, 0)
            self.assertTrue(torch.equal(first, parameter.detach()))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Parallel(Case):
    def test_variants(self):
        expected = self.alone(sgd)
        for options in (
            {},
            {"gradient_as_bucket_view": True},
            {"find_unused_parameters": True},
            {"static_graph": True},
            {"bucket_cap_mb": 0.01},
            {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01, "static_graph": True},
        ):
            with self.subTest(**options):
                # Different first values: rank 0's are everybody's.
                model = DDP(make_net(self.rank), **options)
                self.train(model, sgd(model.parameters()), rank=self.rank)
                self.close(model.module, expected)
                self.the_same_everywhere(model.module)

    @needs_torch_2
    def test_compiled(self):
        # From the second step on, DDP's C++ calls the group's methods while torch.compile looks on.
        expected = self.alone(sgd)
        for options in {}, {"static_graph": True}:
            with self.subTest(**options):
                wrapped = DDP(make_net(self.rank), **options)
                self.train(torch.compile(wrapped, backend="eager"), sgd(wrapped.parameters()), rank=self.rank)
                self.close(wrapped.module, expected)
                self.the_same_everywhere(wrapped.module)

        @torch.compile(backend="eager")
        def moves(tensor):
            sent = tensor + 1
            dist.broadcast(sent, self.size - 1)
            got = torch.zeros_like(sent)
            if self.rank == 0 and self.size > 1:
                dist.send(sent * 2, 1)
            elif self.rank == 1:
                dist.recv(got, 0)
            return sent + got

        got = 2.0 * self.size if self.rank == 1 else 0.0
        self.assertEqual(moves(torch.full((2,), float(self.rank))).tolist(), [self.size + got] * 2)

    def test_large_buckets(self):
        # More than is carried out by the caller at once.
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 600), nn.Linear(600, 600), nn.Linear(600, 4))
        twin = copy.deepcopy(net)
        model = DDP(net, bucket_cap_mb=1)
        self.train(model, sgd(net.parameters()), rank=self.rank, steps=5)
        self.train(twin, sgd(twin.parameters()), steps=5)
        self.close(net, twin, 1e-4)
        self.the_same_everywhere(net)

    def test_unused_parameters(self):
        class Branches(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.never = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)
                self.scale = nn.Parameter(torch.ones(1))

            def forward(self, inputs, which):
                return (self.a if which else self.b)(inputs) * self.scale

        model = DDP(Branches(), find_unused_parameters=True)
        inputs, labels = self.data(0, self.rank)
        F.cross_entropy(model(inputs, self.rank == 0), labels).backward()
        self.assertTrue(model.module.a.weight.grad.abs().sum() > 0)
        self.assertIsNone(model.module.never.weight.grad)
        if self.size > 1:
            self.assertTrue(model.module.b.weight.grad.abs().sum() > 0)

    def test_no_sync_and_buffers(self):
        model = DDP(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
        inputs, labels = self.data(0, self.rank)
        with model.no_sync():
            F.cross_entropy(model(inputs), labels).backward()
        F.cross_entropy(model(inputs), labels).backward()
        gradient = model.module[0].weight.grad
        first = gradient.clone()
        dist.broadcast(first, 0)
        self.assertTrue(torch.equal(first, gradient))
        model(inputs)  # takes rank 0's buffers before
        self.assertEqual(model.module[1].num_batches_tracked.item(), 3)

    def test_halves_do_not_make_backward_wait(self):
        if self.size != 2:
            return
        other = 1 - self.rank

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = (nn.Parameter(torch.ones(1024, dtype=torch.float16)) for _ in range(2))

            def forward(self, inputs):
                hidden = self.first * inputs
                outputs = self.last * hidden
                if not self.has_buckets:
                    return outputs
                if other == 0:  # this rank's last gradient comes once rank 0 is past its own
                    outputs.register_hook(lambda _: dist.irecv(torch.zeros(1), other).wait() and None)
                else:
                    hidden.register_hook(lambda _: dist.send(torch.zeros(1), other))
                return outputs

        net = Net()
        with unittest.mock.patch.object(work, "_builtin_hooks", set()):
            model = DDP(net, bucket_cap_mb=0.001)
            for step in range(4):
                net.has_buckets = step > 1  # DDP has made one for each
                model(torch.ones(1024, dtype=torch.float16) * (self.rank + 1)).sum().backward()
                self.assertEqual(set(net.last.grad.tolist()), {1.5})
                model.zero_grad(set_to_none=True)

    def test_hooks(self):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        expected = self.alone(sgd)
        for hook, places in ((default_hooks.allreduce_hook, 1e-5), (default_hooks.fp16_compress_hook, 1e-2)):
            model = DDP(make_net())
            model.register_comm_hook(None, hook)
            self.train(model, sgd(model.parameters()), rank=self.rank)
            self.close(model.module, expected, places)

        def own(state, bucket):
            work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        model = DDP(make_net())
        model.register_comm_hook(None, own)
        self.train(model, sgd(model.parameters()), rank=self.rank)
        self.close(model.module, expected)
        from torch._C._distributed_c10d import BuiltinCommHookType

        for kind, places in ((BuiltinCommHookType.ALLREDUCE, 1e-5), (BuiltinCommHookType.FP16_COMPRESS, 1e-2)):
            for limit in (25, 0.01):
                with self.subTest(kind, bucket_cap_mb=limit):
                    model = DDP(make_net(), bucket_cap_mb=limit)
                    model._register_builtin_comm_hook(kind)
                    self.train(model, sgd(model.parameters()), rank=self.rank)
                    self.close(model.module, expected, places)
                    self.the_same_everywhere(model.module)
        try:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        except (ImportError, AttributeError):
            return
        model = DDP(make_net())
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self.train(model, sgd(model.parameters()), rank=self.rank)
        self.the_same_everywhere(model.module)

    def test_sparse_gradients(self):
        class Words(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.words, self.out = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)

            def forward(self, inputs):
                return self.out(self.words(inputs))

        model, twin = DDP(Words()), Words()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
        for step in range(3):
            words = torch.arange(self.size * 3).view(self.size, 3).add(step) % 10
            optimizers[0].zero_grad()
            optimizers[1].zero_grad()
            model(words[self.rank]).pow(2).mean().backward()
            twin(words.view(-1)).pow(2).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        self.close(model.module, twin)

    def test_join(self):
        # Rank r has r + 1 batches.
        model = DDP(make_net())
        optimizer = sgd(model.parameters())
        steps = 0
        with model.join():
            for step in range(self.rank + 1):
                inputs, labels = self.data(step, self.rank)
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                steps += 1
        self.assertEqual(steps, self.rank + 1)
        self.the_same_everywhere(model.module)

    def test_join_that_divides_by_the_ranks_that_are_left(self):
        # The Work that tells how many they are is C++'s alone: backward() waits for it.
        for uneven in (False, True):  # rank r has r more batches
            model = DDP(nn.Linear(3, 1, bias=False))
            with model.join(divide_by_initial_world_size=False):
                for step in range(2 + (self.rank if uneven else 0)):
                    model.zero_grad()
                    model(torch.full((1, 3), float(self.rank + 1))).sum().backward()
                    left = [r for r in range(self.size) if step < 2 or (uneven and step < 2 + r)]
                    expected = sum(r + 1 for r in left) / len(left)
                    self.assertTrue(torch.allclose(model.module.weight.grad, torch.full((1, 3), expected)))

    def test_cohorts_own_trains_on_the_group(self):
        # No other import, and no world but the group's.
        expected = self.alone(sgd)
        model = cohort.nn.DistributedDataParallel(make_net(self.rank))
        self.assertIs(model.communicator, dist.group.WORLD.communicator)
        self.train(model, sgd(model.parameters()), rank=self.rank)
        self.close(model.module, expected)
        cohort.nn.require_same_parameters(model.named_parameters())
        groups = [dist.new_group([rank]) for rank in range(self.size)]
        alone = cohort.nn.DistributedDataParallel(make_net(), process_group=groups[self.rank])
        self.assertEqual(alone.communicator.size(), 1)
        others = [group for rank, group in enumerate(groups) if rank != self.rank]
        for wrong in [*others[:1], "cohort"]:
            with self.assertRaisesRegex(cohort.InvalidArgument, "a group of the backend \"cohort\" is wanted"):
                cohort.nn.DistributedDataParallel(make_net(), process_group=wrong)
        with self.assertRaisesRegex(cohort.InvalidArgument, "give one"):
            cohort.nn.DistributedDataParallel(make_net(), model.communicator, process_group=groups[self.rank])

    def test_a_work_that_is_let_go_of_holds_no_large_tensor(self):
        tensor = torch.ones(1 << 20)
        gone = weakref.ref(tensor)
        dist.all_reduce(tensor, async_op=True)
        del tensor
        dist.barrier()
        dist.all_reduce(torch.ones(2), async_op=True)  # the next one that is let go of looks after those before it
        dist.barrier()
        self.assertIsNone(gone())

    def test_a_mismatch_in_backward_is_said(self):
        if self.size == 1:
            return
        torch.manual_seed(0)

        def hook(state, bucket):
            extra = torch.zeros(300_000 + self.rank)
            return dist.all_reduce(extra, async_op=True).get_future().then(lambda future: future.value()[0])

        model = DDP(make_net())
        model.register_comm_hook(None, hook)
        inputs, labels = self.data(0, self.rank)
        loss = F.cross_entropy(model(inputs), labels)
        with self.assertRaises(RuntimeError) as raised:
            loss.backward()
        self.assertIn("all_reduce", str(raised.exception))

    def test_a_group_of_its_own(self):
        group = dist.new_group([0])
        if self.rank == 0:
            model = DDP(make_net(), process_group=group)
            self.train(model, sgd(model.parameters()), rank=0, steps=2)

    def test_sampler(self):
        sampler = torch.utils.data.DistributedSampler(range(10), shuffle=True)
        sampler.set_epoch(1)
        mine = torch.tensor(list(sampler))
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        self.assertEqual(set(torch.cat(parts).tolist()), set(range(10)))


class Sharded(Case):
    def test_zero_redundancy_optimizer(self):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        def adam(parameters):
            return torch.optim.Adam(parameters, lr=0.01)

        expected = self.alone(adam)
        for view in (False, True):
            model = DDP(make_net())
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.Adam, parameters_as_bucket_view=view, lr=0.01
            )
            self.train(model, optimizer, rank=self.rank)
            self.close(model.module, expected)
            optimizer.consolidate_state_dict(to=0)
            if self.rank == 0:
                self.assertEqual(len(optimizer.state_dict()["state"]), 6)

    @needs_torch_2
    def test_fully_shard(self):
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError:
            self.skipTest("this torch has no fully_shard")

        def adam(parameters):
            return torch.optim.Adam(parameters, lr=0.01)

        expected = self.alone(adam)
        net = make_net()
        mesh = dist.init_device_mesh("cpu", (self.size,)) if hasattr(dist, "init_device_mesh") else None
        for layer in (net[0], net[2], net[4]):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        self.train(net, adam(net.parameters()), rank=self.rank)
        for (name, sharded), whole in zip(net.named_parameters(), expected.parameters()):
            self.assertTrue(torch.allclose(sharded.full_tensor(), whole, atol=1e-5), name)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        self.assertGreater(norm.full_tensor().item(), 0)

    @needs_torch_2
    def test_dtensor(self):
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

        mesh = dist.init_device_mesh("cpu", (self.size,))
        whole = torch.arange(self.size * 8.0).view(self.size * 2, 4)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        self.assertEqual(sharded.to_local().shape[0], 2)
        self.assertTrue(torch.equal(sharded.full_tensor(), whole))
        self.assertTrue(torch.equal(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole))
        self.assertTrue(torch.equal(sharded.sum(0).full_tensor(), whole.sum(0)))
        other = distribute_tensor(torch.eye(4), mesh, [Replicate()])
        self.assertTrue(torch.equal((sharded @ other).full_tensor(), whole))
        partial = DTensor.from_local(torch.ones(4), mesh, [dist.tensor.Partial()])
        self.assertTrue(torch.equal(partial.redistribute(mesh, [Replicate()]).to_local(), torch.full((4,), float(self.size))))
        uneven = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
        self.assertTrue(torch.equal(uneven.full_tensor(), torch.arange(5.0)))

    @needs_torch_2
    def test_tensor_parallel(self):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = dist.init_device_mesh("cpu", (self.size,))
        net = make_net()
        inputs = self.data(0)[0]
        expected = net(inputs)
        parallel = parallelize_module(copy.deepcopy(net), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        found = parallel(inputs)
        self.assertTrue(torch.allclose(found, expected, atol=1e-5))
        found.sum().backward()

    @needs_torch_2
    def test_functional_collectives(self):
        import torch.distributed._functional_collectives as functional

        group = dist.group.WORLD
        mine = torch.full((2,), float(self.rank + 1))
        total = sum(range(1, self.size + 1))
        self.assertEqual(functional.all_reduce(mine, "sum", group).tolist(), [total] * 2)
        self.assertEqual(functional.all_reduce(mine, "avg", group).tolist(), [total / self.size] * 2)
        gathered = functional.all_gather_tensor(mine, 0, group)
        self.assertEqual(gathered.tolist(), [float(r + 1) for r in range(self.size) for _ in range(2)])
        scattered = functional.reduce_scatter_tensor(torch.ones(self.size), "sum", 0, group)
        self.assertEqual(scattered.tolist(), [self.size])
        exchanged = functional.all_to_all_single(torch.full((self.size,), float(self.rank)), None, None, group)
        self.assertEqual(exchanged.tolist(), list(range(self.size)))
        self.assertEqual(functional.broadcast(mine, 0, group).tolist(), [1, 1])
        one, two = functional.all_reduce_coalesced([mine, torch.ones(3)], "sum", group)
        self.assertEqual((one.tolist(), two.tolist()), ([total] * 2, [self.size] * 3))
        large = functional.all_reduce(torch.ones(400_000), "sum", group)
        self.assertEqual(large[-1].item(), self.size)

    @needs_torch_2
    def test_distributed_checkpoint(self):
        import tempfile

        import torch.distributed.checkpoint as dcp

        folder = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folder, 0)
        net = make_net()
        try:
            dcp.save({"net": net.state_dict()}, checkpoint_id=folder[0])
            other = {"net": make_net(5).state_dict()}
            dcp.load(other, checkpoint_id=folder[0])
            for name, value in net.state_dict().items():
                self.assertTrue(torch.equal(other["net"][name], value), name)
        finally:
            dist.barrier()
            if self.rank == 0:
                import shutil

                shutil.rmtree(folder[0])

    @needs_torch_2
    def test_mesh_of_two_dimensions(self):
        if self.size != 4:
            self.skipTest("for 4 ranks")
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        tensor = torch.tensor([float(self.rank)])
        dist.all_reduce(tensor, group=mesh.get_group("rows"))
        self.assertEqual(tensor.item(), 2 + 2 * (self.rank % 2))


if __name__ == "__main__":
    unittest.main()
