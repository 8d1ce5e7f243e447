"""Operations in graphs of TensorFlow 1, which sessions run: each time, also where everything is constant and TensorFlow
folds what it takes for one. Each rank of `cohort run -np N` runs this, and test_tensorflow_without_eager."""

import unittest

import numpy as np
import tensorflow as tf
from support_tensorflow import Case, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them
from tensorflow.core.protobuf import rewriter_config_pb2

import cohort.tensorflow as hvd
from cohort.hvd.process_sets import global_process_set
from cohort.tensorflow import _library

v1 = tf.compat.v1


def folding():
    """A session's settings with all that optimises graphs, small ones too."""
    config = v1.ConfigProto()
    config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L1
    rewrite = config.graph_options.rewrite_options
    rewrite.constant_folding = rewriter_config_pb2.RewriterConfig.AGGRESSIVE
    rewrite.function_optimization = rewriter_config_pb2.RewriterConfig.AGGRESSIVE
    rewrite.min_graph_nodes = -1
    return config


class Counting(Case):
    def asked(self):
        """Number of times that the engine has carried out operations; those that it finds together count as one."""
        hvd.barrier()
        return global_process_set._engine.statistics()["batches"]

    def run_thrice(self, session, fetches, operations=1):
        """Returns the last of three runs' results. Each run has to ask the engine."""
        for _ in range(3):
            before = self.asked()
            result = session.run(fetches)
            self.assertGreaterEqual(self.asked() - before, operations)
        return result

    def graph(self):
        graph = tf.Graph()
        return graph, v1.Session(graph=graph, config=folding())


class Sessions(Counting):
    def setUp(self):
        super().setUp()
        if _library.loaded() is None:
            self.skipTest("without the op library sessions are refused: see ByPython")

    def test_of_constants(self):
        expected = {
            "allreduce": (lambda: hvd.allreduce(tf.ones([2]), op=hvd.Sum), [self.size] * 2),
            "broadcast": (lambda: hvd.broadcast(tf.constant([7.0]), 0), [7.0]),
            "allgather": (lambda: hvd.allgather(tf.ones([2])), [1.0] * 2 * self.size),
            "alltoall": (lambda: hvd.alltoall(tf.ones([self.size])), [1.0] * self.size),
            "reducescatter": (lambda: hvd.reducescatter(tf.ones([self.size]), op=hvd.Sum), [self.size]),
            "grouped": (lambda: hvd.grouped_allreduce([tf.ones([2]), tf.ones([2])], op=hvd.Sum)[1], [self.size] * 2),
        }
        for name, (operation, result) in expected.items():
            with self.subTest(name=name):
                graph, session = self.graph()
                with session, graph.as_default():
                    self.same(self.run_thrice(session, operation() * 1.0), result)

    def test_beside_each_other(self):
        graph, session = self.graph()
        with session, graph.as_default():
            many = [hvd.allreduce(tf.fill([3], float(i)), op=hvd.Sum, name=f"beside.{i}") for i in range(20)]
            total = self.run_thrice(session, tf.add_n(many))
        self.same(total, [self.size * sum(range(20))] * 3)

    def test_of_a_variable_and_its_first_value(self):
        graph, session = self.graph()
        with session, graph.as_default():
            own = v1.get_variable("own", initializer=tf.constant([float(self.rank)]))
            shared = v1.get_variable("shared", initializer=hvd.broadcast(tf.constant([self.rank + 5.0]), 0))
            total = hvd.allreduce(own.initial_value + 1.0, op=hvd.Sum)
            self.run_thrice(session, shared.initializer)
            self.same(session.run(shared), [5.0])
            self.same(self.run_thrice(session, total), [sum(range(1, self.size + 1))])
            session.run(own.initializer)
            reduced = hvd.allreduce(own, op=hvd.Sum)
            (gradient,) = v1.gradients(reduced * (self.rank + 1.0), [own])
            self.same(self.run_thrice(session, reduced), [sum(range(self.size))])
            self.same(self.run_thrice(session, gradient), [sum(range(1, self.size + 1))])

    def test_in_loops_and_branches(self):
        graph, session = self.graph()
        with session, graph.as_default():

            def turn(i, total):
                return i + 1, total + hvd.allreduce(tf.ones([2]), op=hvd.Sum, name="turn")

            _, total = v1.while_loop(lambda i, _: i < 5, turn, [tf.constant(0), tf.zeros([2])])
            self.same(self.run_thrice(session, total, 5), [5.0 * self.size] * 2)
            taken = v1.placeholder(tf.bool, [])
            branch = v1.cond(taken, lambda: hvd.allreduce(tf.ones([2]), op=hvd.Sum, name="branch"), lambda: tf.zeros([2]))
            always = v1.cond(
                tf.constant(True), lambda: hvd.allreduce(tf.ones([1]), op=hvd.Sum, name="always"), lambda: tf.zeros([1])
            )
            for which in (True, False, True):
                before = self.asked()
                self.same(session.run(branch, {taken: which}), [self.size * which] * 2)
                self.assertEqual(self.asked() - before, int(which))
            self.same(self.run_thrice(session, always), [self.size])

    def test_within_functions(self):
        """A function of the graph, and one in a function, that take nothing but constants."""
        graph, session = self.graph()
        with session, graph.as_default():

            @tf.function
            def inner():
                return hvd.allreduce(tf.ones([2]), op=hvd.Max, name="inner")  # not carried out together with the other

            @tf.function
            def outer(x):
                return inner() + hvd.allreduce(x, op=hvd.Sum, name="outer")

            self.same(self.run_thrice(session, outer(tf.ones([2])), 2), [1.0 + self.size] * 2)

    def test_operations_meet_in_any_order(self):
        order = range(8) if self.rank % 2 else range(7, -1, -1)
        graph, session = self.graph()
        with session, graph.as_default():
            made = {i: hvd.allreduce(tf.fill([4], float(i)), op=hvd.Sum, name=f"order.{i}") for i in order}
            got = self.run_thrice(session, [made[i] for i in range(8)])
        self.same(got, [[i * self.size] * 4 for i in range(8)])

    def test_large_ones(self):
        graph, session = self.graph()
        with session, graph.as_default():
            x = tf.random.uniform([1 << 18], seed=3) * 0.0 + tf.cast(self.rank + 1, tf.float32)
            got = self.run_thrice(session, [x, hvd.allreduce(x, op=hvd.Sum)])
        self.same(got[0], np.full(1 << 18, self.rank + 1.0))
        self.same(got[1], np.full(1 << 18, sum(range(1, self.size + 1))))


class ByPython(Counting):
    """Also Adasum, which is done in Python."""

    def test_within_functions_there_is_an_order(self):
        order = range(4)
        graph, session = self.graph()
        with session, graph.as_default():

            @tf.function
            def step():
                return [hvd.allreduce(tf.fill([2], float(i)), op=hvd.Adasum, name=f"python.{i}") for i in order]

            got = self.run_thrice(session, step(), len(order))
        self.close(got, [[i] * 2 for i in order])

    def test_elsewhere_it_is_refused(self):
        graph, session = self.graph()
        with session, graph.as_default():
            with self.assertRaisesRegex(RuntimeError, "adasum 'allreduce.*TensorFlow 1.*tf.function"):
                hvd.allreduce(tf.ones([2]), op=hvd.Adasum)
            if _library.loaded() is None:
                with self.assertRaisesRegex(RuntimeError, "allreduce .*COHORT_TENSORFLOW_OP"):
                    hvd.allreduce(tf.ones([2]))


if __name__ == "__main__":
    unittest.main()
