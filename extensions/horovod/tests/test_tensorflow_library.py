"""Operations of graphs by the op library: each rank of `cohort run -np N` runs this."""

import threading
import time
import unittest

import numpy as np
import tensorflow as tf
from support_tensorflow import Case, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort.tensorflow as hvd
from cohort.horovod.process_sets import global_process_set
from cohort.tensorflow import _library
from cohort.tensorflow._gradients import reduce_gradients


def batches():
    return global_process_set._engine.statistics()["batches"]


class Library(Case):
    def setUp(self):
        super().setUp()
        _library.loaded()

    def test_operations_of_constants_are_carried_out_each_time(self):
        for operation in (lambda: hvd.allreduce(tf.ones([2])), lambda: hvd.allgather(tf.ones([2])),
                          lambda: reduce_gradients([tf.ones([2])], ["constant"])[0]):  # fmt: skip
            whole = tf.function(operation)
            whole()
            hvd.barrier()
            before = batches()
            for _ in range(3):
                whole()
            self.assertGreaterEqual(batches() - before, 3)

    def test_ranks_differ_in_order(self):
        """Ranks call graphs in different orders, too."""
        order = range(8) if self.rank % 2 else range(7, -1, -1)

        @tf.function
        def step(x):
            with tf.name_scope(f"scope_{self.rank}"):
                return [(i, reduce_gradients([x * i], [f"order.{i}"], op=hvd.Sum)[0]) for i in order]

        for _ in range(2):
            for i, got in step(tf.constant([1.0])):
                self.same(got, [i * self.size])

    def test_threads_of_tensorflow_do_not_wait(self):
        """More operations than threads wait for another rank, and computations continue."""
        count = 4 * (tf.config.threading.get_inter_op_parallelism_threads() or 16)
        done = tf.Variable(0)

        @tf.function
        def step(x):
            waiting = [hvd.allreduce(x * i, op=hvd.Sum, name=f"waiting.{i}") for i in range(count)]
            done.assign_add(1)
            return tf.add_n(waiting)

        expected = self.size * sum(range(count))
        self.same(step(tf.constant([1.0])), [expected])
        if self.rank == 0:
            hvd.broadcast_object(None, 0, name="go")
            self.same(step(tf.constant([1.0])), [expected])
            return
        hvd.broadcast_object(None, 0, name="go")
        time.sleep(0.3)  # rank 0 waits for this rank meanwhile; the duration does not matter
        self.same(step(tf.constant([1.0])), [expected])
        self.same(done, 2)

    def test_python_is_not_needed(self):
        """Operations go on while a thread of this process holds Python's lock most of the time."""
        step = tf.function(lambda x: tf.add_n([hvd.allreduce(x, op=hvd.Sum, name=f"lock.{i}") for i in range(50)]))
        step(tf.ones([100]))
        stop = threading.Event()

        def hold():
            while not stop.is_set():
                sum(range(20_000))

        thread = threading.Thread(target=hold)
        thread.start()
        try:
            self.same(step(tf.ones([100])), np.full(100, 50 * self.size))
        finally:
            stop.set()
            thread.join()

    def test_a_loop_uses_its_names_again(self):
        """This also holds if its iterations do not wait for each other."""

        @tf.function
        def steps(x):
            total = tf.zeros_like(x)
            for i in tf.range(30):
                total += hvd.allreduce(x * tf.cast(i, x.dtype), op=hvd.Sum, name="loop")
            return total

        for _ in range(3):
            self.same(steps(tf.ones([3])), np.full(3, self.size * sum(range(30))))

    def test_many(self):
        @tf.function
        def steps(x):
            for _ in tf.range(100):
                results = [hvd.allreduce(x + i, op=hvd.Average, name=f"many.{i}") for i in range(50)]
                x = tf.add_n(results) / 50 - 24.5
            return x

        for _ in range(2):
            self.close(steps(tf.fill([16], 3.0)), np.full(16, 3.0))

    def test_large_ones_do_not_change_what_others_hold(self):
        """The result may use the input's memory, but only if nothing else reads the input."""

        @tf.function
        def step(x):
            y = x * 2
            return y, reduce_gradients([y], ["shared"], op=hvd.Sum)[0]

        x = tf.fill([1 << 20], float(self.rank + 1))
        own, total = step(x)
        self.same(own, np.full(1 << 20, 2.0 * (self.rank + 1)))
        self.same(total, np.full(1 << 20, 2.0 * sum(range(1, self.size + 1))))
        again = tf.function(lambda x: reduce_gradients([x], ["shared"], op=hvd.Sum)[0])
        again(x)
        self.same(x, np.full(1 << 20, self.rank + 1.0))

    def test_a_graph_outlives_a_world(self):
        step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="worlds"))
        self.same(step(tf.ones([2])), [self.size] * 2)
        hvd.shutdown()
        with self.assertRaises(tf.errors.OpError) as raised:
            step(tf.ones([2]))
        self.assertIsNotNone(hvd.as_internal_error(raised.exception))
        hvd.init()
        self.same(step(tf.ones([2])), [self.size] * 2)

    def test_a_saved_model_has_the_operations(self):
        """A model whose step has an operation can be saved and loaded."""

        class Model(tf.Module):
            @tf.function(input_signature=[tf.TensorSpec([2], tf.float32)])
            def step(self, x):
                return hvd.allreduce(x, op=hvd.Sum, name="saved")

        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            tf.saved_model.save(Model(), folder)
            self.same(tf.saved_model.load(folder).step(tf.ones([2])), [self.size] * 2)


if __name__ == "__main__":
    unittest.main()
