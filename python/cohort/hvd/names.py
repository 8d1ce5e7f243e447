"""The names that all frameworks export; each framework adds its own."""

from __future__ import annotations

from cohort.hvd import basics, operations, process_sets
from cohort.hvd.basics import *  # noqa: F403
from cohort.hvd.exceptions import HorovodInternalError
from cohort.hvd.operations import *  # noqa: F403
from cohort.hvd.process_sets import *  # noqa: F403

__all__ = [*basics.__all__, *operations.__all__, *process_sets.__all__, "HorovodInternalError"]
