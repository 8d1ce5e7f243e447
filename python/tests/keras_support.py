"""Where the tests find Keras: an interpreter for each backend."""

import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BACKENDS = {
    "tensorflow": {"KERAS_BACKEND": "tensorflow"},
    "torch": {"KERAS_BACKEND": "torch"},
    "jax": {"KERAS_BACKEND": "jax"},
    "tf_keras": {"TF_USE_LEGACY_KERAS": "1"},
}
_MODULES = {"tensorflow": "keras, tensorflow", "torch": "keras, torch", "jax": "keras, jax", "tf_keras": "tf_keras"}


@functools.lru_cache(maxsize=None)
def python_of(backend):
    """The interpreter that has Keras with this backend, or None."""
    named = dict(one.split("=", 1) for one in os.environ.get("COHORT_TEST_KERAS", "").split())
    folder = "tensorflow" if backend == "tf_keras" else backend
    for python in (named.get(folder), str(ROOT / "build" / f"keras-{folder}" / "bin" / "python"), sys.executable):
        if python and shutil.which(python) and _has(python, _MODULES[backend]):
            return python
    return None


def _has(python, modules):
    """Whether they are installed there, for the same Python as the compiled module's."""
    looks = "import sys, importlib.util as u; sys.exit(any(u.find_spec(m) is None for m in sys.argv[2].split(', ')) or " \
            "sys.implementation.cache_tag != sys.argv[1])"  # fmt: skip
    return subprocess.run([python, "-c", looks, sys.implementation.cache_tag, modules], stderr=subprocess.DEVNULL,
                          env=dict(os.environ, PYTHONPATH="")).returncode == 0  # fmt: skip


def environment(backend, **more):
    """For a program of that Keras's."""
    return dict(os.environ, **BACKENDS[backend], TF_CPP_MIN_LOG_LEVEL="3", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
                PYTHONWARNINGS="ignore::DeprecationWarning", **more)  # fmt: skip


def finish(words, folder, env, seconds):
    """Runs a command; its exit status, and what it and its children printed. Whatever is left after `seconds` is killed."""
    process = subprocess.Popen(words, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    try:
        text = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text = process.communicate()[0] + f"\nkilled after {seconds} s"
    return process.returncode, text
