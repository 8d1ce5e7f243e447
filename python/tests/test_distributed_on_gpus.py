"""torch.distributed over the backend "cohort" with tensors of "cuda": each operation gives what it gives on the CPU. 2
ranks, which share a GPU."""

import copy
import os
import time
import types
import unittest
import unittest.mock
import weakref

import cuda_support  # before torch
import torch
import torch.distributed as dist
from support_group import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort
from cohort.distributed.tensors import Pieces

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
needs_torch_2 = unittest.skipIf(TORCH < (2, 0), "torch 1.13 does not have it")
GPU = torch.device("cuda", 0)
BY_NCCL = os.environ.get("COHORT_NCCL") != "off"


class Case(unittest.TestCase):
    def setUp(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def of(self, rank, count=6, dtype=torch.float32):
        """Returns a rank's input; sums of it are exact in each type."""
        return (torch.arange(count) % 5 + rank + 1).to(dtype)

    def alike(self, call, by_nccl=True, within=0.0):
        """`call` is given the device, and returns tensors.

        by_nccl   whether NCCL carries out what it calls; None: some of it
        within    of values that a real GPU sums in another order than the CPU
        """
        expected = call(torch.device("cpu"))
        before = cuda_support.operations_of_nccl()
        found = call(GPU)
        values = [one.cpu() for one in found]  # for which the host waits
        count = cuda_support.operations_of_nccl() - before
        if by_nccl is not None and cuda_support.FAKE:
            self.assertEqual(count > 0, by_nccl and BY_NCCL, f"{count} operations of NCCL")
        self.assertEqual(len(found), len(expected))
        for one, value, other in zip(found, values, expected):
            self.assertEqual((one.device, one.dtype, one.shape), (GPU, other.dtype, other.shape))
            within = 0.0 if cuda_support.FAKE else within
            torch.testing.assert_close(value, other, rtol=within, atol=within)


class Reductions(Case):
    def test_all_reduce(self):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8):
            for op in ("SUM", "MAX", "PRODUCT"):

                def call(device, dtype=dtype, op=op):
                    tensor = self.of(self.rank, 7, dtype).to(device)
                    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
                    return [tensor]

                with self.subTest(dtype=dtype, op=op):
                    self.alike(call)

    def test_what_nccl_cannot_do_is_folded(self):
        def call(device):
            tensors = [self.of(self.rank, 5, dtype).to(device) for dtype in (torch.int16, torch.int32, torch.bool)]
            for tensor, op in zip(tensors, ("SUM", "AVG", "MAX")):
                dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            bits = torch.tensor([0b100 | self.rank]).to(device)
            dist.all_reduce(bits, dist.ReduceOp.BXOR)
            return [*tensors, bits]

        self.alike(call)

    def test_tensors_that_are_not_contiguous(self):
        def call(device):
            mine = self.of(self.rank, 12).view(3, 4).to(device)
            tensors = [
                mine.t().contiguous().t(),
                torch.stack([mine, mine], -1)[..., 0],
                torch.cat([mine, mine], 1)[:, :4],
            ]
            for tensor in tensors:
                self.assertFalse(tensor.is_contiguous())
                dist.all_reduce(tensor)
            scalar = torch.tensor(float(self.rank), device=device)
            dist.all_reduce(scalar)
            empty = torch.empty(0, 3, device=device)
            dist.all_reduce(empty)
            return [*tensors, scalar, empty]

        self.alike(call)

    def test_wait_returns_when_a_copied_result_is_there(self):
        waits = []

        class Stream:
            cuda_stream = 0

            def synchronize(self):
                waits.append(tensor.cpu().tolist())

        tensor = torch.ones(2, 2, device=GPU)[:, 0]
        with unittest.mock.patch.object(torch.cuda, "current_stream", lambda device=None: Stream()):
            dist.all_reduce(tensor)
        self.assertEqual(waits, [[2.0, 2.0]])

    def test_reduce(self):
        def call(device):
            tensor = self.of(self.rank).to(device)
            dist.reduce(tensor, 1)
            return [tensor]

        self.alike(call)

    def test_reduce_scatter(self):
        def call(device):
            inputs = [self.of(self.rank + part).to(device) for part in range(self.size)]
            outputs = [torch.empty(6, device=device), torch.empty(6, device=device), torch.empty(6, 2, device=device)[:, 1]]
            dist.reduce_scatter(outputs[0], inputs)
            getattr(dist, "reduce_scatter_tensor", dist._reduce_scatter_base)(outputs[1], torch.cat(inputs))
            dist.reduce_scatter(outputs[2], inputs)
            uneven = torch.empty(self.rank + 1, device=device)
            dist.reduce_scatter(uneven, [self.of(self.rank, part + 1).to(device) for part in range(self.size)])
            return [*outputs, uneven]

        self.alike(call)

    def test_coalesced(self):
        def call(device):
            tensors = [self.of(self.rank, n).to(device) for n in (3, 500, 1)]
            dist.all_reduce_coalesced(tensors)
            return tensors

        self.alike(call)

    def test_async(self):
        def call(device):
            tensors = [self.of(self.rank, 50_000).to(device) for _ in range(3)]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for work, tensor in zip(reversed(works), reversed(tensors)):
                self.assertTrue(work.wait())
                self.assertIs(work.result()[0], tensor)
                while not work.is_completed():
                    time.sleep(0.001)
                self.assertTrue(work.is_success())
            return tensors

        self.alike(call)

    @unittest.skipUnless(cuda_support.WITH_NCCL, "the host waits for what goes by its memory")
    def test_the_host_does_not_wait(self):
        tensors = [self.of(self.rank, 1000).to(GPU) for _ in range(2)]
        dist.all_reduce(tensors[0])
        dist.barrier()
        with cuda_support.delay_of_nccl(6000):
            begun = time.monotonic()
            dist.all_reduce(tensors[0])
            work = dist.all_reduce(tensors[1], async_op=True)
            self.assertTrue(work.wait())
            self.assertIs(work.get_future().wait()[0], tensors[1])
            self.assertFalse(work.is_completed())
            self.assertLess(time.monotonic() - begun, 5)
            expected = sum(self.of(rank, 1000) for rank in range(self.size))
            self.assertTrue(torch.equal(tensors[1].cpu(), expected))  # in the stream that waits
            self.assertTrue(torch.equal(tensors[0].cpu(), sum(expected for _ in range(self.size))))
            while not work.is_completed():
                self.assertLess(time.monotonic() - begun, 20)
            self.assertTrue(work.is_success())

    @unittest.skipUnless(cuda_support.WITH_NCCL, "the host waits for what goes by its memory")
    def test_memory_goes_in_the_order_of_the_stream(self):
        dist.all_reduce(self.of(self.rank).to(GPU))
        dist.barrier()
        with cuda_support.delay_of_nccl(600):
            gone = []
            for _ in range(3):
                tensor = self.of(self.rank, 1000).to(GPU)
                work = dist.all_reduce(tensor, async_op=True)
                self.assertTrue(work.wait())
                gone.append(weakref.ref(tensor))
                self.assertFalse(work.is_completed())
                del tensor, work
            self.assertEqual([one() for one in gone], [None] * 3)
            # A stream that others have made it in is not put behind the operation.
            tensor, stream = self.of(self.rank, 1000).to(GPU), cuda_support.new_stream()
            work = dist.group.WORLD.communicator.all_reduce(tensor, async_op=True)
            work.synchronize(stream)
            gone = weakref.ref(tensor)
            del tensor
            self.assertFalse(work.done())
            self.assertIsNotNone(gone())
            work.wait()
            self.assertIsNone(gone())

    @needs_torch_2
    def test_memory_of_many_that_are_waited_for(self):
        """As FSDP does: in the order of a stream nothing is held; in that of another, nothing once the GPU is done."""
        streams = [torch.cuda.current_stream]
        if cuda_support.FAKE:
            other = types.SimpleNamespace(cuda_stream=cuda_support.new_stream())
            streams.append(lambda device=None: other)
        for stream in streams:
            gone = []
            for _ in range(16):
                whole = torch.empty(self.size * 1000, device=GPU)
                work = dist.all_gather_into_tensor(whole, self.of(self.rank, 1000).to(GPU), async_op=True)
                with unittest.mock.patch.object(torch.cuda, "current_stream", stream):
                    work.wait()
                gone.append(weakref.ref(whole))
                del whole, work
            until = time.monotonic() + (0 if stream is streams[0] else 10)
            while any(one() is not None for one in gone) and time.monotonic() < until:
                time.sleep(0.001)
            self.assertEqual([one() for one in gone], [None] * 16)

    @needs_torch_2
    def test_memory_of_what_nobody_waits_for(self):
        for turned in (False, True):  # the result is copied to where it is wanted
            gone, works = [], []
            for count in (1000, 200_000):
                for keeps in (False, True):
                    tensor = self.of(self.rank, count).to(GPU)
                    if turned:
                        tensor = tensor.view(2, -1).t()
                    work = dist.all_reduce(tensor, async_op=True)
                    gone.append(weakref.ref(tensor))
                    if keeps:
                        works.append(work)
                    del tensor, work
            until = time.monotonic() + 10
            if turned:
                dist.barrier()  # and then with the next operation that begins
                dist.barrier()
            while any(one() is not None for one in gone[::2]) and time.monotonic() < until:
                time.sleep(0.001)
            self.assertEqual([one() for one in gone[::2]], [None] * 2)
            # A Work that is kept still has its result.
            self.assertEqual([work.wait() and work.result()[0] is one() for work, one in zip(works, gone[1::2])], [True] * 2)
            works.clear()
            self.assertEqual([one() for one in gone], [None] * 4)

    def test_futures(self):
        def call(device):
            results = []
            for count in (3, 50_000):
                tensor = self.of(self.rank, count).to(device)
                future = dist.all_reduce(tensor, async_op=True).get_future()
                results.append(future.then(lambda ended: ended.value()[0] / 2).wait())
            return results

        self.alike(call)

    @needs_torch_2
    def test_autograd_sees_what_is_written(self):
        weight, tensor = torch.ones(3, requires_grad=True, device=GPU), torch.ones(3, device=GPU)
        product = weight * tensor
        dist.all_reduce(tensor)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            product.sum().backward()


class Moves(Case):
    def test_broadcast(self):
        types = [torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.complex64]
        types += [torch.float8_e4m3fn] if hasattr(torch, "float8_e4m3fn") else []

        def call(device):
            tensors = [self.of(self.rank, 4).to(dtype).to(device) for dtype in types]
            for tensor in tensors:
                dist.broadcast(tensor, 1)
            wide = torch.full((4, 6), float(self.rank)).to(device)
            dist.broadcast(wide[:, 2], 1)
            return [*(tensor.to(torch.complex64) for tensor in tensors), wide]

        self.alike(call)

    def test_all_gather(self):
        def call(device):
            outputs = [torch.empty(6, device=device) for _ in range(self.size)]
            dist.all_gather(outputs, self.of(self.rank).to(device))
            sizes = list(range(1, self.size + 1))
            pieces = list(torch.empty(sum(sizes), device=device).split(sizes))
            self.assertIs(Pieces(pieces, "test", reads=False)._own, False)
            dist.all_gather(pieces, self.of(self.rank, self.rank + 1).to(device))
            turned = [torch.empty(2, 3, device=device).t() for _ in range(self.size)]
            dist.all_gather(turned, self.of(self.rank).view(3, 2).to(device))
            whole = torch.empty(self.size, 6, device=device)
            getattr(dist, "all_gather_into_tensor", dist._all_gather_base)(whole, self.of(self.rank).to(device))
            return [*outputs, *pieces, *turned, whole]

        self.alike(call)

    def test_all_gather_coalesced(self):
        def call(device):
            outputs = [[torch.empty(2, device=device), torch.empty(5, device=device)] for _ in range(self.size)]
            dist.all_gather_coalesced(outputs, [self.of(self.rank, n).to(device) for n in (2, 5)])
            return [tensor for of_rank in outputs for tensor in of_rank]

        self.alike(call)

    @needs_torch_2
    def test_the_coalescing_manager(self):
        from torch.distributed.distributed_c10d import _coalescing_manager

        def call(device):
            sums = [self.of(self.rank, n).to(device) for n in (3, 4)]
            with _coalescing_manager(device=device, async_ops=True) as manager:
                for tensor in sums:
                    dist.all_reduce(tensor)
            manager.wait()
            wholes = [torch.empty(self.size * n, device=device) for n in (3, 4)]
            with _coalescing_manager(device=device):
                for whole, n in zip(wholes, (3, 4)):
                    dist.all_gather_into_tensor(whole, self.of(self.rank, n).to(device))
            parts = [torch.empty(n, device=device) for n in (3, 4)]
            with _coalescing_manager(device=device):
                for part, n in zip(parts, (3, 4)):
                    dist.reduce_scatter_tensor(part, self.of(self.rank, n).repeat(self.size).to(device))
            return [*sums, *wholes, *parts]

        self.alike(call)

    def test_gather_and_scatter(self):
        def call(device):
            outputs = [torch.empty(6, device=device) for _ in range(self.size)] if self.rank == 1 else None
            dist.gather(self.of(self.rank).to(device), outputs, 1)
            output = torch.empty(3, 2, device=device).t()
            parts = [self.of(rank).view(2, 3).to(device) for rank in range(self.size)]
            dist.scatter(output, parts if self.rank == 1 else None, 1)
            return [*(outputs or []), output]

        self.alike(call)

    def test_all_to_all(self):
        def call(device):
            inputs = [self.of(10 * self.rank + to, to + 1).to(device) for to in range(self.size)]
            outputs = [torch.empty(self.rank + 1, device=device) for _ in range(self.size)]
            dist.all_to_all(outputs, inputs)
            even = torch.empty(self.size, 2, device=device)
            dist.all_to_all_single(even, torch.full((self.size, 2), float(self.rank), device=device))
            sizes = [to + 1 for to in range(self.size)]
            uneven = torch.empty((self.rank + 1) * self.size, 2, device=device)
            rows = torch.full((sum(sizes), 2), float(self.rank), device=device)
            dist.all_to_all_single(uneven, rows, [self.rank + 1] * self.size, sizes)
            return [*outputs, even, uneven]

        self.alike(call)

    def test_messages(self):
        other = 1 - self.rank

        def call(device):
            found = [torch.empty(count, device=device) for count in (1, 50_000)]
            for tensor in found:
                mine = self.of(self.rank, tensor.numel()).to(device)
                works = [dist.isend(mine, other), dist.irecv(tensor, other)]
                for work in works:
                    work.wait()
            strided = torch.zeros(3, 2, device=device)
            mine = self.of(self.rank, 3).to(device)
            ops = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, strided[:, 0], other)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            any_source = torch.empty(2, device=device)
            if self.rank == 1:
                dist.send(mine[1:], 0)
                dist.recv(any_source, 0, tag=3)
            else:
                self.assertEqual(dist.recv(any_source), 1)
                dist.send(any_source, 1, tag=3)
            return [*found, strided, any_source]

        self.alike(call, by_nccl=False)

    def test_objects(self):
        found = [None] * self.size
        dist.all_gather_object(found, {"rank": self.rank})
        self.assertEqual([one["rank"] for one in found], list(range(self.size)))
        objects = [("one", self.rank)]
        dist.broadcast_object_list(objects, 1, device=GPU)
        self.assertEqual(objects, [("one", 1)])

    def test_barrier(self):
        dist.barrier()
        if TORCH < (2, 0):
            return  # it takes device_ids with NCCL only
        waits = []
        stream = unittest.mock.Mock(synchronize=lambda: waits.append("stream"))
        with unittest.mock.patch.object(torch.cuda, "current_stream", lambda device=None: waits.append(device) or stream):
            dist.barrier(device_ids=[0])
        self.assertEqual(waits, [0, "stream"])


class Groups(Case):
    def test_the_devices(self):
        world = dist.group.WORLD
        self.assertIs(world._get_backend(GPU) if TORCH >= (2, 0) else world, world)
        if TORCH >= (2, 0):
            self.assertEqual([device.type for device in world._device_types], ["cpu", "cuda"])
            self.assertEqual(dist.Backend.backend_capability["cohort"], ["cpu", "cuda"])

    @needs_torch_2
    def test_names_with_devices(self):
        for name in ("cuda:cohort", "cpu:cohort,cuda:cohort"):
            group = dist.new_group(backend=name)

            def call(device, group=group):
                tensor = self.of(self.rank).to(device)
                dist.all_reduce(tensor, group=group)
                return [tensor]

            with self.subTest(name):
                self.alike(call)
            dist.destroy_process_group(group)

    @needs_torch_2
    def test_gloo_beside(self):
        group = dist.new_group(backend="cpu:gloo,cuda:cohort")
        self.assertIn("Gloo", type(group._get_backend(torch.device("cpu"))).__name__)
        self.assertIs(group._get_backend(GPU), group)

        def call(device):
            tensor = self.of(self.rank).to(device)
            dist.all_reduce(tensor, group=group)
            return [tensor]

        self.alike(call)


class Errors(Case):
    def test_tensors_of_several_devices(self):
        here, there = torch.ones(3, device=GPU), torch.ones(3)
        words = "its tensors lie on cuda:0 and on cpu -- pass tensors of one device"
        for call in (
            lambda: dist.all_reduce_coalesced([here, there]),
            lambda: dist.all_to_all([here, there], [here, here]),
            lambda: dist.all_gather([here.clone(), here.clone()], there),
            lambda: dist.all_to_all_single(torch.ones(2, device=GPU), torch.ones(2)),
        ):
            with self.assertRaisesRegex(cohort.InvalidArgument, f"{words}|cpu and on cuda:0"):
                call()
        dist.barrier()

    def test_ranks_of_several_devices(self):
        with self.assertRaises(cohort.Mismatch):
            dist.all_reduce(torch.ones(3, device=GPU if self.rank == 0 else "cpu"))
        dist.barrier()


class Remembering(torch.nn.Module):
    """With a buffer: DDP sends rank 0's to all."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(64))

    def forward(self, x):
        self.last.copy_(x[-1].detach())
        return x + self.last


class Training(Case):
    """torch's DistributedDataParallel."""

    def test_gradients_are_those_of_the_cpu(self):
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), Remembering(), torch.nn.Linear(64, 4))
        inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(self.rank))

        def train(device, hook=None, **options):
            on_gpu = device.type == "cuda"
            model = copy.deepcopy(net).to(device)
            model = DistributedDataParallel(model, device_ids=[0] if on_gpu else None, bucket_cap_mb=0.001, **options)
            if isinstance(hook, dist.BuiltinCommHookType):
                model._register_builtin_comm_hook(hook)
            elif hook is not None:
                model.register_comm_hook(None, hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            for _ in range(3):
                optimizer.zero_grad()
                model(inputs.to(device)).square().sum().backward()
                optimizer.step()
            return [tensor.detach() for tensor in model.module.state_dict().values()]

        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        for options in (
            {},
            {"gradient_as_bucket_view": True},
            {"hook": default_hooks.allreduce_hook},
            {"hook": default_hooks.fp16_compress_hook},
            {"hook": dist.BuiltinCommHookType.FP16_COMPRESS},
            # The fake has no pinned memory for torch 1.13.
            *([{"static_graph": True}, {"find_unused_parameters": True}] if TORCH >= (2, 0) else []),
        ):
            with self.subTest(**options):
                # Halves may be rounded the other way.
                self.alike(lambda device, options=options: train(device, **options), within=5e-3)


if __name__ == "__main__":
    unittest.main()
