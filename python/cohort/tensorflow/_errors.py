"""What TensorFlow raises as a graph is made, or run, and an operation fails: as the error that it stands for."""

from __future__ import annotations

import re
from typing import Optional

from cohort._horovod.exceptions import HorovodInternalError

# How ops say it; TensorFlow puts its own words before and after.
MARK = "HorovodInternalError: "

_AFTER = re.compile(r"\n\nTraceback|\n\n  File|\n?\s*\[\[\{\{node|\s*\[Op:", re.DOTALL)


def as_internal_error(error: BaseException) -> Optional[HorovodInternalError]:
    """The HorovodInternalError that an error is or, raised by TensorFlow, tells of; None for all others."""
    if isinstance(error, HorovodInternalError):
        return error
    text = str(error)
    if not type(error).__module__.startswith("tensorflow.") or MARK not in text:
        return None
    internal = HorovodInternalError(_AFTER.split(text.split(MARK, 1)[1], maxsplit=1)[0].strip())
    internal.__cause__ = error
    return internal
