"""Training that survives failures: its state is saved at each commit, restored after a failure, and sent from rank 0 to
new ranks. `run` calls a function until it ends without a failure or a change of hosts."""

from __future__ import annotations

import array
import functools
import queue
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

from cohort import REQUEUE_STATUS, _core
from cohort.errors import Unavailable
from cohort.horovod import basics
from cohort.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from cohort.horovod.objects import allgather_object, broadcast_array, broadcast_object

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run"]

# A program's own error occurs again and again at the same point, and is no failure to survive.
_MOST_WITHOUT_COMMIT = 3

# Kinds of host changes, as passed to on_hosts_updated; 3 means both.
_REMOVED, _ADDED = 1, 2


def _change_of_job() -> int:
    """Returns 0 if this process's world belongs to the latest epoch of the job that is known, or if the job is not elastic."""
    news = _core.job_news() if basics.rank() == 0 else None
    if news is None:
        return 0
    _, came, left = news
    # The same workers in a different order need no new state either.
    return (_ADDED if came else 0) | (_REMOVED if left or not came else 0)


class State:
    """The base of states, which says when to save, restore and send. Subclasses define how."""

    _commits = 0
    _told_job = False  # the job knows that the training has begun

    def __init__(self, **kwargs: Any) -> None:
        self._host_messages: "queue.Queue[Tuple[float, int]]" = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: List[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: List[Callable[[], None]]) -> None:
        """Registers functions to call after each reset, for example because a new world needs a different learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called when the world is a new one."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Call when hosts have changed: update_res is 1 if some left, 2 if some joined, 3 for both. Any thread."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves, and raises HostsUpdatedInterrupt if hosts have changed. All ranks call it."""
        self.save()
        self._commits += 1
        _core.note_state()
        if basics.rank() == 0 and not self._told_job:
            _core.note_trained(0)  # only the program knows its progress
            self._told_job = True
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt, on all ranks, if rank 0 has learned that hosts have changed: in an elastic job
        (`cohort run --min-np`) from the job's next epoch, else from `on_hosts_updated`."""
        latest, result = self._last_updated_timestamp, _change_of_job()
        while True:
            try:
                timestamp, one = self._host_messages.get_nowait()
            except queue.Empty:
                break
            if timestamp > self._last_updated_timestamp:
                latest, result = max(latest, timestamp), result | one
        news = array.array("d", [latest, float(result)])
        broadcast_array(news, 0, "elastic.host_updates")
        self._last_updated_timestamp, result = float(news[0]), int(news[1])
        if result:
            raise HostsUpdatedInterrupt(skip_sync=result == _REMOVED)

    def save(self) -> None:
        """Keeps the current values."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the values kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Sets all ranks' state to rank 0's."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called when the world is a new one; for subclasses."""


class ObjectState(State):
    """Attributes that may be any objects. They are kept without a copy, so replace them instead of changing them.

    bcast_object  sends rank 0's object to all; default: hvd.broadcast_object
    get_rank      this process's rank; default: hvd.rank
    """

    def __init__(self, bcast_object: Optional[Callable[..., Any]] = None, get_rank: Optional[Callable[[], int]] = None,
                 **kwargs: Any) -> None:  # fmt: skip
        self._bcast_object = bcast_object or broadcast_object
        self._rank = get_rank or basics.rank
        self._saved_state: Dict[str, Any] = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)
        super().__init__()

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)

    def sync(self) -> None:
        if self._saved_state:
            current = {name: getattr(self, name) for name in self._saved_state}
            self._saved_state = self._bcast_object(current, root_rank=0)
            self.restore()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates func(state, ...): the state is sent from rank 0 to all, then the function is called.

    On HorovodInternalError the state goes back to its last commit. On HostsUpdatedInterrupt it stays as it is (and is
    not sent again if hosts were only removed). In both cases the world is left and formed anew, `state.on_reset()` is
    called, and everything starts over. If all ranks are new, and earlier ranks had committed in this attempt of the
    job, all raise cohort.Unavailable, since that training is lost. After three failures without a commit between them the
    last one is raised; failures that ended an epoch of an elastic job do not count.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync = False
        failures, commits = 0, state._commits
        while True:
            epoch = _core.formed_epoch()
            try:
                # New processes have no state; of the others, one may have noticed a failure and another a change of
                # hosts.
                if _core.is_elastic():
                    anew = not _core.has_state()
                    lost = _core.lost_training(-1) if anew and basics.rank() == 0 else ""
                    said = allgather_object((skip_sync, anew, lost), "elastic.skip_sync")
                    skip_sync = all(each[0] for each in said)
                    if all(each[1] for each in said) and said[0][2]:
                        raise Unavailable(said[0][2])
                if not skip_sync:
                    state.sync()
                _core.note_state()
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                failures = failures + 1 if state._commits == commits else 1
                commits = state._commits
                if failures >= _MOST_WITHOUT_COMMIT:
                    raise
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as change:
                skip_sync = change.skip_sync
            try:
                basics.form_again()
            except Exception as error:
                if not _core.removed_from_job():
                    raise
                print(f"cohort: elastic: this process leaves the job: {error}", file=sys.stderr)
                raise SystemExit(REQUEUE_STATUS) from None
            if _core.formed_epoch() != epoch:  # a process was lost or joined, which is not the program's fault
                failures = 0
            state.on_reset()

    return wrapper

