"""Finds Keras with each backend for the tests: in the folders that tools/setup --for all makes below build/, in this
Python, or with the interpreters that COHORT_TEST_KERAS names: "tensorflow=/path/to/python torch=/other/python
jax=/third/python"."""

import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys

BUILD = pathlib.Path(__file__).resolve().parents[3] / "build"
# By backend: its programs' environment, the modules that they need, and the folders to search.
BACKENDS = {
    "tensorflow": ({"KERAS_BACKEND": "tensorflow"}, ["keras", "tensorflow"], ["tensorflow/2.21"]),
    "torch": ({"KERAS_BACKEND": "torch"}, ["keras", "torch"], ["keras"]),
    "jax": ({"KERAS_BACKEND": "jax"}, ["keras", "jax"], ["jax"]),
    "tf_keras": ({"TF_USE_LEGACY_KERAS": "1"}, ["tf_keras", "tensorflow"], ["tensorflow/2.21", "tf_keras"]),
}


# A program of tf_keras that `cohort run --tf-config` starts.
STRATEGY = """
import json, os
import numpy, tensorflow, tf_keras
strategy = tensorflow.distribute.MultiWorkerMirroredStrategy()
x = numpy.random.default_rng(1).normal(size=(64, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
with strategy.scope():
    model = tf_keras.Sequential([tf_keras.layers.Dense(8, activation="tanh"), tf_keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = tensorflow.data.Dataset.from_tensor_slices((x, y)).batch(16)
losses = model.fit(data, epochs=2, verbose=0).history["loss"]
workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
print("TRAINED", os.environ["RANK"], strategy.num_replicas_in_sync, len({one.rsplit(":", 1)[0] for one in workers}),
      losses[1] < losses[0], float(sum(numpy.abs(w).sum() for w in model.get_weights())), flush=True)
"""


@functools.lru_cache(maxsize=None)
def place_of(backend):
    """Returns (interpreter, folders for PYTHONPATH) that have Keras with this backend, or None."""
    _, modules, below = BACKENDS[backend]
    named = dict(one.split("=", 1) for one in os.environ.get("COHORT_TEST_KERAS", "").split())
    folders = [str(BUILD / one) for one in below if (BUILD / one).is_dir()]
    for python, path in [(named.get("tensorflow" if backend == "tf_keras" else backend), []), (sys.executable, folders)]:
        if python and shutil.which(python) and _has(python, path, modules):
            return python, path
    return None


def _has(python, folders, modules):
    """Returns True if the interpreter has the modules, and is the Python that the compiled module is for."""
    looks = (
        "import sys, importlib.util as u; "
        "sys.exit(sys.implementation.cache_tag != sys.argv[1] or any(u.find_spec(m) is None for m in sys.argv[2:]))"
    )
    command = [python, "-c", looks, sys.implementation.cache_tag, *modules]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(folders))
    return subprocess.run(command, stderr=subprocess.DEVNULL, env=env).returncode == 0


def environment(backend, with_cohort=True, **more):
    """Returns the environment for a program that uses that Keras."""
    path = [*place_of(backend)[1], *([os.environ.get("PYTHONPATH", "")] if with_cohort else [])]
    return dict(os.environ, **BACKENDS[backend][0], PYTHONPATH=os.pathsep.join(path), TF_CPP_MIN_LOG_LEVEL="3",
                OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **more)  # fmt: skip


def ranks(backend, folder, script, *options, count=2, seconds=400):
    """Returns the command that runs a script on `count` ranks."""
    return [os.environ.get("COHORT_COMMAND", "cohort"), "run", "-q", "-np", str(count), "--prefix", "none", "--run-dir",
            f"{folder}/run", "--timeout", str(seconds), *options, "--", place_of(backend)[0], str(script)]  # fmt: skip


def finish(words, folder, env, seconds):
    """Runs a command. Returns its exit status, and what it and its children printed. Processes left after `seconds` are
    killed."""
    process = subprocess.Popen(words, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    try:
        text = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text = process.communicate()[0] + f"\nkilled after {seconds} s"
    return process.returncode, text


MISSING = "no Keras with {}: tools/setup --for all"
