"""How operations are named, and handed to an engine."""

from __future__ import annotations

from typing import Any, Callable, List, Optional

from cohort._core import NamedWork
from cohort.errors import Error
from cohort.torch import _timeline
from cohort.torch.exceptions import translated
from cohort.torch.process_sets import ProcessSet


def named(kind: str, name: Optional[str], process_set: ProcessSet) -> str:
    """The name that ranks meet under. Without one it counts: then all ranks have to call in the same order."""
    return f"{kind}.{name}" if name is not None else f"{kind}.noname.{process_set._number(kind)}"


def group_names(kind: str, name: Optional[str], process_set: ProcessSet, count: int) -> List[str]:
    """The names of the tensors of a group."""
    base = named(kind, name, process_set)
    return [f"{base}_{i + 1}of{count}" for i in range(count)]


def started(kind: str, names: List[str], start: Callable[..., Any], *args: Any, **kwargs: Any) -> List[NamedWork]:
    """The operations that `start` asks the engine for, seen by the timeline."""
    timeline = _timeline.current
    began = 0.0 if timeline is None else _timeline.now()
    try:
        works = start(*args, **kwargs)
    except Error as error:
        raise translated(error) from error
    works = works if isinstance(works, list) else [works]
    if timeline is not None:
        timeline.watch(kind, names, works, began)
    return works
