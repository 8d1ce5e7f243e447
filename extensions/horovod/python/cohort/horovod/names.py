"""The names that all frameworks export; each framework adds its own."""

from __future__ import annotations

from cohort.horovod import basics, operations, process_sets
from cohort.horovod.basics import *  # noqa: F403
from cohort.horovod.exceptions import HorovodInternalError
from cohort.horovod.operations import *  # noqa: F403
from cohort.horovod.process_sets import *  # noqa: F403

__all__ = [*basics.__all__, *operations.__all__, *process_sets.__all__, "HorovodInternalError"]
