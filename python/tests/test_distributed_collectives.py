"""torch.distributed over the backend "cohort": every function of it, on all ranks of `cohort run -np N`."""

import datetime
import math
import os
import unittest
import warnings

from support import SECONDS, needs_torch, torch
from support_group import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort

if torch is not None:
    import torch.distributed as dist

    from cohort.distributed.tensors import Pieces

TORCH_2 = torch is not None and int(torch.__version__.split(".")[0]) >= 2
VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2]) if torch is not None else (0, 0)
needs_torch_2 = unittest.skipUnless(TORCH_2, "torch 1.13 does not have it")


@needs_torch
class Case(unittest.TestCase):
    def setUp(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def of(self, rank, count=6, dtype=None):
        """Returns a rank's input."""
        values = torch.arange(count) % 5 + rank + 1
        return values.to(dtype or torch.float32)

    def all(self, count=6, dtype=None):
        return [self.of(rank, count, dtype) for rank in range(self.size)]

    def equal(self, one, other):
        self.assertEqual(one.dtype, other.dtype)
        self.assertTrue(torch.equal(one, other), f"{one} is not {other}")


DTYPES = "float16 bfloat16 float32 float64 complex64 complex128 uint8 int8 int16 int32 int64".split()


class Reductions(Case):
    def test_the_group(self):
        self.assertEqual(dist.get_backend(), "cohort")
        self.assertEqual((self.rank, self.size), (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
        self.assertTrue(os.environ["LOCAL_RANK"])

    def test_all_reduce_of_all_types(self):
        for name in DTYPES + [n for n in ("uint16", "uint32", "uint64") if hasattr(torch, n)]:
            with self.subTest(name):
                dtype = getattr(torch, name)
                tensor = self.of(self.rank, 7, dtype)
                self.assertIsNone(dist.all_reduce(tensor))
                self.equal(tensor, sum(self.of(r, 7) for r in range(self.size)).to(dtype))

    def test_all_reduce_with_all_operations(self):
        parts = torch.stack(self.all()).double()
        op = dist.ReduceOp
        for how, expected in [
            (op.SUM, parts.sum(0)),
            (op.AVG, parts.mean(0)),
            (op.PRODUCT, parts.prod(0)),
            (op.MIN, parts.amin(0)),
            (op.MAX, parts.amax(0)),
        ]:
            tensor = parts[self.rank].clone()
            dist.all_reduce(tensor, how)
            self.assertTrue(torch.allclose(tensor, expected), (how, tensor, expected))
        bits = [torch.tensor([0b100 | r % 2, 1 << r]) for r in range(self.size)]
        for how, fold in [
            (op.BAND, lambda a, b: a & b),
            (op.BOR, lambda a, b: a | b),
            (op.BXOR, lambda a, b: a ^ b),
        ]:
            tensor, expected = bits[self.rank].clone(), bits[0]
            for other in bits[1:]:
                expected = fold(expected, other)
            dist.all_reduce(tensor, how)
            self.equal(tensor, expected)

    def test_truth(self):
        op = dist.ReduceOp
        parts = [torch.tensor([r == 0, True, False]) for r in range(self.size)]
        one = self.size == 1
        for how, expected in [
            (op.SUM, [True, True, False]),
            (op.MAX, [True, True, False]),
            (op.BOR, [True, True, False]),
            (op.MIN, [one, True, False]),
            (op.PRODUCT, [one, True, False]),
            (op.BAND, [one, True, False]),
        ]:
            tensor = parts[self.rank].clone()
            dist.all_reduce(tensor, how)
            self.assertEqual(tensor.tolist(), expected, how)

    @needs_torch_2
    def test_premultiplied_sum(self):
        tensor = self.of(self.rank)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
        self.equal(tensor, sum(self.all()) * 0.5)
        tensor = self.of(self.rank)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(torch.tensor(2.0)))
        self.equal(tensor, sum(self.all()) * 2)

    @unittest.skipIf(TORCH_2, "for torch 1.13")
    def test_the_factor_that_torch_hides(self):
        with self.assertRaisesRegex(cohort.InvalidArgument, "PREMUL_SUM"):
            dist.all_reduce(self.of(self.rank), dist._make_nccl_premul_sum(0.5))

    def test_what_lies_anywhere(self):
        total = sum(self.all(12)).view(3, 4)
        mine = self.of(self.rank, 12).view(3, 4)
        for tensor in (
            mine.t().contiguous().t(),
            torch.stack([mine, mine], -1)[..., 0],
            torch.cat([mine, mine], 1)[:, :4],
            mine.expand(1, 3, 4)[0],
        ):
            dist.all_reduce(tensor)
            self.equal(tensor, total)
        scalar = torch.tensor(float(self.rank))
        dist.all_reduce(scalar)
        self.assertEqual(scalar.item(), sum(range(self.size)))
        empty = torch.empty(0, 3)
        dist.all_reduce(empty)
        negated = torch.full((3,), 1 + 2j).conj().imag
        self.assertTrue(negated.is_neg())
        dist.all_reduce(negated)
        self.assertEqual(negated.tolist(), [-2 * self.size] * 3)

    def test_async(self):
        tensors = [self.of(self.rank, 100_000) for _ in range(4)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work, tensor in zip(works, tensors):
            self.assertTrue(work.wait())
            self.assertTrue(work.is_completed() and work.is_success())
            self.assertIsNone(work.exception())
            self.assertIs(work.result()[0], tensor)
            self.equal(tensor, sum(self.all(100_000)))

    def test_futures(self):
        for count in (3, 300_000):
            tensor = self.of(self.rank, count)
            future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0] / self.size)
            self.equal(future.wait(), sum(self.all(count)) / self.size)

    def test_futures_that_wait_for_futures(self):
        for count in (5, 300_000):
            for _ in range(10):
                first, second = self.of(self.rank, count), self.of(self.rank, count)
                later = self.of(self.rank, count)

                def then(future, second=second):
                    dist.all_reduce(second, async_op=True).get_future().wait()
                    return future.value()[0] + second

                total = dist.all_reduce(first, async_op=True).get_future().then(then).wait()
                self.equal(total, 2 * sum(self.all(count)))
                dist.all_reduce(later, async_op=True).get_future().wait()

    def test_coalesced(self):
        tensors = [self.of(self.rank, n) for n in (3, 500, 1)]
        dist.all_reduce_coalesced(tensors)
        for tensor, n in zip(tensors, (3, 500, 1)):
            self.equal(tensor, sum(self.all(n)))

    def test_reduce(self):
        root, mine = self.size - 1, self.of(self.rank)
        for op, expected in [(dist.ReduceOp.SUM, sum(self.all())), (dist.ReduceOp.MAX, self.all()[-1])]:
            tensor = mine.clone()
            dist.reduce(tensor, root, op)
            self.equal(tensor, expected if self.rank == root else mine)

    def test_reduce_scatter(self):
        inputs = [self.of(self.rank + part) for part in range(self.size)]
        expected = sum(self.of(r + self.rank) for r in range(self.size))
        output = torch.empty(6)
        dist.reduce_scatter(output, inputs)
        self.equal(output, expected)
        output = torch.empty(6)
        getattr(dist, "reduce_scatter_tensor", dist._reduce_scatter_base)(output, torch.cat(inputs))
        self.equal(output, expected)
        # Inputs of different sizes.
        inputs = [self.of(self.rank, part + 1) for part in range(self.size)]
        output = torch.empty(self.rank + 1)
        dist.reduce_scatter(output, inputs, dist.ReduceOp.MAX)
        self.equal(output, self.of(self.size - 1, self.rank + 1))

    def test_sparse(self):
        places = torch.tensor([[self.rank, self.rank + 1]])
        tensor = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0]), (self.size + 1,))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            dist.all_reduce(tensor)
        self.assertEqual([str(one.message) for one in said if "sparse.py" in one.filename], [])
        expected = torch.zeros(self.size + 1)
        for rank in range(self.size):
            expected[rank] += 1
            expected[rank + 1] += 2
        self.equal(tensor.to_dense(), expected)
        rows = torch.sparse_coo_tensor([[0]], torch.full((1, 3), float(self.rank)), (4, 3))
        work = dist.all_reduce(rows, dist.ReduceOp.AVG, async_op=True)
        work.wait()
        self.equal(rows.to_dense()[0], torch.full((3,), sum(range(self.size)) / self.size))


class Moving(Case):
    def test_broadcast(self):
        for name in DTYPES + ["bool"] + [n for n in ("float8_e4m3fn",) if hasattr(torch, n)]:
            with self.subTest(name):
                dtype, root = getattr(torch, name), self.size - 1
                tensor = self.of(self.rank, 4).to(dtype)
                dist.broadcast(tensor, root)
                self.equal(tensor.to(torch.complex128), self.of(root, 4).to(dtype).to(torch.complex128))
        wide = torch.zeros(4, 6)
        wide[:, 2] = self.rank
        dist.broadcast(wide[:, 2], 0)
        self.assertEqual(wide.sum().item(), 0)

    def test_all_gather(self):
        outputs = [torch.empty(6) for _ in range(self.size)]
        dist.all_gather(outputs, self.of(self.rank))
        for output, expected in zip(outputs, self.all()):
            self.equal(output, expected)
        # Inputs of different sizes, and into pieces of one tensor.
        outputs = list(torch.empty(sum(range(1, self.size + 1))).split(list(range(1, self.size + 1))))
        self.assertIs(Pieces(outputs, "test", reads=False)._own, False)
        dist.all_gather(outputs, self.of(self.rank, self.rank + 1))
        for rank, output in enumerate(outputs):
            self.equal(output, self.of(rank, rank + 1))
        outputs = [torch.empty(2, 3).t() for _ in range(self.size)]
        dist.all_gather(outputs, self.of(self.rank).view(3, 2))
        for output, expected in zip(outputs, self.all()):
            self.equal(output, expected.view(3, 2))

    def test_all_gather_into_tensor(self):
        gather = getattr(dist, "all_gather_into_tensor", dist._all_gather_base)
        output = torch.empty(self.size, 6)
        gather(output, self.of(self.rank))
        self.equal(output, torch.stack(self.all()))
        output = torch.empty(self.size * 6, dtype=torch.bool)
        work = gather(output, self.of(self.rank) > 2, async_op=True)
        work.wait()
        self.equal(output, torch.cat(self.all()) > 2)

    def test_all_gather_coalesced(self):
        outputs = [[torch.empty(2), torch.empty(5)] for _ in range(self.size)]
        dist.all_gather_coalesced(outputs, [self.of(self.rank, 2), self.of(self.rank, 5)])
        for rank, (a, b) in enumerate(outputs):
            self.equal(a, self.of(rank, 2))
            self.equal(b, self.of(rank, 5))

    @needs_torch_2
    def test_the_coalescing_manager(self):
        from torch.distributed.distributed_c10d import _coalescing_manager

        device = torch.device("cpu")
        tensors = [self.of(self.rank, n) for n in (3, 4)]
        with _coalescing_manager(device=device, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        for tensor, n in zip(tensors, (3, 4)):
            self.equal(tensor, sum(self.all(n)))
        outputs = [torch.empty(self.size * n) for n in (3, 4)]
        with _coalescing_manager(device=device):
            for output, n in zip(outputs, (3, 4)):
                dist.all_gather_into_tensor(output, self.of(self.rank, n))
        for output, n in zip(outputs, (3, 4)):
            self.equal(output, torch.cat(self.all(n)))
        outputs = [torch.empty(n) for n in (3, 4)]
        with _coalescing_manager(device=device):
            for output, n in zip(outputs, (3, 4)):
                dist.reduce_scatter_tensor(output, self.of(self.rank, n).repeat(self.size))
        for output, n in zip(outputs, (3, 4)):
            self.equal(output, sum(self.all(n)))

    def test_gather_and_scatter(self):
        root = self.size - 1
        outputs = [torch.empty(6) for _ in range(self.size)] if self.rank == root else None
        dist.gather(self.of(self.rank), outputs, root)
        for output, expected in zip(outputs or [], self.all()):
            self.equal(output, expected)
        output = torch.empty(2, 3)
        dist.scatter(output, [part.view(2, 3) for part in self.all()] if self.rank == root else None, root)
        self.equal(output, self.of(self.rank).view(2, 3))

    def test_all_to_all(self):
        inputs = [self.of(10 * self.rank + to, to + 1) for to in range(self.size)]
        outputs = [torch.empty(self.rank + 1) for _ in range(self.size)]
        dist.all_to_all(outputs, inputs)
        for rank, output in enumerate(outputs):
            self.equal(output, self.of(10 * rank + self.rank, self.rank + 1))
        output = torch.empty(self.size, 2)
        dist.all_to_all_single(output, torch.full((self.size, 2), float(self.rank)))
        self.assertEqual(output[:, 0].tolist(), list(range(self.size)))
        # Row r of a rank's input goes to rank r; rank r receives size * 1 rows... of different sizes.
        sizes = [to + 1 for to in range(self.size)]
        output = torch.empty((self.rank + 1) * self.size, 2)
        dist.all_to_all_single(output, torch.full((sum(sizes), 2), float(self.rank)), [self.rank + 1] * self.size, sizes)
        self.assertEqual(output[:, 1].tolist(), [float(r) for r in range(self.size) for _ in range(self.rank + 1)])

    def test_messages(self):
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if self.size == 1:
            return
        for count in (1, 100_000):
            received = torch.empty(count)
            works = [dist.isend(self.of(self.rank, count), right), dist.irecv(received, left)]
            for work in works:
                work.wait()
            self.equal(received, self.of(left, count))
        # By tag, whichever comes first.
        one, two = torch.empty(1), torch.empty(1)
        sent = [dist.isend(torch.tensor([float(tag)]), right, tag=tag) for tag in (1, 2)]
        dist.recv(two, left, tag=2)
        self.assertEqual(dist.recv(one, left, tag=1), left)
        for work in sent:
            work.wait()
        self.assertEqual((one.item(), two.item()), (1, 2))
        strided = torch.zeros(3, 2)
        ops = [dist.P2POp(dist.isend, self.of(self.rank, 3), right), dist.P2POp(dist.irecv, strided[:, 0], left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        self.equal(strided[:, 0], self.of(left, 3))
        # From whichever comes first.
        if self.rank > 0:
            dist.send(torch.tensor([float(self.rank)]), 0)
            return
        sources = []
        for _ in range(self.size - 1):
            sources.append(dist.recv(one))
            self.assertEqual(one.item(), sources[-1])
        self.assertEqual(sorted(sources), list(range(1, self.size)))

    def test_objects(self):
        mine = {"rank": self.rank, "text": "x" * (100 * self.rank)}
        found = [None] * self.size
        dist.all_gather_object(found, mine)
        self.assertEqual([one["rank"] for one in found], list(range(self.size)))
        found = [None] * self.size if self.rank == 0 else None
        dist.gather_object(mine, found)
        self.assertEqual([one["rank"] for one in found or []], list(range(self.size)) if self.rank == 0 else [])
        objects = [mine, (1, "two")] if self.rank == self.size - 1 else [None, None]
        dist.broadcast_object_list(objects, self.size - 1)
        self.assertEqual(objects[0]["rank"], self.size - 1)
        mine_now = [None]
        dist.scatter_object_list(mine_now, [{"for": r} for r in range(self.size)] if self.rank == 0 else None)
        self.assertEqual(mine_now, [{"for": self.rank}])

    def test_barrier(self):
        dist.barrier()
        dist.barrier(async_op=True).wait()
        if TORCH_2:  # 1.13 takes them with NCCL only
            self.assertFalse(torch.cuda.is_initialized())
            dist.barrier(device_ids=[0])
        cohort.monitored_barrier(timeout=SECONDS)


class Groups(Case):
    def test_any_ranks(self):
        for ranks in ([0], [self.size - 1], list(range(self.size)), list(range(self.size))[::-1], [0, self.size - 1]):
            ranks = sorted(set(ranks), key=ranks.index)
            group = dist.new_group(ranks)
            if self.rank not in ranks:
                self.assertFalse(isinstance(group, dist.ProcessGroup))
                continue
            tensor = self.of(self.rank)
            dist.all_reduce(tensor, group=group)
            self.equal(tensor, sum(self.of(rank) for rank in ranks))
            self.assertEqual(dist.get_world_size(group), len(ranks))
            root = ranks[-1]
            tensor = self.of(self.rank)
            dist.broadcast(tensor, root, group=group)
            self.equal(tensor, self.of(root))
            found = [None] * len(ranks)
            dist.all_gather_object(found, self.rank, group=group)
            self.assertEqual(sorted(found), sorted(ranks))
            dist.destroy_process_group(group)

    def test_groups_side_by_side(self):
        groups = [dist.new_group([rank for rank in range(self.size) if rank % 2 == part]) for part in range(min(2, self.size))]
        mine = groups[self.rank % 2]
        tensors = [self.of(self.rank, 1000) for _ in range(3)]
        whole = self.of(self.rank, 50_000)
        works = [dist.all_reduce(tensor, group=mine, async_op=True) for tensor in tensors]
        works.append(dist.all_reduce(whole, async_op=True))
        for work in reversed(works):
            work.wait()
        self.equal(whole, sum(self.all(50_000)))
        for tensor in tensors:
            self.equal(tensor, sum(self.of(rank, 1000) for rank in range(self.rank % 2, self.size, 2)))

    def test_gloo_beside(self):
        group = dist.new_group(list(range(self.size)), backend="gloo")
        tensor = self.of(self.rank)
        dist.all_reduce(tensor, group=group)
        self.equal(tensor, sum(self.all()))


class Timeouts(Case):
    def test_of_a_group_that_is_changed(self):
        group, second = dist.new_group(), datetime.timedelta(seconds=1)
        if VERSION >= (2, 14):
            dist.set_timeout(second, group)
        else:
            if hasattr(dist.distributed_c10d, "_set_pg_timeout"):
                with self.assertWarnsRegex(UserWarning, "only supported for either nccl or gloo"):
                    dist.distributed_c10d._set_pg_timeout(second, group)
            group.set_timeout(second)
        if TORCH_2:
            options = group._get_backend(torch.device("cpu")).options
            self.assertEqual((options._timeout, options.backend), (second, "cohort"))
            world = dist.group.WORLD._get_backend(torch.device("cpu")).options
            self.assertEqual(world._timeout, datetime.timedelta(seconds=SECONDS))
        if self.size == 1:
            return
        if self.rank == 0:
            with self.assertRaisesRegex(cohort.Timeout, r"timed out after (1000|\d{1,3}) ms"):
                dist.barrier(group)
        dist.barrier()
        if self.rank != 0:
            with self.assertRaises(cohort.Error):  # the group is over
                dist.barrier(group)


@unittest.skipUnless(VERSION >= (2, 14), "before torch 2.14 C++ asks a process group in Python for little")
class FromCpp(Case):
    """The functions of C++'s ProcessGroup, which ask the group for what it has in Python, and else the backend in it."""

    def call(self, name, *arguments):
        work = getattr(dist.ProcessGroup, name)(dist.group.WORLD, *arguments)
        if work is not None:
            work.wait()

    def test_moves(self):
        from torch._C import _distributed_c10d as c10d

        root = c10d.GatherOptions()
        root.rootRank = self.size - 1
        is_root = self.rank == root.rootRank
        found = [[torch.zeros(6) for _ in range(self.size)]] if is_root else []
        self.call("gather", found, [self.of(self.rank)], root)
        for one, other in zip(found[0] if is_root else [], self.all()):
            self.equal(one, other)
        root = c10d.ScatterOptions()
        root.rootRank = self.size - 1
        mine = torch.zeros(6)
        self.call("scatter", [mine], [self.all()] if is_root else [], root)
        self.equal(mine, self.of(self.rank))
        found = [torch.zeros(6) for _ in range(self.size)]
        self.call("alltoall", found, [self.of(self.rank)] * self.size, c10d.AllToAllOptions())
        for one, other in zip(found, self.all()):
            self.equal(one, other)
        found = [[torch.zeros(6)] for _ in range(self.size)]
        self.call("allgather_coalesced", found, [self.of(self.rank)], c10d.AllgatherOptions())
        for (one,), other in zip(found, self.all()):
            self.equal(one, other)

    def test_reductions(self):
        from torch._C import _distributed_c10d as c10d

        root = c10d.ReduceOptions()
        root.rootRank = self.size - 1
        tensor = self.of(self.rank)
        self.call("reduce", [tensor], root)
        self.equal(tensor, sum(self.all()) if self.rank == root.rootRank else self.of(self.rank))
        part = torch.zeros(6)
        self.call("_reduce_scatter_base", part, torch.cat([self.of(self.rank)] * self.size), c10d.ReduceScatterOptions())
        self.equal(part, sum(self.all()))

    def test_out_variants(self):
        name, found = dist.group.WORLD.group_name, torch.zeros(6 * self.size)
        torch.ops._c10d_functional.all_gather_into_tensor_out(self.of(self.rank), self.size, name, out=found)
        torch.ops._c10d_functional.wait_tensor(found)
        self.equal(found, torch.cat(self.all()))

    def test_the_rest(self):
        self.call("monitored_barrier", datetime.timedelta(seconds=SECONDS), False)
        self.assertEqual(
            dist.ProcessGroup._get_sequence_number_for_group(dist.group.WORLD),
            dist.group.WORLD._get_sequence_number_for_group(),
        )
        if self.size == 2:
            tensor = torch.zeros(2)
            if self.rank == 0:
                self.call("recv_anysource", [tensor], 5)
                self.equal(tensor, torch.ones(2))
            else:
                self.call("send", [torch.ones(2)], 0, 5)
        group = dist.new_group()
        dist.ProcessGroup.set_timeout(group, datetime.timedelta(seconds=7))
        self.assertEqual(group.options._timeout, datetime.timedelta(seconds=7))


class Errors(Case):
    def test_mismatch_leaves_the_group_usable(self):
        if self.size == 1:
            return
        tensor = torch.ones(3 + (self.rank == 1))
        with self.assertRaises(cohort.Mismatch):
            dist.all_reduce(tensor)
        tensor = self.of(self.rank)
        dist.all_reduce(tensor)
        self.equal(tensor, sum(self.all()))
        # The error of an operation that is not over at once: by the Work, and by its future, as text.
        tensor = torch.ones(300_000 + (self.rank == 1))
        work = dist.all_reduce(tensor, async_op=True)
        with self.assertRaises(RuntimeError) as raised:
            work.get_future().wait()
        self.assertIn("all_reduce", str(raised.exception))
        with self.assertRaises(cohort.Mismatch):
            work.wait()
        self.assertIsInstance(work.exception(), cohort.Mismatch)
        self.assertFalse(work.is_success())
        dist.barrier()

    def test_other_devices(self):
        with self.assertRaisesRegex(cohort.InvalidArgument, "lies on meta.*cpu:cohort,meta:BACKEND"):
            dist.all_reduce(torch.ones(3, device="meta"))

    def test_what_has_no_meaning(self):
        with self.assertRaises(cohort.InvalidArgument):
            dist.all_gather([torch.empty(3)] * (self.size + 1), torch.ones(3))
        with self.assertRaises(cohort.InvalidArgument):
            dist.all_reduce(torch.ones(3), dist.ReduceOp.BXOR)
        if hasattr(torch, "float8_e4m3fn"):
            with self.assertRaisesRegex(cohort.InvalidArgument, "float8"):
                dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn))

    def test_a_wait_that_gives_up(self):
        if self.size == 1:
            return
        if self.rank == 0:
            tensor = torch.empty(1)
            work = dist.irecv(tensor, 1, tag=9)
            self.assertFalse(work.is_completed())
            with self.assertRaises(cohort.Timeout):
                work.wait(datetime.timedelta(seconds=0.1))
            dist.barrier()
            self.assertTrue(work.wait())
            self.assertEqual(tensor.item(), 5)
        else:
            dist.barrier()
            if self.rank == 1:
                dist.send(torch.tensor([5.0]), 0, tag=9)

    def test_memory_of_the_group(self):
        group = dist.group.WORLD if TORCH_2 else dist.distributed_c10d._get_default_group()
        self.assertTrue(group.supports_tensor_alloc(torch.device("cpu")))
        self.assertFalse(group.supports_tensor_alloc("cuda:0"))

        def give(count, dtype=torch.float32):
            return group.allocate_tensor(count, dtype=dtype, device=torch.device("cpu"))

        for dtype in (torch.float32, torch.bfloat16, torch.int8, getattr(torch, "float8_e4m3fn", torch.bool)):
            self.assertEqual((give(70_000, dtype).shape, give(3, dtype).dtype), ((70_000,), dtype))
        first, second = give(100_000), give(100_000)
        self.assertNotEqual(first.data_ptr(), second.data_ptr())
        for tensor in first, second:
            tensor.fill_(1)
            dist.all_reduce(tensor)
            self.assertEqual(set(tensor.tolist()), {self.size})
        if self.size == 1:
            return
        view, address = first[10:20], first.data_ptr()
        del first, tensor
        self.assertNotIn(address, [one.data_ptr() for one in [give(100_000) for _ in range(3)]])  # the view lies in it
        del view
        self.assertIn(address, [one.data_ptr() for one in [give(60_000) for _ in range(5)]])
        gathered = give(self.size * 40_000)
        mine = gathered[self.rank * 40_000 :][:40_000].fill_(self.rank)
        group._allgather_base(gathered, mine).wait()
        self.assertEqual(gathered[::40_000].tolist(), list(range(self.size)))

    @needs_torch_2
    def test_autograd_sees_what_is_written(self):
        weight = torch.ones(3, requires_grad=True)
        tensor = torch.ones(3)
        product = weight * tensor
        dist.all_reduce(tensor)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            product.sum().backward()


class Many(Case):
    def test_random_order_of_sizes(self):
        generator = torch.Generator().manual_seed(3)
        for _ in range(100):
            count = int(torch.randint(1, 40_000, (1,), generator=generator)) if torch.rand(1, generator=generator) < 0.3 else 5
            tensor = self.of(self.rank, count)
            dist.all_reduce(tensor)
            self.assertEqual(math.fsum(tensor[:5].tolist()), math.fsum(sum(self.all(count))[:5].tolist()))


if __name__ == "__main__":
    unittest.main()
