"""Converts errors of `fit` when ranks fail to Horovod's, whatever form the framework has given them."""

from __future__ import annotations

import contextlib
import sys
from typing import Iterator, Optional

from cohort.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt, retold
from cohort.errors import Error


def _known(error: Optional[BaseException]) -> Optional[BaseException]:
    """Returns Cohort's error among an exception and its causes."""
    for _ in range(50):  # the chain may be a cycle
        if error is None or isinstance(error, (HorovodInternalError, Error)):
            return error
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raises a failed operation as a HorovodInternalError, or a `cohort.Error` that is a ValueError too, while the
    context lasts. Leaves out the framework's own error, which says the same in a hundred lines."""
    try:
        yield
    except (HostsUpdatedInterrupt, Error):
        raise
    except Exception as error:
        known = _known(error) or _of_framework(error)
        if known is None:
            raise
        # Keras has removed the cause.
        raise known from getattr(known, "error", None) or known.__cause__


def _of_framework(error: Exception) -> Optional[BaseException]:
    """Returns the error that a framework has turned into text."""
    if type(error).__module__.startswith("tensorflow."):
        from cohort.tensorflow._errors import as_internal_error

        told = as_internal_error(error)
        return None if told is None else retold(str(told))
    if "jax" not in sys.modules:
        return None
    from cohort.jax._errors import as_internal_error as of_jax

    return of_jax(error)
