"""The op library, by which graphs run operations without Python."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import sys
import threading
import time
from typing import Any

import tensorflow as tf

from cohort import _core
from cohort._process import world as _world

_PATH = pathlib.Path(_core.__file__).with_name("_tensorflow_op.so")


def loaded() -> Any:
    """Returns the module with its operations. Raises RuntimeError if the library cannot be loaded."""
    try:
        return _load()
    except Exception as error:
        raise RuntimeError(
            f"cohort.tensorflow: graphs need the op library, which cannot be loaded -- {error} -- install Cohort's wheel, which "
            "has it, or build the target cohort_python; with TensorFlow 2.12 or newer from PyPI"
        ) from error


@functools.lru_cache(maxsize=None)
def _load() -> Any:
    operations = tf.load_op_library(str(_PATH))
    library = ctypes.CDLL(str(_PATH))
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    library.cohort_tensorflow_use.restype = ctypes.c_char_p
    library.cohort_tensorflow_use.argtypes = [ctypes.c_void_p]
    problem = library.cohort_tensorflow_use(pointer_of(_core.named_calls(), b"cohort.named_calls"))
    if problem:
        raise RuntimeError(problem.decode())
    _world.once_left.append(_let_threads_return)
    return operations


def _let_threads_return(seconds: float = 2.0) -> None:
    """Called at the end of the process, when operations under way have failed: waits for threads to leave TensorFlow. Python
    ends threads that leave it later, which ends the process, because C++ on their stacks does not allow it."""
    end = time.monotonic() + seconds
    own = threading.get_ident()
    while time.monotonic() < end:
        frames = [frame for thread, frame in sys._current_frames().items() if thread != own]
        if not any(map(_is_within, frames)):
            return
        time.sleep(0.01)


def _is_within(frame: Any) -> bool:
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("tensorflow."):
        frame = frame.f_back
    return frame is not None
