"""Operations by name, on all ranks of `cohort run -np N`: each rank runs this."""

import random
import threading
import time
import unittest

from support import KINDS, SECONDS, needs_numpy, needs_torch, numpy, torch
from support_named import WithEngine, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort
from cohort import _core


class Operations(WithEngine):
    def test_who(self):
        world = cohort.world()
        self.assertEqual((self.rank, self.size), (world.rank(), world.size()))
        self.assertIn(f"rank {self.rank} of {self.size}", repr(self.engine))

    def test_all_reduce(self):
        for kind, dtype in self.each(unless=("bool",)):
            total = sum(r + 1 for r in range(self.size))
            data = self.make(kind, dtype, self.rank + 1, 2)
            work = self.engine.all_reduce("in place", data, op="sum")
            self.assertTrue(work.wait())
            self.assertTrue(work.done())
            self.assertIsNone(work.error())
            self.assertIsNone(work.result)
            self.expect(kind, dtype, data, total, 2 * self.size)

            data, out = self.make(kind, dtype, self.rank + 1), self.make(kind, dtype, 0)
            self.engine.all_reduce(name="apart", input=data, output=out, op=cohort.ReduceOp.Sum).wait()
            self.expect(kind, dtype, data, self.rank + 1)
            self.expect(kind, dtype, out, total)

    def test_average_is_the_default(self):
        for kind in KINDS:
            data = kind.make([float(self.rank)], "float64")
            self.engine.all_reduce("mean", data).wait()
            self.assertEqual(kind.values(data), [sum(range(self.size)) / self.size])
            data = kind.make([-self.rank - 1], "int64")
            self.engine.all_reduce("mean", data).wait()
            self.assertEqual(kind.values(data), [-(sum(range(1, self.size + 1)) // self.size)])

    def test_scales(self):
        for kind in KINDS:
            data = kind.make([3.0 + self.rank], "float32")
            self.engine.all_reduce("floats", data, op="sum", prescale=0.5, postscale=4.0).wait()
            self.assertEqual(kind.values(data), [sum(2 * (3.0 + r) for r in range(self.size))])

    def test_integers_are_scaled_toward_zero(self):
        before = [[7 + r, -7 - r, 100 * r] for r in range(self.size)]
        columns = [[int(value * 0.5) for value in column] for column in zip(*before)]
        for kind in KINDS:
            for dtype in ("int16", "int32", "int64"):
                for size in (1, 40_000):  # the small one is fused, the large one runs alone
                    with self.subTest(kind=kind.name, dtype=dtype, size=size):
                        given = kind.make(before[self.rank] * size, dtype)
                        out, other = kind.make([0] * 3 * size, dtype), kind.make([1] * 3, dtype)
                        works = self.engine.all_reduce_group(
                            ["out", "other"], [given, other], [out, other], op="sum", prescale=0.5, postscale=3
                        )
                        for work in works:
                            work.wait()
                        self.assertEqual(kind.values(out), [sum(column) * 3 for column in columns] * size)
                        self.assertEqual(kind.values(given), before[self.rank] * size)
                        self.assertEqual(kind.values(other), [0, 0, 0])
                        self.engine.all_reduce("in place", given, op="average", prescale=0.5, postscale=0.5).wait()
                        self.assertEqual(
                            kind.values(given), [int(sum(column) * 0.5 / self.size) for column in columns] * size
                        )
        (part,) = self.engine.reduce_scatter_group(["rows"], [KINDS[0].make([3] * self.size, "int32")], op="average", postscale=1.5)
        part.wait()
        self.assertEqual(self.seen(part.result), [4])
        (part,) = self.engine.reduce_scatter_group(["rows"], [KINDS[0].make([3] * self.size, "int32")], prescale=0.4, postscale=2)
        part.wait()
        self.assertEqual(self.seen(part.result), [2 * self.size])

    def test_min_max_product_bits(self):
        for kind in KINDS:
            for op, expected in (("min", 1), ("Max", self.size), ("product", [1, 2, 6, 24][self.size - 1])):
                data = kind.make([self.rank + 1], "int32")
                self.engine.all_reduce(f"one {op}", data, op=op).wait()
                self.assertEqual(kind.values(data), [expected])
            data = kind.make([1 << self.rank], "uint8")
            self.engine.all_reduce("bits", data, op="bit_or").wait()
            self.assertEqual(kind.values(data), [(1 << self.size) - 1])

    def test_names_in_any_order(self):
        order = random.Random(self.rank)
        for step in range(5):
            names = [f"tensor {i} é" for i in range(60)]
            order.shuffle(names)
            data = {name: KINDS[0].make([float(name.split()[1]) + self.rank] * 5, "float32") for name in names}
            works = {name: self.engine.all_reduce(name, data[name], op="sum") for name in names}
            order.shuffle(names)
            for name in names:
                works[name].wait()
                value = self.size * float(name.split()[1]) + sum(range(self.size))
                self.assertEqual(list(data[name]), [value] * 5)
        self.assertLess(self.engine.statistics()["exchanges"], 70)

    def test_a_repeated_step_is_not_described_again(self):
        names = [f"p{i}" for i in range(20)]
        described = []
        for _ in range(4):
            data = [bytearray(8) for _ in names]
            for work in self.engine.all_reduce_group(names, data, op="sum"):
                work.wait()
            described.append(self.engine.statistics()["exchanges"])
            cohort.world().barrier()  # no rank describes the next test's operations before all have read the count
        self.assertEqual(described, described[:1] * 4)
        self.assertEqual(sorted(self.engine.statistics()), ["batches", "exchanges", "rings", "rounds"])

    def test_groups_are_carried_out_together(self):
        data = [KINDS[0].make([float(i)], "float32") for i in range(6)]
        works = self.engine.all_reduce_group([str(i) for i in range(6)], tuple(data), op="sum")
        works[3].wait()
        for i, work in enumerate(works):
            work.wait(timeout=SECONDS)
            self.assertEqual(list(data[i]), [float(i * self.size)])
        before = self.engine.statistics()["batches"]
        for work in self.engine.all_reduce_group([str(i) for i in range(6)], tuple(data), op="sum"):
            work.wait()
        self.assertEqual(self.engine.statistics()["batches"], before + 1)
        self.assertEqual(self.engine.all_reduce_group([], []), [])

    def test_broadcast(self):
        root = self.size - 1
        for kind, dtype in self.each(unless=("bool",)):
            data = self.make(kind, dtype, self.rank, 1)
            self.engine.broadcast_group(["one"], [data], root)[0].wait()
            self.expect(kind, dtype, data, root, 1)
        data = [bytearray([self.rank]), bytearray([self.rank + 1])]
        for work in self.engine.broadcast_group(["a", "b"], data, root=root):
            work.wait()
        self.assertEqual([list(one) for one in data], [[root], [root + 1]])
        # The root's buffer is only read.
        data = bytes([7]) if self.rank == root else bytearray(1)
        self.engine.broadcast_group(["bytes"], [data], root=root)[0].wait()
        self.assertEqual(data, b"\7")

    def test_all_gather(self):
        for kind, dtype in self.each(unless=("bool",)):
            (work,) = self.engine.all_gather_group(["rows"], [self.make(kind, dtype, *[self.rank] * self.rank)])
            work.wait()
            result = work.result
            self.assertEqual((result.dtype, result.shape), (dtype, (sum(range(self.size)),)))
            self.assertEqual(work.received_splits, list(range(self.size)))
            self.assertEqual(len(result), result.shape[0])
            if kind.name != "array":
                array = result.as_torch() if kind.name == "torch" else numpy.asarray(result)
                self.expect(kind, dtype, array, *[r for r in range(self.size) for _ in range(r)])
        works = self.engine.all_gather_group(["a", "b"], [bytes([self.rank]), bytes([self.rank, 9])])
        for work in works:
            work.wait()
        self.assertEqual(bytes(works[0].result), bytes(range(self.size)))
        self.assertEqual(bytes(works[1].result), b"".join(bytes([r, 9]) for r in range(self.size)))

    @needs_numpy
    def test_all_gather_of_rows(self):
        mine = numpy.full((self.rank, 2, 3), self.rank, dtype="float16")
        (work,) = self.engine.all_gather_group(["matrix"], [mine])
        work.wait()
        expected = numpy.concatenate([numpy.full((r, 2, 3), r) for r in range(self.size)])
        array = numpy.asarray(work.result)
        numpy.testing.assert_array_equal(array, expected)
        self.assertEqual((array.shape, array.dtype.name), (expected.shape, "float16"))
        array[...] = 5  # it may be written
        self.assertTrue((numpy.asarray(work.result) == 5).all())
        if hasattr(numpy, "from_dlpack"):
            self.assertEqual(numpy.from_dlpack(work.result).shape, expected.shape)

    @needs_torch
    def test_results_as_tensors(self):
        mine = torch.full((1, 3), float(self.rank), dtype=torch.bfloat16)
        (work,) = self.engine.all_gather_group(["tensors"], [mine])
        work.wait()
        expected = torch.arange(self.size).to(torch.bfloat16).view(-1, 1).expand(-1, 3)
        self.assertTrue(torch.equal(work.result.as_torch(), expected))
        self.assertTrue(torch.equal(torch.from_dlpack(work.result), expected))
        self.assertEqual(memoryview(work.result).format, "H")
        (work,) = self.engine.all_gather_group(["nothing"], [torch.empty(0, 3)])
        work.wait()
        self.assertEqual(tuple(work.result.as_torch().shape), (0, 3))
        # A tensor outlives the objects that it came from.
        (work,) = self.engine.all_gather_group(["kept"], [torch.full((1000,), float(self.rank))])
        work.wait()
        tensor = work.result.as_torch()
        del work
        self.assertEqual(tensor[::1000].tolist(), [float(r) for r in range(self.size)])

    def test_reduce_scatter(self):
        for kind, dtype in self.each(unless=("bool",)):
            rows = self.size + 1  # the first rank gets one row more
            (work,) = self.engine.reduce_scatter_group(["parts"], [self.make(kind, dtype, *range(rows))])
            work.wait()
            mine = [0, 1] if self.rank == 0 else [self.rank + 1]
            if kind.name == "torch":
                self.expect(kind, dtype, work.result.as_torch(), *[value * self.size for value in mine])
            elif kind.name == "numpy":
                self.expect(kind, dtype, numpy.asarray(work.result), *[value * self.size for value in mine])
        works = self.engine.reduce_scatter_group(["x", "y"], [bytes(self.size), bytes([2] * self.size)], op="max")
        self.assertEqual([work.wait() and bytes(work.result) for work in works], [b"\0", b"\2"])

    def test_all_to_all(self):
        for kind, dtype in self.each(unless=("bool",)):
            # Sends 2 elements to each rank, then s + 1 elements to rank s.
            work = self.engine.all_to_all("equal", self.make(kind, dtype, *[self.rank] * self.size * 2))
            work.wait()
            self.assertEqual(work.received_splits, [2] * self.size)
        splits = [s + 1 for s in range(self.size)]
        work = self.engine.all_to_all("uneven", bytes([self.rank] * sum(splits)), splits)
        work.wait()
        self.assertEqual(work.received_splits, [self.rank + 1] * self.size)
        self.assertEqual(bytes(work.result), bytes(r for r in range(self.size) for _ in range(self.rank + 1)))
        if torch:
            work = self.engine.all_to_all("tensors", torch.arange(sum(splits)), torch.tensor(splits))
            work.wait()
            self.assertEqual(work.result.as_torch().numel(), self.size * (self.rank + 1))

    def test_barrier_and_callbacks(self):
        told, events = [], [threading.Event(), threading.Event()]
        work = self.engine.barrier("all")
        for event in events:  # either may be called first, one of them at once by this thread
            work.add_done_callback(lambda one, event=event: (told.append(one), event.set()))
        for event in events:
            self.assertTrue(event.wait(SECONDS))
        self.assertEqual(told, [work, work])
        work.wait()
        work.add_done_callback(told.append)  # at once
        self.assertEqual(told, [work] * 3)

    def test_join(self):
        steps = 1 + self.rank
        for step in range(steps):
            data = KINDS[0].make([1.0], "float32")
            self.engine.all_reduce("loss", data, op="sum").wait()
            self.assertEqual(list(data), [float(self.size - step)])
        joined = self.engine.join()
        joined.wait()
        self.assertEqual(joined.last_joined, self.size - 1)
        data = KINDS[0].make([2.0], "float32")
        self.engine.all_reduce("loss", data).wait()
        self.assertEqual(list(data), [2.0])

    def test_groups_of_ranks(self):
        pair = self.engine.form_group([1, 0], timeout=SECONDS)
        if self.rank > 1:
            self.assertIsNone(pair)
        else:
            self.assertEqual((pair.rank(), pair.size()), (1 - self.rank, 2))
            engine = _core.NamedEngine(pair)
            data = bytearray([self.rank + 1])
            engine.all_reduce("x", data, op="sum").wait()
            self.assertEqual(data[0], 3)
            engine.barrier("end").wait()
            engine.shutdown()
            self.assertTrue(pair.has_left)

    def test_arrays_outlive_their_names(self):
        memory = [cohort.world().allocate(4 * 50_000) for _ in range(10)]
        for i, one in enumerate(memory):
            memoryview(one).cast("f")[0] = 1.0
            self.engine.all_reduce(f"m{i}", memoryview(one).cast("f"), op="sum")
            self.engine.all_reduce(f"b{i}", bytearray(10_000), op="sum")
        for one in memory:
            until = time.monotonic() + SECONDS
            while memoryview(one).cast("f")[0] != float(self.size) and time.monotonic() < until:
                time.sleep(0.001)
            self.assertEqual(memoryview(one).cast("f")[0], float(self.size))

    @needs_torch
    def test_memory(self):
        count = 30000
        memory = self.engine.allocate(2 * count * 4)
        self.assertEqual(memory.nbytes, 2 * count * 4)
        both = memory.as_torch(torch.float32)
        self.assertEqual(float(both.abs().sum()), 0.0)
        one, two = both[:count], both[count:]
        mine = torch.full((count,), float(self.rank + 1))
        self.engine.all_reduce("from elsewhere", mine, one, op="sum").wait()
        two.fill_(float(self.rank))
        self.engine.all_reduce("in place", two, op="sum").wait()
        self.assertTrue(bool((mine == self.rank + 1).all()))
        self.engine.barrier("all have seen theirs").wait()
        del memory
        self.engine.shutdown()
        with self.assertRaises(cohort.errors.InvalidArgument):
            self.engine.allocate(4096)
        self.assertTrue(bool((one == sum(range(1, self.size + 1))).all()))
        self.assertTrue(bool((two == sum(range(self.size))).all()))
        self.engine = _core.NamedEngine(cohort.world().split(), **self.options)

    def test_threads(self):
        def work(thread):
            try:
                for i in range(20):
                    data = bytearray([thread])
                    self.engine.all_reduce(f"{thread} {i}", data, op="sum").wait()
                    self.assertEqual(data[0], thread * self.size)
            except BaseException as error:
                failed.append(error)

        failed = []
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        self.assertEqual(failed, [])


if __name__ == "__main__":
    unittest.main()
