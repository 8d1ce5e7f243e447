"""Converts errors that JAX raises when an operation of a compiled program fails to the operation's own errors."""

from __future__ import annotations

import re
from typing import Optional

import jax

from cohort.horovod.exceptions import HorovodInternalError, retold

# XLA's name for the kind of error, then the text of a cohort.Error. If a program calls back into Python,
# that text is the last line of a traceback.
_TOLD = re.compile(r"(?:UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNKNOWN): (.*)", re.DOTALL)
_CALLED_BACK = re.compile(r"HorovodInternalError: ([^\n]*)")


def as_internal_error(error: BaseException) -> Optional[HorovodInternalError]:
    """Returns the HorovodInternalError of an error: the error itself, or the cause of one raised by JAX; None for
    others. A `cohort.Error` that names a lost rank is the `__cause__` of the result."""
    if isinstance(error, HorovodInternalError):
        return error
    if not isinstance(error, (jax.errors.JaxRuntimeError, ValueError)):
        return None
    found = _CALLED_BACK.search(str(error)) or _TOLD.match(str(error))
    if found is None or not ("-- rank " in found[1] or "on all ranks" in found[1]):
        return None
    return retold(found[1])
