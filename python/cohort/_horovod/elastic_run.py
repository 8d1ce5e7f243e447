"""`elastic.run`: calls a function until it ends without a failure or a change of hosts."""

from __future__ import annotations

import functools
from typing import Any, Callable

from cohort._horovod import runtime
from cohort._horovod.elastic_state import State
from cohort._horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt

# A program's own mistake fails again and again at the same place: then it is no failure to be survived.
_MOST_WITHOUT_COMMIT = 3


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates func(state, ...): the state is sent from rank 0 to all, then the function is called.

    HorovodInternalError: the state goes back to its last commit. HostsUpdatedInterrupt: it stays as it is (and is not
    sent again if hosts only went). In both cases the world is left and formed anew, `state.on_reset()` is called, and
    then all of this again. After three failures with no commit between them the last is raised.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync = False
        failures, commits = 0, state._commits
        while True:
            try:
                if not skip_sync:
                    state.sync()
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
            reset()
            state.on_reset()

    return wrapper


def reset() -> None:
    """Leaves the world and forms a new one."""
    runtime.shutdown()
    runtime.init()
