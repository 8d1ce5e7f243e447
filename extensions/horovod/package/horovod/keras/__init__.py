"""`import horovod.keras as hvd`: all names are those of `cohort.keras`."""

from __future__ import annotations

from horovod import _names

with _names.needs_cohort(__name__):
    import cohort.keras as _hvd
    from cohort.keras import *  # noqa: F403
    from cohort.keras import _training

# Programs that were written for Keras 2 give `compile` arguments that Keras 3 refuses.
_training.drop_old_arguments = True

__getattr__, __dir__ = _names.passed_on(_hvd, globals())
