"""Refused operations by name, and ranks that have joined, on all ranks of `cohort run -np N`. Each rank runs this."""

import unittest

from support import KINDS, numpy
from support_named import WithEngine, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort
from cohort import _core


class Refusals(WithEngine):
    def good(self):
        data = bytearray([1])
        self.engine.all_reduce("good", data, op="sum").wait()
        self.assertEqual(data[0], self.size)

    def differs(self, work, text):
        with self.assertRaises(cohort.Mismatch) as raised:
            work.wait()
        self.assertIn(text, str(raised.exception))
        self.assertRegex(str(raised.exception), "ranks? 0 .*ranks? 1 ")
        self.assertIsInstance(work.error(), cohort.Mismatch)
        with self.assertRaises(cohort.Mismatch):
            work.result
        self.good()

    def test_mismatches(self):
        data = KINDS[0].make([1, 2, 3, 4], "int32")
        odd = self.rank % 2
        self.differs(self.engine.all_reduce("shape", memoryview(data)[: 2 + odd]), "int32[3]")
        self.differs(self.engine.all_reduce("type", KINDS[0].make([1], "int8" if odd else "int32")), "int8[1]")
        self.differs(self.engine.all_reduce("op", data, op="max" if odd else "min"), "min")
        self.differs(self.engine.all_reduce("scale", data, prescale=1 + odd), "prescale 2")
        self.differs(self.engine.broadcast_group(["root"], [data], root=odd)[0], "from rank 1")
        gather = lambda: self.engine.all_gather_group(["kind"], [data])[0]  # noqa: E731
        self.differs(gather() if odd else self.engine.all_reduce("kind", data), "all_gather")
        if numpy:
            self.differs(self.engine.all_reduce("folded", numpy.zeros((2, 3) if odd else (3, 2))), "[3, 2]")

    def test_what_has_no_meaning(self):
        data = KINDS[0].make([1.0], "float32")
        cases = [
            lambda: self.engine.all_reduce("", data),
            lambda: self.engine.all_reduce("x" * 5000, data),
            lambda: self.engine.all_reduce("x", data, op="fast"),
            lambda: self.engine.all_reduce("x", b"1234"),
            lambda: self.engine.all_reduce("x", "text"),
            lambda: self.engine.all_reduce("x", data, bytearray(4)),
            lambda: self.engine.all_reduce("x", data, KINDS[0].make([1.0, 2.0], "float32")),
            lambda: self.engine.all_reduce("x", data, prescale=float("inf")),
            lambda: self.engine.all_reduce("x", bytearray(4), op="bit_or", prescale=2),
            lambda: self.engine.broadcast_group(["x"], [data], root=self.size),
            lambda: self.engine.all_to_all("x", data, [5] * self.size),
            lambda: self.engine.all_to_all("x", data, []),
            lambda: self.engine.all_reduce_group(["a", "b"], [data]),
            lambda: self.engine.all_reduce_group(["a", "a"], [data, bytearray(4)]),
            lambda: self.engine.form_group([self.size]),
            lambda: _core.NamedEngine(cohort.world(), joined_average="some"),
            lambda: _core.NamedEngine(cohort.world(), timeout=0),
        ]
        for case in cases:
            with self.assertRaises(cohort.InvalidArgument):
                case()
        for case in (lambda: self.engine.all_reduce(5, data), lambda: self.engine.all_to_all("x", data, ["a"])):
            with self.assertRaises(TypeError):
                case()
        self.good()

    def test_a_name_twice(self):
        data = bytearray([1])
        if self.rank == 0:
            first = self.engine.all_reduce("twice", data, op="sum")
            with self.assertRaises(cohort.InvalidArgument) as raised:
                self.engine.all_reduce_group(["other", "twice"], [bytearray(1), bytearray(1)])
            self.assertIn("under way", str(raised.exception))
            self.assertFalse(first.done())
            with self.assertRaises(cohort.InvalidArgument):
                first.result
            self.assertFalse(first.wait(timeout=0.01))
        self.engine.barrier("seen").wait()
        if self.rank != 0:
            first = self.engine.all_reduce("twice", data, op="sum")
        first.wait()
        self.assertEqual(data[0], self.size)
        # No operation of the group was accepted.
        self.engine.all_reduce("other", bytearray(1)).wait()

    def test_a_name_that_some_lack(self):
        engine = _core.NamedEngine(cohort.world().split(), timeout=1.0, stall_after=0.4)
        if self.rank == 0:
            with self.assertRaises(cohort.Timeout) as raised:
                engine.all_reduce("lonely", bytearray(3)).wait()
            self.assertIn("did not ask for it", str(raised.exception))
            self.assertIsInstance(raised.exception, TimeoutError)
        self.good()
        engine.shutdown()

    def test_the_communicator_is_given_over(self):
        comm = cohort.world().split()
        work = comm.all_reduce(bytearray(100_000), async_op=True)
        engine = _core.NamedEngine(comm)
        self.assertTrue(work.done())
        for use in (comm.barrier, comm.split, lambda: comm.allocate(10), lambda: _core.NamedEngine(comm)):
            with self.assertRaises(cohort.InvalidArgument) as raised:
                use()
            self.assertIn("given to a NamedEngine", str(raised.exception))
        self.assertFalse(comm.has_left)
        self.assertEqual(comm.rank(), self.rank)
        engine.barrier("both").wait()
        comm.leave()
        self.assertTrue(comm.has_left)
        with self.assertRaises(cohort.InvalidArgument) as raised:
            engine.barrier("more")
        self.assertIn("shut down", str(raised.exception))
        engine.shutdown()

    def test_shutdown_ends_it_on_all_ranks(self):
        engine = _core.NamedEngine(cohort.world().split())
        engine.barrier("all are there").wait()
        if self.rank == 0:
            engine.shutdown()
            engine.shutdown()
        else:
            with self.assertRaises(cohort.Aborted) as raised:
                engine.all_reduce("too late", bytearray(1)).wait()
            self.assertIn("rank 0", str(raised.exception))
            engine.shutdown()
        self.assertTrue(engine.statistics()["rounds"] > 0)
        self.good()

    def test_an_engine_that_nobody_holds_goes_on(self):
        data = bytearray([1])
        engine = _core.NamedEngine(cohort.world().split())
        work = engine.all_reduce("x", data, op="sum")
        if self.rank == 0:
            del engine
        work.wait()
        self.assertEqual(data[0], self.size)


class Joined(WithEngine):
    options = {"joined_average": "active"}

    def test_averages_of_the_active(self):
        for kind in KINDS:
            if self.rank == 0:
                self.engine.join().wait()
            else:
                for dtype in ("float32", "int32"):
                    data = kind.make([12, 13], dtype)
                    self.engine.all_reduce("mean", data).wait()
                    self.assertEqual(kind.values(data), [12, 13])
                    self.engine.all_reduce("scaled", data, postscale=0.5).wait()
                    self.assertEqual(kind.values(data), [6, 6.5 if dtype == "float32" else 6])
                    data = kind.make([-3], dtype)
                    self.engine.all_reduce("max", data, op="max", prescale=2).wait()
                    self.assertEqual(kind.values(data), [-6])
                self.engine.join().wait()


if __name__ == "__main__":
    unittest.main()
