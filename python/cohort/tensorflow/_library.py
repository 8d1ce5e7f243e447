"""The op library, by which graphs ask for operations without Python. Where it cannot be used, why is said once."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import warnings
from typing import Any, Optional

import tensorflow as tf

from cohort import _core

_PATH = pathlib.Path(_core.__file__).with_name("_tensorflow_op.so")


@functools.lru_cache(maxsize=None)
def loaded() -> Optional[Any]:
    """The module with its operations; None where graphs have to call Python, which was asked for or is warned of."""
    if _core.environment_value("COHORT_TENSORFLOW_OP") is False:
        return None
    try:
        return _load()
    except Exception as error:
        warnings.warn(
            "cohort.tensorflow: graphs call back into Python for their operations, one after another, which takes longer -- "
            f"{error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


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
    return operations
