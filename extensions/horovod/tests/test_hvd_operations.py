"""Peculiarities of `cohort.horovod.torch`'s operations (handles, in place, sparse tensors), on all ranks of `cohort run -np N`:
each rank runs this. test_hvd_shared.py has the tests common to all frameworks."""

import random
import time
import unittest

from support import SECONDS, torch
from support_hvd import Case, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

from cohort.horovod.compression import compressed

if torch is not None:
    import cohort.horovod.torch as hvd

REDUCIBLE = ("int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "uint8", "int8", "int16")
MOVABLE = (*REDUCIBLE, "bool")


class Reductions(Case):
    def values(self, rank, dtype="float32", shape=(3, 2)):
        count = torch.Size(shape).numel()
        return ((torch.arange(count, dtype=torch.float64) + rank) % 5 + 1).reshape(shape).to(getattr(torch, dtype))

    def all_values(self, dtype="float32", shape=(3, 2)):
        return [self.values(rank, dtype, shape) for rank in range(self.size)]

    def test_in_place(self):
        for dtype in REDUCIBLE:
            with self.subTest(dtype=dtype):
                mine, total = self.values(self.rank, dtype), sum(self.all_values(dtype))
                self.same(hvd.allreduce_(mine, op=hvd.Sum), total)
                self.same(mine, total)
        with self.assertWarns(DeprecationWarning):
            self.close(hvd.allreduce_(self.values(self.rank), True), sum(self.all_values()) / self.size)
        with self.assertWarns(DeprecationWarning):
            self.same(hvd.allreduce(self.values(self.rank), False), sum(self.all_values()))
        self.close(hvd.allreduce_(torch.ones(2, 2), op=hvd.Adasum), torch.ones(2, 2))

    def test_what_does_not_lie_in_a_row(self):
        mine = self.values(self.rank).t()
        self.assertFalse(mine.is_contiguous())
        total = sum(self.all_values()).t()
        self.same(hvd.allreduce(mine, op=hvd.Sum), total)
        base = torch.zeros(4, 4)
        base[1:3, ::2] = self.rank + 1.0
        self.assertIsNotNone(hvd.allreduce_(base[1:3, ::2], op=hvd.Sum))
        expected = torch.zeros(4, 4)
        expected[1:3, ::2] = sum(range(1, self.size + 1))
        self.same(base, expected)
        last = torch.full((1, 3, 2, 2), float(self.rank)).to(memory_format=torch.channels_last)
        self.same(hvd.broadcast_(last, self.size - 1), torch.full((1, 3, 2, 2), self.size - 1.0))
        turned = torch.tensor([1 + 2j, 3 - 1j]).conj()
        self.same(hvd.allreduce(turned, op=hvd.Sum), torch.tensor([1 - 2j, 3 + 1j]) * self.size)

    def test_groups(self):
        dtypes = ("float32", "float64", "float32", "int32")
        given = [self.values(self.rank, dtype, (i + 1,)) for i, dtype in enumerate(dtypes)]
        totals = [sum(self.all_values(dtype, (i + 1,))) for i, dtype in enumerate(dtypes)]
        for got in (
            hvd.synchronize(hvd.grouped_allreduce_async(given, op=hvd.Sum)),
            hvd.grouped_allreduce(tuple(given), op=hvd.Sum, compression=hvd.Compression.fp16),
        ):
            self.assertEqual([one.dtype for one in got], [one.dtype for one in given])
            for one, total in zip(got, totals):
                self.same(one, total)
        # Between hosts only float32 is rounded. The rest of the group, and other reductions, are exact.
        got = hvd.grouped_allreduce(given, op=hvd.Sum, compression=hvd.Compression.int8)
        self.assertEqual([one.dtype for one in got], [one.dtype for one in given])
        for one, total in zip(got, totals):
            if one.dtype == torch.float32:
                self.assertLessEqual((one - total).abs().max(), total.abs().max() / 50)
            else:
                self.same(one, total)
        best = hvd.allreduce(given[0], op=hvd.Max, compression=hvd.Compression.int8)
        self.same(best, torch.stack(self.all_values("float32", (1,))).amax(0))
        with self.assertRaisesRegex(ValueError, "Int4Compressor: wire formats are for horovod.torch"):
            compressed(given, hvd.Compression.int4)  # TensorFlow's operations begin with this
        copies = [one.clone() for one in given]
        got = hvd.grouped_allreduce_(copies, op=hvd.Sum)
        for one, same, total in zip(got, copies, totals):
            self.assertIs(one, same)
            self.same(one, total)

    def test_a_backward_for_each_result_of_a_group(self):
        for op, expected in ((hvd.Sum, self.size), (hvd.Average, 1.0)):
            leaves = [torch.ones(i + 1, requires_grad=True) for i in range(3)]
            results = hvd.grouped_allreduce(leaves, op=op)
            for one in results:
                one.backward(torch.ones_like(one))
            for leaf in leaves:
                self.same(leaf.grad, torch.full(leaf.shape, expected))
        for operation in hvd.grouped_allgather, hvd.grouped_reducescatter:
            leaves = [torch.ones(self.size, i + 1, requires_grad=True) for i in range(2)]
            for one in operation(leaves):
                one.backward(torch.ones_like(one))
            self.assertTrue(all(float(leaf.grad.abs().sum()) > 0 for leaf in leaves))
        alone = torch.ones(2, requires_grad=True)
        result = hvd.allreduce(alone, op=hvd.Max)
        for _ in range(2):
            result.backward(torch.ones_like(result), retain_graph=True)
        self.same(alone.grad, torch.full((2,), 2.0))

    def test_any_order(self):
        names = [f"any.{i}" for i in range(50)]
        order = list(range(len(names)))
        for step in range(3):
            random.Random(self.rank * 100 + step).shuffle(order)
            handles = {}
            for i in order:
                handles[i] = hvd.allreduce_async(torch.full((i + 1,), float(self.rank + i)), name=names[i], op=hvd.Sum)
            random.Random(self.rank).shuffle(order)
            for i in order:
                self.same(hvd.synchronize(handles[i]), [sum(range(self.size)) + i * self.size] * (i + 1.0).__int__())

    def test_sparse(self):
        rows = self.rank + 1
        mine = torch.sparse_coo_tensor(
            torch.tensor([[0, 3][: min(rows, 2)]]), torch.ones(min(rows, 2), 2) * (self.rank + 1), (5, 2)
        )
        for op in (hvd.Sum, hvd.Average):
            result = hvd.sparse_allreduce_async(mine, name=f"sparse.{op}", op=op)()
            self.assertTrue(result.is_sparse)
            expected = torch.zeros(5, 2)
            for rank in range(self.size):
                expected[0] += rank + 1
                if rank > 0:
                    expected[3] += rank + 1
            self.close(result.to_dense(), expected / (self.size if op == hvd.Average else 1))
        with self.assertRaises(ValueError):
            hvd.allreduce(mine)


class Movements(Case):
    def test_in_place_and_by_handles(self):
        for dtype in MOVABLE:
            with self.subTest(dtype=dtype):
                mine = torch.full((3, 2), self.rank % 2).to(getattr(torch, dtype))
                self.assertIs(hvd.broadcast_(mine, self.size - 1), mine)
                self.same(mine, torch.full((3, 2), (self.size - 1) % 2).to(mine.dtype))
        only = torch.ones(2 if self.rank == 1 else 0, 3)
        self.same(hvd.synchronize(hvd.allgather_async(only, name="only")), torch.ones(2, 3))
        got, received = hvd.synchronize(hvd.alltoall_async(torch.ones(self.size)))
        self.assertEqual((got.tolist(), received.tolist()), ([1.0] * self.size, [1] * self.size))
        given = torch.arange(2.0 * self.size) + self.rank
        mine = (torch.arange(2.0 * self.size) * self.size + sum(range(self.size)))[2 * self.rank : 2 * self.rank + 2]
        self.close(hvd.synchronize(hvd.reducescatter_async(given, "rs", hvd.Sum, hvd.global_process_set, 2.0, 0.25)), mine / 2)
        # Between hosts float32 is rounded on its way, as in allreduce.
        numbers = torch.linspace(-1, 1, 1000 * self.size)
        for kind in (torch.float32, torch.float64):
            exact = hvd.reducescatter(numbers.to(kind), op=hvd.Sum)
            rounded = hvd.reducescatter(numbers.to(kind), op=hvd.Sum, compression=hvd.Compression.int8)
            self.assertLessEqual((rounded - exact).abs().max(), self.size / 50)
            self.assertEqual(torch.equal(rounded, exact), kind == torch.float64 or hvd.local_size() == self.size)
        with self.assertRaises(hvd.HorovodInternalError):
            own = hvd.Compression.int8 if self.rank == 0 else hvd.Compression.none
            hvd.reducescatter(numbers, name="rs.formats", compression=own)
        for op in (hvd.Min, hvd.Adasum):
            with self.assertRaises(NotImplementedError) as caught:
                hvd.reducescatter_async(given, op=op)
            self.assertIsInstance(caught.exception, hvd.HorovodInternalError)
            self.assertNotIsInstance(caught.exception, ValueError)

    def test_splits(self):
        splits = [self.rank + other for other in range(self.size)]
        mine = torch.ones(sum(splits), 2)
        for given in (splits, torch.tensor(splits), torch.tensor(splits, dtype=torch.int32)):
            got, received = hvd.alltoall(mine, splits=given)
            self.assertEqual((len(got), received.tolist()), (sum(splits), splits))
            self.assertEqual(received.dtype, given.dtype if isinstance(given, torch.Tensor) else torch.int32)
        for wrong in ([1], [5] * self.size, torch.ones(self.size)):
            with self.assertRaises(ValueError):
                hvd.alltoall(torch.ones(self.size), splits=wrong)

    def test_parameters(self):
        for form in ("state_dict", "named_parameters", "parameters", "list"):
            with self.subTest(form=form):
                torch.manual_seed(self.rank)
                model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
                given = getattr(model, form)() if form != "list" else list(model.named_parameters())
                hvd.broadcast_parameters(given, root_rank=self.size - 1)
                torch.manual_seed(self.size - 1)
                expected = torch.nn.Linear(3, 2)
                self.same(model[0].weight.detach(), expected.weight.detach())
                self.same(model[0].bias.detach(), expected.bias.detach())
        for wrong in (3, torch.ones(2), {"a": 3}, [("a", "b")]):
            with self.assertRaises(ValueError):
                hvd.broadcast_parameters(wrong, 0)


class Errors(Case):
    def test_one_name_twice(self):
        blocker = hvd.allreduce_async(torch.ones(1), name="twice") if self.rank == 0 else None
        if self.rank == 0:
            with self.assertRaises(ValueError):
                hvd.allreduce_async(torch.ones(1), name="twice")
        hvd.barrier()
        if blocker is None:
            blocker = hvd.allreduce_async(torch.ones(1), name="twice")
        self.same(hvd.synchronize(blocker), [1.0])

    def test_handles(self):
        handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
        self.assertIsInstance(handle, int)
        until = time.monotonic() + SECONDS
        while not hvd.poll(handle):
            self.assertLess(time.monotonic(), until)
            time.sleep(0.001)
        self.same(hvd.synchronize(handle), [self.size])
        self.assertIsNone(hvd.synchronize(handle))
        with self.assertRaises(ValueError):
            hvd.poll(handle)

    def test_what_is_no_tensor(self):
        for wrong in (3, [1.0], None, torch.ones(2).to_sparse()):
            with self.assertRaises(ValueError):
                hvd.allreduce(wrong)
        with self.assertRaises(ValueError) as caught:
            hvd.allreduce(torch.empty(2, device="meta"))
        self.assertIn("meta", str(caught.exception))


for case in (Reductions, Movements, Errors):
    case.tearDown = lambda self: hvd.barrier()

if __name__ == "__main__":
    unittest.main()
