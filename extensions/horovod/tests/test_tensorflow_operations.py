"""Peculiarities of `cohort.tensorflow`'s operations and their gradients, in eager mode and in graphs: each rank of
`cohort run -np N` runs this. test_hvd_shared.py has the tests common to all frameworks."""

import unittest

import numpy as np
import tensorflow as tf
from support_tensorflow import Case, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort
import cohort.tensorflow as hvd
from cohort.tensorflow._gradients import reduce_gradients


class Operations(Case):
    def test_splits(self):
        splits = [(self.rank + to) % 3 for to in range(self.size)]
        rows = tf.fill([sum(splits) + 1], self.rank)
        for given in (tf.constant(splits), tf.constant(splits, tf.int64)):
            for got, received in self.both(lambda: hvd.alltoall(rows, splits=given)):
                self.same(received, [(rank + self.rank) % 3 for rank in range(self.size)])
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
            hvd.allreduce(tf.constant("text"))

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
        self.same(hvd.allreduce(tf.ones(2)), np.ones(2))  # the world continues

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
        @tf.function
        def whole(x):
            made, received = hvd.alltoall(x, splits)
            return tf.gradients([made * 3.0, tf.cast(received, tf.float32)], x)[0]

        self.close(whole(tf.ones([self.size, 2])), np.full((self.size, 2), 3.0))


class ReduceGradients(Case):
    def nearly(self, tensor, expected):
        """Asserts equality up to 8 bits of precision."""
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
        with self.assertRaises(ValueError):
            hvd.broadcast_global_variables(0)

    def test_object_function(self):
        self.assertEqual(hvd.broadcast_object_fn(0)([self.rank]), [0])


class Sets(Case):
    def test_questions(self):
        evens = hvd.add_process_set(list(range(0, self.size, 2)))
        try:
            if self.rank % 2 == 0:
                for got in self.both(lambda: hvd.size_op(evens.process_set_id)):
                    self.same(got, len(evens.ranks))
            self.assertEqual(int(hvd.process_set_included_op(evens.process_set_id)), self.rank % 2 == 0)
        finally:
            hvd.remove_process_set(evens)


if __name__ == "__main__":
    unittest.main()
