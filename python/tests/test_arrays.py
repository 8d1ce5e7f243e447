"""Accepted and refused arrays, in a world of one: nothing here needs a peer."""

import array
import ctypes
import datetime
import gc
import pickle
import unittest
import weakref

from support import needs_numpy, needs_torch, numpy, torch

import cohort


def setUpModule():
    cohort.init(alone=True)


def tearDownModule():
    cohort.shutdown()


class Arrays(unittest.TestCase):
    def setUp(self):
        self.world = cohort.world()

    def refused(self, *words, call=None, data=None, **arguments):
        """The message of the refusal has all of `words`."""
        with self.assertRaises(cohort.InvalidArgument) as raised:
            (call or self.world.all_reduce)(data, **arguments)
        for word in words:
            self.assertIn(word, str(raised.exception))
        self.assertIsInstance(raised.exception, ValueError)

    def doubled(self, data):
        """Scaling shows which type the elements were taken for, and that it was these."""
        self.world.all_reduce(data, postscale=2)
        return data

    def test_buffers(self):
        self.assertEqual(self.doubled(array.array("f", [1, 2])).tolist(), [2, 4])
        self.assertEqual(self.doubled(array.array("d", [1, 2])).tolist(), [2, 4])
        self.assertEqual(list(self.doubled((ctypes.c_float * 2)(1, 2))), [2, 4])
        for letter in "bhilqBHILQ":
            with self.subTest(letter=letter):
                data = array.array(letter, [7])
                out = array.array(letter, [0])
                self.world.all_reduce(data, out, op="bit_xor")
                self.assertEqual(out[0], 7)
        self.world.all_reduce(b"read only", bytearray(9))
        self.world.broadcast(b"the root only reads")
        self.world.reduce_scatter(memoryview(b"abc"), bytearray(3))

    def test_no_arrays(self):
        for data in (1.0, None, "text", {}, object()):
            with self.subTest(data=data):
                self.refused("all_reduce: the array is a", "not an array", data=data)
        self.refused("element 1 is an int, not an array", data=[bytearray(1), 1])
        self.refused("grouped form", data=[bytearray(1)], output=bytearray(1))
        self.refused("lists (or tuples)", call=lambda _: self.world.all_gather([b"a"], bytearray(1)))

    def test_read_only(self):
        self.refused("writable", "bytes", data=b"abc")
        self.refused("the output", call=lambda _: self.world.all_reduce(b"abc", b"def"))

    def test_not_contiguous(self):
        data = bytearray(8)
        self.refused("not contiguous", data=memoryview(data)[::2])
        data.append(1)  # a refusal holds no buffer

    def test_unknown_formats(self):
        self.refused("which Cohort does not know", data=array.array("u", "ab"))
        self.refused("which Cohort does not know", data=(ctypes.c_longdouble * 2)())

        class Pair(ctypes.Structure):
            _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_int)]

        self.refused("which Cohort does not know", data=(Pair * 2)())

    def test_swapped_bytes(self):
        self.refused("which Cohort does not know", data=(ctypes.c_int.__ctype_be__ * 2)())

    def test_reductions_by_name(self):
        self.world.all_reduce(bytearray(1), op="BIT_OR")
        self.refused("the reduction is 'add'", "'average'", data=bytearray(1), op="add")
        self.refused("the reduction is 3", data=bytearray(1), op=3)
        self.refused("all_reduce", data=array.array("f", [1]), op="bit_or")
        self.assertTrue(cohort.supports("bfloat16", "average"))
        self.assertFalse(cohort.supports("float32", "bit_or"))
        self.assertFalse(cohort.supports("text", "sum"))

    def test_timeouts(self):
        for timeout in (1, 0.5, datetime.timedelta(seconds=3), None):
            self.world.barrier(timeout=timeout)
        for timeout in (0, -1, float("nan"), "soon", 1e300, float("inf")):
            with self.subTest(timeout=timeout):
                self.refused("barrier", call=lambda _, t=timeout: self.world.barrier(timeout=t))

    def test_arguments_of_the_core(self):
        self.refused("root", call=lambda _: self.world.broadcast(bytearray(1), root=1))
        self.refused("peer", call=lambda _: self.world.send(b"a", 0))
        self.refused("output", call=lambda _: self.world.gather(b"a"))
        self.refused("no input", call=lambda _: self.world.scatter(None, bytearray(1)))
        self.refused("elements", call=lambda _: self.world.all_reduce(b"abc", bytearray(2)))

    def test_arrays_are_let_go(self):
        class Bytes(bytearray):
            pass

        data = Bytes(1000)
        gone = weakref.ref(data)
        work = self.world.all_reduce(data, async_op=True)
        work.wait()
        data.append(1)  # BufferError as long as anybody has its buffer
        del data
        gc.collect()
        self.assertIsNone(gone())

    def test_errors_travel(self):
        with self.assertRaises(cohort.InvalidArgument) as raised:
            self.world.broadcast(bytearray(1), root=9)
        copy = pickle.loads(pickle.dumps(raised.exception))
        self.assertEqual(str(copy), str(raised.exception))
        self.assertEqual((copy.code, copy.rank, copy.operation), ("InvalidArgument", 0, "broadcast"))
        self.assertEqual(copy.host, self.world.host())
        self.assertIsNone(copy.peer)

    def test_memory_lives_on(self):
        memory = self.world.allocate(100)
        view = memoryview(memory)
        del memory
        gc.collect()
        view[99] = 7
        self.assertEqual(view[99], 7)

    @needs_numpy
    def test_numpy(self):
        self.assertEqual(self.doubled(numpy.array(3.0)), 6.0)  # no dimension: one element
        self.assertEqual(self.doubled(numpy.ones((2, 3), "complex64")).sum(), 12)
        self.refused("not contiguous", data=numpy.ones((3, 4)).T)
        self.refused("not contiguous", data=numpy.asfortranarray(numpy.ones((3, 4))))
        self.refused("which Cohort does not know", data=numpy.ones(3, ">f4"))
        self.refused("which Cohort does not know", data=numpy.ones(3, "longdouble"))
        self.refused("the array (numpy.ndarray)", data=numpy.array(["2020-01-01"], "datetime64[D]"))
        frozen = numpy.ones(3)
        frozen.flags.writeable = False
        self.refused("writable", data=frozen)
        self.world.all_reduce(frozen, numpy.empty(3))

    @needs_numpy
    def test_numpy_bfloat16(self):
        try:
            import ml_dtypes
        except ImportError:
            self.skipTest("ml_dtypes is not installed")
        data = numpy.array([1, 2], ml_dtypes.bfloat16)
        self.assertEqual(self.doubled(data).astype("float32").tolist(), [2, 4])
        self.refused("not contiguous", data=numpy.ones((2, 2), ml_dtypes.bfloat16).T)

    @needs_torch
    def test_torch(self):
        self.assertEqual(self.doubled(torch.tensor(3.0)).item(), 6.0)
        self.assertEqual(self.doubled(torch.ones(2, 3, dtype=torch.complex64)).sum().item(), 12)
        self.assertEqual(self.doubled(torch.ones(4)[1:3]).tolist(), [2, 2])
        self.assertEqual(self.doubled(torch.nn.Parameter(torch.ones(2))).tolist(), [2, 2])
        self.refused("not contiguous", "[4, 3]", "contiguous()", data=torch.ones(3, 4).t())
        self.refused("meta", data=torch.ones(3, device="meta"))
        self.refused("sparse_coo", data=torch.ones(3).to_sparse())
        self.refused("conjugated", data=torch.ones(3, dtype=torch.complex64).conj())
        unknown = "float8_e4m3fn" if hasattr(torch, "float8_e4m3fn") else "qint8"
        self.refused(unknown, data=torch.empty(0, dtype=getattr(torch, unknown)))

    @needs_torch
    def test_devices(self):
        class Elsewhere:
            """A tensor as one with an Intel GPU has it. (CUDA's: test_gpus.)"""

            dtype, layout = torch.float32, torch.strided
            device = torch.device("xpu:1")
            data_ptr = is_contiguous = numel = lambda self: self.fail()

        self.refused("lies on xpu:1", "the host's memory and CUDA's", "tensor.cpu()", data=Elsewhere())

    @needs_numpy
    def test_dlpack(self):
        class Wrapped:
            """Passes on the array by DLPack only."""

            def __init__(self, array):
                self.array = array

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

            def __dlpack__(self, **arguments):
                return self.array.__dlpack__(**arguments)

        out = numpy.zeros(6, "float32")
        self.world.all_reduce(Wrapped(numpy.arange(6, dtype="float32").reshape(2, 3)), out)
        self.assertEqual(out.tolist(), [0, 1, 2, 3, 4, 5])
        self.refused("not contiguous", call=lambda _: self.world.all_reduce(Wrapped(numpy.ones((2, 3)).T), numpy.ones(6)))
        if torch is not None:
            out = torch.zeros(2, dtype=torch.bfloat16)
            self.world.all_reduce(Wrapped(torch.ones(2, dtype=torch.bfloat16)), out)
            self.assertEqual(out.tolist(), [1, 1])

        class OnGpu(Wrapped):
            def __dlpack_device__(self):
                return (10, 0)

        self.refused("(10, 0)", data=OnGpu(numpy.ones(1)))

        class Old(Wrapped):
            def __dlpack__(self):
                return self.array.__dlpack__()

        self.refused("does not say that it may be written", data=Old(numpy.ones(1)))


if __name__ == "__main__":
    unittest.main()
