"""The step of a training that is being made: by a backend that traces it once, or by one that does it each time."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Iterator, List, Optional, Set, Tuple

from cohort.hvd.process_sets import ProcessSet


class Step:
    """factor: this rank's part of the samples of all, times the ranks; None where every rank counts alike.
    before_reducing: called once it is known of which kinds the gradients are."""

    def __init__(self, process_set: ProcessSet, factor: Any, before_reducing: Callable[[], None]) -> None:
        self.process_set = process_set
        self.factor = factor
        self.before_reducing = before_reducing
        self.weighted: Set[int] = set()  # ids of reductions whose loss has had the factor
        self.applied: List[Tuple[Any, List[Any]]] = []  # optimizers and the variables that they changed, in order


_now = threading.local()


def current() -> Optional[Step]:
    """The step that this thread is at."""
    step: Optional[Step] = getattr(_now, "step", None)
    return step


@contextlib.contextmanager
def at(step: Step) -> Iterator[Step]:
    """Within it `step` is the current one."""
    before = current()
    _now.step = step
    try:
        yield step
    finally:
        _now.step = before
