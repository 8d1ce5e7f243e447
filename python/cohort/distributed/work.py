"""torch's Work over the core's work: the result of every operation of a process group."""

from __future__ import annotations

import collections
import copy
import datetime
import sys
import threading
from typing import Any, Callable, ClassVar, Collection, Hashable, List, Optional, Sequence

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C import _distributed_c10d

import cohort
from cohort.distributed.completion import call_after

_NO_TIMEOUT = datetime.timedelta(0)

# A Work dropped by Python without waiting may still be used by C++: DDP's `join` gives one to its reducer and keeps
# nothing. Its C++ half cannot complete without the Python half, so the last such Python halves stay here. They drop large
# tensors, which the core keeps until the operation has ended, because C++ asks only for a count.
_let_go: collections.deque[Work] = collections.deque(maxlen=256)
_MOST_KEPT = 1 << 10  # bytes
_under_way: collections.deque[Work] = collections.deque()  # Works whose results may have to be copied

# Errors of operations. A torch future keeps only the text of an error raised by a function on it.
_failures: collections.deque[cohort.Error] = collections.deque(maxlen=64)


def failure_told_by(error: BaseException) -> Optional[cohort.Error]:
    """Returns the operation's error with the same text as this one, which a torch future has made from it."""
    text = str(error)
    return next((copy.copy(one) for one in reversed(_failures) if str(one) in text), None)


def settle_what_was_let_go() -> None:
    while _under_way:
        try:
            first = _under_way.popleft()
        except IndexError:  # another thread removed it
            return
        if not first.is_completed():
            _under_way.appendleft(first)
            return
        first._let_go_of_outputs()


class Work(_distributed_c10d.Work):
    """An operation under way, which progresses by itself. Its results are in place when `wait` has returned,
    `is_completed` is true, or the future has its value. For GPU memory, `wait` and the future only order later work of
    the current stream after the result, as with torch's NCCL, and `is_completed` means that the result is there."""

    def __init__(self, name: str, line: Hashable, core: Sequence[Any], outputs: Sequence[torch.Tensor],
                 deliver: Optional[Callable[[], None]] = None, source: Optional[int] = -1,
                 by_stream: bool = False, failed: Callable[[BaseException], None] = lambda _: None,
                 copies: bool = True) -> None:  # fmt: skip
        """
        name     of the operation, for messages
        line     operations of the same line end in their order (completion.py)
        core     the core's works; all have to end
        outputs  the value of the future and of result()
        deliver  called once, when all have succeeded: copies results to the caller's tensors
        source   the rank that sent the message; None: the core knows the rank at the end
        by_stream  streams wait for the outputs, not the host; `deliver` does not read the outputs
        failed     called with the operation's error, if it has one
        copies     `deliver` may copy, or wait, so it is called only after the operation has ended
        """
        super().__init__()
        self._name, self._line, self._core = name, line, core
        self._outputs: Optional[List[torch.Tensor]] = list(outputs)
        self._deliver, self._source, self._failed = deliver, source, failed
        self._by_stream, self._copies = by_stream, copies
        self._settling = threading.RLock()
        self._is_settling = False
        self._settled = False
        self._waited = False
        self._failure: Optional[BaseException] = None
        self._future: Any = None
        # True if torch's C++ hook FP16_COMPRESS may have started it. The hook accepts only a future whose value is a C++
        # list of tensors. A future that is fulfilled later cannot hold such a list, so this one is complete when made.
        self.is_of_half = self.value_for_cpp = False

    def __del__(self) -> None:
        if self._waited or sys.is_finalizing():
            return
        _let_go.append(self)
        _under_way.append(self)
        if not self._copies:
            self._note_delivery()
            self._let_go_of_outputs()
        settle_what_was_let_go()

    def _let_go_of_outputs(self) -> None:
        if sum(tensor.numel() * tensor.element_size() for tensor in self._outputs or ()) > _MOST_KEPT:
            self._outputs = None

    def _note_delivery(self) -> None:
        with self._settling:
            deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver()

    def _settle(self) -> None:
        """Called when all works have ended; delivers results, or keeps the error."""
        with self._settling:
            if self._settled or self._is_settling:  # garbage collection has called this recursively
                return
            self._is_settling = True
            try:
                for one in self._core:
                    one.wait()
                if self._source is None:
                    self._source = self._core[0].source()
                if self._deliver is not None:
                    self._deliver()
            except Exception as error:
                self._failure = error
                if isinstance(error, cohort.Error):
                    _failures.append(copy.copy(error))  # a copy without the traceback, which holds tensors
                self._failed(error)
            self._core, self._deliver = (), None
            self._settled = True

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Blocks until the operation has ended; raises its error, a cohort.Error. After `timeout` (0: the operation's
        own deadline) raises cohort.Timeout and stops waiting; the operation goes on."""
        if self._by_stream and timeout <= _NO_TIMEOUT and not self.is_completed():
            self._order()
        elif not self._settled:
            seconds = timeout.total_seconds()
            for one in self._core:
                try:
                    if not one.wait(seconds if seconds > 0 else None):
                        raise cohort.Timeout(
                            f"{self._name}: not over after {seconds:g} s -- the operation goes on, until its own deadline -- "
                            "wait again, or longer"
                        )
                except cohort.Error:
                    if not one.done():
                        raise
                    break  # the operation's own error, which settling finds again
            self._settle()
        self._waited = True
        if self._failure is not None:
            raise self._failure
        return True

    def _order(self) -> None:
        """Makes the current stream wait for the outputs."""
        core = self._core
        try:
            for one in core:
                one.synchronize()
        except cohort.Error:
            if not all(one.done() for one in core):
                raise
            self._settle()
            return
        self._note_delivery()

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._settled and all(one.done() for one in self._core):
            self._settle()
        return self._settled

    def is_success(self) -> bool:
        return self.is_completed() and self._failure is None

    def exception(self) -> Optional[BaseException]:
        """Returns the error of an operation that has ended; None while it runs and if it succeeded."""
        return self._failure if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """Returns the operation's output, when it has ended or has been waited for."""
        if not self._waited and not self.is_completed():
            raise cohort.InvalidArgument(f"{self._name}: there is no result yet -- call wait() first")
        return self._value()

    def source_rank(self) -> int:
        if self._source is None:
            self.wait()
        assert self._source is not None  # set by wait()
        if self._source < 0:
            raise cohort.InvalidArgument(f"{self._name}: only what is received has a source")
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Returns a torch.futures.Future of the tensors that the operation wrote, or of its error, as text."""
        if self._future is None:
            if self._outputs is None:
                raise cohort.InvalidArgument(f"{self._name}: nobody has waited for it or kept it, so its tensors are gone")
            if self.value_for_cpp:
                self._future = torch._C.fork(self._value)  # called immediately, on this thread
                return self._future
            # With GPUs, callbacks get streams that torch orders before the streams of threads that wait for the future.
            gpus = {tensor.device for tensor in self._outputs if tensor.is_cuda}
            ended = torch.futures.Future(devices=list(gpus)) if gpus else torch.futures.Future()
            if self.is_completed() and self._failure is None:
                ended.set_result(self._outputs)
                self._future = ended
            else:
                # set_exception would pass the exception to C++ (DDP's reducer, for example) as if it were the result.
                self._future = ended.then(lambda _: self._value())
                if self._settled:
                    ended.set_result(None)
                else:
                    core = _Given(self._core, gpus) if self._by_stream else All(self._core)
                    call_after(self._line, core, lambda: ended.set_result(None))
        return self._future

    def _value(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs or []


class Failed:
    """The core's work of an operation that failed when it was started."""

    def __init__(self, error: cohort.Error) -> None:
        self._error = error

    def wait(self, timeout: Any = None) -> bool:
        raise self._error

    synchronize = wait

    def done(self) -> bool:
        return True


class _Given:
    """Several of the core's works. A wait queues them on GPUs, in streams that nothing else uses."""

    _streams: ClassVar[dict[torch.device, Any]] = {}

    def __init__(self, works: Sequence[Any], gpus: Collection[torch.device]) -> None:
        self._works, self._gpus = works, gpus

    def wait(self) -> None:
        for gpu in self._gpus:
            if gpu not in self._streams:
                self._streams[gpu] = torch.cuda.Stream(gpu)
            for work in self._works:
                work.synchronize(self._streams[gpu])


class All:
    """Several of the core's works as one; without any, already done."""

    def __init__(self, works: Sequence[Any] = ()) -> None:
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def done(self) -> bool:
        return all(work.done() for work in self._works)


# torch's version: (2, 13).
TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])

# Before torch 2.7, C++ drops the Python half of a Work returned by a Python process group, and the C++ half never ends. C++
# callers therefore get another kind of Work then.
_C_KEEPS_WORKS = TORCH >= (2, 7)


def for_caller(work: Work) -> Any:
    """Returns a Work that the caller of the process group's method can hold. Called by that method itself."""
    if (_C_KEEPS_WORKS and not work.is_of_half) or _is_called_from_python():
        return work
    work.value_for_cpp = work.is_of_half
    return work if _C_KEEPS_WORKS else _distributed_c10d._create_work_from_future(work.get_future())


_builtin_hooks: set[Any] = set()  # built-in hooks of DDP that this process uses


def _note_hooks(register: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def call(reducer: Any, kind: Any) -> Any:
        _builtin_hooks.add(kind)
        return register(reducer, kind)

    return call


dist._register_builtin_comm_hook = _note_hooks(dist._register_builtin_comm_hook)


def may_be_compressed(tensor: torch.Tensor) -> bool:
    """Returns True if the hook FP16_COMPRESS may have made the tensor."""
    return tensor.dtype == torch.float16 and dist.BuiltinCommHookType.FP16_COMPRESS in _builtin_hooks


def _is_called_from_python() -> bool:
    """Returns True if the caller is a function of torch.distributed, which holds the Work in Python. Any other caller may
    be Python or C++."""
    try:
        caller = sys._getframe(3)
    except ValueError:
        return False
    return caller.f_globals is c10d.__dict__
