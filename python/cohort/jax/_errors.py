"""Converts errors that JAX raises as an operation of a compiled program fails: to the errors that they stand for."""

from __future__ import annotations

import re
from typing import Optional

import jax

from cohort.hvd.exceptions import HorovodInternalError, retold

# XLA's name of the kind, then the text of a cohort.Error, which says on which rank. If a program calls back into
# Python, that is the last line of a traceback.
_TOLD = re.compile(r"(?:UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNKNOWN): (.*)", re.DOTALL)
_CALLED_BACK = re.compile(r"HorovodInternalError: ([^\n]*)")


def as_internal_error(error: BaseException) -> Optional[HorovodInternalError]:
    """The HorovodInternalError that an error is or, raised by JAX, stands for; None for all others. The `cohort.Error`
    that names a lost rank is its `__cause__`."""
    if isinstance(error, HorovodInternalError):
        return error
    if not isinstance(error, (jax.errors.JaxRuntimeError, ValueError)):
        return None
    found = _CALLED_BACK.search(str(error)) or _TOLD.match(str(error))
    if found is None or not ("-- rank " in found[1] or "on all ranks" in found[1]):
        return None
    return retold(found[1])
