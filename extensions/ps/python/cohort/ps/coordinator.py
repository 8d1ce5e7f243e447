"""Functions that a coordinator schedules on workers, with the names of TensorFlow's ClusterCoordinator.

    if cohort.role() == "server":
        ps.serve()
    elif cohort.role_number() > 0:
        ps.serve_functions()                           # runs scheduled functions until the coordinator closes
    else:
        with ps.ClusterCoordinator() as coordinator:
            batches = coordinator.create_per_worker_dataset(make_batches)
            results = [coordinator.schedule(step, args=(iter(batches),)) for _ in range(1000)]
            coordinator.join()
            print(coordinator.fetch(results[-1]))

Worker 0 is the coordinator. Functions and results travel as pickles (by cloudpickle if it is installed) through the
job's store, which only processes with the job's secret can access. A worker without a heartbeat for `patience` seconds
is lost: another worker runs its function, and it may come back, as a new process or the same one.

A function's pushes to tables whose pushes take effect with the clock (all except Async) count exactly once, even if the
function had to be run twice: the worker ends its clock after each function, together with a mark of that function, and
before the function is reassigned, the servers settle whether that clock had ended. Such tables must not wait for other
workers: `Bounded(ps.UNBOUNDED)`. Other effects of functions (files, tables with Async) may happen twice.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import cohort.ps as ps
from cohort import _core
from cohort._launch import pickling as _pickling
from cohort.errors import Aborted, Error, Internal, InvalidArgument, Timeout, Unavailable
from cohort.ps._checks import refuse

UNBOUNDED = 2**40  # for Bounded: pushes take effect with the clock, but no worker waits for another
_STORE = 30.0  # timeout, in seconds, of the job's store, which usually answers immediately
_BEAT = 0.5  # seconds between heartbeats
_SLICE = 0.5  # seconds after which a waiting thread checks whether to go on
_MOST_QUEUED = 262_144
_MARKS = "cohort/functions"  # the table of functions that have run: 1 for each function's number


def _place(*parts: Any) -> str:
    return "/".join(["coordinator", os.environ.get("COHORT_RESTART", "0"), *map(str, parts)])


def _marks(client: ps.Client) -> ps.Table:
    return client.table(_MARKS, 1, optimizer=ps.Sgd(lr=1.0), consistency=ps.Bounded(UNBOUNDED))


class RemoteValue:
    """The result of a scheduled function, when it has returned. Not an argument for other functions."""

    def __init__(self) -> None:
        self._there = threading.Event()
        self._value: Any = None
        self._error: Optional[BaseException] = None

    def done(self) -> bool:
        return self._there.is_set()

    def fetch(self, timeout: Optional[float] = None) -> Any:
        """Waits for the value. Raises the function's error; Aborted if the function was cancelled; Unavailable if its
        worker was lost, and with it the value, after its pushes had taken effect."""
        if not self._there.wait(timeout):
            raise Timeout(f"fetch: the function has not returned within {timeout:g} s")
        if self._error is not None:
            raise self._error
        return self._value

    get = fetch

    def _set(self, value: Any = None, error: Optional[BaseException] = None) -> None:
        self._value, self._error = value, error
        self._there.set()

    def __reduce__(self) -> Any:
        raise TypeError("a RemoteValue cannot be an argument of a function -- fetch it")


class _PerWorker:
    """A placeholder for each worker's own object: a dataset, or an iterator over it."""

    def __init__(self, number: int, iterator: Optional[int] = None) -> None:
        self._number = number
        self._iterator = iterator

    def __iter__(self) -> _PerWorker:
        return _PerWorker(self._number, next(_iterators))

    def __next__(self) -> Any:
        raise TypeError("this stands for each worker's own iterator: an argument of scheduled functions, nothing to read here")


_iterators = itertools.count()


def _same(dataset: Any) -> Any:
    return dataset


class _Call:
    def __init__(self, number: int, data: bytes, name: str) -> None:
        self.number, self.data, self.name = number, data, name
        self.value = RemoteValue()


class ClusterCoordinator:
    """Schedules functions on the job's other workers. Create one for each job, in worker 0's process.

    client          worker 0's client; None: creates one if the job has servers. Without servers, all effects of a function
                    may happen twice
    patience        seconds without a heartbeat after which a worker is lost
    worker_timeout  seconds that functions wait without any worker before an error (Unavailable)
    """

    def __init__(
        self, client: Optional[ps.Client] = None, *, patience: float = 10.0, worker_timeout: float = 300.0
    ) -> None:
        if client is not None and not isinstance(client, ps.Client):
            refuse("ClusterCoordinator", "client", client, "pass worker 0's, as ps.connect() returns it, or nothing")
        if _core.role() != "worker" or _core.role_number() != 0:
            raise InvalidArgument(f"ClusterCoordinator: worker 0 is the coordinator, and this is {_core.role()} {_core.role_number()}")
        self._workers = range(1, _core.num_workers())
        if not self._workers:
            raise InvalidArgument("ClusterCoordinator: there are no workers beside this one -- cohort run -np 2 or more")
        self._own = client is None and _core.num_servers() > 0
        self._client = ps.connect() if self._own else client
        self._patience, self._worker_timeout = patience, worker_timeout
        self._store = _core.JobStore(_STORE)
        self._table = _marks(self._client) if self._client is not None else None
        self._changed = threading.Condition()
        self._queue: deque[_Call] = deque()
        self._running: dict[int, _Call] = {}  # by worker
        self._present: set[int] = set()
        self._somebody = time.monotonic()  # the last time at which there was a worker
        self._failure: Optional[BaseException] = None
        self._closing = False
        self._numbers = itertools.count()
        self._finished: list[int] = []
        self._threads = [threading.Thread(target=self._drive, args=(worker,), daemon=True) for worker in self._workers]
        for thread in self._threads:
            thread.start()

    # ---- what users call ----

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Optional[Mapping[str, Any]] = None
    ) -> RemoteValue:
        """Queues a call of `fn` on some worker, and returns immediately, unless 262,144 calls are waiting. Raises the
        error of an earlier function that failed."""
        call = _Call(next(self._numbers), _pickling.dump_call(fn, args, dict(kwargs or {})), getattr(fn, "__name__", "?"))
        with self._changed:
            self._wait(lambda: len(self._queue) < _MOST_QUEUED)
            self._queue.append(call)
            self._changed.notify_all()
        return call.value

    def join(self) -> None:
        """Waits until all scheduled functions have run. Raises a function's error. Functions that had not begun are then
        cancelled, no function is running any more, and new ones can be scheduled."""
        with self._changed:
            self._wait(lambda: not self._queue and not self._running)

    def done(self) -> bool:
        """Returns True if all functions have run. Raises like `join`."""
        with self._changed:
            if self._failure is not None:
                self._wait(lambda: False)
            return not self._queue and not self._running

    def fetch(self, values: Any) -> Any:
        """Returns the values of RemoteValues, also within lists, tuples and dictionaries."""
        if isinstance(values, RemoteValue):
            return values.fetch()
        if isinstance(values, dict):
            return {key: self.fetch(value) for key, value in values.items()}
        if isinstance(values, (list, tuple)):
            return type(values)(self.fetch(value) for value in values)
        return values

    def create_per_worker_dataset(self, dataset: Any) -> Any:
        """Creates a dataset for each worker: `dataset` is called there, or iterated over if it is no function. The
        result, or `iter` of it, is an argument of functions, which receive their own worker's. The dataset starts over
        when a worker comes back."""
        number = next(self._numbers)
        made = _pickling.dump_call(dataset, (), {}) if callable(dataset) else _pickling.dump_call(_same, (dataset,), {})
        self._store.put(_place("dataset", number), made)
        return _PerWorker(number)

    def close(self) -> None:
        """Waits for running functions, cancels those not yet started (call `join` first), and lets the workers end."""
        with self._changed:
            self._closing = True
            self._cancel("the coordinator has closed")
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._store.put(_place("closed"), b"")  # for workers that come later
        if self._own and self._client is not None:
            self._client.leave()

    def __enter__(self) -> ClusterCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- within ----

    def _wait(self, over: Callable[[], bool]) -> None:
        """Waits, with the lock held. Raises a function's failure when nothing runs any more."""
        while not over() or self._failure is not None:
            if self._failure is not None:
                self._cancel("one before it had failed")
                if not self._running:
                    failure, self._failure = self._failure, None
                    raise failure
            elif self._queue and not self._present and time.monotonic() - self._somebody > self._worker_timeout:
                self._cancel("there is no worker")
                raise Unavailable(
                    f"no worker has been there for {self._worker_timeout:g} s, of {len(self._workers)}, and functions wait "
                    "for one -- do workers call cohort.ps.serve_functions?"
                )
            self._changed.wait(_SLICE)

    def _cancel(self, why: str) -> None:
        while self._queue:
            call = self._queue.popleft()
            call.value._set(error=Aborted(f"function {call.name} was cancelled: {why}"))

    def _drive(self, worker: int) -> None:
        try:
            self._drive_lives(worker)
        except BaseException as error:  # otherwise callers would wait for a thread that has ended
            lost = Unavailable(f"worker {worker} is given up: {type(error).__name__}: {error}")
            lost.__cause__ = error
            with self._changed:
                self._present.discard(worker)
                self._somebody = time.monotonic()
                call = self._running.pop(worker, None)
                if call is not None:
                    call.value._set(error=lost)
                    self._failure = self._failure or lost
                self._changed.notify_all()
            warnings.warn(str(lost), stacklevel=1)

    def _drive_lives(self, worker: int) -> None:
        store = _core.JobStore(_STORE)
        for life in itertools.count():  # the worker's processes, in order
            while True:
                with contextlib.suppress(Timeout):
                    store.wait(_place("here", worker, life), _SLICE)
                    break
                with self._changed:
                    if self._closing:
                        self._cancel("the coordinator has closed")
                        return
            with self._changed:
                self._present.add(worker)
            ended = self._use(store, worker, life)
            with self._changed:
                self._present.discard(worker)
                self._somebody = time.monotonic()
            if ended:
                return

    def _use(self, store: _core.JobStore, worker: int, life: int) -> bool:
        """Gives functions to a worker until it is lost (returns False) or everything has ended (True)."""
        signs = _Signs(store, worker, life, self._patience)
        for turn in itertools.count():
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait(_SLICE)
                    if not signs.alive():
                        break
                if not signs.alive():
                    call = None
                elif self._queue:
                    call = self._queue.popleft()
                    self._running[worker] = call
                    self._changed.notify_all()
                else:
                    store.put(_place("call", worker, life, turn), b"")
                    return True
            if call is None:
                self._give_up(store, worker, life, None)
                return False
            key, answer = _place("call", worker, life, turn), _place("result", worker, life, turn)
            store.put(key, pickle.dumps((call.number, call.data)))
            outcome: Optional[bytes] = None
            while outcome is None and signs.alive():
                with contextlib.suppress(Timeout):
                    outcome = store.wait(answer, _SLICE)
            outcome = outcome or store.get(answer, _STORE)  # the worker may have answered before it was lost
            if outcome is None:
                self._give_up(store, worker, life, call)
                return False
            store.remove(answer)
            store.remove(key)
            self._finish(worker, call, *_outcome_of(call, outcome))
        return False

    def _finish(self, worker: int, call: _Call, value: Any, error: Optional[BaseException],
                lost: Optional[BaseException] = None) -> None:  # fmt: skip
        """`lost`: the reason why the value is missing, if the function has not failed."""
        call.value._set(value, error or lost)
        with self._changed:
            self._running.pop(worker, None)
            self._failure = self._failure or error
            self._finished.append(call.number)
            marks, self._finished = (self._finished, []) if len(self._finished) >= 1024 else ([], self._finished)
            self._changed.notify_all()
        if marks and self._table is not None:
            self._table.erase(marks)

    def _give_up(self, store: _core.JobStore, worker: int, life: int, call: Optional[_Call]) -> None:
        store.put(_place("lost", worker, life), b"")
        took_effect = False
        error: Optional[BaseException] = None
        try:
            if self._client is not None:
                # Connecting as this worker fences the lost process; the servers accept the connection when they have
                # settled the lost process's last clock.
                ps.connect(worker=worker).leave()
            if call is not None and self._table is not None:
                took_effect = bool(self._table.pull([call.number])[0, 0])
        except Error as raised:
            error = raised
        store.put(_place("fenced", worker, life), b"")  # the worker's next process may connect to the servers
        if call is None:
            return
        if took_effect:
            error = Unavailable(f"function {call.name} counts, but worker {worker} was lost before it told what it returned")
            self._finish(worker, call, None, None, error)
        elif error is not None:
            self._finish(worker, call, None, error)
        else:
            with self._changed:
                self._running.pop(worker, None)
                self._queue.appendleft(call)
                self._changed.notify_all()


class _Signs:
    """A worker's heartbeats."""

    def __init__(self, store: _core.JobStore, worker: int, life: int, patience: float) -> None:
        self._store, self._key, self._patience = store, _place("beat", worker, life), patience
        self._last: Optional[bytes] = None
        self._at = self._looked = time.monotonic()

    def alive(self) -> bool:
        now = time.monotonic()
        if now - self._looked >= _BEAT:
            self._looked = now
            beat = self._store.get(self._key, _STORE)
            if beat == b"gone":
                return False
            if beat != self._last:
                self._last, self._at = beat, now
        return now - self._at < self._patience


def _outcome_of(call: _Call, data: bytes) -> tuple[Any, Optional[BaseException], Optional[BaseException]]:
    """Returns value, failure, and the reason for a missing value if the function has not failed."""
    value, error, text = pickle.loads(data)
    if text is None:
        try:
            return (_pickling.load_call(value) if value is not None else None), None, None
        except Exception as wrong:
            lost = Internal(f"function {call.name} counts, but what it returned cannot be unpickled here: {type(wrong).__name__}: {wrong}")
            lost.__cause__ = wrong
            return None, None, lost
    try:
        raised = _pickling.load_call(error) if error is not None else None
    except Exception:
        raised = None
    if not isinstance(raised, BaseException):
        raised = Internal(f"a scheduled function failed:\n{text}")
    elif hasattr(raised, "add_note"):
        raised.add_note(f"on its worker:\n{text}")
    return None, raised, None


_current: Optional[ps.Client] = None


def current_client() -> ps.Client:
    """Returns, within a scheduled function, its worker's client."""
    if _current is None:
        raise InvalidArgument("current_client: this is no function that a ClusterCoordinator has scheduled, or there are no servers")
    return _current


def serve_functions(**options: Any) -> None:
    """Runs a worker for a ClusterCoordinator: runs the functions that it receives, in order, until the coordinator
    closes. `options`: those of `connect`."""
    worker = _core.role_number()
    if _core.role() != "worker" or worker == 0:
        raise InvalidArgument("serve_functions: worker 0 is the coordinator, and servers serve tables")
    store = _core.JobStore(_STORE)
    life = 0
    while store.get(_place("here", worker, life), _STORE) is not None:
        life += 1
    while not _serve_life(store, worker, life, options):
        life += 1


def _serve_life(store: _core.JobStore, worker: int, life: int, options: dict[str, Any]) -> bool:
    """Returns True when the coordinator has closed, False if this worker was declared lost."""
    ended = threading.Event()
    beats = threading.Thread(target=_beat, args=(_place("beat", worker, life), ended), daemon=True)
    datasets: dict[tuple[int, Optional[int]], Any] = {}
    client: Optional[ps.Client] = None
    try:
        while life > 0 and store.get(_place("fenced", worker, life - 1), _STORE) is None:
            if store.get(_place("closed"), _STORE) is not None:
                return True
            time.sleep(_SLICE / 5)
        client = _connected(options)
        beats.start()
        store.put(_place("here", worker, life), b"")
        for turn in itertools.count():
            data: Optional[bytes] = None
            while data is None:
                with contextlib.suppress(Timeout):
                    data = store.wait(_place("call", worker, life, turn), _SLICE)
                if data is None and store.get(_place("lost", worker, life), _STORE) is not None:
                    return False
                if data is None and store.get(_place("closed"), _STORE) is not None:
                    return True
            if not data:
                return True
            number, call = pickle.loads(data)
            outcome, aborted = _carry_out(store, client, number, call, datasets)
            if aborted:
                return False
            if outcome[2] is not None and client is not None:  # the function's pushes do not count
                client.leave()
                client = _connected(options)
            store.put(_place("result", worker, life, turn), pickle.dumps(outcome))
    finally:
        ended.set()
        if beats.ident is not None:
            beats.join()
            store.put(_place("beat", worker, life), b"gone")
        _forget()
        if client is not None:
            with contextlib.suppress(Error):  # Aborted, if this worker was declared lost
                client.leave()
    return True


def _connected(options: dict[str, Any]) -> Optional[ps.Client]:
    global _current
    _current = ps.connect(**options) if options.get("servers") or _core.num_servers() > 0 else None
    return _current


def _forget() -> None:
    global _current
    _current = None


def _beat(key: str, ended: threading.Event) -> None:
    store = _core.JobStore(_STORE)
    for beat in itertools.count():
        store.put(key, b"%020d" % beat)
        if ended.wait(_BEAT):
            return


def _carry_out(
    store: _core.JobStore, client: Optional[ps.Client], number: int, data: bytes, datasets: dict[Any, Any]
) -> tuple[tuple[Optional[bytes], Optional[bytes], Optional[str]], bool]:
    """Returns ((value, exception, traceback), whether this worker was declared lost)."""
    try:
        function, args, kwargs = _pickling.load_call(data)
        own = [_own(store, one, datasets) for one in args]
        value = function(*own, **{name: _own(store, one, datasets) for name, one in kwargs.items()})
        pickled = None if value is None else _pickling.dumps(value)
        if client is not None:
            import numpy

            _marks(client).push([number], numpy.full((1, 1), -1, numpy.float32))
            client.clock()
        return (pickled, None, None), False
    except Aborted as error:
        if client is not None:
            return (None, None, str(error)), True
        return _failed(error), False
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _failed(error), False


def _failed(error: BaseException) -> tuple[None, Optional[bytes], str]:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        return None, _pickling.dumps(error), text
    except Exception:
        return None, None, text


def _own(store: _core.JobStore, one: Any, datasets: dict[tuple[int, Optional[int]], Any]) -> Any:
    """Replaces a placeholder for workers' own objects by this worker's object, made when first needed; returns others
    unchanged."""
    if not isinstance(one, _PerWorker):
        return one
    key = (one._number, one._iterator)
    if key not in datasets:
        if one._iterator is None:
            make, args, kwargs = _pickling.load_call(store.wait(_place("dataset", one._number), _STORE))
            datasets[key] = make(*args, **kwargs)
        else:
            datasets[key] = iter(_own(store, _PerWorker(one._number), datasets))
    return datasets[key]


__all__ = ["UNBOUNDED", "ClusterCoordinator", "RemoteValue", "current_client", "serve_functions"]
