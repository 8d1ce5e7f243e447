"""Every collective over every array library and its types, on all ranks of `cohort run -np N`: each rank runs this."""

import array
import os
import unittest
import weakref

from support import KINDS, SECONDS, needs_numpy, needs_torch, numpy, ranks_of_hosts, torch

import cohort


def setUpModule():
    cohort.init(timeout=SECONDS)


def tearDownModule():
    cohort.shutdown()


def part(rank, count, dtype):
    """Returns a rank's input: small numbers, so that every type holds every result exactly."""
    if dtype == "bool":
        return [(i + rank) % 3 == 0 for i in range(count)]
    if dtype.startswith("complex"):
        return [complex(i % 5 + rank, i % 3) for i in range(count)]
    return [(i + rank) % 5 + 1 for i in range(count)]


def total(parts, dtype):
    return [any(column) if dtype == "bool" else sum(column) for column in zip(*parts)]


class Collectives(unittest.TestCase):
    def setUp(self):
        self.world = cohort.world()
        self.rank, self.size = self.world.rank(), self.world.size()

    def each(self):
        for kind in KINDS:
            for dtype in kind.dtypes:
                with self.subTest(kind=kind.name, dtype=dtype):
                    yield kind, dtype

    def parts(self, count, dtype):
        return [part(rank, count, dtype) for rank in range(self.size)]

    def flat(self, lists):
        return [value for one in lists for value in one]

    def expect(self, kind, array, values):
        self.assertEqual(kind.values(array), list(values))

    def test_the_environment_s_world(self):
        self.assertEqual(self.rank, int(os.environ["RANK"]))
        self.assertEqual(self.size, int(os.environ["WORLD_SIZE"]))
        hosts = ranks_of_hosts(self.size)
        host, local = 0, self.rank
        while local >= hosts[host]:
            local -= hosts[host]
            host += 1
        beside = [number for number in hosts if number > local]  # hosts with a rank of this local number
        place = sum(number > local for number in hosts[:host])
        self.assertEqual(
            (cohort.rank(), cohort.size(), cohort.local_rank(), cohort.local_size(), cohort.cross_rank(), cohort.cross_size()),
            (self.rank, self.size, local, hosts[host], place, len(beside)),
        )
        self.assertTrue(self.world.host())
        self.assertEqual(self.world.timeout(), SECONDS)

    def test_all_reduce(self):
        for kind, dtype in self.each():
            parts = self.parts(7, dtype)
            data = kind.make(parts[self.rank], dtype)
            self.assertIsNone(self.world.all_reduce(data))
            self.expect(kind, data, total(parts, dtype))

            data = kind.make(parts[self.rank], dtype)
            out = kind.make([0] * 7, dtype)
            self.assertIs(self.world.all_reduce(data, out), out)
            self.expect(kind, data, parts[self.rank])
            self.expect(kind, out, total(parts, dtype))

    def test_all_reduce_of_many_elements(self):
        count = 300_001  # more than a caller carries out by itself
        for kind in KINDS:
            with self.subTest(kind=kind.name):
                data = kind.make([float(i % 11) for i in range(count)], "float32")
                self.world.all_reduce(data, op=cohort.ReduceOp.Sum)
                self.expect(kind, data, [float(i % 11) * self.size for i in range(count)])

    def test_all_reduce_operations(self):
        for kind in KINDS:
            for op, expected in [
                ("sum", sum),
                ("average", lambda column: sum(column) / self.size),
                ("min", min),
                (cohort.ReduceOp.Max, max),
                ("Product", lambda column: __import__("math").prod(column)),
            ]:
                with self.subTest(kind=kind.name, op=op):
                    parts = [[2.0**rank, 1.0] for rank in range(self.size)]
                    data = kind.make(parts[self.rank], "float64")
                    self.world.all_reduce(data, op=op)
                    self.expect(kind, data, [expected(column) for column in zip(*parts)])
            for op, expected in [("bit_and", 0b100), ("bit_or", 0b111), ("BitXor", None)]:
                with self.subTest(kind=kind.name, op=op):
                    mine = [0b100 | (self.rank % 2) | 0b010 * (self.rank == 0)]
                    data = kind.make(mine, "int32")
                    self.world.all_reduce(data, op=op)
                    if expected is None:
                        expected = 0
                        for rank in range(self.size):
                            expected ^= 0b100 | (rank % 2) | 0b010 * (rank == 0)
                    self.expect(kind, data, [expected])

    def test_weighted_and_scaled(self):
        for kind in KINDS:
            data = kind.make([float(self.rank)], "float64")
            self.world.all_reduce(data, op="average", weight=self.rank)
            weights = range(self.size)
            self.assertAlmostEqual(kind.values(data)[0], sum(w * w for w in weights) / sum(weights))
            data = kind.make([1.0], "float32")
            self.world.all_reduce(data, prescale=2, postscale=0.25)
            self.expect(kind, data, [0.5 * self.size])

    def test_bfloat16_between_hosts(self):
        for kind in KINDS:
            data = kind.make([1.5 * (self.rank + 1)] * 20000, "float32")
            self.world.all_reduce(data, wire_format="bfloat16")
            # Halves of up to 8 bits are not rounded, wherever the ranks are.
            self.assertEqual(kind.values(data)[::5000], [1.5 * self.size * (self.size + 1) / 2] * 4)
            with self.assertRaisesRegex(cohort.InvalidArgument, "only float32 has other formats"):
                self.world.all_reduce(kind.make([1.0], "float64"), wire_format=torch.bfloat16)
            with self.assertRaisesRegex(cohort.InvalidArgument, "wire_format is no format"):
                self.world.all_reduce(data, wire_format="halves")

    def test_narrow_formats_between_hosts(self):
        for kind in KINDS:
            for name in ("int8", "int4"):
                residual = kind.make([0.0] * 20000, "float32")
                data = kind.make([1.5 * (self.rank + 1)] * 20000, "float32")
                self.world.all_reduce(data, wire_format=name, residual=residual)
                exact = 1.5 * self.size * (self.size + 1) / 2
                for value in kind.values(data)[::5000]:
                    self.assertAlmostEqual(value / exact, 1, places=1)
                with self.assertRaisesRegex(cohort.InvalidArgument, "as many float32"):
                    self.world.all_reduce(data, wire_format=name, residual=kind.make([0.0], "float32"))
                with self.assertRaisesRegex(cohort.InvalidArgument, "goes with int8 and int4"):
                    self.world.all_reduce(data, residual=residual)

    def test_whether_a_result_is_finite(self):
        for kind in KINDS:
            for count in (1, 3000, 400000):
                for bad in (True, False):
                    data = kind.make([1.0] * count, "float32")
                    if bad and self.rank == self.size - 1:
                        data[count // 2] = float("inf")
                    work = self.world.all_reduce(data, check_finite=True, async_op=True)
                    work.wait()
                    self.assertIs(work.finite(), not bad)
            with self.assertRaisesRegex(cohort.InvalidArgument, "check_finite: the Work tells .* async_op=True"):
                self.world.all_reduce(data, check_finite=True)
            work = self.world.all_reduce(data, async_op=True)
            work.wait()
            self.assertIsNone(work.finite())

    def test_group_of_arrays(self):
        for kind in KINDS:
            with self.subTest(kind=kind.name):
                data = [kind.make([self.rank + i] * (i + 1), dtype) for i, dtype in enumerate(["float32", "int64", "float32"])]
                self.assertIsNone(self.world.all_reduce(data))
                for i, one in enumerate(data):
                    self.expect(kind, one, [sum(range(self.size)) + i * self.size] * (i + 1))
                data = [kind.make([self.rank] * 3, "int32"), kind.make([self.rank], "float64")]
                self.world.broadcast(tuple(data), root=self.size - 1)
                self.expect(kind, data[0], [self.size - 1] * 3)
                self.expect(kind, data[1], [self.size - 1])
                outs = [kind.make([0] * self.size, "int32"), kind.make([0] * 2 * self.size, "float32")]
                ins = [kind.make([self.rank], "int32"), kind.make([self.rank] * 2, "float32")]
                self.assertIs(self.world.all_gather(ins, outs), outs)
                self.expect(kind, outs[0], range(self.size))
                self.expect(kind, outs[1], [r for r in range(self.size) for _ in range(2)])
                back = [kind.make([0], "int32"), kind.make([0] * 2, "float32")]
                self.world.reduce_scatter(outs, back)
                self.expect(kind, back[0], [self.rank * self.size])
                self.expect(kind, back[1], [self.rank * self.size] * 2)

    def test_reduce(self):
        for kind, dtype in self.each():
            parts = self.parts(5, dtype)
            root = self.size - 1
            data = kind.make(parts[self.rank], dtype)
            self.world.reduce(data, root=root)
            self.expect(kind, data, total(parts, dtype) if self.rank == root else parts[self.rank])
            data = kind.make(parts[self.rank], dtype)
            out = kind.make([0] * 5, dtype)
            self.world.reduce(data, out, root=root)
            self.expect(kind, out, total(parts, dtype) if self.rank == root else [0] * 5)

    def test_broadcast(self):
        for kind, dtype in self.each():
            data = kind.make(part(self.rank, 9, dtype), dtype)
            self.assertIsNone(self.world.broadcast(data, root=self.size - 1))
            self.expect(kind, data, part(self.size - 1, 9, dtype))

    def test_all_gather(self):
        for kind, dtype in self.each():
            parts = self.parts(4, dtype)
            out = kind.make([0] * 4 * self.size, dtype)
            self.assertIs(self.world.all_gather(kind.make(parts[self.rank], dtype), out), out)
            self.expect(kind, out, self.flat(parts))

    def test_all_gather_v(self):
        counts = [rank + 1 for rank in range(self.size)]
        for kind, dtype in self.each():
            parts = [part(rank, counts[rank], dtype) for rank in range(self.size)]
            out = kind.make([0] * sum(counts), dtype)
            self.world.all_gather_v(kind.make(parts[self.rank], dtype), out, counts)
            self.expect(kind, out, self.flat(parts))

    def test_reduce_scatter(self):
        for kind, dtype in self.each():
            parts = self.parts(3 * self.size, dtype)
            out = kind.make([0] * 3, dtype)
            self.assertIs(self.world.reduce_scatter(kind.make(parts[self.rank], dtype), out), out)
            self.expect(kind, out, total(parts, dtype)[3 * self.rank : 3 * self.rank + 3])

    def test_reduce_scatter_v(self):
        counts = [2 * rank + 1 for rank in range(self.size)]
        begin = sum(counts[: self.rank])
        for kind, dtype in self.each():
            parts = self.parts(sum(counts), dtype)
            out = kind.make([0] * counts[self.rank], dtype)
            self.world.reduce_scatter_v(kind.make(parts[self.rank], dtype), out, counts)
            self.expect(kind, out, total(parts, dtype)[begin : begin + counts[self.rank]])

    def test_gather_and_scatter(self):
        root = self.size - 1
        for kind, dtype in self.each():
            parts = self.parts(3, dtype)
            out = kind.make([0] * 3 * self.size, dtype) if self.rank == root else None
            self.assertIs(self.world.gather(kind.make(parts[self.rank], dtype), out, root=root), out)
            if out is not None:
                self.expect(kind, out, self.flat(parts))
            mine = kind.make([0] * 3, dtype)
            self.assertIs(self.world.scatter(out, mine, root=root), mine)
            self.expect(kind, mine, parts[self.rank])

    def test_gather_v_and_scatter_v(self):
        root = self.size - 1
        counts = [2 * rank for rank in range(self.size)]  # the first brings nothing
        for kind, dtype in self.each():
            parts = [part(rank, counts[rank], dtype) for rank in range(self.size)]
            out = kind.make([0] * sum(counts), dtype) if self.rank == root else None
            sent = kind.make(parts[self.rank], dtype)
            self.assertIs(self.world.gather_v(sent, out, counts, root=root), out)
            if out is not None:
                self.expect(kind, out, self.flat(parts))
            mine = kind.make([0] * counts[self.rank], dtype)
            self.assertIs(self.world.scatter_v(out, mine, counts, root=root), mine)
            self.expect(kind, mine, parts[self.rank])

    def test_all_to_all(self):
        for kind, dtype in self.each():
            parts = self.parts(2 * self.size, dtype)
            out = kind.make([0] * 2 * self.size, dtype)
            self.world.all_to_all(kind.make(parts[self.rank], dtype), out)
            self.expect(kind, out, self.flat(p[2 * self.rank : 2 * self.rank + 2] for p in parts))

    def test_all_to_all_v(self):
        # Rank r sends s + 1 elements, all of them r, to rank s.
        counts = [s + 1 for s in range(self.size)]
        for kind in KINDS:
            out = kind.make([0] * self.size * (self.rank + 1), "int32")
            sent = kind.make([self.rank] * sum(counts), "int32")
            self.world.all_to_all_v(sent, counts, out, [self.rank + 1] * self.size)
            self.expect(kind, out, [r for r in range(self.size) for _ in range(self.rank + 1)])

    def test_send_and_recv(self):
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for kind, dtype in self.each():
            for count in (3, 40_000) if dtype == "float32" else (3,):
                out = kind.make([0] * count, dtype)
                sent = self.world.send(kind.make(part(self.rank, count, dtype), dtype), following, tag=5, async_op=True)
                self.assertIsNone(self.world.recv(out, before, tag=5))
                sent.wait()
                self.expect(kind, out, part(before, count, dtype))

    def test_recv_from_any_source(self):
        if self.size == 1:
            return
        kind = KINDS[0]
        if self.rank > 0:
            for _ in range(2):
                self.world.send(kind.make([self.rank], "int32"), 0, tag=6)
            return
        sources = []
        for asynchronous in (False, True) * (self.size - 1):
            out = kind.make([0], "int32")
            if asynchronous:
                work = self.world.recv(out, tag=6, async_op=True)
                work.wait()
                sources.append(work.source())
            else:
                sources.append(self.world.recv(out, tag=6))
            self.expect(kind, out, [sources[-1]])
        self.assertEqual(sorted(sources), sorted(list(range(1, self.size)) * 2))

    def test_async(self):
        for kind in KINDS:
            with self.subTest(kind=kind.name):
                data = [kind.make([float(i)] * (1 + i * 3000), "float32") for i in range(40)]
                works = [self.world.all_reduce(one, async_op=True) for one in data]
                self.assertTrue(all(work.wait() for work in reversed(works)))
                for i, (one, work) in enumerate(zip(data, works)):
                    self.assertTrue(work.done())
                    self.assertIsNone(work.error())
                    self.expect(kind, one, [float(i) * self.size] * (1 + i * 3000))

    def test_arrays_outlive_their_names(self):
        # Nobody refers to the arrays or the Work any more; what they get is read back through memory of our own.
        memory = [self.world.allocate(4 * 100_000) for _ in range(20)]
        for one in memory:
            memoryview(one).cast("f")[0] = 1.0
            self.world.all_reduce(memoryview(one).cast("f"), async_op=True)
        for _ in range(100):
            self.world.all_reduce(bytearray(100_000), async_op=True)
        self.world.barrier()
        self.assertEqual([memoryview(one).cast("f")[0] for one in memory], [float(self.size)] * 20)

    def test_arrays_of_what_has_ended_go_with_the_next_operation(self):
        data = array.array("f", [1.0] * 10)
        gone = weakref.ref(data)
        self.world.all_reduce(data, async_op=True)
        del data
        self.world.barrier()
        self.world.barrier()
        self.assertIsNone(gone())

    def test_wait_with_a_limit(self):
        token = bytearray(1)
        if self.rank == 0:
            work = self.world.barrier(async_op=True)
            self.assertFalse(work.wait(timeout=0.01))
            self.assertFalse(work.done())
            self.world.send(token, 1)
            self.assertTrue(work.wait(timeout=SECONDS))
        else:
            if self.rank == 1:
                self.world.recv(token, 0)
            self.world.barrier()

    def test_zero_elements(self):
        for kind in KINDS:
            empty = kind.make([], "float32")
            self.world.all_reduce(empty)
            self.world.all_gather(empty, kind.make([], "float32"))

    def test_groups(self):
        half = self.world.split(color=self.rank % 2, key=-self.rank)
        members = sorted((r for r in range(self.size) if r % 2 == self.rank % 2), reverse=True)
        self.assertEqual((half.rank(), half.size()), (members.index(self.rank), len(members)))
        data = bytearray([1])
        half.all_reduce(data)
        self.assertEqual(data[0], len(members))

        others = self.world.split(color=None if self.rank == 0 else 3)
        self.assertEqual(others is None, self.rank == 0)
        alone = self.world.group([self.size - 1])
        self.assertEqual(alone is None, self.rank != self.size - 1)

    def test_memory(self):
        memory = self.world.allocate(4096)
        self.assertEqual((len(memory), memory.nbytes, memory.data_ptr() % 4096), (4096, 4096, 0))
        memoryview(memory)[:4] = bytes([1, 2, 3, 4])
        self.world.all_reduce(memory)
        self.assertEqual(bytes(memoryview(memory)[:4]), bytes(v * self.size for v in (1, 2, 3, 4)))

    @needs_numpy
    def test_memory_as_numpy(self):
        array = self.world.allocate(4096).as_numpy("float32", (4, 8))
        array[:] = self.rank  # the Memory lives as long as the array
        self.world.all_reduce(array)
        self.assertTrue((array == sum(range(self.size))).all())
        with self.assertRaises(cohort.InvalidArgument):
            self.world.allocate(16).as_numpy(numpy.float64, 3)

    @needs_torch
    def test_memory_as_torch(self):
        tensor = self.world.allocate(4096).as_torch(torch.bfloat16, (2, 3))
        tensor.fill_(self.rank + 1)
        self.world.all_reduce(tensor)
        self.assertTrue((tensor == sum(range(1, self.size + 1))).all())

    @needs_torch
    def test_data_loader_workers(self):
        # Forked workers hold copies of everything, and may ask who their parent is.
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                return cohort.rank() * 100 + index

        loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1, multiprocessing_context="fork")
        seen = []
        for batch in loader:
            seen += batch.tolist()
            self.world.all_reduce(batch)
        self.assertEqual(seen, [self.rank * 100 + i for i in range(8)])

    def test_join(self):
        steps = 2 + self.rank
        for _ in range(steps):
            data = bytearray([1])
            self.world.all_reduce(data)
            self.assertIn(data[0], range(1, self.size + 1))
        self.assertEqual(self.world.join(), self.size - 1)


class Refusals(unittest.TestCase):
    """Arguments on which ranks disagree. The world stays usable."""

    def setUp(self):
        self.world = cohort.world()
        self.rank, self.size = self.world.rank(), self.world.size()

    def tearDown(self):
        data = bytearray([1])
        self.world.all_reduce(data)
        self.assertEqual(data[0], self.size)

    def test_counts(self):
        with self.assertRaises(cohort.Mismatch) as raised:
            self.world.all_reduce(bytearray(4 + self.rank))
        self.assertEqual(raised.exception.code, "Mismatch")
        self.assertEqual(raised.exception.rank, self.rank)
        self.assertIn("all_reduce", raised.exception.operation)

    def test_operations_async(self):
        data = bytearray(400_000)
        work = self.world.all_reduce(data, async_op=True) if self.rank == 0 else self.world.broadcast(data, async_op=True)
        with self.assertRaises(cohort.Mismatch):
            work.wait()
        with self.assertRaises(cohort.Mismatch):  # the same answer again
            work.wait()
        self.assertIsInstance(work.error(), cohort.Mismatch)

    def test_roots(self):
        with self.assertRaises(cohort.Mismatch):
            self.world.broadcast(bytearray(3), root=self.rank)


if __name__ == "__main__":
    unittest.main()
