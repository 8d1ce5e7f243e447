"""Ends a preempted job in order, like cohort::Preemption in C++ and with the same guarantees."""

from __future__ import annotations

import array
import signal

from cohort import _core
from cohort._process import world as _world
from cohort.errors import InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Optional

    from cohort import Communicator
    from cohort._process.world import Seconds

REQUEUE_STATUS: int = _core.REQUEUE_STATUS


class Preemption:
    """Handles signals that ask this job, through any rank, to save and end; all ranks learn of it at the same step.

        preemption = cohort.Preemption()                      # early: without it a signal ends the process
        for batch in loader:
            ...; optimizer.step(); sampler.step()
            if preemption.requested():
                checkpoints.save(net, optimizer, step=step, epoch=sampler.epoch, sampler=sampler)
                sys.exit(cohort.REQUEUE_STATUS)               # no failure for `cohort run`; see docs/reference/run.md

    signals  the signals; default SIGUSR1 and SIGTERM. Earlier handlers are called as well. A handler installed later
             with `signal.signal` replaces this one: these signals are then no longer noticed
    every    N: ask the other ranks only at every Nth call of `requested`
    timeout  seconds that asking may take; default: the communicator's timeout

    Under `cohort run` a rank with a Preemption gets --preempt-grace instead of --grace when SIGTERM tells the job to
    end, and SIGUSR1 waits until there is a Preemption. Raises InvalidArgument for no signals, signals that cannot be
    handled, and `every` below 1. One thread at a time. The handlers are removed with the object; but after `requested`
    has returned True, or `received` a signal, they stay, since a rank that is ending may be signalled again: SIGTERM
    then no longer ends the process.
    """

    def __init__(self, signals: Sequence[int] = (signal.SIGUSR1, signal.SIGTERM), *, every: int = 1,
                 timeout: Optional[Seconds] = None) -> None:  # fmt: skip
        if every < 1:
            raise InvalidArgument(f"Preemption: every is {every} -- at every call is 1")
        self._signals = _core.PreemptionSignals([int(number) for number in signals])
        self._every = every
        self._timeout = timeout
        self._calls = 0
        self._signal = 0  # the signal for which the answer became True

    def requested(self, comm: Optional[Communicator] = None) -> bool:
        """Returns True if the job is to save and end; collective, the same on all ranks. Call it once per step.

        comm  default: the default world; without one, this process alone decides

        Does an all_reduce of 4 bytes and raises its errors. Once it has returned True, it always does, without asking.
        """
        if self._signal:
            return True
        self._calls += 1
        if self._calls % self._every:
            return False
        if comm is None and _world.is_initialized():
            comm = _world.world()
        number = array.array("i", [self._signals.received()])
        if comm is not None and comm.size() > 1:
            _core.begin_call("Preemption.requested")
            try:
                comm.all_reduce(number, op="max", timeout=self._timeout)
            finally:
                _core.end_call()
        if not number[0]:
            return False
        self._signal = number[0]
        self._signals.say_yes(self._signal)
        return True

    @property
    def signal(self) -> int:
        """The signal for which `requested` returned True, the highest that any rank received; 0 before that."""
        return self._signal

    def received(self) -> int:
        """Returns the first of `signals` received by this process since this object was made, or 0. Not collective."""
        return self._signals.received()
