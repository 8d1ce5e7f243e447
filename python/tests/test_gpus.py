"""Arrays of a GPU in cohort's own operations, over a fake driver and a fake NCCL (comm/gpu/fake): torch's tensors,
known by what they can do, and DLPack's. 2 ranks, which share a GPU."""

import array
import ctypes
import os
import sys
import threading
import time
import types
import unittest
import unittest.mock
import weakref

import cohort

CUDA = ctypes.CDLL("libcuda.so.1")
CUDA.fake_cuda_memory.restype = ctypes.c_void_p
CUDA.fake_cuda_memory.argtypes = [ctypes.c_void_p]


class Memory:
    """Floats of a GPU, which this process cannot read where they lie."""

    def __init__(self, values):
        address = ctypes.c_ulonglong()
        assert CUDA.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4 * len(values))) == 0
        self.address, self.count = address.value, len(values)
        self.seen = (ctypes.c_float * self.count).from_address(CUDA.fake_cuda_memory(address.value))
        self.seen[:] = values


class Tensor(Memory):
    """The part of a torch.Tensor that is looked at."""

    dtype, layout = "torch.float32", "torch.strided"

    def __init__(self, values):
        super().__init__(values)
        self.device = types.SimpleNamespace(type="cuda", index=0)
        self.shape = (self.count,)

    def data_ptr(self):
        return self.address

    def numel(self):
        return self.count

    def is_contiguous(self):
        return True

    def is_neg(self):
        return False


class DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", DLDevice), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64)]  # fmt: skip


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64), ("tensor", DLTensor)]  # fmt: skip


class Exported(Memory):
    """As CuPy and JAX give their arrays away."""

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, stream=None, max_version=None):
        self.stream = stream
        self.shape = (ctypes.c_int64 * 1)(self.count)
        self.managed = Versioned(1, 0, None, None, 0, DLTensor(self.address, DLDevice(2, 0), 1, 2, 32, 1, self.shape, None, 0))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), b"dltensor_versioned", None)


class Kept(Exported):
    """Notes when what it has given away is let go of."""

    def __init__(self, values):
        super().__init__(values)
        self.let_go = []

    def __dlpack__(self, stream=None, max_version=None):
        capsule = super().__dlpack__(stream, max_version)
        self.note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: self.let_go.append("once"))
        ctypes.pythonapi.PyCapsule_SetDestructor(ctypes.py_object(capsule), self.note)
        return capsule


class WithBuffer(Exported, bytearray):
    """As CuPy's do, its type has a buffer, too: not that of the GPU."""

    def __new__(cls, values):
        return bytearray.__new__(cls, 4 * len(values))


def setUpModule():
    cohort.init()


def tearDownModule():
    cohort.shutdown()


class Gpus(unittest.TestCase):
    def setUp(self):
        self.world = cohort.world()
        self.streams = []
        self.stream = ctypes.c_void_p()
        assert CUDA.cuStreamCreate(ctypes.byref(self.stream), 0) == 0

        def current_stream(device):
            self.streams.append(getattr(device, "index", device))
            return types.SimpleNamespace(cuda_stream=self.stream.value)

        # A torch without CUDA has no streams.
        torch = types.SimpleNamespace(cuda=types.SimpleNamespace(current_stream=current_stream))
        patched = unittest.mock.patch.dict(sys.modules, torch=torch)
        patched.start()
        self.addCleanup(patched.stop)

    def test_tensors_come_after_the_current_stream(self):
        tensor = Tensor([1.0, 2.0])
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

        @function
        def kernel(_):
            tensor.seen[0] = 5.0

        assert CUDA.cuLaunchHostFunc(self.stream, kernel, None) == 0
        self.world.all_reduce(tensor)
        self.assertEqual(list(tensor.seen), [10.0, 4.0])
        self.assertEqual(self.streams, [0])

    def test_streams_come_after_results(self):
        tensor = Tensor([1.0, 2.0])
        self.world.all_reduce(tensor)
        self.world.barrier()
        seen, ended = [], threading.Event()
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

        @function
        def kernel(_):
            seen.append(list(tensor.seen))
            if len(seen) == 3:
                ended.set()

        others = [ctypes.c_void_p(), ctypes.c_void_p()]
        for stream in others:
            assert CUDA.cuStreamCreate(ctypes.byref(stream), 0) == 0
        with unittest.mock.patch.dict(os.environ, FAKE_NCCL_DELAY="300"):
            work = self.world.all_reduce(tensor, async_op=True)
            work.synchronize()
            work.synchronize(others[0].value)
            work.synchronize(types.SimpleNamespace(ptr=others[1].value))
            self.assertFalse(work.done())
            for stream in (self.stream, *others):
                assert CUDA.cuLaunchHostFunc(stream, kernel, None) == 0
            self.assertTrue(ended.wait(30))
        self.assertEqual(seen, [[4.0, 8.0]] * 3)
        work.wait()
        work.synchronize()
        work = self.world.all_reduce(tensor, async_op=True)
        with self.assertRaisesRegex(cohort.InvalidArgument, "stream is a CUDA stream"):
            work.synchronize("default")
        work.wait()
        host = self.world.all_reduce(array.array("f", [1.0]), async_op=True)
        host.synchronize()
        self.assertTrue(host.done())

    def test_all_operations_take_them(self):
        rank = cohort.rank()
        whole, part = Tensor([0.0] * 4), Tensor([rank + 1.0] * 2)
        self.world.all_gather(part, whole)
        self.assertEqual(list(whole.seen), [1.0, 1.0, 2.0, 2.0])
        self.world.reduce_scatter(whole, part)
        self.assertEqual(list(part.seen), [2.0 * (rank + 1)] * 2)
        self.world.broadcast(part, root=1)
        self.assertEqual(list(part.seen), [4.0, 4.0])
        group = [Tensor([float(i)] * i) for i in range(1, 5)]
        self.world.all_reduce(group, op="average")
        self.assertEqual([list(one.seen) for one in group], [[float(i)] * i for i in range(1, 5)])
        if rank == 0:
            self.world.send(part, 1)
        else:
            part.seen[:] = [0.0, 0.0]
            self.world.recv(part, 0)
        self.assertEqual(list(part.seen), [4.0, 4.0])

    def test_sums_are_nccls_unless_they_are_to_be_exact(self):
        cuda = ctypes.CDLL("libcuda.so.1")
        before = cuda.fake_cuda_folds()
        tensor = Tensor([1.0, 2.0])
        self.world.all_reduce(tensor)
        self.assertEqual(cuda.fake_cuda_folds() - before, 0)
        self.world.all_reduce(tensor, gpu_sums="exact")
        self.assertGreater(cuda.fake_cuda_folds() - before, 0)
        self.assertEqual(list(tensor.seen), [4.0, 8.0])
        with self.assertRaisesRegex(cohort.InvalidArgument, "gpu_sums is 'fast' or 'exact', and not 'quick'"):
            self.world.all_reduce(tensor, gpu_sums="quick")

    def test_arrays_of_other_libraries(self):
        for kind in (Exported, WithBuffer):
            with self.subTest(kind.__name__):
                array = kind([1.0, 2.0, 3.0])
                self.world.all_reduce(array)
                self.assertEqual(list(array.seen), [2.0, 4.0, 6.0])
                self.assertEqual(array.stream, 1)

    def test_only_torchs_tensors_go_in_the_order_of_the_stream(self):
        tensor, exported = Tensor([1.0, 2.0]), Kept([1.0, 2.0])
        for one in tensor, exported:
            self.world.all_reduce(one)
        self.world.barrier()
        exported.let_go.clear()
        with unittest.mock.patch.dict(os.environ, FAKE_NCCL_DELAY="300"):
            works = [self.world.all_reduce(one, async_op=True) for one in (tensor, exported)]
            works[0].synchronize(self.stream.value)
            works[1].synchronize(0)
            self.assertFalse(works[0].done())
            gone = weakref.ref(tensor)
            del tensor, one
            self.assertIsNone(gone())
            self.assertEqual(exported.let_go, [])
        works[1].wait()
        self.assertEqual(exported.let_go, ["once"])

    def test_arrays_go_when_the_gpu_is_done_with_them(self):
        """With a wait, a kept Work or a dropped one; and without another call of the program."""
        exported = Kept([2.0])
        for one in (Tensor([1.0]), exported):
            self.world.all_reduce(one)
        for ways in ((), ("wait",), ("synchronize",), ("drop",)):
            with self.subTest(ways):
                self.world.barrier()
                exported.let_go.clear()
                tensor = Tensor([1.0, 2.0])
                with unittest.mock.patch.dict(os.environ, FAKE_NCCL_DELAY="50"):
                    works = [self.world.all_reduce(one, async_op=True) for one in (tensor, exported)]
                    gone = weakref.ref(tensor)
                    del tensor
                    if "wait" in ways:
                        for work in works:
                            work.wait()
                        self.assertEqual((gone(), exported.let_go), (None, ["once"]))
                    if "synchronize" in ways:
                        for work in works:
                            work.synchronize(0)  # not the stream that they came in
                    if "drop" in ways:
                        del works
                until = time.monotonic() + 10
                while (gone() is not None or not exported.let_go) and time.monotonic() < until:
                    time.sleep(0.001)
                self.assertEqual((gone(), exported.let_go), (None, ["once"]))

    def test_messages_let_go_of_arrays(self):
        self.world.barrier()
        tensor = Tensor([1.0, 2.0])
        work = self.world.send(tensor, 1, async_op=True) if cohort.rank() == 0 else self.world.recv(tensor, 0, async_op=True)
        gone = weakref.ref(tensor)
        del tensor
        until = time.monotonic() + 10
        while gone() is not None and time.monotonic() < until:
            time.sleep(0.001)
        self.assertIsNone(gone())
        work.wait()

    def test_graphs_that_are_captured(self):
        tensor = Tensor([1.0, 2.0])
        self.world.all_reduce(tensor)
        self.world.barrier()
        if cohort.rank() == 0:
            assert CUDA.cuStreamBeginCapture_v2(self.stream, 0) == 0
            for call in (self.world.all_reduce, self.world.broadcast):
                with self.assertRaisesRegex(cohort.InvalidArgument, r"\(float32\[2\]\).* -- rank 0 .*captured into a CUDA graph"):
                    call(tensor)
            self.assertEqual(CUDA.cuStreamEndCapture(self.stream, ctypes.byref(ctypes.c_void_p())), 0)
        self.world.all_reduce(tensor)
        self.assertEqual(list(tensor.seen), [4.0, 8.0])

    def test_what_reads_them_itself_refuses(self):
        with self.assertRaisesRegex(cohort.InvalidArgument, "lies on .*the host's memory here -- pass tensor.cpu"):
            cohort._core.permute(Tensor([1.0]), 1, 0)
