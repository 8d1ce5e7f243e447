"""The training step under way, in a backend that traces it once or in one that runs it each time."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Iterator, List, Optional, Set, Tuple

from cohort.horovod.process_sets import ProcessSet


class Step:
    """factor: this rank's fraction of all samples, times the number of ranks; None if every rank counts equally.
    before_reducing: called when the kinds of the gradients are known."""

    def __init__(self, process_set: ProcessSet, factor: Any, before_reducing: Callable[[], None]) -> None:
        self.process_set = process_set
        self.factor = factor
        self.before_reducing = before_reducing
        self.weighted: Set[int] = set()  # ids of reductions whose loss has been scaled
        self.applied: List[Tuple[Any, List[Any]]] = []  # optimizers and the variables that they changed, in order


_now = threading.local()


def current() -> Optional[Step]:
    """Returns the step that this thread is running."""
    step: Optional[Step] = getattr(_now, "step", None)
    return step


@contextlib.contextmanager
def at(step: Step) -> Iterator[Step]:
    """Makes `step` the current one while the context lasts."""
    before = current()
    _now.step = step
    try:
        yield step
    finally:
        _now.step = before
