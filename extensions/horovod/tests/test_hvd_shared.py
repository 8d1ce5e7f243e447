"""Tests common to the operations of `cohort.horovod.torch`, `cohort.tensorflow` and `cohort.jax`. Each has a class, whose tests
each rank of `cohort run -np N` runs. Values are NumPy's, in double, and are cast to a framework's types and back."""

import functools
import itertools
import os
import threading
import unittest

from support import SECONDS

import cohort

np = None  # NumPy, imported after the framework, since JAX may bring its own
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")


class Unpicklable(Exception):
    """Unpickling makes an exception from one argument, which this class refuses."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


class OfTorch:
    types = (*INTEGERS, "float16", "bfloat16", "float32", "float64", "complex64", "complex128")
    integer, twice = "int64", "float64"
    compresses = has_adasum = scatters_groups = gathers_groups = True
    no_scatter = NotImplementedError
    has_uneven_programs = True

    def __init__(self):
        import torch

        import cohort.horovod.torch as hvd

        self.torch, self.hvd = torch, hvd
        torch.set_num_threads(1)

    def make(self, values, dtype="float32"):
        return self.torch.as_tensor(values).to(getattr(self.torch, dtype))

    def values(self, tensor):
        wide = self.torch.complex128 if tensor.is_complex() else self.torch.float64
        return tensor.detach().to(wide).numpy()

    def type_of(self, tensor):
        return str(tensor.dtype)[6:]

    def ways(self, function, *tensors):
        """Yields a function's results, first eagerly, then as part of a program."""
        yield function(*tensors)

    def gradients(self, function, weight, *tensors):
        """Like `ways`, but yields the gradients of the sum of the result times a weight."""
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        (function(*leaves) * weight).sum().backward()
        yield [leaf.grad for leaf in leaves]


class OfTensorflow(OfTorch):
    types = (*OfTorch.types, "uint16", "uint32", "uint64")

    def __init__(self):
        import tensorflow as tf

        import cohort.tensorflow as hvd

        self.tf, self.hvd = tf, hvd
        tf.get_logger().setLevel("ERROR")  # it warns of many small graphs, which these tests make

    def make(self, values, dtype="float32"):
        return self.tf.cast(self.tf.constant(values), dtype)

    def values(self, tensor):
        return self.tf.cast(tensor, self.tf.complex128 if tensor.dtype.is_complex else self.tf.float64).numpy()

    def type_of(self, tensor):
        return tensor.dtype.name

    def ways(self, function, *tensors):
        yield function(*tensors)
        whole = self.tf.function(function)
        whole(*tensors)
        yield whole(*tensors)

    def gradients(self, function, weight, *tensors):
        def whole(*given):
            with self.tf.GradientTape() as tape:
                tape.watch(given)
                loss = self.tf.reduce_sum(self.tf.cast(function(*given), self.tf.float64)) * weight
            return tape.gradient(loss, given)

        yield from self.ways(whole, *tensors)


class OfJax(OfTorch):
    types = ("uint8", "int8", "int32", "uint32", "float16", "bfloat16", "float32", "complex64")
    integer, twice = "int32", "float32"
    compresses = has_adasum = scatters_groups = gathers_groups = False
    no_scatter = ValueError
    has_uneven_programs = False  # shapes are known in advance

    def __init__(self):
        from support_jax import NEEDED, jax

        if jax is None:
            raise unittest.SkipTest(NEEDED)
        import cohort.jax as hvd

        self.jax, self.hvd = jax, hvd

    def make(self, values, dtype="float32"):
        return self.jax.numpy.asarray(values).astype(dtype)

    def values(self, tensor):
        return np.asarray(tensor).astype(np.complex128 if tensor.dtype == "complex64" else np.float64)

    def type_of(self, tensor):
        return tensor.dtype.name

    def ways(self, function, *tensors):
        yield function(*tensors)
        yield self.jax.jit(function)(*tensors)

    def gradients(self, function, weight, *tensors):
        def loss(*given):
            return (function(*given) * weight).sum()

        yield from self.ways(self.jax.grad(loss, tuple(range(len(tensors)))), *tensors)


def numbered(rank, shape=(3, 2)):
    return ((np.arange(np.prod(shape, dtype=int)) + rank) % 5 + 1.0).reshape(shape)


class Shared:
    kind = OfTorch

    @classmethod
    def setUpClass(cls):
        global np
        try:
            cls.of = cls.kind()
            import numpy as np
        except ImportError as missing:
            raise unittest.SkipTest(str(missing)) from missing
        os.environ["COHORT_TIMEOUT"] = str(int(SECONDS))
        cls.of.hvd.init()

    @classmethod
    def tearDownClass(cls):
        cls.of.hvd.shutdown()

    def setUp(self):
        self.hvd = self.of.hvd
        self.rank, self.size = self.hvd.rank(), self.hvd.size()

    def tearDown(self):
        self.hvd.barrier()

    def every(self, shape=(3, 2)):
        return np.stack([numbered(rank, shape) for rank in range(self.size)])

    def own(self, dtype="float32", shape=(3, 2)):
        return self.of.make(numbered(self.rank, shape), dtype)

    def same(self, tensor, expected, dtype=None):
        """Asserts equality, up to the precision of the type; `dtype`: the type expected."""
        self.assertEqual(self.of.type_of(tensor), dtype or self.of.type_of(tensor))
        expected = np.asarray(expected, np.complex128 if np.iscomplexobj(expected) else np.float64)
        self.assertEqual(tuple(tensor.shape), expected.shape)
        np.testing.assert_array_equal(self.of.values(tensor), self.of.values(self.of.make(expected, self.of.type_of(tensor))))

    def close(self, tensor, expected):
        self.assertEqual(tuple(tensor.shape), np.shape(expected))
        np.testing.assert_allclose(self.of.values(tensor), expected, rtol=1e-5, atol=1e-6)

    def each(self, types=None, **more):
        for dtype in types or self.of.types:
            with self.subTest(dtype=dtype, **more):
                yield dtype

    # --- reductions ---

    def test_each_type(self):
        for dtype in self.each():
            mine = self.own(dtype)
            for got in self.of.ways(lambda x, d=dtype: self.hvd.allreduce(x, op=self.hvd.Sum, name=f"type.{d}"), mine):
                self.same(got, self.every().sum(0), dtype)
            self.same(mine, numbered(self.rank))

    def test_each_op(self):
        every, hvd = self.every(), self.hvd
        for op, expected in ((None, every.mean(0)), (hvd.Average, every.mean(0)), (hvd.Sum, every.sum(0)),
                             (hvd.Min, every.min(0)), (hvd.Max, every.max(0)), (hvd.Product, every.prod(0))):  # fmt: skip
            for got in self.of.ways(lambda x, op=op: hvd.allreduce(x, op=op), self.own()):
                self.close(got, expected)

    def test_shapes(self):
        for shape in ((), (1,), (0,), (3, 0), (0, 3), (1, 1, 1), (100_000,)):
            with self.subTest(shape=shape):
                for got in self.of.ways(lambda x: self.hvd.allreduce(x, op=self.hvd.Sum), self.own(shape=shape)):
                    self.same(got, self.every(shape).sum(0))

    def test_average_of_integers_is_truncated(self):
        for value in (7, -7):
            mine = self.of.make([value if self.rank == 0 else 0], "int32")
            for got in self.of.ways(self.hvd.allreduce, mine):
                self.same(got, [int(value / self.size)], "int32")

    def test_average_is_deprecated(self):
        for average, expected in ((False, self.every().sum(0)), (True, self.every().mean(0))):
            with self.assertWarns(DeprecationWarning):
                self.close(self.hvd.allreduce(self.own(), average=average), expected)
        with self.assertRaises(ValueError):
            self.hvd.allreduce(self.own(), average=True, op=self.hvd.Sum)
        with self.assertRaises(ValueError):
            self.hvd.allreduce(self.own(), op=17)

    def test_factors(self):
        hvd, total = self.hvd, self.every().sum(0)
        for got in self.of.ways(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), self.own()):
            self.same(got, total * 2)
        for got in self.of.ways(lambda x: hvd.allreduce(x, prescale_factor=0.5), self.own()):
            self.close(got, total / self.size / 2)
        integers = self.of.make(np.array([5, 3]) * (self.rank + 1), "int32")
        for factor in ("prescale_factor", "postscale_factor"):
            for got in self.of.ways(lambda x, f=factor: hvd.allreduce(x, op=hvd.Sum, **{f: 2.0}), integers):
                self.same(got, np.array([10, 6]) * sum(range(1, self.size + 1)), "int32")

    def test_compression(self):
        if not self.of.compresses:
            self.skipTest("of gradients alone")
        hvd = self.hvd
        for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
            for got in self.of.ways(lambda x, c=compression: hvd.allreduce(x, compression=c, op=hvd.Sum), self.own()):
                self.same(got, self.every().sum(0), "float32")
        whole = self.of.make([70000], "int32")
        self.same(hvd.allreduce(whole, compression=hvd.Compression.fp16, op=hvd.Sum), [70000 * self.size], "int32")

    def test_groups(self):
        hvd = self.hvd
        kinds = [("float32", (2,)), (self.of.twice, ()), ("float32", (0,)), ("int32", (3, 3)), ("float32", (70000,))]
        mine = [self.own(dtype, shape) for dtype, shape in kinds]
        for name in (None, "group"):
            for got in self.of.ways(lambda *xs, n=name: hvd.grouped_allreduce(list(xs), op=hvd.Sum, name=n), *mine):
                for one, (dtype, shape) in zip(got, kinds):
                    self.same(one, self.every(shape).sum(0), dtype)
        self.assertEqual(len(hvd.grouped_allreduce(tuple(mine), op=hvd.Sum)), len(mine))
        self.assertEqual(hvd.grouped_allreduce([]), [])
        with self.assertRaises(ValueError):
            hvd.grouped_allreduce(mine[0])

    def test_adasum(self):
        hvd = self.hvd
        if not self.of.has_adasum:
            with self.assertRaisesRegex(ValueError, "Adasum"):
                hvd.allreduce(self.own(), op=2)
            return

        def pair(a, b):
            return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b

        level = [np.array([1.0 + rank, 2.0, -rank, 0.5]) for rank in range(self.size)]
        mine = self.of.make(level[self.rank])
        while len(level) > 1:
            level = [pair(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
        for got in self.of.ways(lambda x: hvd.allreduce(x, op=hvd.Adasum), mine):
            self.close(got, level[0])
        for dtype in ("float32", "float16"):  # equal vectors are averaged
            for got in self.of.ways(lambda x: hvd.allreduce(x, op=hvd.Adasum), self.of.make([3.0, 4.0], dtype)):
                self.close(got, [3.0, 4.0])
        alone = self.of.make(np.eye(self.size)[self.rank] * 2)  # orthogonal vectors are added
        for got in self.of.ways(lambda x: hvd.grouped_allreduce([x], op=hvd.Adasum)[0], alone):
            self.close(got, [2.0] * self.size)
        with self.assertRaises(ValueError):
            hvd.allreduce(self.of.make([1], "int32"), op=hvd.Adasum)

    # --- what moves ---

    def test_allgather(self):
        rows = [numbered(rank, (2, 3)) for rank in range(self.size)]
        for dtype in self.each((*self.of.types, "bool")):
            expected = np.concatenate(rows) % 2 if dtype == "bool" else np.concatenate(rows)
            mine = self.of.make(rows[self.rank] % 2 if dtype == "bool" else rows[self.rank], dtype)
            for got in self.of.ways(lambda x, d=dtype: self.hvd.allgather(x, name=f"gather.{d}"), mine):
                self.same(got, expected, dtype)
        with self.assertRaises(ValueError):
            self.hvd.allgather(self.of.make(1.0))

    def ways_of_uneven(self, function, *tensors):
        return self.of.ways(function, *tensors) if self.of.has_uneven_programs else [function(*tensors)]

    def test_allgather_of_unequal_rows(self):
        rows = [numbered(rank, (rank + 1, 2)) for rank in range(self.size)]
        for got in self.ways_of_uneven(self.hvd.allgather, self.of.make(rows[self.rank])):
            self.same(got, np.concatenate(rows))
        for got in self.ways_of_uneven(self.hvd.allgather, self.of.make(np.ones((2 if self.rank == 1 else 0, 3)))):
            self.same(got, np.ones((2, 3)))
        for got in self.of.ways(self.hvd.allgather, self.of.make(np.ones((0, 2)))):
            self.same(got, np.ones((0, 2)))
        if self.of.gathers_groups:
            mine = [self.of.make(rows[self.rank]), self.of.make(np.full((self.rank, 2), self.rank), "int32")]
            for got in self.of.ways(lambda *xs: self.hvd.grouped_allgather(list(xs)), *mine):
                self.same(got[0], np.concatenate(rows), "float32")
                self.same(got[1], np.repeat(range(self.size), 2 * np.arange(self.size)).reshape(-1, 2), "int32")

    def test_broadcast(self):
        for root in (0, self.size - 1):
            # Compiling a program for each type takes long.
            for dtype in self.each((*self.of.types, "bool") if root or self.of.has_uneven_programs else ["float32"], root=root):
                wanted = [numbered(rank) % 2 if dtype == "bool" else numbered(rank) for rank in (root, self.rank)]
                mine = self.of.make(wanted[1], dtype)
                for got in self.of.ways(lambda x, d=dtype, r=root: self.hvd.broadcast(x, r, name=f"cast.{r}.{d}"), mine):
                    self.same(got, wanted[0], dtype)
                self.same(mine, wanted[1], dtype)
        for root in (-1, self.size):
            with self.assertRaises(ValueError):
                self.hvd.broadcast(self.own(), root)

    def test_alltoall(self):
        for dtype in self.each((*self.of.types, "bool")):
            flags = dtype == "bool"
            sent = np.array([[self.rank, other] for other in range(self.size)])
            expected = np.array([[other, self.rank] for other in range(self.size)])
            mine = self.of.make(sent % 2 if flags else sent, dtype)
            for got in self.of.ways(lambda x, d=dtype: self.hvd.alltoall(x, name=f"all.{d}"), mine):
                self.same(got, expected % 2 if flags else expected, dtype)

    def test_alltoall_with_splits(self):
        splits = [(self.rank + to) % 3 for to in range(self.size)]
        counts = [(rank + self.rank) % 3 for rank in range(self.size)]
        mine = self.of.make(np.full((sum(splits) + 1, 2), self.rank))  # the last is not sent
        for got, received in self.ways_of_uneven(lambda x: self.hvd.alltoall(x, splits=splits), mine):
            self.same(got, np.repeat(range(self.size), counts)[:, None] * np.ones(2))
            self.same(received, counts, "int32")
        for wrong in ([1] * (self.size + 1), [sum(splits) + 1] * self.size):
            with self.assertRaises(ValueError):
                self.hvd.alltoall(mine, splits=wrong)

    def test_reducescatter(self):
        hvd, rows = self.hvd, 2 * self.size + 1  # the first rank gets one more
        begin = 2 * self.rank + min(self.rank, 1)
        total = self.every((rows, 3)).sum(0)[begin : begin + 2 + (self.rank == 0)]
        given = self.own(shape=(rows, 3))
        for got in self.of.ways(lambda x: hvd.reducescatter(x, op=hvd.Sum), given):
            self.same(got, total)
        for got in self.of.ways(hvd.reducescatter, given):
            self.close(got, total / self.size)
        for got in self.of.ways(lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25), given):
            self.close(got, total / 2)
        if self.of.scatters_groups:
            wide = self.own(self.of.twice, (rows, 3))
            for got in self.of.ways(lambda *xs: hvd.grouped_reducescatter(list(xs), op=hvd.Sum), given, wide):
                self.same(got[0], total, "float32")
                self.same(got[1], total, self.of.twice)
            half = hvd.reducescatter(given, compression=hvd.Compression.bf16, op=hvd.Sum)
            self.same(half, total, "float32")
        for op in (hvd.Min, hvd.Max, 2):
            calls = [lambda op=op: hvd.reducescatter(given, op=op)]
            if self.of.scatters_groups:
                calls.append(lambda op=op: hvd.grouped_reducescatter([given], op=op))
            for call in calls:
                with self.assertRaises(self.of.no_scatter) as caught:
                    call()
                self.assertIsInstance(caught.exception, (hvd.HorovodInternalError, ValueError))
        with self.assertRaises(ValueError):
            hvd.reducescatter(self.of.make(1.0))

    def test_objects(self):
        hvd, last = self.hvd, self.size - 1
        got = hvd.broadcast_object({"rank": self.rank, "tensor": np.ones(2) * self.rank}, root_rank=last)
        self.assertEqual((got["rank"], list(got["tensor"])), (last, [last, last]))
        self.assertEqual(hvd.broadcast_object(None), None)
        self.assertEqual(hvd.allgather_object("x" * self.rank), ["x" * rank for rank in range(self.size)])
        self.assertEqual(hvd.allgather_object((1, 2) if self.rank else "other type")[0], "other type")

    def test_objects_that_cannot_be_pickled(self):
        hvd, given = self.hvd, threading.Lock() if self.rank == 0 else None
        for call in (lambda: hvd.broadcast_object(given, 0), lambda: hvd.allgather_object(given)):
            with self.assertRaises(TypeError if self.rank == 0 else hvd.HorovodInternalError):
                call()
        self.assertEqual(hvd.broadcast_object(self.rank, 0), 0)

    def test_objects_that_cannot_be_unpickled(self):
        hvd, last = self.hvd, self.size - 1
        given = Unpicklable("a", "b") if self.rank == last else None
        text = rf"the object of rank {last} was pickled there and cannot be unpickled here -- TypeError"
        with self.assertRaisesRegex(hvd.HorovodInternalError, f"allgather_object: {text}"):
            hvd.allgather_object(given)
        if self.rank == last:
            self.assertIs(hvd.broadcast_object(given, last), given)
        else:
            with self.assertRaisesRegex(hvd.HorovodInternalError, f"broadcast_object: {text}"):
                hvd.broadcast_object(given, last)
        self.assertEqual(hvd.broadcast_object(self.rank, 0), 0)

    # --- gradients: Horovod's ---

    def weighted(self, function, *values):
        return self.of.gradients(function, self.rank + 1.0, *map(self.of.make, values))

    @property
    def weights(self):
        return np.arange(1.0, self.size + 1)

    def test_gradients_of_reductions(self):
        hvd, total = self.hvd, self.weights.sum()
        for op, expected in ((hvd.Sum, total), (hvd.Average, total / self.size)):
            scaled = functools.partial(hvd.allreduce, op=op, prescale_factor=2.0, postscale_factor=0.25)
            for function, factor in ((functools.partial(hvd.allreduce, op=op), 1), (scaled, 0.5)):
                for (got,) in self.weighted(lambda x, f=function: f(x), numbered(self.rank, (3,))):
                    self.close(got, [expected * factor] * 3)
        for one, other in self.weighted(lambda x, y: 2.0 * hvd.grouped_allreduce([x, y], op=hvd.Sum, name="both")[0],
                                        np.ones(2), np.ones(3)):  # fmt: skip
            self.close(one, [2 * total] * 2)
            self.close(other, [0.0] * 3)
        if self.of.compresses:
            for (got,) in self.weighted(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16), np.ones(3)):
                self.assertEqual(self.of.type_of(got), "float32")
                self.close(got, [total / self.size] * 3)

    def test_gradients_of_minimum_maximum_product(self):
        hvd, total = self.hvd, self.weights.sum()
        value = np.array([self.rank + 1.0, -self.rank - 1.0, 5.0])  # the last values are equal, and share the gradient
        last, first = self.rank == self.size - 1, self.rank == 0
        for op, factor, won in ((hvd.Max, 1.0, [last, first]), (hvd.Min, 1.0, [first, last]), (hvd.Max, -1.0, [first, last])):
            reduce = functools.partial(hvd.allreduce, op=op, prescale_factor=factor)
            for (got,) in self.weighted(lambda x, f=reduce: f(x), value):
                self.close(got, np.array([*won, 1 / self.size]) * total * factor)
        every = np.array([[rank + 2.0, rank] for rank in range(self.size)])  # dividing by the own value would fail
        others = np.delete(every, self.rank, 0).prod(0)
        for name in (None, "product"):
            for (got,) in self.weighted(lambda x, n=name: hvd.allreduce(x, op=hvd.Product, name=n), every[self.rank]):
                self.close(got, others * total)

    def test_gradients_of_what_moves(self):
        hvd, weights = self.hvd, self.weights
        mean = weights.mean()
        for (got,) in self.weighted(lambda x: hvd.allgather(x, name="gathered"), np.ones((2, 2))):
            self.close(got, np.full((2, 2), mean))
        for (got,) in self.weighted(lambda x: hvd.broadcast(x, self.size - 1), np.ones(2)):
            self.close(got, [mean if self.rank == self.size - 1 else 0.0] * 2)
        for (got,) in self.weighted(hvd.alltoall, np.ones(self.size)):
            self.close(got, weights)
        for op, factor in ((hvd.Sum, self.size), (hvd.Average, 1)):
            scatter = functools.partial(hvd.reducescatter, op=op, prescale_factor=0.5)
            for (got,) in self.weighted(lambda x, f=scatter: f(x), np.ones(self.size + 1)):
                self.close(got, np.array([1.0, *weights]) * factor / 2)

    def test_gradients_of_unequal_rows(self):
        """Weights tell from which row of the result each gradient comes."""
        begin, rows = sum(range(1, self.rank + 1)), sum(range(1, self.size + 1))
        each = self.of.make(np.arange(1.0, rows + 1)[:, None])
        gathered = self.of.gradients(lambda x: self.hvd.allgather(x) * each, 1.0, self.of.make(np.ones((self.rank + 1, 2))))
        for (got,) in itertools.islice(gathered, None if self.of.has_uneven_programs else 1):
            self.close(got, [[begin + i + 1.0] * 2 for i in range(self.rank + 1)])
        splits = [to + 1 for to in range(self.size)]
        if self.of.has_uneven_programs:
            for (got,) in self.weighted(lambda x: self.hvd.alltoall(x, splits)[0], np.ones(sum(splits) + 2)):
                self.close(got, [*np.repeat(self.weights, splits), 0.0, 0.0])  # two rows are not sent

    # --- ranks that differ, sets, ends of data ---

    def test_what_ranks_disagree_on(self):
        hvd, two, three = self.hvd, self.of.make([1.0, 1.0]), self.of.make([1.0] * 3)
        wide = [self.of.make(np.ones((2, columns))) for columns in (2, 3)]
        calls = {
            "shape": [lambda n: hvd.allreduce(two, name=n), lambda n: hvd.allreduce(three, name=n)],
            "dtype": [lambda n: hvd.allreduce(two, name=n), lambda n: hvd.allreduce(self.of.make([1, 1], "int32"), name=n)],
            "op": [lambda n: hvd.allreduce(two, name=n), lambda n: hvd.allreduce(two, name=n, op=hvd.Sum)],
            "root": [lambda n: hvd.broadcast(two, 0, name=n), lambda n: hvd.broadcast(two, 1, name=n)],
            "columns": [lambda n: hvd.allgather(wide[0], name=n), lambda n: hvd.allgather(wide[1], name=n)],
            "factor": [lambda n: hvd.allreduce(two, name=n), lambda n: hvd.allreduce(two, name=n, prescale_factor=2.0)],
        }
        for what, makers in calls.items():
            with self.subTest(what), self.assertRaisesRegex(hvd.HorovodInternalError, f"differ.{what}") as caught:
                makers[self.rank % 2](f"differ.{what}")
            self.assertIsInstance(caught.exception.__cause__, cohort.Mismatch)
            self.same(hvd.allreduce(two, op=hvd.Sum), [self.size] * 2)  # the world continues

    def test_a_process_set(self):
        hvd, mine = self.hvd, self.of.make([float(self.rank)])
        evens = hvd.add_process_set(list(range(0, self.size, 2)))
        try:
            if self.rank % 2 == 0:
                for got in self.of.ways(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=evens), mine):
                    self.same(got, [sum(evens.ranks)])
                for got in self.of.ways(lambda x: hvd.allgather(x, process_set=evens), mine):
                    self.same(got, evens.ranks)
                for got in self.of.ways(lambda x: hvd.broadcast(x, evens.ranks[-1], process_set=evens), mine):
                    self.same(got, [evens.ranks[-1]])
                hvd.barrier(process_set=evens)
                with self.assertRaises(ValueError):
                    hvd.broadcast(mine, 1, process_set=evens)
            else:
                with self.assertRaisesRegex(ValueError, "not in it"):
                    hvd.allreduce(mine, process_set=evens)
        finally:
            hvd.remove_process_set(evens)
        with self.assertRaises(ValueError):
            hvd.allreduce(mine, process_set=evens)

    def test_ranks_without_data(self):
        mine = self.of.make([1.0])
        for step in range(3 + self.rank):
            for got in itertools.islice(self.of.ways(lambda x: self.hvd.allreduce(x, op=self.hvd.Sum, name="uneven"), mine), 1):
                self.same(got, [sum(3 + rank > step for rank in range(self.size))])
        self.assertEqual(int(self.hvd.join()), self.size - 1)
        self.same(self.hvd.allreduce(mine, op=self.hvd.Sum), [self.size])


class Torch(Shared, unittest.TestCase):
    pass


class Tensorflow(Shared, unittest.TestCase):
    kind = OfTensorflow


class Jax(Shared, unittest.TestCase):
    kind = OfJax


if __name__ == "__main__":
    unittest.main()
