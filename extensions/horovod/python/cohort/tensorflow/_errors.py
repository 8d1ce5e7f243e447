"""Converts errors that TensorFlow raises when it builds or runs a graph in which an operation fails to the operation's
own errors."""

from __future__ import annotations

import contextlib
import re
from typing import Iterator, Optional

import tensorflow as tf

from cohort.horovod.exceptions import HorovodInternalError
from cohort.errors import Error, InvalidArgument

# Marks the operation's own text in a message; TensorFlow adds text before and after it.
MARK = "HorovodInternalError: "

_AFTER = re.compile(r"\n\nTraceback|\n\n  File|\n?\s*\[\[\{\{node|\s*\[Op:", re.DOTALL)


def as_internal_error(error: BaseException) -> Optional[HorovodInternalError]:
    """Returns the HorovodInternalError that an error is, or that TensorFlow made it from; None for other errors."""
    if isinstance(error, HorovodInternalError):
        return error
    text = str(error)
    if not type(error).__module__.startswith("tensorflow.") or MARK not in text:
        return None
    internal = HorovodInternalError(_AFTER.split(text.split(MARK, 1)[1], maxsplit=1)[0].strip())
    internal.__cause__ = error
    return internal


# Exceptions that are both TensorFlow's, because Horovod's programs catch these, and ours.


class EagerHorovodInternalError(HorovodInternalError, tf.errors.FailedPreconditionError):
    """Raised by an operation that has failed, in eager mode."""

    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class EagerInvalidArgument(InvalidArgument, tf.errors.InvalidArgumentError):
    """Raised by an operation with invalid arguments, in eager mode."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


@contextlib.contextmanager
def as_of_tensorflow() -> Iterator[None]:
    """While the context lasts, turns errors of operations into ones that are also TensorFlow's."""
    try:
        yield
    except HorovodInternalError as error:
        internal = EagerHorovodInternalError(str(error))
        internal.error = error.error
        raise internal from (error.__cause__ or error)
    except ValueError as error:
        invalid = EagerInvalidArgument(str(error))
        if isinstance(error, Error):
            invalid.__dict__.update(vars(error))
        raise invalid from error
