"""cohort.horovod.torch on tensors of "cuda" (cuda_support): results are as on the CPU. 2 ranks share a GPU,
with NCCL, and with COHORT_NCCL=off through host memory. Values are whole, so sums are exact in any order."""

import ctypes
import gc
import threading
import time
import unittest
import weakref

from cuda_support import FAKE  # first: before torch
from support_torch_on_gpus import BY_NCCL, Gpus

import cohort.horovod.torch as hvd
import torch
from support_hvd import setUpModule, tearDownModule  # noqa: F401

CUDA = ctypes.CDLL("libcuda.so.1")
if FAKE:
    CUDA.fake_cuda_memory.restype = ctypes.c_void_p
    CUDA.fake_cuda_memory.argtypes = [ctypes.c_void_p]
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def engine():
    return hvd.global_process_set._engine


class Operations(Gpus):
    def test_allreduce(self):
        floats = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
        for dtype in (*floats, torch.int16, torch.int64, torch.uint8):
            for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
                with self.subTest(dtype=dtype, op=op):

                    def program(device):
                        tensor = self.values(device, 3, 4, dtype=dtype)
                        result = hvd.allreduce(tensor, op=op)
                        handle = hvd.allreduce_async_(tensor, op=op)
                        self.assertIs(hvd.synchronize(handle), tensor)
                        return result, tensor

                    self.on_both(program)

    def test_handles(self):
        tensor = self.values("cuda", 5)
        handle = hvd.allreduce_async(tensor, op=hvd.Sum)
        while not hvd.poll(handle):
            pass
        self.same(hvd.synchronize(handle).cpu(), [3.0, 5.0, 7.0, 9.0, 11.0])
        self.same(tensor.cpu() - self.rank, [1.0, 2.0, 3.0, 4.0, 5.0])

    def test_results_are_not_kept(self):
        for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter, hvd.allreduce):
            result = weakref.ref(call(self.values("cuda", 4)))
            self.assertIsNone(result())

    def test_memory_of_what_nobody_waits_for(self):
        """The memory is released when the operation has ended, without any further call."""
        for keeps in (True, False):
            for call in ("all_reduce_group", "all_gather_group"):
                with self.subTest(keeps=keeps, call=call):
                    tensor = self.values("cuda", 500)
                    work = getattr(engine(), call)([f"unattended {call} {keeps}"], [tensor])
                    gone = weakref.ref(tensor)
                    del tensor
                    if not keeps:
                        del work
                    until = time.monotonic() + 10
                    while gone() is not None and time.monotonic() < until:
                        time.sleep(0.001)
                    self.assertIsNone(gone())

    @unittest.skipUnless(FAKE, "counts what pretends")
    def test_results_that_are_dropped_go_by_themselves(self):
        hvd.allgather(self.values("cuda", 10))
        hvd.barrier()

        def results():
            gc.collect()
            return sum(type(one) is torch.Tensor and one.shape == (1234 * self.size,) for one in gc.get_objects())

        engine().all_gather_group(["unattended results"], [self.values("cuda", 1234)])
        until = time.monotonic() + 10
        while not results() and time.monotonic() < until - 9:
            time.sleep(0.001)  # the result exists when all ranks have called
        while results() and time.monotonic() < until:
            time.sleep(0.001)
        self.assertEqual(results(), 0)

    def test_scales(self):
        for dtype in (torch.float32, torch.int32):

            def program(device):
                tensor = self.values(device, 6, dtype=dtype)
                by = {"prescale_factor": 4.0, "postscale_factor": 0.5}
                return [
                    *[hvd.allreduce(tensor, op=op, **by) for op in (hvd.Average, hvd.Sum)],
                    *hvd.grouped_allreduce([tensor, tensor + 1], op=hvd.Sum, **by),
                    hvd.reducescatter(tensor, op=hvd.Sum, **by),
                ]

            # NCCL does not scale: it moves the values, which are then folded. The host scales integers.
            with self.by_nccl(4 if dtype.is_floating_point else 0):
                self.on_both(program)

    def test_those_of_other_shapes(self):
        def program(device):
            nothing = torch.empty(0, 3, device=device)
            across = self.values(device, 4, 3).t()
            in_place = hvd.allreduce_(across.clone().t())
            return hvd.allreduce(nothing), hvd.allgather(nothing), hvd.allreduce(across), in_place

        self.on_both(program)

    def test_what_moves_data(self):
        def program(device):
            part = self.values(device, 3 * self.rank, 2)  # rank 0 contributes nothing
            spread = hvd.broadcast_(self.values(device, 7), root_rank=1)
            parts, counts = hvd.alltoall(self.values(device, 5, 2), splits=torch.tensor([3 - self.rank, 1 + self.rank]))
            self.assertEqual(counts.tolist(), [1, 2] if self.rank else [3, 2])
            whole = hvd.alltoall(self.values(device, 4, dtype=torch.bool))
            return hvd.allgather(part), spread, hvd.broadcast(self.values(device, 2), 0), parts, whole

        self.on_both(program)

    def test_reducescatter(self):
        for op in (hvd.Sum, hvd.Average):
            self.on_both(lambda device: hvd.reducescatter(self.values(device, 5, 3), op=op))

    def test_groups(self):
        def program(device):
            tensors = [self.values(device, i + 1) for i in range(4)]
            more = [self.values(device, i) for i in (3, 0, 70000)]
            return [
                hvd.grouped_allreduce(tensors, op=hvd.Sum),
                hvd.grouped_allreduce_(more, op=hvd.Average),
                hvd.grouped_allgather(tensors),
                hvd.grouped_reducescatter(tensors, op=hvd.Sum),
            ]

        self.on_both(program)

    def test_compression(self):
        def program(device):
            tensor = self.values(device, 9)
            kinds = (hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compression.none)
            return [hvd.allreduce(tensor, compression=kind) for kind in kinds]

        self.on_both(program)

    @unittest.skipIf(torch.__version__ < "2", "the fake tensors of torch 1 are not sparse")
    def test_sparse(self):
        def program(device):
            indices = torch.tensor([[0, 2, 3][: 2 + self.rank]]).to(device)
            tensor = torch.sparse_coo_tensor(indices, self.values(device, 2 + self.rank, 2), (4, 2))
            sums = [hvd.sparse_allreduce_async(tensor, f"{op}", op)() for op in (hvd.Sum, hvd.Average)]
            return [part for one in sums for part in (one._indices(), one._values())]

        self.on_both(program)

    def test_adasum(self):
        def program(device):
            tensors = [self.values(device, 4), self.values(device, 2, 2) * (1 - 2 * self.rank)]
            in_place = hvd.allreduce_(self.values(device, 3), op=hvd.Adasum)
            return hvd.grouped_allreduce(tensors, op=hvd.Adasum), in_place

        self.on_both(program, within=1e-6)

    def test_differentiable(self):
        def program(device):
            gradients = []
            for function in (
                lambda x: hvd.allreduce(x, op=hvd.Sum),
                lambda x: hvd.allreduce(x, op=hvd.Max),
                lambda x: hvd.allreduce(x, op=hvd.Product),
                lambda x: hvd.grouped_allreduce([x, 2 * x])[1],
                lambda x: hvd.allgather(x[: 2 + self.rank]),
                lambda x: hvd.broadcast(x, 1),
                lambda x: hvd.alltoall(x, splits=[1 + self.rank, 2])[0],
                lambda x: hvd.reducescatter(x, op=hvd.Sum),
            ):
                x = self.values(device, 4).requires_grad_()
                (function(x).square().sum() * (1 + self.rank)).backward()
                gradients.append(x.grad)
            return gradients

        self.on_both(program)

    def test_process_sets(self):
        sets = [hvd.add_process_set([rank]) for rank in range(self.size)]
        alone = sets[self.rank]

        def program(device):
            tensor = self.values(device, 4)
            return [
                hvd.allreduce(tensor, op=hvd.Sum, process_set=alone),
                hvd.grouped_allreduce([tensor, tensor + 1], process_set=alone),
                hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0, process_set=alone),
                hvd.allgather(tensor, process_set=alone),
                hvd.broadcast(tensor, self.rank, process_set=alone),
                hvd.alltoall(tensor, process_set=alone),
                hvd.reducescatter(tensor, process_set=alone),
            ]

        with self.by_nccl(0):
            self.on_both(program)
        for one in sets:
            self.assertTrue(hvd.remove_process_set(one))


class Nccl(Gpus):
    def test_carries_them_out(self):
        tensor = self.values("cuda", 4)
        for times, call in (
            (1, lambda: hvd.allreduce(tensor, op=hvd.Sum)),
            (1, lambda: hvd.allreduce(tensor)),
            (1, lambda: hvd.allreduce(tensor, op=hvd.Max)),  # NCCL's Max loses NaN, so it is folded
            (1, lambda: hvd.allgather(tensor[: self.rank + 1])),
            (1, lambda: hvd.broadcast(tensor, 1)),
            (1, lambda: hvd.alltoall(tensor)),
            (1, lambda: hvd.reducescatter(tensor)),
            (0, lambda: hvd.allreduce(tensor.cpu())),
        ):
            with self.by_nccl(times):
                call()

    def test_is_given_a_group_as_one(self):
        tensors = [self.values("cuda", length) for length in (1, 50, 20000, 3)]
        with self.by_nccl(1):
            hvd.grouped_allreduce(tensors)
        with self.by_nccl(1):
            hvd.grouped_allreduce_(tensors)
        with self.by_nccl(1):
            hvd.broadcast_parameters([(str(i), one) for i, one in enumerate(tensors)], 0)
        # Tensors of the host, and of a different type, are reduced separately.
        mixed = [tensors[0], tensors[1].cpu(), tensors[2], tensors[3].half()]
        with self.by_nccl(2):
            hvd.grouped_allreduce(mixed)

    def test_what_is_built(self):
        self.assertTrue(hvd.cuda_built())
        if FAKE or not BY_NCCL:
            self.assertEqual(hvd.nccl_built(), 23007 if BY_NCCL else 0)
        else:
            self.assertGreaterEqual(hvd.nccl_built(), 21800)

    @unittest.skipIf(torch.cuda.device_count() < 2, "there is no other GPU")
    def test_another_gpu_is_refused(self):
        hvd.allreduce(torch.ones(2, device="cuda:0"))
        other = torch.ones(2, device="cuda:1")
        if BY_NCCL:
            with self.assertRaisesRegex(ValueError, "is on cuda:1, and that of operations before .* on cuda:0"):
                hvd.allreduce(other, name="other")
        else:
            self.same(hvd.allreduce(other, name="other", op=hvd.Sum).cpu(), [2.0, 2.0])


class Agreement(Gpus):
    def test_mixed_devices_are_refused_on_all_ranks(self):
        mine = self.values(("cpu", "cuda")[self.rank], 3)
        for call in (hvd.allreduce, hvd.allgather, lambda one, name: hvd.broadcast(one, 0, name)):
            both = "rank 0 brought .* on the CPU, rank 1 brought .* on a GPU"
            with self.assertRaisesRegex(hvd.HorovodInternalError, both):
                call(mine, name="mixed")
        self.same(hvd.allreduce(mine.cuda(), op=hvd.Sum, name="mixed").cpu(), [3.0, 5.0, 7.0])

    def test_a_name_may_move_to_the_gpu(self):
        for device in ("cpu", "cuda", "cuda", "cpu"):
            self.same(hvd.allreduce(self.values(device, 2), op=hvd.Sum, name="moves").cpu(), [3.0, 5.0])

    def test_repeated_steps_are_not_described_again(self):
        tensors = [self.values("cuda", i + 1) for i in range(5)]

        def step():
            for handle in [hvd.allreduce_async(one, name=f"repeated.{i}") for i, one in enumerate(tensors)]:
                hvd.synchronize(handle)
            hvd.allgather(tensors[self.rank], name="repeated")

        looked = self.values("cuda", 1)
        exchanges = []
        for _ in range(4):
            step()
            exchanges.append(engine().statistics()["exchanges"])
            # No rank begins the next test's descriptions before all have read the count; only the first call describes this.
            hvd.allreduce(looked, name="looked")
        self.assertEqual(exchanges[1:], exchanges[1:2] * 3)


@unittest.skipUnless(FAKE, "kernels are functions of Python here")
class Streams(Gpus):
    def launch(self, work):
        kernel = KERNEL(lambda _: work())
        assert CUDA.cuLaunchHostFunc(None, kernel, None) == 0
        self.kernels.append(kernel)

    def setUp(self):
        super().setUp()
        self.kernels = []

    def test_an_operation_comes_after_what_its_stream_had_and_not_after_more(self):
        tensor = self.values("cuda", 2)
        seen = (ctypes.c_float * 2).from_address(CUDA.fake_cuda_memory(tensor.data_ptr()))
        come, go_on, over = threading.Event(), threading.Event(), threading.Event()

        def before():
            come.wait(10)
            seen[0] = 10.0

        self.launch(before)
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum)

        def behind():  # stands for the rest of backward
            go_on.wait(10)
            over.set()

        self.launch(behind)
        come.set()
        hvd.synchronize(handle)
        result, waited = list(seen), over.is_set()
        go_on.set()
        self.assertFalse(waited)
        self.assertEqual(result, [20.0, 5.0])
        hvd.barrier()


class Joined(Gpus):
    def test_ranks_without_data(self):
        def program(device):
            results = []
            if self.rank == 0:
                results += [hvd.allreduce(self.values(device, 3), op=op) for op in (hvd.Sum, hvd.Average, hvd.Min)]
                whole = self.values(device, 3, dtype=torch.int32)
                results.append(hvd.allreduce(whole, op=hvd.Sum, prescale_factor=3.0))
                results += hvd.grouped_allreduce([self.values(device, 2), self.values(device, 20000)], op=hvd.Sum)
                results.append(hvd.allreduce(self.values(device, 4), op=hvd.Adasum))
            self.assertIn(hvd.join(), range(self.size))
            return results

        with self.by_nccl(0):
            self.on_both(program)
        with self.by_nccl(1):  # all ranks have returned from `join`
            hvd.allreduce(self.values("cuda", 3))
