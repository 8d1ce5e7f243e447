"""`fit` of `cohort.keras` when a rank is killed, raises, or leaves the world. The others name it within seconds; with each
backend that is found."""

import pathlib
import tempfile
import time
import unittest

from keras_support import BACKENDS, MISSING, environment, finish, place_of, ranks

HEAD = """
import os, signal, sys, time
import numpy as np
import cohort
import cohort.keras as hvd
if os.environ.get("TF_USE_LEGACY_KERAS") == "1":
    import tf_keras as keras
else:
    import keras
hvd.init()
rank = hvd.rank()
keras.utils.set_random_seed(1)
x, y = np.ones((64, 6), "float32"), np.ones((64, 1), "float32")

class At(keras.callbacks.Callback):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and rank == 1:
            print(f"HARM {time.monotonic()}", flush=True)
            self.call()

def fit(call, layers=(), callbacks=()):
    model = keras.Sequential([keras.layers.Input((6,)), *layers, keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    model.fit(x, y, batch_size=8, epochs=1000, verbose=0,
              callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), At(call), *callbacks])
"""

KILLED = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it comes half a second after the kill: on a busy machine, before the error
try:
    fit(lambda: os.kill(os.getpid(), signal.SIGKILL))
except hvd.HorovodInternalError as error:
    said = time.monotonic()
    cause = error.__cause__
    while cause is not None and not isinstance(cause, cohort.Error):
        cause = cause.__cause__
    print(f"SAID {said} {type(cause).__name__} {str(error)[:300]!r}", flush=True)
    raise
"""

RAISES = """
def fail():
    raise ValueError("the program's own mistake")

fit(fail)
"""

# The layer fails on only one rank, in the middle of its step; that rank prints a line when it raises.
IN_A_LAYER = """
class Bad(keras.layers.Layer):
    def call(self, x):
        if rank == 1:
            print(f"HARM {time.monotonic()}", flush=True)
            raise ValueError("this layer is wrong")
        return x

    def compute_output_shape(self, shape):
        return shape

fit(lambda: None, layers=[Bad()])
"""

LEAVES = """
if rank == 1:
    time.sleep(1)
    print(f"HARM {time.monotonic()}", flush=True)
    hvd.shutdown()
    print("LEFT", flush=True)
else:
    try:
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
        model.fit(x, y, epochs=1000, verbose=0)
    except hvd.HorovodInternalError as error:
        print(f"SAID {time.monotonic()} {str(error)[:300]!r}", flush=True)
"""


class Ends:
    backend = ""
    LIMIT = 30.0  # seconds until all ranks know and the job is over, on a loaded machine

    def setUp(self):
        if place_of(self.backend) is None:
            self.skipTest(MISSING.format(self.backend))
        folder = tempfile.TemporaryDirectory(prefix="cohort-keras-test-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def run_ranks(self, text):
        script = pathlib.Path(self.folder, "program.py")
        script.write_text(HEAD + text)
        words = ranks(self.backend, self.folder, script, "--grace", "20", seconds=200)
        status, said = finish(words, self.folder, environment(self.backend), 240)
        ended = time.monotonic()
        harm = [float(line.split()[1]) for line in said.splitlines() if line.startswith("HARM ")]
        self.assertTrue(harm, said[-6000:])
        self.assertLess(ended - harm[0], self.LIMIT, said[-6000:])
        return status, said

    def test_a_rank_that_is_killed(self):
        status, said = self.run_ranks(KILLED)
        self.assertNotEqual(status, 0)
        self.assertIn("rank 1 failed: killed by SIGKILL", said)
        told = [line for line in said.splitlines() if line.startswith("SAID ")]
        self.assertEqual(len(told), 1, said[-6000:])
        self.assertRegex(told[0], "PeerLost|Aborted", said[-6000:])
        self.assertIn("rank 1", told[0])

    def test_a_rank_that_raises(self):
        status, said = self.run_ranks(RAISES)
        self.assertNotEqual(status, 0)
        self.assertIn("rank 1 failed", said)
        self.assertIn("the program's own mistake", said)

    def test_a_layer_that_raises_on_one_rank(self):
        status, said = self.run_ranks(IN_A_LAYER)
        self.assertNotEqual(status, 0)
        self.assertIn("rank 1 failed", said)
        self.assertIn("this layer is wrong", said)

    def test_a_rank_that_leaves(self):
        status, said = self.run_ranks(LEAVES)
        self.assertEqual(status, 0, said[-6000:])
        self.assertIn("SAID", said)
        self.assertIn("rank 1", said)


for _backend in BACKENDS:
    _name = "".join(word.capitalize() for word in _backend.split("_"))
    globals()[_name] = type(_name, (Ends, unittest.TestCase), {"backend": _backend})
del _backend


if __name__ == "__main__":
    unittest.main()
