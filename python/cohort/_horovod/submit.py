"""How operations are named, and handed to an engine."""

from __future__ import annotations

from typing import Any, Callable, List, Optional

from cohort._core import NamedWork
from cohort._horovod import timeline
from cohort._horovod.exceptions import translated
from cohort._horovod.process_sets import ProcessSet
from cohort.errors import Error


def named(kind: str, name: Optional[str], process_set: ProcessSet) -> str:
    """The name that ranks meet under. Without one it counts: then all ranks have to call in the same order."""
    return f"{kind}.{name}" if name is not None else f"{kind}.noname.{process_set._number(kind)}"


def group_names(kind: str, name: Optional[str], process_set: ProcessSet, count: int) -> List[str]:
    """The names of the tensors of a group."""
    base = named(kind, name, process_set)
    return [f"{base}_{i + 1}of{count}" for i in range(count)]


def started(kind: str, names: List[str], start: Callable[..., Any], *args: Any, **kwargs: Any) -> List[NamedWork]:
    """The operations that `start` asks the engine for, seen by the timeline."""
    recorder = timeline.current
    began = 0.0 if recorder is None else timeline.now()
    try:
        works = start(*args, **kwargs)
    except Error as error:
        raise translated(error) from error
    works = works if isinstance(works, list) else [works]
    if recorder is not None:
        recorder.watch(kind, names, works, began)
    return works


class Pending:
    """Operations that have one handle, and what makes the caller's result of them once they are done."""

    __slots__ = ("finish", "works")

    def __init__(self, works: List[NamedWork], finish: Callable[[], Any]) -> None:
        self.works = works
        self.finish = finish

    def done(self) -> bool:
        return all(work.done() for work in self.works)

    def wait(self) -> Any:
        """The result. Raises what the first operation that failed did, once all are done."""
        failed: Optional[Error] = None
        for work in self.works:
            try:
                work.wait()
            except Error as error:
                failed = failed or error
        if failed is not None:
            raise translated(failed)
        return self.finish()
