"""cohort.tensorflow's operations and their gradients, in eager mode and in graphs: each rank of `cohort run -np N` runs this."""

import unittest

import numpy as np
import tensorflow as tf
from support_tensorflow import Case, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort
import cohort.tensorflow as hvd
from cohort.tensorflow import _library
from cohort.tensorflow._gradients import reduce_gradients

REDUCIBLE = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32", "float64",
             "complex64", "complex128")  # fmt: skip
MOVABLE = (*REDUCIBLE, "bool")


def numbered(rank, shape=(3, 2)):
    count = int(np.prod(shape))
    return ((np.arange(count, dtype=np.float64) + rank) % 5 + 1).reshape(shape)


class Operations(Case):
    def cast(self, array, dtype):
        return tf.cast(tf.constant(array), dtype)

    def values(self, rank, dtype="float32", shape=(3, 2)):
        return self.cast(numbered(rank, shape), dtype)

    def every(self, shape=(3, 2)):
        return np.stack([numbered(rank, shape) for rank in range(self.size)])

    def test_each_type(self):
        for dtype in REDUCIBLE:
            with self.subTest(dtype=dtype):
                mine = self.values(self.rank, dtype)
                for result in self.both(lambda: hvd.allreduce(mine, op=hvd.Sum, name=f"type.{dtype}")):
                    self.assertEqual(result.dtype.name, dtype)
                    self.same(result, self.cast(self.every().sum(0), dtype))
                self.same(mine, self.values(self.rank, dtype))

    def test_each_type_moves(self):
        for dtype in MOVABLE:
            with self.subTest(dtype=dtype):
                mine = self.values(self.rank, dtype)
                rows = np.concatenate(list(self.every()))
                for gathered, sent in self.both(lambda: (hvd.allgather(mine), hvd.broadcast(mine, self.size - 1))):
                    self.same(gathered, self.cast(rows, dtype))
                    self.same(sent, self.values(self.size - 1, dtype))

    def test_each_op(self):
        every = self.every()
        mine = self.values(self.rank)
        expected = {hvd.Average: every.mean(0), hvd.Sum: every.sum(0), hvd.Min: every.min(0), hvd.Max: every.max(0),
                    hvd.Product: every.prod(0)}  # fmt: skip
        for op, result in expected.items():
            for got in self.both(lambda: hvd.allreduce(mine, op=op)):
                self.close(got, result)

    def test_shapes(self):
        for shape in ((), (1,), (0,), (3, 0), (1, 1, 1), (100_000,)):
            with self.subTest(shape=shape):
                mine = self.values(self.rank, shape=shape)
                for got in self.both(lambda: hvd.allreduce(mine, op=hvd.Sum)):
                    self.same(got, self.every(shape).sum(0))
                    self.assertEqual(got.shape, shape)

    def test_average_of_integers_is_truncated(self):
        for value in (7, -7):
            mine = tf.constant([value if self.rank == 0 else 0])
            for got in self.both(lambda: hvd.allreduce(mine)):
                self.same(got, [int(value / self.size)])

    def test_factors_and_compression(self):
        mine = self.values(self.rank)
        total = self.every().sum(0)
        for got in self.both(lambda: hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)):
            self.close(got, total * 2)
        for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
            for got in self.both(lambda: hvd.allreduce(mine, compression=compression, op=hvd.Sum)):
                self.assertEqual(got.dtype, tf.float32)
                self.same(got, total)

    def test_adasum(self):
        mine = tf.one_hot(self.rank, self.size)  # orthogonal: they add up
        for got in self.both(lambda: hvd.allreduce(mine, op=hvd.Adasum)):
            self.close(got, np.ones(self.size))
        for got in self.both(lambda: hvd.allreduce(tf.ones(3, tf.float16), op=hvd.Adasum)):  # parallel: the average
            self.close(got, np.ones(3))
        with self.assertRaises(ValueError):
            hvd.allreduce(tf.constant([1]), op=hvd.Adasum)

    def test_groups(self):
        shapes = [(2,), (), (0,), (3, 3)]
        mine = [self.values(self.rank, "float64", shape) for shape in shapes]
        for got in self.both(lambda: hvd.grouped_allreduce(mine, op=hvd.Sum)):
            for one, shape in zip(got, shapes):
                self.same(one, self.every(shape).sum(0))
        rows = [mine[0], mine[3]]
        for got in self.both(lambda: hvd.grouped_allgather(rows)):
            for one, shape in zip(got, ((2,), (3, 3))):
                self.same(one, np.concatenate(list(self.every(shape))))
        for got in self.both(
            lambda: hvd.grouped_reducescatter([self.values(self.rank, shape=(self.size, 2))], op=hvd.Sum)
        ):
            self.same(got[0], self.every((self.size, 2)).sum(0)[self.rank : self.rank + 1])
        self.assertEqual(hvd.grouped_allreduce([]), [])

    def test_gather_of_unequal_rows(self):
        mine = tf.fill([self.rank + 1, 2], float(self.rank))
        expected = np.concatenate([np.full((rank + 1, 2), rank) for rank in range(self.size)])
        for got in self.both(lambda: hvd.allgather(mine)):
            self.same(got, expected)
        none = tf.zeros([0 if self.rank else 2, 3])
        for got in self.both(lambda: hvd.allgather(none)):
            self.assertEqual(got.shape, (2, 3))

    def test_scatter(self):
        rows = 2 * self.size + 1  # the first rank gets one more
        mine = self.values(self.rank, shape=(rows, 3))
        begin = 0 if self.rank == 0 else 2 * self.rank + 1
        expected = self.every((rows, 3)).sum(0)[begin : begin + (3 if self.rank == 0 else 2)]
        for got in self.both(lambda: hvd.reducescatter(mine, op=hvd.Sum, postscale_factor=2.0)):
            self.close(got, expected * 2)
        for got in self.both(lambda: hvd.reducescatter(mine)):
            self.close(got, expected / self.size)
        with self.assertRaises(NotImplementedError):
            hvd.reducescatter(mine, op=hvd.Max)

    def test_all_to_all(self):
        mine = tf.repeat(tf.range(self.size), 2) + 10 * self.rank
        for got in self.both(lambda: hvd.alltoall(mine)):
            self.same(got, np.repeat([10 * rank + self.rank for rank in range(self.size)], 2))
        splits = [(self.rank + to) % 3 for to in range(self.size)]
        rows = tf.fill([sum(splits) + 1], self.rank)  # the last is not sent
        counts = [(rank + self.rank) % 3 for rank in range(self.size)]
        for given in (splits, tf.constant(splits), tf.constant(splits, tf.int64)):
            for got, received in self.both(lambda: hvd.alltoall(rows, splits=given)):
                self.same(got, np.repeat(range(self.size), counts))
                self.same(received, counts)
                self.assertEqual(received.dtype, tf.int32)
        with self.assertRaises(ValueError):
            hvd.alltoall(rows, splits=[0.5] * self.size)
        for kind in (tf.errors.InvalidArgumentError, ValueError, cohort.InvalidArgument):
            with self.assertRaises(kind):
                hvd.alltoall(rows, splits=[1] * (self.size + 1))

    def test_sparse(self):
        indices = [0, self.rank + 1]
        slices = tf.IndexedSlices(
            tf.fill([2, 3], float(self.rank + 1)), tf.constant(indices), tf.constant([self.size + 1, 3])
        )
        expected = np.zeros((self.size + 1, 3))
        for rank in range(self.size):
            expected[[0, rank + 1]] += rank + 1
        for op, scale in ((hvd.Sum, 1), (hvd.Average, 1 / self.size)):
            for got in self.both(lambda: hvd.allreduce(slices, op=op)):
                self.assertIsInstance(got, tf.IndexedSlices)
                self.close(tf.convert_to_tensor(got), expected * scale)
            for got in self.both(lambda: hvd.grouped_allreduce([slices, slices], op=op)):
                self.close(tf.convert_to_tensor(got[1]), expected * scale)
            mine = tf.fill([2], float(self.rank))
            for got in self.both(lambda: hvd.grouped_allreduce([mine, slices, mine + 1, slices], op=op)):
                self.close(got[0], [sum(range(self.size)) * scale] * 2)
                self.close(got[2], [sum(range(1, self.size + 1)) * scale] * 2)
                for i in (1, 3):
                    self.assertIsInstance(got[i], tf.IndexedSlices)
                    self.close(tf.convert_to_tensor(got[i]), expected * scale)
        with self.assertRaises(NotImplementedError):
            hvd.allreduce(slices, op=hvd.Max)

    def test_many_names_in_one_graph(self):
        count = 200
        mine = [tf.fill([i % 7], float(i + self.rank)) for i in range(count)]
        for got in self.both(lambda: [hvd.allreduce(one, op=hvd.Sum, name=f"many.{i}") for i, one in enumerate(mine)]):
            for i, one in enumerate(got):
                self.same(one, np.full(i % 7, sum(i + rank for rank in range(self.size))))

    def test_what_has_no_meaning(self):
        with self.assertRaises(ValueError):
            hvd.allgather(tf.constant(1.0))
        with self.assertRaises(ValueError):
            hvd.allreduce(tf.constant("text"))
        with self.assertRaises(ValueError):
            hvd.grouped_allreduce(tf.zeros(3))
        with self.assertRaises(ValueError):
            hvd.allreduce(tf.zeros(3), op=17)
        with self.assertRaises(ValueError):
            hvd.broadcast(tf.zeros(3), root_rank=self.size)

    def test_disagreement(self):
        mine = tf.zeros([self.rank + 1])
        with self.assertRaises(hvd.HorovodInternalError) as raised:
            hvd.allreduce(mine, name="disagree")
        self.assertIsInstance(raised.exception.__cause__, cohort.Mismatch)
        self.assertIsInstance(raised.exception, tf.errors.FailedPreconditionError)
        self.assertIn("disagree", str(raised.exception))
        with self.assertRaises(tf.errors.OpError) as raised:
            tf.function(lambda: hvd.allreduce(mine, name="disagree"))()
        internal = hvd.as_internal_error(raised.exception)
        self.assertIsInstance(internal, hvd.HorovodInternalError)
        self.assertIn("disagree", str(internal))
        self.assertNotIn("node", str(internal))
        self.same(hvd.allreduce(tf.ones(2)), np.ones(2))  # all goes on

    def test_questions(self):
        def ask():
            return hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op()

        for answers in self.both(ask):
            self.assertEqual(
                [int(one) for one in answers], [self.rank, self.size, hvd.local_rank(), hvd.local_size(), 1]
            )
        with self.assertRaises(ValueError):
            hvd.size_op(17)


class Gradients(Case):
    def gradient(self, function, *values):
        """Of the sum of what `function` gives times rank + 1, by its inputs; in both ways."""

        def whole(*given):
            with tf.GradientTape() as tape:
                tape.watch(given)
                result = function(*given)
                loss = tf.reduce_sum(tf.cast(result, tf.float64)) * (self.rank + 1)
            return tape.gradient(loss, given)

        yield from self.both(whole, *values)

    def setUp(self):
        super().setUp()
        self.weights = range(1, self.size + 1)

    def test_all_reduce(self):
        for op, expected in ((hvd.Sum, sum(self.weights)), (hvd.Average, sum(self.weights) / self.size)):
            for (got,) in self.gradient(lambda x: hvd.allreduce(x, op=op), tf.ones([2])):
                self.close(got, [expected] * 2)

    def test_min_max_product(self):
        value = tf.constant([self.rank + 1.0, -self.rank - 1.0])
        wins = [self.rank == self.size - 1, self.rank == 0]
        for op, won in ((hvd.Max, wins), (hvd.Min, wins[::-1])):
            for (got,) in self.gradient(lambda x: hvd.allreduce(x, op=op), value):
                self.close(got, np.array(won) * sum(self.weights))
        others = np.prod([rank + 1.0 for rank in range(self.size) if rank != self.rank])
        for (got,) in self.gradient(lambda x: hvd.allreduce(x, op=hvd.Product), value[:1]):
            self.close(got, [others * sum(self.weights)])

    def test_gather_broadcast_scatter(self):
        mean = sum(self.weights) / self.size
        for (got,) in self.gradient(hvd.allgather, tf.ones([self.rank + 1, 2])):
            self.close(got, np.full((self.rank + 1, 2), mean))
        for (got,) in self.gradient(lambda x: hvd.broadcast(x, self.size - 1), tf.ones([2])):
            self.close(got, np.full(2, mean if self.rank == self.size - 1 else 0))
        for op, factor in ((hvd.Sum, self.size), (hvd.Average, 1)):
            for (got,) in self.gradient(lambda x: hvd.reducescatter(x, op=op), tf.ones([self.size])):
                self.close(got, np.array(self.weights) * factor)

    def test_all_to_all(self):
        splits = [to + 1 for to in range(self.size)]
        rows = sum(splits)
        for (got,) in self.gradient(lambda x: hvd.alltoall(x, splits)[0], tf.ones([rows + 1])):
            self.close(got, [*np.repeat(self.weights, splits), 0])

    def test_twice(self):
        def second(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = hvd.allreduce(x * x * x, op=hvd.Sum)
                first = inner.gradient(y, x)
            return outer.gradient(first, x)

        for got in self.both(second, tf.constant(2.0)):
            self.close(got, 12.0 * self.size)


    def test_several_through_one_operation(self):
        mine = tf.constant([[1.0, 2.0], [3.0, 4.0]] * self.size) * (self.rank + 1)
        operations = {
            "reduce": lambda x: hvd.allreduce(x, name="y"),
            "least": lambda x: hvd.allreduce(x, op=hvd.Min, name="y"),
            "gather": lambda x: hvd.allgather(x, name="y"),
            "broadcast": lambda x: hvd.broadcast(x, 0, name="y"),
            "scatter": lambda x: hvd.reducescatter(x, name="y"),
            "exchange": lambda x: hvd.alltoall(x, [2] * self.size, name="y")[0],
            "group": lambda x: tf.add_n(hvd.grouped_allgather([x, 2 * x], name="y")),
        }
        for name, operation in operations.items():
            with self.subTest(name):

                def losses(operation=operation):
                    with tf.GradientTape(persistent=True) as tape:
                        tape.watch(mine)
                        made = operation(mine)
                        one, two = tf.reduce_sum(made), tf.reduce_sum(made * made)
                    return tape.gradient(one, mine), tape.gradient(two, mine)

                one = tf.function(operation)

                @tf.function
                def called_twice(one=one):
                    with tf.GradientTape() as tape:
                        tape.watch(mine)
                        total = tf.reduce_sum(one(mine)) + tf.reduce_sum(one(3 * mine))
                    return total, tape.gradient(total, mine)

                called_twice()
                self.close(called_twice()[0], 4 * tf.reduce_sum(operation(mine)))
                now, later = self.both(losses)
                self.close(now[0], later[0])
                self.close(now[1], later[1])

    def test_through_rows_that_are_counted(self):
        splits = [1] * self.size
        if _library.loaded() is not None:  # sessions need it
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                mine = tf.ones([self.size, 2]) * (self.rank + 1)
                made, received = hvd.alltoall(mine, splits)
                (gradient,) = tf.gradients(made * 3.0, mine)
                self.close(session.run(gradient), np.full((self.size, 2), 3.0))

        @tf.function
        def whole(x):
            made, received = hvd.alltoall(x, splits)
            return tf.gradients([made * 3.0, tf.cast(received, tf.float32)], x)[0]

        self.close(whole(tf.ones([self.size, 2])), np.full((self.size, 2), 3.0))


class ReduceGradients(Case):
    def nearly(self, tensor, expected):
        """As far as 8 bits of precision go."""
        np.testing.assert_allclose(np.asarray(tensor, np.float64), expected, rtol=1e-2)

    def test_mixed(self):
        dense = tf.fill([4], float(self.rank))
        slices = tf.IndexedSlices(tf.fill([1, 2], 1.0), tf.constant([self.rank]), tf.constant([self.size, 2]))
        total = sum(range(self.size))

        def reduce(as_dense):
            return reduce_gradients([dense, None, slices, dense], ["a", "b", "c", "d"], op=hvd.Average, prescale=2.0,
                                    postscale=0.5, sparse_as_dense=as_dense, compression=hvd.Compression.bf16)  # fmt: skip

        for as_dense in (False, True):
            for got in self.both(reduce, as_dense):
                self.nearly(got[0], np.full(4, total / self.size))
                self.assertIsNone(got[1])
                self.assertEqual(isinstance(got[2], tf.IndexedSlices), not as_dense)
                self.nearly(tf.convert_to_tensor(got[2]), np.full((self.size, 2), 1 / self.size))
                self.nearly(got[3], np.full(4, total / self.size))
        with self.assertRaises(ValueError):
            reduce_gradients([dense, dense], ["a", "a"])


class Variables(Case):
    def test_broadcast(self):
        for way in ("eager", "graph"):
            variables = [tf.Variable(tf.fill([3], float(self.rank))), tf.Variable(self.rank, dtype=tf.int64),
                         tf.keras.Variable(np.full(2, self.rank, "float32"))]  # fmt: skip
            root = self.size - 1
            if way == "eager":
                hvd.broadcast_variables(variables, root_rank=root)
            else:
                tf.function(lambda: hvd.broadcast_variables(variables, root_rank=root))()
            for variable, expected in zip(variables, (np.full(3, root), root, np.full(2, root))):
                self.same(tf.convert_to_tensor(variable), expected)
        mine = tf.Variable(float(self.rank))
        self.assertIs(hvd.broadcast_([mine], 0)[0], mine)
        self.same(mine, 0.0)
        with self.assertRaises(ValueError):
            hvd.broadcast_variables([tf.zeros(3)], 0)
        with self.assertRaises(RuntimeError):
            hvd.broadcast_global_variables(0)

    def test_objects(self):
        self.assertEqual(hvd.broadcast_object({"rank": self.rank}, root_rank=self.size - 1), {"rank": self.size - 1})
        self.assertEqual(hvd.broadcast_object_fn(0)([self.rank]), [0])
        self.assertEqual(hvd.allgather_object((self.rank,)), [(rank,) for rank in range(self.size)])


class Sets(Case):
    def test_operations(self):
        evens = hvd.add_process_set(list(range(0, self.size, 2)))
        try:
            mine = tf.constant([float(self.rank)])
            if self.rank % 2 == 0:
                ranks = evens.ranks
                for got in self.both(lambda: hvd.allreduce(mine, op=hvd.Sum, process_set=evens)):
                    self.same(got, [sum(ranks)])
                for got in self.both(lambda: hvd.allgather(mine, process_set=evens)):
                    self.same(got, ranks)
                for got in self.both(lambda: hvd.size_op(evens.process_set_id)):
                    self.same(got, len(ranks))
                hvd.barrier(process_set=evens)
            else:
                with self.assertRaises(ValueError):
                    hvd.allreduce(mine, process_set=evens)
            self.assertEqual(int(hvd.process_set_included_op(evens.process_set_id)), self.rank % 2 == 0)
        finally:
            hvd.remove_process_set(evens)


class Join(Case):
    def test_uneven(self):
        mine = tf.constant([1.0])
        step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="uneven"))
        for i in range(3 + self.rank):
            self.same(step(mine), [sum(3 + rank > i for rank in range(self.size))])
        self.assertEqual(int(hvd.join()), self.size - 1)
        self.same(hvd.allreduce(mine, op=hvd.Sum), [self.size])


if __name__ == "__main__":
    unittest.main()
