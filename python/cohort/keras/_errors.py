"""What `fit` raises when ranks fail: Horovod's errors, whatever the framework makes of them on their way."""

from __future__ import annotations

import contextlib
import sys
from typing import Iterator, Optional

from cohort._horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from cohort.errors import Error


def _known(error: Optional[BaseException]) -> Optional[BaseException]:
    """Of an exception and those it comes from, the one that is Cohort's."""
    for _ in range(50):  # a chain may lead back into itself
        if error is None or isinstance(error, (HorovodInternalError, Error)):
            return error
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Within it a failed operation is a HorovodInternalError, or a `cohort.Error` that is a ValueError too."""
    try:
        yield
    except (HorovodInternalError, HostsUpdatedInterrupt, Error):
        raise
    except Exception as error:
        known = _known(error) or _of_framework(error)
        if known is None:
            raise
        raise known from (known.__cause__ or error)


def _of_framework(error: Exception) -> Optional[BaseException]:
    """Where a framework has made text of it."""
    if "tensorflow" in sys.modules and "cohort.tensorflow" in sys.modules:
        from cohort.tensorflow._errors import as_internal_error

        return as_internal_error(error)
    return None
