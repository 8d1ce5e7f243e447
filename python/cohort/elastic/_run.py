"""`run`: calls a function for each world of an elastic job, in one process."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import signal
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional, Union

from cohort import REQUEUE_STATUS, Communicator, _core
from cohort._process import world as _world
from cohort.elastic._state import State
from cohort.errors import Aborted, Error, InvalidArgument, PeerLost


class MembershipChanged(Error):
    """Raised by `State.step` on all ranks when the world has changed. `run` catches it; a function that catches it has
    to raise it again."""

    code = "Aborted"


@dataclass(frozen=True)
class World:
    """One world of the job.

    comm        its Communicator; the default world (`cohort.world()`)
    epoch       of the job's membership; None if the job is not elastic
    first_size  number of ranks of this state's first world, the same on all ranks; batches or rates were chosen for it
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
        init: Optional[Mapping[str, Any]] = None) -> Callable[..., Any]:  # fmt: skip
    """Decorates train(state, world, ...), which is then called as train(state, ...). That calls the function with one
    world after the other, until it returns in a world of which no rank is lost. Each call gets the current state, even
    one at its end, so loops have to begin where the state says.

        @cohort.elastic.run                     or     @cohort.elastic.run(save=save)
        def train(state, world): ...

    ledger  the file in which rank 0 records which samples steps have used; "" for none. Default: samples-W.jsonl in the
            run's folder, with W the number of the process in its job; none without `cohort run`
    save    save(state, world): called on all ranks at the same step when the job has been told to end (SIGTERM,
            SIGUSR1), and also while a job waits for more members: with a world of one, once, on the rank with the most
            steps. When the job has been told to end, the process then ends with 75 (SystemExit), or with 143 (128 +
            SIGTERM) if there is no `save`; with 75, too, if the job goes on without this process
    init    arguments of `cohort.init`, for each world

    Each world becomes the process's default world, so `cohort.all_reduce`, `cohort.nn`, `hvd.init` and
    init_process_group("cohort") use it. `train` itself makes objects of one world, such as a DistributedDataParallel or
    a process group. If `hvd` was initialised, it is initialised again for the next world, and process groups are
    destroyed.

    Returns the result of `train`, and raises its exceptions except those for a lost rank. If the job is not elastic (no
    `cohort run --min-np`) there is one world.
    """
    if train is None:
        return functools.partial(run, ledger=ledger, save=save, init=init)
    function = train
    if save is not None:
        _require_save(save)
    # Without a `save`, a restarted process would find nothing, so the status does not ask for a restart.
    told_to_end = REQUEUE_STATUS if save is not None else 128 + signal.SIGTERM

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        file = _default_ledger() if ledger is None else os.fspath(ledger)
        while True:
            world: Optional[World] = None
            try:
                world = _enter(state, file, dict(init or {}))
                result = function(state, world, *args, **kwargs)
                state._core.finish()  # before others can learn that this rank has ended
                # Nothing has to wait for a rank that is lost in the last step, because the others have ended that step, too.
                world.comm.barrier()
                return result
            except Exception as error:
                cause = _loss_in(error)
                if cause is not None and world is None and _core.removed_from_job():
                    print(f"cohort: elastic: this process leaves the job after step {state.steps}: {cause}", file=sys.stderr)
                    raise SystemExit(REQUEUE_STATUS) from None
                if world is None and isinstance(error, Error) and state._core.ends_without_world(error):
                    pass  # the others do not come any more
                elif cause is None or world is None and cause.operation == "init":
                    state._core.finish()
                    raise
                elif not state._core.leave(cause):
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
                    print(f"cohort: elastic: there are no other members: this rank saves, after step {state.steps}",
                          file=sys.stderr, flush=True)  # fmt: skip
                    save(state, World(_core.form_thread_world(1, None, None)[0], None, 0))
            if wait == "end":
                raise SystemExit(told_to_end)
        if state._core.told_to_leave:  # the other ranks have all of this rank's state
            raise SystemExit(REQUEUE_STATUS)
        if save is not None:
            save(state, world)
        raise SystemExit(told_to_end)

    return wrapper


def _require_save(save: Callable[..., Any]) -> None:
    """Refuses now a `save` that would fail later, when the job has been told to end and has to be saved."""
    try:
        with contextlib.suppress(ValueError):  # a compiled function may have no signature
            inspect.signature(save).bind("state", "world")
    except TypeError as error:
        raise InvalidArgument(f"elastic.run: save={save!r} is called as save(state, world) -- {error}") from None


def _default_ledger() -> str:
    folder = str(_core.environment_value("COHORT_RUN_DIR") or "")
    worker = _core.environment_value("COHORT_WORKER") or 0
    return os.path.join(folder, f"samples-{worker}.jsonl") if folder else ""


def _enter(state: State, ledger: str, init: dict[str, Any]) -> World:
    if not _world.is_initialized():
        _world.init(**init)
    comm = _world.world()
    epoch = _core.formed_epoch()
    first_size = state._core.enter(comm, epoch, ledger)
    world = World(comm, epoch, first_size)
    if world.rank == 0 and world.size == first_size and state._policies:
        print("cohort: elastic: " + "; ".join(say(first_size) for say in state._policies), file=sys.stderr, flush=True)
    state._policies.clear()  # the longest member is rank 0, so other ranks need not repeat them
    if _hvd_was_used:
        from cohort.horovod import basics

        basics.init()
    for callback in state._on_change:
        callback(world)
    return world


_hvd_was_used = False


def _leave_world() -> None:
    """Leaves the default world, and ends what other packages have made of it."""
    global _hvd_was_used
    basics = sys.modules.get("cohort.horovod.basics")
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
        gc.collect()  # wrapped models and Horovod's optimizers are reference cycles with hooks on the parameters
    _world.shutdown()


def _loss_in(error: BaseException) -> Optional[Error]:
    """Returns the error that reports a lost rank or a change. A framework, a hook or the program's own `except` may have
    turned it into the exception given."""
    todo: list[Optional[BaseException]] = [error]
    seen: set[int] = set()
    while todo:
        one = todo.pop(0)
        if one is None or id(one) in seen:
            continue
        if isinstance(one, (MembershipChanged, PeerLost, Aborted)):
            return one
        # torch's DistributedDataParallel keeps only the text.
        retold = re.search(r"running the callback: (PeerLost|Aborted): ", str(one)) if type(one) is RuntimeError else None
        if retold:
            return {"PeerLost": PeerLost, "Aborted": Aborted}[retold[1]](str(one)[retold.end() :])
        seen.add(id(one))
        todo += [getattr(one, "error", None), one.__cause__, one.__context__]
        todo = [each for each in todo if isinstance(each, BaseException)]
    return None


def _let_go_of(error: BaseException) -> None:
    """Clears the frames of `train`, which hold wrapped models, whose hooks are on the parameters."""
    one: Optional[BaseException] = error
    while one is not None:
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    reducers = sys.modules.get("cohort.nn._reducer")
    if reducers is not None:
        for reducer in set(reducers._owners.values()):
            reducer.detach()
