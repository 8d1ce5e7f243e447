"""`import horovod.tensorflow as hvd`: all names are those of `cohort.tensorflow`."""

from __future__ import annotations

from horovod import _names

with _names.needs_cohort(__name__):
    import cohort.tensorflow as _hvd
    from cohort.tensorflow import *  # noqa: F403
from horovod.tensorflow.util import _executing_eagerly  # noqa: F401

__getattr__, __dir__ = _names.passed_on(_hvd, globals())
