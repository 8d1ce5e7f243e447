"""cohort.tensorflow's tape, batch normalization and elastic states: each rank of `cohort run -np N` runs this."""

import time
import unittest

import numpy as np
import tensorflow as tf
from support import SECONDS
from support_tensorflow import Case, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort.tensorflow as hvd
from cohort.tensorflow import elastic


def batch(rank):
    """Returns (inputs, targets) of a rank, with 8 rows."""
    numbers = np.random.default_rng(rank)
    return tuple(tf.constant(numbers.normal(size=shape), tf.float32) for shape in ((8, 5), (8, 3)))


def make_variables():
    numbers = np.random.default_rng(99)
    return [tf.Variable(tf.constant(numbers.normal(size=shape), tf.float32)) for shape in ((5, 4), (4,), (4, 3), (3,))]


def loss_of(variables, inputs, targets):
    hidden = tf.nn.relu(tf.matmul(inputs, variables[0]) + variables[1])
    return tf.reduce_mean(tf.square(tf.matmul(hidden, variables[2]) + variables[3] - targets))


class Tape(Case):
    def expected(self):
        """Returns the gradients for all ranks' rows together."""
        variables = make_variables()
        every = [batch(rank) for rank in range(self.size)]
        inputs, targets = (tf.concat(parts, 0) for parts in zip(*every))
        with tf.GradientTape() as tape:
            loss = loss_of(variables, inputs, targets)
        return tape.gradient(loss, variables)

    def gradients(self, variables, inside=False, **options):
        inputs, targets = batch(self.rank)

        def step():
            if inside:
                with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
                    loss = loss_of(variables, inputs, targets)
            else:
                with tf.GradientTape() as tape:
                    loss = loss_of(variables, inputs, targets)
                tape = hvd.DistributedGradientTape(tape, **options)
            self.assertIsInstance(tape, tf.GradientTape)
            return tape.gradient(loss, variables)

        return self.both(step)

    def test_a_rank_that_does_not_use_what_others_do(self):
        dense, table, unused = (tf.Variable(tf.ones([4, 2])) for _ in range(3))
        only = self.rank == self.size - 1

        def step(mixed=False):
            with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
                loss = tf.reduce_sum(3 * dense) if only else tf.constant(0.0)
                if only:
                    loss += tf.reduce_sum(tf.gather(table, [1, 1]))
                elif mixed:
                    loss += tf.reduce_sum(table)
            return tape.gradient(loss, [dense, table, unused])

        got = step()
        self.close(got[0], np.full((4, 2), 3.0))
        self.assertIsInstance(got[1], tf.IndexedSlices)
        rows = np.zeros((4, 2))
        rows[1] = 2
        self.close(tf.convert_to_tensor(got[1]), rows)
        self.assertIsNone(got[2])
        self.close(step(mixed=True)[1], rows + (self.size - 1))
        began = time.monotonic()
        with self.assertRaisesRegex(tf.errors.OpError, r"sparse or missing on others.*0\.Var.*1\.Var") as raised:
            tf.function(step)()
        self.assertLess(time.monotonic() - began, SECONDS / 2)
        self.assertIsInstance(hvd.as_internal_error(raised.exception), hvd.HorovodInternalError)
        self.close(step()[0], np.full((4, 2), 3.0))  # the world continues

    def test_gradients_are_those_of_all_rows(self):
        variables = make_variables()
        for options in ({}, {"inside": True}, {"gradient_predivide_factor": 2.0}, {"groups": 2}, {"groups": [variables[:2]]},
                        {"compression": hvd.Compression.none, "sparse_as_dense": True}):  # fmt: skip
            with self.subTest(**{name: str(value)[:20] for name, value in options.items()}):
                for got in self.gradients(variables, **options):
                    for one, expected in zip(got, self.expected()):
                        np.testing.assert_allclose(one, expected, rtol=2e-5, atol=1e-6)

    def test_training_keeps_ranks_alike(self):
        variables = make_variables()
        variables[0].assign_add(tf.fill([5, 4], float(self.rank)))
        hvd.broadcast_variables(variables, root_rank=0)
        inputs, targets = batch(self.rank)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = loss_of(variables, inputs, targets)
            tape = hvd.DistributedGradientTape(tape)
            for variable, gradient in zip(variables, tape.gradient(loss, variables)):
                variable.assign_sub(0.1 * gradient)
            return loss

        first = hvd.allreduce(step())
        for _ in range(50):
            last = hvd.allreduce(step())
        self.assertLess(float(last), float(first) / 2)
        every = hvd.allgather_object([variable.numpy().tobytes() for variable in variables])
        self.assertEqual(every, [every[0]] * self.size)

    def test_local_sources(self):
        variables = make_variables()
        inputs, targets = batch(self.rank)
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_of(variables, inputs, targets)
        own = tape.gradient(loss, variables)
        for scales in (True, False):
            wrapped = hvd.DistributedGradientTape(tape, scale_local_gradients=scales)
            wrapped.register_local_source(variables[1])
            got = wrapped.gradient(loss, variables, use_generic_names=True)
            self.close(got[1], own[1] / (self.size if scales else 1))
            np.testing.assert_allclose(got[0], self.expected()[0], rtol=2e-5, atol=1e-6)
            local, others = wrapped.get_local_and_global_gradients(got, variables)
            self.assertEqual([len(local), len(others)], [1, 3])
            self.assertIs(local[0][1], variables[1])
        layer = tf.keras.layers.Dense(2)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(inputs)) * (self.rank + 1)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=False)
        got = tape.gradient(loss, layer.trainable_variables)
        self.close(got[1], [8.0 * (self.rank + 1)] * 2)

    def test_keras_variables_and_sparse(self):
        table = tf.keras.layers.Embedding(self.size + 1, 2)
        table.build(None)
        rows = tf.constant([self.rank, self.size])

        def step(**options):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(table(rows))
            return hvd.DistributedGradientTape(tape, op=hvd.Sum, **options).gradient(loss, table.trainable_variables)[0]

        expected = np.ones((self.size + 1, 2))
        expected[-1] = self.size
        for got in self.both(step):
            self.assertIsInstance(got, tf.IndexedSlices)
            self.close(tf.convert_to_tensor(got), expected)
        for got in self.both(lambda: step(sparse_as_dense=True)):
            self.assertNotIsInstance(got, tf.IndexedSlices)
            self.close(got, expected)

    def test_two_tapes_of_one_graph(self):
        """Their variables have the same names, and their gradients are reduced at the same time."""
        one, two = tf.Variable([1.0]), tf.Variable([1.0])

        @tf.function
        def step():
            results = []
            for variable, factor in ((one, 1.0), (two, 10.0)):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(variable * factor) * (self.rank + 1)
                results.append(hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [variable])[0])
            return results

        total = sum(range(1, self.size + 1))
        for _ in range(3):
            first, second = step()
            self.close(first, [total])
            self.close(second, [10 * total])

    def test_an_optimizer_of_keras(self):
        model = tf.keras.Sequential([tf.keras.layers.Input((5,)), tf.keras.layers.Dense(3)])
        hvd.broadcast_variables(model.weights, root_rank=0)
        model.compile(optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), loss="mse")
        inputs, targets = batch(self.rank)
        model.fit(inputs, targets, epochs=2, batch_size=4, shuffle=False, verbose=0)
        every = hvd.allgather_object([weight.tobytes() for weight in model.get_weights()])
        self.assertEqual(every, [every[0]] * self.size)

    def test_branches_and_loops_of_a_graph(self):
        """Operations without names of a loop's body and of the graph around it are under way at the same time."""

        @tf.function
        def step(x):
            first = hvd.allreduce(x, op=hvd.Sum)
            for _ in tf.range(3):
                x = hvd.allreduce(x, op=hvd.Average)
            if tf.reduce_sum(x) > 0:
                x = hvd.allreduce(x * 2, op=hvd.Average)
            return first, x

        for _ in range(2):
            first, last = step(tf.ones([2]))
            self.same(first, [self.size] * 2)
            self.close(last, [2.0, 2.0])

    def test_what_has_no_meaning(self):
        for options in ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, {"groups": 0}, {"groups": "all"}):
            with self.subTest(**options), self.assertRaises(ValueError):
                hvd.DistributedGradientTape(tf.GradientTape(), **options)
        with self.assertRaises(ValueError):
            hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
        with self.assertRaises(NotImplementedError):
            hvd.BroadcastGlobalVariablesHook(0)


class BatchNormalization(Case):
    def test_as_of_all_rows(self):
        rows = [
            tf.constant(np.random.default_rng(rank).normal(rank, 1.0, (4 + rank, 3)), tf.float32)
            for rank in range(self.size)
        ]
        own, alone = hvd.SyncBatchNormalization(), tf.keras.layers.BatchNormalization()
        own.build((None, 3))
        alone.build((None, 3))
        weights = [
            tf.constant(np.random.default_rng(7 + rank).normal(size=(4 + rank, 3)), tf.float32)
            for rank in range(self.size)
        ]
        with tf.GradientTape() as tape:
            every = tf.concat(rows, 0)
            tape.watch(every)
            expected = alone(every, training=True)
            loss = tf.reduce_sum(expected * tf.concat(weights, 0))
        gradient = tape.gradient(loss, every)
        begin = sum(4 + rank for rank in range(self.rank))
        mine = slice(begin, begin + 4 + self.rank)

        def step(x, weight):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = own(x, training=True)
                loss = tf.reduce_sum(y * weight)
            return y, tape.gradient(loss, x)

        for y, got in self.both(step, rows[self.rank], weights[self.rank]):
            np.testing.assert_allclose(y, expected[mine], rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(got, gradient[mine], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(own(rows[0], training=False).shape, (4, 3))


class Elastic(Case):
    def test_variables(self):
        variables = [tf.Variable([float(self.rank)]), tf.Variable(self.rank)]
        state = elastic.TensorFlowState(variables, step=self.rank)
        state.sync()
        self.same(variables[0], [0.0])
        self.assertEqual(state.step, 0)
        variables[0].assign([5.0])
        state.step = 3
        state.restore()
        self.same(variables[0], [0.0])
        self.assertEqual(state.step, 0)
        variables[0].assign([7.0])
        state.commit()
        variables[0].assign([8.0])
        state.restore()
        self.same(variables[0], [7.0])
        with self.assertRaises(ValueError):
            elastic.TensorFlowState(variables, session=object())

    def test_keras(self):
        model = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(2)])
        model.compile(optimizer=tf.keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
        model.weights[0].assign(tf.fill([3, 2], float(self.rank)))
        state = elastic.TensorFlowKerasState(model, epoch=self.rank)
        state.sync()
        self.same(model.get_weights()[0], np.zeros((3, 2)))
        self.assertEqual(state.epoch, 0)
        model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
        state.restore()
        self.same(model.get_weights()[0], np.zeros((3, 2)))

    def test_run_survives_a_failed_graph(self):
        state = elastic.TensorFlowState([tf.Variable([1.0])], tries=0)
        worlds = []
        step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="elastic.step"))

        @elastic.run
        def train(state):
            worlds.append(hvd.size())
            if len(worlds) == 1:
                step(tf.zeros([self.rank + 1]))  # ranks disagree
            return step(tf.ones([2]))

        self.same(train(state), [self.size] * 2)
        self.assertEqual(len(worlds), 2 if self.size > 1 else 1)

        @elastic.run
        def fails(state):
            tf.function(lambda: tf.debugging.assert_equal(1, tf.constant(2)))()

        with self.assertRaises(tf.errors.InvalidArgumentError):
            fails(state)


if __name__ == "__main__":
    unittest.main()
