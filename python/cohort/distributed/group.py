"""The process group: torch.distributed's operations over a Communicator of Cohort.

Results are written to the caller's tensors on any device; contiguous tensors are used without a copy. A rank's wrong
call is refused on all ranks (cohort.Mismatch), and the group can still be used.
"""

from __future__ import annotations

import collections
import datetime
import hashlib
import itertools
from typing import Any, Collection, Optional, Sequence

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import cohort
from cohort.distributed import arrivals, completion, environment, inner, profiler
from cohort.distributed.operations import Operations
from cohort.distributed.pool import Pool
from cohort.distributed.tensors import DEVICES, check_device
from cohort.distributed.work import Failed, Work, settle_what_was_let_go

_numbers = itertools.count()
_ZERO, _UNSET = datetime.timedelta(0), datetime.timedelta(milliseconds=-1)
# Grace period for unfinished operations when a group is destroyed.
_GRACE_SECONDS = 30.0
# Numbers of the groups that reported a lost rank, a missed deadline or an abort, since the default group was made.
ended: set[int] = set()


class ProcessGroup(Operations, dist.ProcessGroup):
    """One rank's handle of a group. Use it through torch.distributed."""

    def __init__(self, communicator: cohort.Communicator, ranks: Sequence[int] = (),
                 others: Collection[str] = (), elastic: bool = False) -> None:  # fmt: skip
        """
        ranks    the world's ranks that form the group, in its order; empty: the world itself
        others   devices whose tensors belong to other backends
        elastic  the world belongs to an epoch of an elastic job
        """
        dist.ProcessGroup.__init__(self, communicator.rank(), communicator.size())
        self.communicator = communicator
        self._rank, self._size = communicator.rank(), communicator.size()
        self._timeout: Optional[float] = None
        self._aborted = ""  # reason for this rank's abort
        self._number = next(_numbers)
        self._line = (self._number, "collectives")
        self._pool = Pool(communicator)
        self._started = 0
        self._name, self._description = "", "undefined"
        self._coalesced: Optional[list[Work]] = None
        self._beside: Any = None
        self._beside_devices: list[str] = []
        self._devices = [kind for kind in DEVICES if kind not in others]
        self.elastic = elastic
        self.has_trained = False  # `members_changed` was called after a step
        self._parts: collections.Counter[str] = collections.Counter()
        if not ranks:
            ended.clear()
        self._filled = environment.fill(communicator, elastic) if not ranks else []
        self._ranks = list(ranks) or list(range(self._size))
        inner.attach(self, self._devices)

    # --- who it is ---

    def getBackendName(self) -> str:
        return "cohort"

    # C++ keeps the name with the group's backends, of which this group has none.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout.total_seconds()

    @property
    def options(self) -> Any:
        """Returns a Backend.Options with the current values: changing it has no effect. torch 1.13 has none."""
        timeout = self.communicator.timeout() if self._timeout is None else self._timeout
        found = c10d.Backend.Options("cohort", datetime.timedelta(seconds=timeout))
        found.group_name, found.global_ranks_in_group = self._name, self._ranks
        return found

    @property
    def _device_types(self) -> list[torch.device]:
        # torch asks for the device of pickled objects, and warns if there is a choice.
        own = [kind for kind in self._devices if kind == "cpu" or torch.cuda.is_available()]
        return [torch.device(kind) for kind in (*own, *self._beside_devices)]

    def _get_backend(self, device: Any) -> Any:
        kind = torch.device(device).type
        return self._beside._get_backend(torch.device(device)) if kind in self._beside_devices else self

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False

    # Called by FSDP2 after the program has called set_allocate_memory_from_process_group_for_comm(True).
    def supports_tensor_alloc(self, device: Any) -> bool:
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Returns a 1-D tensor in memory that this group's collectives use without copies between a host's ranks."""
        return self._pool.empty(size, dtype)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._started

    def name_of_part(self, ranks: Sequence[int]) -> str:
        """Returns a name for a group of these ranks that this process makes now. (All these ranks have made equally many
        groups of these ranks; torch's names may differ after a failure.)"""
        part = hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:32]
        self._parts[part] += 1
        return f"torch {part} {self._parts[part]}"

    def note_failure(self, error: BaseException) -> None:
        """Records a failure for `is_over`."""
        if isinstance(error, (cohort.PeerLost, cohort.Timeout, cohort.Aborted)):
            ended.add(self._number)

    def set_beside(self, container: Any, devices: list[str]) -> None:
        """Adds backends of other devices (beside.py)."""
        self._beside, self._beside_devices = container, devices

    # --- how operations begin ---

    def _limit(self, opts: Any) -> Optional[float]:
        """Returns an operation's time limit, in seconds; None: the group's own."""
        timeout = getattr(opts, "timeout", _UNSET)
        return self._timeout if timeout <= _ZERO else timeout.total_seconds()

    def _start(self, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], written: Sequence[Any],
               call: Any, arguments: Sequence[Any], how: dict[str, Any], line: Any = None,
               source: Optional[int] = -1) -> Work:  # fmt: skip
        """Starts the core's operation `call(*arguments, **how)`. The Work reports errors between ranks, however early
        they are known; wrong arguments raise immediately.

        name     the operation's name, for messages and torch's profiler
        inputs   tensors that the operation reads
        outputs  the value of the Work's future and result
        written  objects that copy results to the caller's tensors
        line     operations of one line end in order; default: the collectives' line
        source   the rank that sends the message; None: the core knows the rank at the end
        """
        check_device([*inputs, *outputs], name)
        event = profiler.begin(name, inputs) if profiler.flag._is_profiler_enabled else None
        try:
            core = call(*arguments, async_op=True, **how)
        except cohort.InvalidArgument:
            if not self._aborted:
                raise
            core = Failed(cohort.Aborted(f"{name} failed -- this rank has aborted the process group: {self._aborted}"))
        except cohort.Error as error:
            self.note_failure(error)
            core = Failed(error)
        line = line or self._line
        if event is not None:
            core = profiler.Seen(core, event, line)
        on_gpu = bool(outputs) and outputs[0].is_cuda and source is not None
        by_stream = on_gpu and not any(one.copies for one in written)
        return self._work(name, core, outputs, written, line, source, by_stream)

    def _work(self, name: str, core: Any, outputs: Sequence[Any], written: Sequence[Any] = (), line: Any = None,
              source: Optional[int] = -1, by_stream: bool = False) -> Work:  # fmt: skip
        self._started += 1

        def deliver() -> None:
            for one in written:
                one.deliver()

        settle_what_was_let_go()
        copies = any(one.copies for one in written)
        work = Work(name, line or self._line, (core,), outputs, deliver, source, by_stream, self.note_failure, copies)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, *_: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, *_: Any) -> Work:
        works, self._coalesced = self._coalesced or [], None

        def deliver() -> None:
            for work in works:
                work.wait()

        core = [one for work in works for one in work._core]
        outputs = [tensor for work in works for tensor in work._outputs or ()]
        by_stream = all(work._by_stream for work in works)
        return Work("coalesced", (self._number, "coalesced"), core, outputs, deliver, by_stream=by_stream)

    # --- monitored barriers, and ends ---

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Raises cohort.Timeout, naming every rank that has not arrived (see arrivals.py)."""
        timeout = getattr(timeout, "timeout", timeout)  # C++ passes BarrierOptions
        seconds = arrivals.seconds_of(timeout, self.communicator.timeout() if self._timeout is None else self._timeout)
        arrivals.wait_for_all(self.communicator, self._ranks, seconds)

    def abort(self, reason: str = "aborted by the program") -> None:
        """Ends the group on all ranks: operations under way and later ones raise cohort.Aborted."""
        if self._beside is not None and hasattr(self._beside, "abort"):
            self._beside.abort()
        ended.add(self._number)
        self._aborted = self._aborted or reason
        if not self.communicator.has_left:
            self.communicator.abort(reason)
        self._leave()

    def shutdown(self) -> None:
        """Leaves the group when operations under way have ended, but waits at most 30 s."""
        if self._beside is not None and hasattr(self._beside, "shutdown"):
            self._beside.shutdown()
        self._leave()

    def _leave(self) -> None:
        self.communicator.leave(grace=_GRACE_SECONDS, reason=f"rank {self._rank} has destroyed the process group")
        completion.forget(lambda line: line[0] == self._number)
        environment.take_back(self._filled)

    def __del__(self, take_back: Any = environment.take_back) -> None:
        # torch 1.13 destroys a group by dropping its reference, and at the process's end modules are gone before.
        take_back(getattr(self, "_filled", []))
