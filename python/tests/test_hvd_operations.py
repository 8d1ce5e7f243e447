"""hvd's operations on all ranks of `cohort run -np N`: each rank runs this."""

import itertools
import random
import time
import unittest

from support import SECONDS, torch
from support_hvd import Case, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

if torch is not None:
    import cohort
    import cohort.torch as hvd

REDUCIBLE = ("int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "uint8", "int8", "int16")
MOVABLE = (*REDUCIBLE, "bool")


class Reductions(Case):
    def values(self, rank, dtype="float32", shape=(3, 2)):
        count = torch.Size(shape).numel()
        return ((torch.arange(count, dtype=torch.float64) + rank) % 5 + 1).reshape(shape).to(getattr(torch, dtype))

    def all_values(self, dtype="float32", shape=(3, 2)):
        return [self.values(rank, dtype, shape) for rank in range(self.size)]

    def test_each_type(self):
        for dtype in REDUCIBLE:
            with self.subTest(dtype=dtype):
                total = sum(self.all_values(dtype))
                mine = self.values(self.rank, dtype)
                self.same(hvd.allreduce(mine, op=hvd.Sum), total)
                self.same(mine, self.values(self.rank, dtype))
                self.same(hvd.allreduce_(mine, op=hvd.Sum), total)
                self.same(mine, total)

    def test_each_op(self):
        every = torch.stack(self.all_values())
        mine = self.values(self.rank)
        self.close(hvd.allreduce(mine), every.mean(0))
        self.close(hvd.allreduce(mine, op=hvd.Average), every.mean(0))
        self.same(hvd.allreduce(mine, op=hvd.Min), every.amin(0))
        self.same(hvd.allreduce(mine, op=hvd.Max), every.amax(0))
        self.close(hvd.allreduce(mine, op=hvd.Product), every.prod(0))

    def test_average_of_integers_is_truncated(self):
        for value in (7, -7):
            mine = torch.tensor([value if self.rank == 0 else 0])
            self.same(hvd.allreduce(mine), [int(value / self.size)])

    def test_average_is_deprecated(self):
        mine = self.values(self.rank)
        with self.assertWarns(DeprecationWarning):
            self.same(hvd.allreduce(mine, False), sum(self.all_values()))
        with self.assertWarns(DeprecationWarning):
            self.close(hvd.allreduce_(mine.clone(), True), sum(self.all_values()) / self.size)
        with self.assertRaises(ValueError):
            hvd.allreduce(mine, average=True, op=hvd.Sum)
        with self.assertRaises(ValueError):
            hvd.allreduce(mine, op=17)

    def test_factors(self):
        mine = self.values(self.rank)
        total = sum(self.all_values())
        self.same(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), total * 2)
        self.close(hvd.allreduce(mine, prescale_factor=0.5), total / self.size / 2)

    def test_factors_of_integers(self):
        mine = torch.tensor([5, 3]) * (self.rank + 1)
        ranks = sum(range(1, self.size + 1))
        self.same(hvd.allreduce(mine, op=hvd.Sum, postscale_factor=2.0), [10 * ranks, 6 * ranks])
        self.same(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0), [10 * ranks, 6 * ranks])

    def test_compression(self):
        mine = self.values(self.rank)
        for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
            result = hvd.allreduce(mine, compression=compression, op=hvd.Sum)
            self.assertEqual(result.dtype, torch.float32)
            self.same(result, sum(self.all_values()))
        whole = hvd.allreduce(torch.tensor([70000]), compression=hvd.Compression.fp16, op=hvd.Sum)
        self.same(whole, [70000 * self.size])

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

    def test_scalars_and_nothing(self):
        self.same(hvd.allreduce(torch.tensor(2.0), op=hvd.Sum), 2.0 * self.size)
        self.same(hvd.allreduce(torch.empty(0, 3), op=hvd.Sum), torch.empty(0, 3))

    def test_groups(self):
        dtypes = ("float32", "float64", "float32", "int32")
        given = [self.values(self.rank, dtype, (i + 1,)) for i, dtype in enumerate(dtypes)]
        totals = [sum(self.all_values(dtype, (i + 1,))) for i, dtype in enumerate(dtypes)]
        for got in (
            hvd.grouped_allreduce(given, op=hvd.Sum, name="group"),
            hvd.synchronize(hvd.grouped_allreduce_async(given, op=hvd.Sum)),
            hvd.grouped_allreduce(tuple(given), op=hvd.Sum, compression=hvd.Compression.fp16),
        ):
            self.assertEqual([one.dtype for one in got], [one.dtype for one in given])
            for one, total in zip(got, totals):
                self.same(one, total)
        copies = [one.clone() for one in given]
        got = hvd.grouped_allreduce_(copies, op=hvd.Sum)
        for one, same, total in zip(got, copies, totals):
            self.assertIs(one, same)
            self.same(one, total)
        self.assertEqual(hvd.grouped_allreduce([]), [])
        with self.assertRaises(ValueError):
            hvd.grouped_allreduce(given[0])

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

    def test_adasum(self):
        def pair(a, b):
            dot, aa, bb = float(a @ b), float(a @ a), float(b @ b)
            return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b

        vectors = [torch.tensor([1.0 + rank, 2.0, -rank, 0.5]) for rank in range(self.size)]
        expected = pair(vectors[0], vectors[1])
        if self.size == 4:
            expected = pair(expected, pair(vectors[2], vectors[3]))
        self.close(hvd.allreduce(vectors[self.rank], op=hvd.Adasum), expected)
        self.close(hvd.allreduce_(vectors[self.rank].clone().reshape(2, 2), op=hvd.Adasum), expected.reshape(2, 2))
        same = torch.tensor([3.0, 4.0])
        self.close(hvd.allreduce(same, op=hvd.Adasum), same)  # alike: averaged
        alone = torch.zeros(self.size)
        alone[self.rank] = 2.0
        self.close(hvd.grouped_allreduce([alone], op=hvd.Adasum)[0], [2.0] * self.size)  # orthogonal: added
        with self.assertRaises(ValueError):
            hvd.allreduce(torch.tensor([1]), op=hvd.Adasum)


class Movements(Case):
    def part(self, rank, rows, dtype="float32"):
        return (torch.arange(rows * 2).reshape(rows, 2) % 2 + rank).to(getattr(torch, dtype))

    def test_allgather(self):
        for dtype in MOVABLE:
            with self.subTest(dtype=dtype):
                got = hvd.allgather(self.part(self.rank, self.rank + 1, dtype))
                self.assertEqual(got.dtype, getattr(torch, dtype))
                self.same(got, torch.cat([self.part(r, r + 1, dtype) for r in range(self.size)]))
        self.same(hvd.allgather(torch.empty(0, 2)), torch.empty(0, 2))
        only = torch.ones(2 if self.rank == 1 else 0, 3)
        self.same(hvd.synchronize(hvd.allgather_async(only, name="only")), torch.ones(2, 3))
        got = hvd.grouped_allgather([self.part(self.rank, 1), self.part(self.rank, self.rank, "int64")])
        self.same(got[0], torch.cat([self.part(r, 1) for r in range(self.size)]))
        self.same(got[1], torch.cat([self.part(r, r, "int64") for r in range(self.size)]))
        with self.assertRaises(ValueError):
            hvd.allgather(torch.tensor(1.0))

    def test_broadcast(self):
        for dtype, root in itertools.product(MOVABLE, (0, self.size - 1)):
            with self.subTest(dtype=dtype, root=root):
                mine = self.part(self.rank, 3, dtype)
                self.same(hvd.broadcast(mine, root), self.part(root, 3, dtype))
                self.same(mine, self.part(self.rank, 3, dtype))
                self.assertIs(hvd.broadcast_(mine, root), mine)
                self.same(mine, self.part(root, 3, dtype))
        for root in (-1, self.size):
            with self.assertRaises(ValueError):
                hvd.broadcast(torch.ones(1), root)

    def test_alltoall(self):
        for dtype in MOVABLE:
            with self.subTest(dtype=dtype):
                kind = getattr(torch, dtype)
                mine = torch.tensor([[self.rank, other] for other in range(self.size)]).to(kind)
                got = hvd.alltoall(mine)
                self.same(got, torch.tensor([[other, self.rank] for other in range(self.size)]).to(kind))
        splits = [self.rank + other for other in range(self.size)]
        mine = torch.cat([torch.full((count, 2), 10.0 * self.rank + other) for other, count in enumerate(splits)])
        expected = torch.cat([torch.full((self.rank + other, 2), 10.0 * other + self.rank) for other in range(self.size)])
        for given in (splits, torch.tensor(splits), torch.tensor(splits, dtype=torch.int32)):
            got, received = hvd.alltoall(mine, splits=given)
            self.same(got, expected)
            self.assertEqual(received.tolist(), [self.rank + other for other in range(self.size)])
            self.assertEqual(received.dtype, given.dtype if isinstance(given, torch.Tensor) else torch.int32)
        got, received = hvd.synchronize(hvd.alltoall_async(torch.ones(self.size)))
        self.assertEqual((got.tolist(), received.tolist()), ([1.0] * self.size, [1] * self.size))
        for wrong in ([1], [5] * self.size, torch.ones(self.size)):
            with self.assertRaises(ValueError):
                hvd.alltoall(torch.ones(self.size), splits=wrong)
        # Rows beyond the splits stay.
        mine = torch.arange(self.size + 2.0, requires_grad=True)
        got, _ = hvd.alltoall(mine, splits=[1] * self.size)
        self.same(got.detach(), [float(self.rank)] * self.size)
        got.sum().backward()
        self.same(mine.grad, [1.0] * self.size + [0.0, 0.0])

    def test_reducescatter(self):
        rows = 2 * self.size + 1  # the first rank gets one more
        everything = sum((torch.arange(rows * 2.0).reshape(rows, 2) + rank) for rank in range(self.size))
        begin = 2 * self.rank + min(self.rank, 1)
        mine = everything[begin : begin + 2 + (self.rank == 0)]
        given = torch.arange(rows * 2.0).reshape(rows, 2) + self.rank
        self.same(hvd.reducescatter(given, op=hvd.Sum), mine)
        self.close(hvd.reducescatter(given), mine / self.size)
        self.close(hvd.synchronize(hvd.reducescatter_async(given, "rs", hvd.Sum, hvd.global_process_set, 2.0, 0.25)), mine / 2)
        self.close(hvd.reducescatter(given, compression=hvd.Compression.bf16, op=hvd.Sum), mine)
        first, second = hvd.grouped_reducescatter([given, given.double()], op=hvd.Sum)
        self.same(first, mine)
        self.same(second, mine.double())
        for op in (hvd.Min, hvd.Adasum):
            for call in (hvd.reducescatter, hvd.reducescatter_async):
                with self.assertRaises(NotImplementedError) as caught:
                    call(given, op=op)
                self.assertIsInstance(caught.exception, hvd.HorovodInternalError)
                self.assertNotIsInstance(caught.exception, ValueError)
            with self.assertRaises(NotImplementedError):
                hvd.grouped_reducescatter([given], op=op)
        with self.assertRaises(ValueError):
            hvd.reducescatter(torch.tensor(1.0))

    def test_objects(self):
        mine = {"rank": self.rank, "tensor": torch.ones(2) * self.rank}
        got = hvd.broadcast_object(mine, root_rank=1)
        self.assertEqual((got["rank"], got["tensor"].tolist()), (1, [1.0, 1.0]))
        self.assertEqual(hvd.broadcast_object(None), None)
        self.assertEqual(hvd.allgather_object("x" * self.rank), ["x" * rank for rank in range(self.size)])
        self.assertEqual(hvd.allgather_object((1, 2) if self.rank else "other type")[0], "other type")

    def test_objects_that_cannot_be_pickled(self):
        import threading

        with self.assertRaises(TypeError if self.rank == 0 else hvd.HorovodInternalError):
            hvd.broadcast_object(threading.Lock() if self.rank == 0 else None, 0)
        with self.assertRaises(TypeError if self.rank == 0 else hvd.HorovodInternalError):
            hvd.allgather_object(threading.Lock() if self.rank == 0 else None)
        self.assertEqual(hvd.broadcast_object(self.rank, 0), 0)

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


class Gradients(Case):
    """Horovod's gradients: see the table in docs/reference/horovod.md."""

    def leaf(self, *shape):
        return (torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape) + self.rank).requires_grad_()

    def test_allreduce(self):
        for op, factor in ((hvd.Sum, self.size), (hvd.Average, 1)):
            x = self.leaf(3)
            y = hvd.allreduce(x, op=op, prescale_factor=2.0, postscale_factor=0.25)
            (y * (self.rank + 1)).sum().backward()
            mean = sum(range(1, self.size + 1)) / self.size
            self.close(x.grad, [mean * factor / 2] * 3)
        x = self.leaf(3)
        hvd.allreduce(x, compression=hvd.Compression.fp16).sum().backward()
        self.assertEqual((x.grad.dtype, x.grad.tolist()), (torch.float32, [1.0] * 3))
        x, z = self.leaf(2), self.leaf(3)
        a, b = hvd.grouped_allreduce([x, z], op=hvd.Sum, name="both")
        (a.sum() * 2).backward()  # the other one's is zero
        self.close(x.grad, [2.0 * self.size] * 2)
        self.close(z.grad, [0.0] * 3)

    def test_minimum_maximum_product(self):
        x = torch.tensor([float(self.rank), 5.0], requires_grad=True)
        hvd.allreduce(x, op=hvd.Min).sum().backward()
        self.close(x.grad, [self.size * float(self.rank == 0), 1.0])  # ties share
        x = torch.tensor([float(self.rank), -2.0 * self.rank], requires_grad=True)
        hvd.allreduce(x, op=hvd.Max, prescale_factor=-1.0).sum().backward()
        self.close(x.grad, [-self.size * float(self.rank == 0), -self.size * float(self.rank == self.size - 1)])
        x = torch.tensor([self.rank + 2.0, float(self.rank)], requires_grad=True)
        hvd.allreduce(x, op=hvd.Product, name="product").sum().backward()
        others = torch.tensor([[r + 2.0, float(r)] for r in range(self.size) if r != self.rank]).prod(0)
        self.close(x.grad, others * self.size)

    def test_others(self):
        x = self.leaf(self.rank + 1, 2)
        y = hvd.allgather(x, name="gathered")
        (y * torch.arange(1.0, len(y) + 1).unsqueeze(1)).sum().backward()
        begin = sum(range(1, self.rank + 1))
        self.close(x.grad, [[begin + i + 1.0] * 2 for i in range(self.rank + 1)])

        x = self.leaf(2)
        (hvd.broadcast(x, 1) * (self.rank + 1)).sum().backward()
        mean = sum(range(1, self.size + 1)) / self.size
        self.close(x.grad, [mean if self.rank == 1 else 0.0] * 2)

        x = self.leaf(self.size)
        (hvd.alltoall(x) * (self.rank + 1)).sum().backward()
        self.close(x.grad, [rank + 1.0 for rank in range(self.size)])

        for op, factor in ((hvd.Sum, self.size), (hvd.Average, 1)):
            x = self.leaf(self.size + 1)
            y = hvd.reducescatter(x, op=op, prescale_factor=0.5)
            (y * (self.rank + 1)).sum().backward()
            expected = [1.0, 1.0] + [rank + 1.0 for rank in range(1, self.size)]
            self.close(x.grad, torch.tensor(expected) * factor / 2)


class Errors(Case):
    def test_what_ranks_disagree_on(self):
        def each(name, *makers):
            with self.subTest(name=name), self.assertRaises(hvd.HorovodInternalError) as caught:
                makers[self.rank % len(makers)]()
            self.assertIsInstance(caught.exception.__cause__, cohort.Mismatch)
            self.same(hvd.allreduce(torch.ones(2), op=hvd.Sum), [self.size] * 2)

        each("shape", lambda: hvd.allreduce(torch.ones(2), name="m1"), lambda: hvd.allreduce(torch.ones(3), name="m1"))
        each("dtype", lambda: hvd.allreduce(torch.ones(2), name="m2"), lambda: hvd.allreduce(torch.ones(2).int(), name="m2"))
        each("op", lambda: hvd.allreduce(torch.ones(2), name="m3"), lambda: hvd.allreduce(torch.ones(2), name="m3", op=hvd.Sum))
        each("root", lambda: hvd.broadcast(torch.ones(2), 0, name="m4"), lambda: hvd.broadcast(torch.ones(2), 1, name="m4"))
        each("columns", lambda: hvd.allgather(torch.ones(2, 2), name="m5"), lambda: hvd.allgather(torch.ones(2, 3), name="m5"))
        each(
            "factor",
            lambda: hvd.allreduce(torch.ones(2), name="m6", prescale_factor=2.0),
            lambda: hvd.allreduce(torch.ones(2), name="m6"),
        )

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


for case in (Reductions, Movements, Gradients, Errors):
    case.tearDown = lambda self: hvd.barrier()

if __name__ == "__main__":
    unittest.main()
