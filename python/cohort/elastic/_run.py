"""`run`: calls a function once for each world of an elastic job, in one process."""

from __future__ import annotations

import functools
import gc
import os
import signal
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional, Union

from cohort import REQUEUE_STATUS, Communicator, _core, _world
from cohort.elastic._state import State
from cohort.errors import Aborted, Error, PeerLost


class MembershipChanged(Error):
    """Raised by `State.step` when the world has changed, on all ranks alike. `run` catches it; a function that catches
    it has to raise it again."""

    code = "Aborted"


@dataclass(frozen=True)
class World:
    """One world of the job.

    comm        its Communicator, which is the default world (`cohort.world()`)
    epoch       of the job's membership; None where the job is not elastic
    first_size  ranks of the first world that this state has been in, on any rank: what a batch or a rate was made for
    """

    comm: Communicator
    epoch: Optional[int]
    first_size: int

    @property
    def rank(self) -> int:
        return self.comm.rank()

    @property
    def size(self) -> int:
        return self.comm.size()


def run(train: Optional[Callable[..., Any]] = None, *, ledger: Union[str, os.PathLike, None] = None,
        save: Optional[Callable[[State, World], None]] = None,
        join: Optional[Mapping[str, Any]] = None) -> Callable[..., Any]:  # fmt: skip
    """Decorates train(state, world, ...), which is then called as train(state, ...): with a world, and again with the next
    one, until it returns in a world of which no rank is lost. It is called with the state as it stands, also at its end:
    loops begin where the state says.

        @cohort.elastic.run                     or     @cohort.elastic.run(save=save)
        def train(state, world): ...

    ledger  the file in which rank 0 writes which samples steps have used; "" for none. Default: samples-W.jsonl in the
            run's folder, W the number of the process in its job; none without `cohort run`
    save    save(state, world): called on all ranks at the same step when the job has been told to end (SIGTERM, SIGUSR1),
            and once while a job waits for more members, with a world of one, on the rank that has gone furthest. When
            the job has been told to end the process ends with 75 afterwards (SystemExit), and with 143 (128 + SIGTERM) if
            there is no `save`; with 75, too, where the job goes on without it
    join    arguments of `cohort.init`, for each world

    Each world becomes the process's default world, so `cohort.all_reduce`... of `cohort.nn`, `hvd.init` and
    init_process_group("cohort") use it. Objects of one world, such as a DistributedDataParallel or a process group, are
    made by `train`. `hvd` is initialised again for the next world where it was before, and process groups are
    destroyed.

    Returns the result of `train`, and raises its exceptions but those for a lost rank. If the job is not elastic
    (`cohort run --min-np`) there is one world.
    """
    if train is None:
        return functools.partial(run, ledger=ledger, save=save, join=join)
    function = train
    # Without a save, a process that is started again would find nothing, so the status does not ask for that.
    told_to_end = REQUEUE_STATUS if save is not None else 128 + signal.SIGTERM

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        file = _default_ledger() if ledger is None else os.fspath(ledger)
        while True:
            world: Optional[World] = None
            try:
                world = _enter(state, file, dict(join or {}))
                result = function(state, world, *args, **kwargs)
                state._core.finish()  # before others can know that this rank has ended
                # A rank that is lost in the last step has to be waited for by nobody: the others have ended it, too.
                world.comm.barrier()
                return result
            except Exception as error:
                cause = _loss_in(error)
                if cause is not None and world is None and _core.removed_from_job():
                    print(f"cohort: elastic: this process leaves the job after step {state.steps}: {cause}", file=sys.stderr)
                    raise SystemExit(REQUEUE_STATUS) from None
                if cause is None or world is None and cause.operation == "join":
                    state._core.finish()
                    raise
                if not state._core.leave(cause):
                    state._core.finish()
                    told = state._core.told_to_end or state._core.told_to_leave
                    if world is None or not told or not isinstance(cause, MembershipChanged):
                        raise
                    break
                _let_go_of(error)
                cause = None
            except BaseException:
                state._core.finish()
                raise
            _leave_world()
            while (wait := state._core.await_members()) == "save":
                if save is not None:
                    print(f"cohort: elastic: the job waits for more members: this rank saves, after step {state.steps}",
                          file=sys.stderr, flush=True)  # fmt: skip
                    save(state, World(_core.form_thread_world(1, None, None)[0], None, 0))
            if wait == "end":
                raise SystemExit(told_to_end)
        if state._core.told_to_leave:  # the others have all that it has
            raise SystemExit(REQUEUE_STATUS)
        if save is not None:
            save(state, world)
        raise SystemExit(told_to_end)

    return wrapper


def _default_ledger() -> str:
    folder = str(_core.environment_value("COHORT_RUN_DIR") or "")
    worker = _core.environment_value("COHORT_WORKER") or 0
    return os.path.join(folder, f"samples-{worker}.jsonl") if folder else ""


def _enter(state: State, ledger: str, join: dict[str, Any]) -> World:
    if not _world.is_initialized():
        _world.init(**join)
    comm = _world.world()
    epoch = _core.joined_epoch()
    first_size = state._core.enter(comm, epoch, ledger)
    world = World(comm, epoch, first_size)
    if world.rank == 0 and world.size == first_size and state._policies:
        print("cohort: elastic: " + "; ".join(say(first_size) for say in state._policies), file=sys.stderr, flush=True)
    state._policies.clear()  # the longest member is rank 0, so another one need not say it again
    if _hvd_was_used:
        from cohort.hvd import basics

        basics.init()
    for callback in state._on_change:
        callback(world)
    return world


_hvd_was_used = False


def _leave_world() -> None:
    """The default world, and what others have made of it."""
    global _hvd_was_used
    basics = sys.modules.get("cohort.hvd.basics")
    if basics is not None and basics.is_initialized():
        _hvd_was_used = True
        basics.shutdown()
    distributed = sys.modules.get("torch.distributed")
    groups = False
    if "cohort.distributed" in sys.modules and distributed is not None:
        groups = distributed.is_initialized()
        if groups:
            distributed.destroy_process_group()
    if groups or _hvd_was_used:
        gc.collect()  # torch's wrapped models and Horovod's optimizers refer to themselves, and have hooks on the parameters
    _world.shutdown()


def _loss_in(error: BaseException) -> Optional[Error]:
    """Returns the error that reports a lost rank, or a change, within an exception that a framework, a hook or a
    program's own `except` may have made of it."""
    todo: list[Optional[BaseException]] = [error]
    seen: set[int] = set()
    while todo:
        one = todo.pop(0)
        if one is None or id(one) in seen:
            continue
        if isinstance(one, (MembershipChanged, PeerLost, Aborted)):
            return one
        # torch's DistributedDataParallel keeps the text alone.
        retold = re.search(r"running the callback: (PeerLost|Aborted): ", str(one)) if type(one) is RuntimeError else None
        if retold:
            return {"PeerLost": PeerLost, "Aborted": Aborted}[retold[1]](str(one)[retold.end() :])
        seen.add(id(one))
        todo += [getattr(one, "error", None), one.__cause__, one.__context__]
        todo = [each for each in todo if isinstance(each, BaseException)]
    return None


def _let_go_of(error: BaseException) -> None:
    """The frames of `train` hold what belongs to its world: wrapped models, whose hooks are on the parameters."""
    one: Optional[BaseException] = error
    while one is not None:
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    reducers = sys.modules.get("cohort.nn._reducer")
    if reducers is not None:
        for reducer in set(reducers._owners.values()):
            reducer.detach()
