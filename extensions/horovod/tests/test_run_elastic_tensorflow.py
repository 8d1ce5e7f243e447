"""Elastic jobs of programs that train by horovod.tensorflow and horovod.keras. A rank is killed within a step, others join,
and compiled functions continue in the next world."""

import os
import pathlib
import re
import tempfile
import unittest

from test_run_elastic import Job

# A file "kill N" ends worker N within a step, while the others wait for its gradients. `tell` is called after each step.
COMMON = """
import hashlib, os, signal, sys, time
import numpy as np
import tensorflow as tf
from cohort import _core

FOLDER, WORKER = os.environ["FOLDER"], os.environ["COHORT_WORKER"]
tf.random.set_seed(int(WORKER))

def killed():
    def look():
        if os.path.exists(os.path.join(FOLDER, "kill " + WORKER)):
            os.kill(os.getpid(), signal.SIGKILL)
    tf.numpy_function(look, [], [])

def tell(hvd, step, variables):
    digest = hashlib.sha256(b"".join(np.asarray(one).tobytes() for one in variables)).hexdigest()[:12]
    print("step", time.monotonic_ns(), _core.formed_epoch(), step, hvd.rank(), hvd.size(), digest, flush=True)
    time.sleep(0.02)
"""

LOOP = """
import horovod.tensorflow as hvd

hvd.init()
model = tf.keras.Sequential([tf.keras.Input((8,)), tf.keras.layers.Dense(4)])
optimizer = tf.keras.optimizers.Adam(0.01)
if BY_OPTIMIZER:
    optimizer = hvd.DistributedOptimizer(optimizer)
optimizer.build(model.trainable_variables)

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - 1.0))
    killed()
    if not BY_OPTIMIZER:
        tape = hvd.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return hvd.allreduce(tf.ones([]), op=hvd.Sum), hvd.size_op()

state = STATE

@hvd.elastic.run
def train(state):
    while not hvd.broadcast_object(os.path.exists(os.path.join(FOLDER, "stop")), 0, name="stop"):
        found = [int(one) for one in (*step(tf.ones([2, 8]) * (hvd.rank() + 1.0)), hvd.allreduce(tf.ones([]), op=hvd.Sum))]
        assert found == [hvd.size()] * 3, found
        state.step += 1
        tell(hvd, state.step, [*model.variables, *optimizer.variables])
        state.commit()

train(state)
"""
OF_MODEL = "hvd.elastic.TensorFlowKerasState(model, optimizer, step=0)"
OF_VARIABLES = "hvd.elastic.TensorFlowState([*model.variables, *optimizer.variables], step=0)"


def loop(state, by_optimizer=False):
    return COMMON + f"BY_OPTIMIZER = {by_optimizer}" + LOOP.replace("STATE", state)


# An epoch has 20 steps.
FIT = (
    COMMON
    + """
import keras
import horovod.keras as hvd

hvd.init()

class Model(keras.Sequential):
    def train_step(self, data):
        killed()
        return super().train_step(data)

model = Model([keras.Input((8,)), keras.layers.Dense(4)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
state = hvd.elastic.KerasState(model, step=0, batch=0, epoch=0)

class Tell(keras.callbacks.Callback):
    async_safe = False

    def on_train_batch_end(self, batch, logs=None):
        state.step += 1
        tell(hvd, state.step, [*model.weights, *model.optimizer.variables])

    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, state.epoch, flush=True)
        self.model.stop_training = os.path.exists(os.path.join(FOLDER, "stop"))

@hvd.elastic.run
def train(state):
    print("begin", state.epoch, flush=True)
    callbacks = [Tell(), hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state),
                 hvd.elastic.CommitStateCallback(state)]
    x = np.ones((40, 8), "float32") * (hvd.rank() + 1)
    model.fit(x, np.ones((40, 4), "float32"), batch_size=2, initial_epoch=state.epoch, epochs=10000, callbacks=callbacks, verbose=0)

train(state)
"""
)


class Elastic(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.hosts = pathlib.Path(folder.name) / "hosts"

    def listed(self, text):
        self.hosts.with_name("new").write_text(text)
        os.replace(self.hosts.with_name("new"), self.hosts)

    def job(self, script, *options):
        return Job("--starter", "local", "--host-discovery-script", f"cat {self.hosts}", *options, script=script)

    def end(self, job, *workers):
        self.assertEqual(job.stop(), 0, job.said())
        job.check(self, *workers)

    def killed_and_refilled(self, script):
        """Returns the logs of workers 0 to 3; worker 1 is killed, and worker 3 joins."""
        self.listed("a:3")
        with self.job(script, "--min-np", "2", "-np", "3", "--blacklist-cooldown-range", "1", "2") as job:
            for worker in range(3):
                job.wait_for_step(worker, 0, worker, 3)
            (job.path / "kill 1").touch()
            for rank, worker in enumerate((0, 2)):
                job.wait_for_step(worker, 1, rank, 2)
            for rank, worker in enumerate((0, 2, 3)):
                job.wait_for_step(worker, 2, rank, 3)
            self.end(job, 0, 1, 2, 3)
            return [job.log(worker) for worker in range(4)]

    def grown_from_one(self, script):
        """Graphs compiled for one rank reduce when other ranks join."""
        self.listed("a")
        with self.job(script, "--min-np", "1") as job:
            job.wait_for_step(0, 0, 0, 1)
            self.listed("a\nb:2")
            for worker in range(3):
                job.wait_for_step(worker, 1, worker, 3)
            self.end(job, 0, 1, 2)

    def test_a_loop_goes_on(self):
        self.killed_and_refilled(loop(OF_MODEL))

    def test_a_loop_of_one_rank_grows(self):
        for by_optimizer in (False, True):
            with self.subTest(by_optimizer=by_optimizer):
                self.grown_from_one(loop(OF_VARIABLES, by_optimizer))

    def test_fit_goes_on(self):
        for log in self.killed_and_refilled(FIT):
            # All ranks count epochs alike and without a break, also a rank that joined later.
            found = re.findall(r"^(begin|epoch) (\d+)(?: (\d+))?$", log, re.MULTILINE)
            self.assertEqual(found[0][0], "begin")
            for (_, before, _), (what, epoch, done) in zip(found, found[1:]):
                if what == "epoch":
                    self.assertEqual(epoch, done, found)
                self.assertIn(int(epoch) - int(before), (0, 1), found)

    def test_fit_of_one_rank_grows(self):
        self.grown_from_one(FIT)


if __name__ == "__main__":
    unittest.main()
