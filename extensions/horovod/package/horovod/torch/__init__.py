"""`import horovod.torch as hvd`: all names are those of `cohort.horovod.torch`."""

from __future__ import annotations

from horovod import _names

with _names.needs_cohort(__name__):
    import cohort.horovod.torch as _hvd
    from cohort.horovod.torch import *  # noqa: F403

__getattr__, __dir__ = _names.passed_on(_hvd, globals())
