"""`import horovod.tensorflow as hvd`: all names are those of `cohort.tensorflow`."""

from __future__ import annotations

try:
    import cohort.tensorflow as _hvd
except ImportError as _error:
    if (_error.name or "").split(".")[0] != "cohort":
        raise
    raise ImportError(
        "horovod.tensorflow is here in Cohort's version, and the package it needs, cohort, is not -- `pip install .` in a clone "
        f"of Cohort installs it for this Python -- {_error}",
        name=_error.name,
    ) from _error

from cohort.tensorflow import *  # noqa: F403
from horovod.tensorflow.util import _executing_eagerly  # noqa: F401


def __getattr__(name: str) -> object:
    return getattr(_hvd, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_hvd)})
