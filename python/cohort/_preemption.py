"""Ends a preempted job in good order: C++'s cohort::Preemption, with the same promises."""

from __future__ import annotations

import array
import signal

from cohort import _core, _world
from cohort.errors import InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Optional

    from cohort import Communicator
    from cohort._world import Seconds

REQUEUE_STATUS: int = _core.REQUEUE_STATUS


class Preemption:
    """Signals ask this job to save and end, whichever rank they come to; all ranks learn of it at the same step.

        preemption = cohort.Preemption()                      # early: before it is there a signal ends the process
        for batch in loader:
            ...; optimizer.step(); sampler.step()
            if preemption.requested():
                checkpoints.save(net, optimizer, step=step, epoch=sampler.epoch, sampler=sampler)
                sys.exit(cohort.REQUEUE_STATUS)               # to `cohort run` no failure; see docs/reference/run.md

    signals  which; default SIGUSR1 and SIGTERM. Handlers that were there before are called as well. One that is installed
             later with `signal.signal` takes the place of this one: such signals are not noticed any more
    every    the other ranks are asked at every so many-th call of `requested` only
    timeout  seconds for a question; default: the communicator's

    Under `cohort run` a rank that has one is given --preempt-grace instead of --grace when the job is told to end by SIGTERM,
    and SIGUSR1 waits until there is one. Raises InvalidArgument for no signals, signals that cannot be handled, `every`
    below 1. One thread at a time. The handlers go when the object does; but once `requested` has said yes, or `received` has
    named a signal, they stay, since a rank that ends may be told once more: SIGTERM does not end such a process any more.
    """

    def __init__(self, signals: Sequence[int] = (signal.SIGUSR1, signal.SIGTERM), *, every: int = 1,
                 timeout: Optional[Seconds] = None) -> None:  # fmt: skip
        if every < 1:
            raise InvalidArgument(f"Preemption: every is {every} -- at every call is 1")
        self._signals = _core.PreemptionSignals([int(number) for number in signals])
        self._every = every
        self._timeout = timeout
        self._calls = 0
        self._signal = 0  # the answer's

    def requested(self, comm: Optional[Communicator] = None) -> bool:
        """True if the job is to save and end: collective, the same answer on all ranks, to be asked once per step.

        comm  default: the default world; where there is none, this process alone decides

        Once it is True it stays so, and nobody is asked any more. An all_reduce of 4 bytes; raises what that raises.
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
        """The signal because of which `requested` said yes, the highest of all ranks'; 0 before that."""
        return self._signal

    def received(self) -> int:
        """The first of `signals` that this process has received since this object was made, or 0. Not collective."""
        return self._signals.received()
