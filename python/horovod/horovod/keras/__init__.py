"""`import horovod.keras as hvd`: all names are those of `cohort.keras`."""

from __future__ import annotations

try:
    import cohort.keras as _hvd
except ImportError as _error:
    if (_error.name or "").split(".")[0] != "cohort":
        raise
    raise ImportError(
        "horovod.keras is here in Cohort's version, and the package it needs, cohort, is not -- `pip install .` in a clone "
        f"of Cohort installs it for this Python -- {_error}",
        name=_error.name,
    ) from _error

from cohort.keras import *  # noqa: F403
from cohort.keras import _training

# Programs that were written for Keras 2 give `compile` what Keras 3 refuses.
_training.drop_old_arguments = True


def __getattr__(name: str) -> object:
    return getattr(_hvd, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_hvd)})
