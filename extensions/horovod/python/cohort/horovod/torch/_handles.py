"""Handles: numbers that stand for operations under way. The table keeps an operation's tensors until `synchronize`.

Any thread may call.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Dict, List, Set, Union

from cohort._core import NamedWork
from cohort.horovod import basics
from cohort.horovod.exceptions import HorovodInternalError, translated
from cohort.horovod.operations import wait_for
from cohort.errors import Error
from cohort.horovod.torch._tensors import copy_back
from torch import Tensor

_numbers = itertools.count()
_pending: Dict[int, Union["_Several", "_One"]] = {}
_of_old_worlds: Set[int] = set()  # handles that nobody waited for before their world ended


class _Several:
    """Operations that have one handle, and the function that makes the caller's result when they are done."""

    __slots__ = ("finish", "works")

    def __init__(self, works: List[NamedWork], finish: Callable[[], Any]) -> None:
        self.works = works
        self.finish = finish

    def done(self) -> bool:
        return all(work.done() for work in self.works)

    def wait(self) -> Any:
        wait_for(self.works)
        return self.finish()


class _One:
    """One operation with one tensor of the caller; `used` is the tensor that the operation worked on."""

    __slots__ = ("tensor", "used", "work")

    def __init__(self, work: NamedWork, tensor: Tensor, used: Tensor) -> None:
        self.work = work
        self.tensor = tensor
        self.used = used

    @property
    def works(self) -> List[NamedWork]:
        return [self.work]

    def done(self) -> bool:
        return self.work.done()

    def wait(self) -> Tensor:
        try:
            self.work.wait()
        except Error as error:
            raise translated(error) from error
        return copy_back(self.tensor, self.used)


def add_one(work: NamedWork, tensor: Tensor, used: Tensor) -> int:
    """Returns a handle for one operation, whose result is `tensor`."""
    handle = next(_numbers)
    _pending[handle] = _One(work, tensor, used)
    return handle


def add(works: List[NamedWork], finish: Callable[[], Any]) -> int:
    """Returns a handle for operations under way."""
    handle = next(_numbers)
    _pending[handle] = _Several(works, finish)
    return handle


def clear() -> None:
    """Forgets all handles."""
    _of_old_worlds.update(_pending)
    _pending.clear()


basics.when_formed.append(clear)


def is_done(handle: int) -> bool:
    """Like `poll`, but an unknown or forgotten handle counts as done."""
    pending = _pending.get(handle)
    return pending is None or pending.done()


def poll(handle: int) -> bool:
    """Returns True if the operation is done, so that `synchronize` will not wait. Raises ValueError for an unknown handle."""
    pending = _pending.get(handle)
    if pending is None:
        raise ValueError(f"poll({handle!r}): there is no such operation, or synchronize was called for it already")
    return pending.done()


def synchronize(handle: int) -> Any:
    """Waits for an operation and returns its result: a tensor, a list of tensors for a group, (tensor, received_splits)
    for `alltoall_async`. Works once per handle; returns None for an unknown or used handle.

    Raises HorovodInternalError if the operation failed: ranks' arguments differed, a rank was lost, or `shutdown`
    was called.
    """
    pending = _pending.pop(handle, None)
    if pending is None:
        if handle in _of_old_worlds:
            _of_old_worlds.remove(handle)
            raise HorovodInternalError(
                f"synchronize({handle}): this operation was of a world that has ended -- start it again in the new one"
            )
        return None
    try:
        return pending.wait()
    except KeyboardInterrupt:
        _pending[handle] = pending  # the operation is still under way
        raise
