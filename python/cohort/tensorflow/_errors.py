"""What TensorFlow raises of a graph whose operation failed, as the error that it stands for."""

from __future__ import annotations

import re
from typing import Optional

import tensorflow as tf

from cohort._horovod.exceptions import HorovodInternalError

# How ops say it; TensorFlow puts its own words before and after.
MARK = "HorovodInternalError: "

_AFTER = re.compile(r"\n\nTraceback|\n\n  File|\n?\s*\[\[\{\{node|\s*\[Op:", re.DOTALL)


def as_internal_error(error: BaseException) -> Optional[HorovodInternalError]:
    """The HorovodInternalError that an error is or, raised by TensorFlow, tells of; None for all others."""
    if isinstance(error, HorovodInternalError):
        return error
    if not isinstance(error, tf.errors.OpError) or MARK not in (error.message or ""):
        return None
    text = error.message.split(MARK, 1)[1]
    internal = HorovodInternalError(_AFTER.split(text, maxsplit=1)[0].strip())
    internal.__cause__ = error
    return internal
