"""The names of cohort.tensorflow, worlds of one, and ranks that end. Runs programs of its own under `cohort run`."""

import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from unittest import mock

import numpy as np
import tensorflow as tf

import cohort.tensorflow as hvd
from cohort.tensorflow import _library

SECONDS = 120
COMMAND = os.environ.get("COHORT_COMMAND", "cohort")

# Order of arguments on which programs rely.
_REDUCE = "average device_dense device_sparse compression op prescale_factor postscale_factor"
SIGNATURES = {
    "allreduce": f"tensor {_REDUCE} name process_set ignore_name_scope",
    "grouped_allreduce": f"tensors {_REDUCE} process_set ignore_name_scope name",
    "allgather": "tensor name ignore_name_scope process_set",
    "grouped_allgather": "tensors name ignore_name_scope process_set",
    "broadcast": "tensor root_rank name ignore_name_scope process_set",
    "broadcast_": "variables root_rank name process_set",
    "alltoall": "tensor splits name ignore_name_scope process_set",
    "broadcast_variables": "variables root_rank process_set inplace",
    "broadcast_object": "obj root_rank session name process_set",
    "broadcast_object_fn": "root_rank session name process_set",
    "allgather_object": "obj session name process_set",
    "DistributedGradientTape": "gradtape device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor "
    "num_groups groups process_set scale_local_gradients",
    "DistributedOptimizer": "optimizer name use_locking device_dense device_sparse compression sparse_as_dense "
    "backward_passes_per_step op gradient_predivide_factor average_aggregated_gradients num_groups groups process_set "
    "scale_local_gradients",
    "size_op": "process_set_id name",
    "rank_op": "name",
    "init": "comm process_sets",
}


class Names(unittest.TestCase):
    def test_signatures(self):
        for name, words in SIGNATURES.items():
            with self.subTest(name=name):
                self.assertEqual(list(inspect.signature(getattr(hvd, name)).parameters), words.split())

    def test_all(self):
        for name in hvd.__all__:
            self.assertTrue(hasattr(hvd, name), name)
        self.assertIs(hvd.mpi_ops._check_has_gpu(), bool(tf.config.list_physical_devices("GPU")))


class Alone(unittest.TestCase):
    def setUp(self):
        hvd.init()
        self.addCleanup(hvd.shutdown)

    def test_operations(self):
        x = tf.constant([[1.0, 2.0], [3.0, 4.0]])

        def each():
            return (hvd.allreduce(x), hvd.allgather(x), hvd.broadcast(x, 0), hvd.alltoall(x), hvd.reducescatter(x),
                    hvd.allreduce(x, op=hvd.Max), hvd.allreduce(x, prescale_factor=2.0, postscale_factor=0.5))  # fmt: skip

        for results in (each(), tf.function(each)(), tf.function(each)()):
            for result in results:
                np.testing.assert_array_equal(result, x)
        self.assertEqual(int(hvd.join()), 0)

    def test_without_the_library_graphs_say_how_to_get_it(self):
        _library._load.cache_clear()
        self.addCleanup(_library._load.cache_clear)
        with mock.patch.object(_library, "_PATH", "/nowhere/_tensorflow_op.so"):
            with self.assertRaisesRegex(RuntimeError, "op library.*nowhere.*cohort_python"):
                tf.function(lambda: hvd.allreduce(tf.ones([2])))()
            np.testing.assert_array_equal(hvd.allreduce(tf.ones([2])), [1.0, 1.0])

    def test_graphs_of_tensorflow_1_are_refused(self):
        with tf.Graph().as_default():
            for operation in (lambda: hvd.allreduce(tf.ones([2])), lambda: hvd.broadcast_variables([tf.Variable(1.0)], 0)):
                with self.assertRaisesRegex(RuntimeError, "TensorFlow 1 are not supported"):
                    operation()

    @unittest.skipIf("LD_PRELOAD" in os.environ, "a sanitizer's library comes first")
    @unittest.skipUnless(shutil.which("cc"), "no C compiler")
    def test_another_standard_library_is_refused(self):
        """Simulated by a `dladdr` that finds nothing, so that the op library cannot identify TensorFlow's std::function."""
        program = """
            import tensorflow as tf, cohort.tensorflow as hvd
            hvd.init()
            try:
                print("RESULT", tf.function(lambda: hvd.allreduce(tf.ones([2])))().numpy())
            except tf.errors.OpError as error:
                print("REFUSED", hvd.as_internal_error(error))
        """
        with tempfile.TemporaryDirectory() as folder:
            library = os.path.join(folder, "no_dladdr.so")
            subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"], check=True, text=True,
                           input="int dladdr(const void* at, void* found) { (void)at, (void)found; return 0; }")  # fmt: skip
            done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], text=True, timeout=SECONDS,
                                  env={**os.environ, "LD_PRELOAD": library},
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
            self.assertRegex(done.stdout, "REFUSED.*libstdc.*PyPI")

    def test_a_compiled_function_says_why_not(self):
        with self.assertRaisesRegex(tf.errors.OpError, "Cohort|unsupported|XLA"):
            tf.function(lambda: hvd.allreduce(tf.ones([2])), jit_compile=True)()

    def test_no_world(self):
        hvd.shutdown()
        for way in (lambda f: f, tf.function):
            with self.assertRaises(Exception) as raised:
                way(lambda: hvd.allreduce(tf.ones([2])))()
            self.assertRegex(str(hvd.as_internal_error(raised.exception)), "^there is no world.*init")
        with self.assertRaises(ValueError):
            hvd.rank()


class Ranks(unittest.TestCase):
    def run_ranks(self, program, ranks=2, options=(), **variables):
        """Runs a program of `ranks` ranks, and returns (status, output)."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        head = """
            import os, signal, sys, threading, time
            import tensorflow as tf
            import cohort.tensorflow as hvd
            hvd.init()
            rank, size = hvd.rank(), hvd.size()
        """
        path = os.path.join(folder.name, "program.py")
        with open(path, "w") as file:
            file.write((textwrap.dedent(head) if not options else "") + textwrap.dedent(program))
        command = [COMMAND, "run", "-q", "--prefix", "none", "-np", str(ranks), *options, "--", sys.executable, path]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "COHORT_TIMEOUT": "20", **variables}
        done = subprocess.run(command, cwd=folder.name, env=environment, text=True, timeout=SECONDS,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        return done.returncode, done.stdout

    def test_a_rank_that_dies_is_named(self):
        program = """
            step = tf.function(lambda x: hvd.allreduce(x, name="step"))
            step(tf.ones([4]))
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            try:
                while True:
                    step(tf.ones([4]))
            except tf.errors.OpError as error:
                print("TOLD", round(time.monotonic() - began), hvd.as_internal_error(error), flush=True)
        """
        began = time.monotonic()
        status, out = self.run_ranks(program)
        self.assertNotEqual(status, 0)
        self.assertRegex(out, r"TOLD \d .*rank 1", out)
        self.assertLess(time.monotonic() - began, 60)

    def test_the_timeline_has_operations_of_graphs(self):
        program = """
            @tf.function
            def step(x):
                return hvd.allreduce(x, name="graph"), hvd.allgather(x, name="rows")

            for turn in range(3):
                if rank == 1:
                    time.sleep(0.05)  # that rank 0 waits for it is what the first row tells
                step(tf.ones([4]))
            hvd.allreduce(tf.ones([4]), name="eager")
            try:
                tf.function(lambda: hvd.allreduce(tf.ones([1 + rank]), name="wrong"))()
            except tf.errors.OpError:
                pass
            hvd.shutdown()
        """
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "timeline.json")
            status, out = self.run_ranks(program, HOROVOD_TIMELINE=path)
            self.assertEqual(status, 0, out)
            with open(path) as file:
                events = json.load(file)
        rows = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
        seen = {name: [(event["name"], event["ph"]) for event in events if event["pid"] == row and event["ph"] != "M"]
                for name, row in rows.items()}  # fmt: skip
        once = [("NEGOTIATE_ALLREDUCE", "X"), ("ALLREDUCE", "X")]
        self.assertEqual(seen["allreduce.graph"], once * 3)
        self.assertEqual(seen["allreduce.eager"], once)
        self.assertEqual(seen["allgather.rows"][1::2], [("ALLGATHER", "X")] * 3)
        self.assertEqual(seen["allreduce.wrong"][-1], ("FAILED", "i"))
        waits = [event["dur"] for event in events if event["pid"] == rows["allreduce.graph"] and event["name"] == "NEGOTIATE_ALLREDUCE"]
        self.assertGreater(max(waits), 10_000)

    def test_the_end_with_operations_under_way(self):
        program = """
            step = tf.function(lambda x, name="never": hvd.allreduce(x, name=f"never.{rank}"))
            threading.Thread(target=step, args=(tf.ones([4]),), daemon=True).start()
            hvd.barrier()
            print("END", rank, flush=True)
        """
        status, out = self.run_ranks(program, COHORT_TIMEOUT="60")
        self.assertEqual((status, out.count("END")), (0, 2), out)

    def test_an_exception_of_one_rank_ends_all(self):
        program = """
            def layer(x):
                if rank == 1:
                    raise RuntimeError("no good")
                return x

            @tf.function
            def step(x):
                return hvd.allreduce(tf.py_function(layer, [x], tf.float32), name="step")

            step(tf.ones([4]))
        """
        status, out = self.run_ranks(program)
        self.assertNotEqual(status, 0)
        self.assertIn("no good", out)
        self.assertIn("rank 1", out)

    def test_as_horovod(self):
        program = """
            import horovod.tensorflow as hvd
            import tensorflow as tf
            from horovod.tensorflow.compression import Compression
            from horovod.tensorflow.elastic import TensorFlowKerasState, run
            from horovod.tensorflow.functions import broadcast_variables
            from horovod.tensorflow.mpi_ops import _basics, allgather, rank
            from horovod.tensorflow.util import _executing_eagerly, refs_to_vars, vars_to_refs
            from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
            from horovod.common.util import extension_available, gpu_available
            hvd.init()
            with tf.GradientTape() as tape:
                x = tf.Variable([1.0])
                loss = x * (hvd.rank() + 1)
            tape = hvd.DistributedGradientTape(tape, compression=Compression.fp16)
            assert hvd._executing_eagerly() and _executing_eagerly() and _basics.size() == 2
            assert refs_to_vars(vars_to_refs([x, [x]]))[1][0] is x
            print("GRADIENT", tape.gradient(loss, [x])[0].numpy(), extension_available("tensorflow"), rank() < 2)
        """
        status, out = self.run_ranks(program, options=("--as-horovod",))
        self.assertEqual((status, out.count("GRADIENT [1.5] True True")), (0, 2), out)


if __name__ == "__main__":
    unittest.main()
