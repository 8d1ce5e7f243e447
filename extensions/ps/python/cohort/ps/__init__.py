"""A parameter server: tables of rows by 64-bit key, and dense variables. Servers hold them; workers pull and push.

    server = cohort.ps.Server("@tables")                       # in a server's process; serves until it is closed
    client = cohort.ps.connect(["@tables"], worker=0, workers=1)
    users = client.table("users", 64, optimizer=cohort.ps.RowAdagrad(lr=0.02), initializer=cohort.ps.normal(0, 0.1))
    rows = users.pull(keys)                                    # float32 [len(keys), 64]
    users.push(keys, gradients)                                # the optimizer steps at the server
    client.clock()                                             # this worker's pushes since its last clock take effect

Arrays are NumPy's, torch's, or anything with DLPack or the buffer protocol, in host memory and dense. Keys are int64 or
uint64, in any order, possibly repeated; rows are float32 and contiguous. A list of numbers may stand for keys.
docs/parameter-server.md has the semantics.

Optimizers, with torch's names, defaults and formulas: Sgd, Adagrad, RowAdagrad (one accumulator per row), Adam, AdamW,
Ftrl. A row's bias correction uses the row's own number of steps.

Errors are those of cohort.errors: Timeout names the server that does not answer, or the workers for which the others
wait; NonFinite names the key; Mismatch means that two workers describe a table differently.
"""

from __future__ import annotations

import math
import operator
import os
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

from cohort import _core
from cohort._core import server_addresses
from cohort.errors import Error, InvalidArgument
from cohort.ps._checks import integer, number, path, rate, refuse, seconds, size, text
from cohort.ps._options import (
    Adagrad,
    Adam,
    AdamW,
    Async,
    Bounded,
    Consistency,
    Ftrl,
    Optimizer,
    RowAdagrad,
    Sgd,
    Sync,
    consistency_of,
    constant,
    initializer_of,
    normal,
    optimizer_of,
    uniform,
)

__all__ = [
    "UNBOUNDED",
    "Adagrad",
    "Adam",
    "AdamW",
    "Async",
    "Bounded",
    "Client",
    "ClusterCoordinator",
    "Ftrl",
    "Pulled",
    "RemoteValue",
    "RowAdagrad",
    "Server",
    "Sgd",
    "Sync",
    "Table",
    "Variable",
    "Work",
    "connect",
    "constant",
    "current_client",
    "normal",
    "serve",
    "serve_functions",
    "uniform",
]

class Pulled(NamedTuple):
    """The age of the values that a pull has read."""

    clock: int  #: the values include all pushes of clocks before this one
    behind: int  #: clocks between `clock` and the reader's own
    version: int  #: steps of the table's rows so far


class Work:
    """A request under way, as returned with `async_op=True`. Keep its arrays alive until it has been waited for."""

    def __init__(self, work: _core.PsWork, result: Any, ages: Optional[Counter[int]] = None) -> None:
        self._work = work
        self._result = result
        self._ages = ages
        self.pulled: Optional[Pulled] = None  #: for a pull, set when it has been waited for

    def wait(self) -> Any:
        """Blocks until the request is done; returns the rows of a pull, else None. May be called again."""
        self.pulled = Pulled(*self._work.wait())
        if self._ages is not None:
            self._ages[self.pulled.behind] += 1
            self._ages = None
        return self._result


def _keys(what: str, keys: Any) -> Any:
    if isinstance(keys, (list, tuple, range)):
        import numpy

        try:
            given = [operator.index(key) for key in keys]
            return numpy.asarray(given, numpy.int64 if any(key < 0 for key in given) else numpy.uint64)
        except (TypeError, OverflowError):
            raise InvalidArgument(f"{what}: keys: {keys!r:.80} -- integers are wanted, all of int64 or all of uint64") from None
    if keys is None or isinstance(keys, (int, float, str, bytes, dict, set, frozenset)):
        example = f": [{keys}]" if type(keys) is int else ""
        refuse(what, "keys", keys, f"pass a list of integers, or an array of int64 or uint64{example}")
    return keys


def _fits(array: Any, shape: tuple[int, ...], what: str) -> None:
    # The number of elements is checked below; flat arrays are accepted, too.
    given = tuple(getattr(array, "shape", ()))
    if len(given) > 1 and given != shape and not (len(shape) == 2 and given[-1] == shape[-1]):
        raise InvalidArgument(f"{what}: an array of shape {list(given)} -- {list(shape)} is wanted")


def _lengths(what: str, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, str) and isinstance(shape, Sequence):
        return tuple(integer(what, f"shape[{i}]", length) for i, length in enumerate(shape))
    if hasattr(shape, "__index__"):
        return (integer(what, "shape", shape),)
    refuse(what, "shape", shape, "pass the array's lengths: 8, or (2, 4)")


def _empty(*shape: int) -> Any:
    import numpy

    return numpy.empty(shape, numpy.float32)


def _count(keys: Any) -> int:
    size = getattr(keys, "size", None)
    if callable(size):  # torch
        return int(keys.numel())
    return int(size) if size is not None else len(keys)


def _done(work: _core.PsWork, result: Any, async_op: bool, ages: Optional[Counter[int]] = None) -> Any:
    pending = Work(work, result, ages)
    return pending if async_op else pending.wait()


class Table:
    """Rows of `dim` floats by key. Created by `Client.table`."""

    def __init__(
        self, table: _core.PsTable, client: Client, name: str, lr: float, consistency: _core.PsConsistency
    ) -> None:
        self._table = table
        self.client = client
        self.name = name
        self.lr = lr  #: the optimizer's own rate
        self._ages: Counter[int] = Counter()
        #: True if the gradients of all workers make one step (Sync), False if each push is its own step.
        self.adds_workers = consistency.adds_workers

    @property
    def dim(self) -> int:
        return self._table.dim

    def pull(self, keys: Any, out: Any = None, *, async_op: bool = False) -> Any:
        """Returns the keys' rows, in `out` or a new NumPy array [number of keys, dim]. For a key without a row, returns
        its initial row without creating it. Waits as the table's consistency says."""
        keys = _keys("pull", keys)
        out = _empty(_count(keys), self.dim) if out is None else out
        return _done(self._table.pull(keys, out), out, async_op, self._ages)

    def push(self, keys: Any, gradients: Any, *, lr: Optional[float] = None, async_op: bool = False) -> Any:
        """Makes a step of the table's optimizer with these gradients; gradients of a repeated key are added first. `lr`
        replaces the optimizer's own rate. Raises NonFinite, naming the key; nothing is sent then."""
        keys = _keys("push", keys)
        _fits(gradients, (_count(keys), self.dim), "push: gradients")
        return _done(self._table.push(keys, gradients, rate("push", lr)), None, async_op)

    def push_pull(
        self, keys: Any, gradients: Any, out: Any = None, *, lr: Optional[float] = None, async_op: bool = False
    ) -> Any:
        """Pushes and pulls in one request. Only with Async do the values read include the push; otherwise pushes take
        effect with `Client.clock`."""
        keys = _keys("push_pull", keys)
        out = _empty(_count(keys), self.dim) if out is None else out
        _fits(gradients, (_count(keys), self.dim), "push_pull: gradients")
        return _done(self._table.push_pull(keys, gradients, out, rate("push_pull", lr)), out, async_op, self._ages)

    def assign(self, keys: Any, rows: Any, *, async_op: bool = False) -> Any:
        """Sets rows, immediately under any consistency, and resets their optimizer. Raises the errors of `push`."""
        keys = _keys("assign", keys)
        _fits(rows, (_count(keys), self.dim), "assign: rows")
        return _done(self._table.assign(keys, rows), None, async_op)

    def erase(self, keys: Any, *, async_op: bool = False) -> Any:
        """Removes rows as if they had never existed, immediately under any consistency."""
        return _done(self._table.erase(_keys("erase", keys)), None, async_op)

    def stats(self) -> dict[str, Any]:
        """Returns rows, bytes, created, evicted, dropped (gradients of keys not admitted), steps, rows_of_servers; and
        `staleness`, only for this object's pulls: the number of pulls by clocks behind."""
        return {**self._table.stats(), "staleness": dict(sorted(self._ages.items()))}


class Variable:
    """A dense float32 array, in slices over all servers. Created by `Client.variable`."""

    def __init__(self, variable: _core.PsVariable, shape: tuple[int, ...]) -> None:
        self._variable = variable
        self.shape = shape

    def pull(self, out: Any = None, *, async_op: bool = False) -> Any:
        """Returns the values, in `out` or a new NumPy array of the variable's shape."""
        out = _empty(*self.shape) if out is None else out
        return _done(self._variable.pull(out), out, async_op)

    def push(self, gradients: Any, *, lr: Optional[float] = None, async_op: bool = False) -> Any:
        _fits(gradients, self.shape, "push: gradients")
        return _done(self._variable.push(gradients, rate("push", lr)), None, async_op)

    def push_pull(self, gradients: Any, out: Any = None, *, lr: Optional[float] = None, async_op: bool = False) -> Any:
        out = _empty(*self.shape) if out is None else out
        _fits(gradients, self.shape, "push_pull: gradients")
        return _done(self._variable.push_pull(gradients, out, rate("push_pull", lr)), out, async_op)

    def assign(self, values: Any, *, async_op: bool = False) -> Any:
        _fits(values, self.shape, "assign: values")
        return _done(self._variable.assign(values), None, async_op)


class Client:
    """A worker's connection to all servers, created by `connect`. Any thread; not in a forked child."""

    def __init__(self, client: _core.PsClient) -> None:
        self._client = client
        self._tables: weakref.WeakSet[Table] = weakref.WeakSet()

    @property
    def tables(self) -> list[Table]:
        """The tables that this client has created and the program still refers to, by name."""
        return sorted(self._tables, key=lambda table: table.name)

    @property
    def worker(self) -> int:
        return self._client.worker

    @property
    def workers(self) -> int:
        return self._client.workers

    @property
    def now(self) -> int:
        """This worker's clock."""
        return self._client.now

    def table(self, name: str, dim: int, *, optimizer: Optional[Optimizer] = None,
              initializer: Union[float, _core.PsInitializer] = 0.0, consistency: Consistency = None, admission: int = 1,
              max_age: int = 0, max_rows: int = 0, victim: str = "least_recent", seed: int = 0) -> Table:  # fmt: skip
        """Returns the table of this name, created by the first worker to call; all workers give the same options.

        optimizer     default: Sgd()
        initializer   initial rows: a number, constant(v), uniform(low, high), normal(mean, deviation); only seed and key matter
        consistency   Sync() (default), Bounded(staleness), Async(); "sync" and "async" may stand for these
        admission     number of steps after which a key gets its row; earlier gradients are dropped
        max_age       seconds after its last push at which a row is removed; 0: never
        max_rows      per server; beyond it the "least_recent" or "least_frequent" (victim) of 64 rows is removed; 0: no
                      limit
        """
        text("table", "name", name)
        what = f"table {name!r}"
        optimizer = optimizer_of(what, optimizer)
        consistency = consistency_of(what, consistency)
        made = self._client.table(
            name,
            integer(what, "dim", dim, 1),
            initializer_of(what, initializer),
            optimizer,
            consistency,
            integer(what, "admission", admission, 1),
            integer(what, "max_age", max_age),
            integer(what, "max_rows", max_rows),
            text(what, "victim", victim, 'pass "least_recent" or "least_frequent"'),
            integer(what, "seed", seed, 0, 2**64 - 1),
        )
        table = Table(made, self, name, optimizer.lr, consistency)
        self._tables.add(table)
        return table

    def variable(self, name: str, shape: Union[int, Sequence[int]], *, initial: float = 0.0,
                 optimizer: Optional[Optimizer] = None, consistency: Consistency = None) -> Variable:  # fmt: skip
        """Returns the variable of this name, created by the first worker to call; options as for a table. RowAdagrad is
        refused, since it is for rows."""
        text("variable", "name", name)
        what = f"variable {name!r}"
        lengths = _lengths(what, shape)
        made = self._client.variable(
            name,
            math.prod(lengths),
            number(what, "initial", initial),
            optimizer_of(what, optimizer),
            consistency_of(what, consistency),
        )
        return Variable(made, lengths)

    def clock(self) -> int:
        """Ends this worker's clock, on all servers or on none; then its pushes take effect. Returns the new clock. A worker
        that is 16 clocks ahead of the slowest, such as one that never pulls, waits for the slowest."""
        return self._client.clock()

    def barrier(self) -> None:
        """Waits until all workers have called it equally often. After Timeout, call again to wait for the same barrier."""
        self._client.barrier()

    def snapshot(self, folder: Union[str, os.PathLike[str]], keep: int = 0) -> str:
        """Writes all tables and variables as a new checkpoint in a folder that all servers see; returns the
        checkpoint's own folder. One worker calls it. With Sync it holds exactly the clocks before this one; otherwise
        call it between two barriers. Servers continue meanwhile.

        keep   number of the newest checkpoints to keep in the folder, including this one; 0: all
        """
        return self._client.snapshot(path("snapshot", "folder", folder), integer("snapshot", "keep", keep, 0, 2**31 - 1))

    def restore(self, folder: Union[str, os.PathLike[str]]) -> int:
        """Loads the newest undamaged snapshot of the folder, written by any number of servers; returns its clock. One
        worker calls it, before any pushes. Raises Unavailable if there is none, Corrupt, Mismatch."""
        return self._client.restore(path("restore", "folder", folder))

    def leave(self) -> None:
        """Leaves, so that the others no longer wait for this worker. Pushes after the last clock are dropped, except with
        Async. All later calls, also of its tables and variables, raise InvalidArgument; only `leave` may be called again."""
        self._client.leave()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.leave()
        except Error:
            if kind is None:  # otherwise the error that ends the block is the one to raise
                raise


class Server:
    """Serves on a separate thread, until `close` or the end of the process.

    endpoint      "HOST:PORT" (port 0: the system chooses), or "@NAME": for this user's processes on this host; "": a free
                  port at the address by which the job's other processes reach this host, 127.0.0.1 if all are on it
    secret_file   for TCP, as `cohort secret` writes it; default: the job's secret
    memory        bytes for tables and waiting pushes, or text such as "500M" or "6G" (powers of 1024), beyond which
                  pushes are refused; 0: nine tenths of the free memory
    patience      seconds, above 0, after which a worker without a connection counts as lost
    journal       a file of all changes: a server restarted with it continues where the killed one had stopped
    replicas      for a server of `cohort run`, the same on all servers: how many others hold a copy of its rows and
                  replace it if it dies, 0 or 1; None: 1 if the job survives a server's death (--server-restarts,
                  --lost-servers) and there is no journal, else 0
    """

    def __init__(self, endpoint: str = "", *, secret_file: Union[str, os.PathLike[str]] = "",
                 memory: Union[int, str] = 0, patience: float = 3.0, journal: Union[str, os.PathLike[str]] = "",
                 replicas: Optional[int] = None, _of_job: bool = False) -> None:  # fmt: skip
        self._server: Optional[_core.PsServer] = _core.PsServer(
            text("Server", "endpoint", endpoint, 'pass "HOST:PORT" or "@NAME", or nothing'),
            path("Server", "secret_file", secret_file),
            size("Server", "memory", memory),
            seconds("Server", "patience", patience),
            path("Server", "journal", journal),
            None if replicas is None else integer("Server", "replicas", replicas, 0, 1),
            _of_job,
        )
        #: The address at which it listens, in the form for `connect`.
        self.endpoint: str = self._server.endpoint

    @property
    def workers_gone(self) -> bool:
        """Returns True if there have been workers and all have left or are lost."""
        return self._server is None or self._server.workers_gone

    def close(self) -> None:
        self._server = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(endpoint: str = "", **options: Any) -> None:
    """Runs a server of `cohort run --servers`: publishes its address, for `connect()`, and serves until all workers
    have left or are lost. `options`: those of Server; if `journal` is a folder, each server writes a file there. A
    server that `cohort run --server-restarts` has restarted listens at its predecessor's address; without
    `cohort run`, under TF_CONFIG, at its address there. Raises InvalidArgument in a process that is no server."""
    with Server(endpoint, **options, _of_job=True) as server:
        while not server.workers_gone:
            time.sleep(0.05)


def connect(servers: Union[Sequence[str], str, None] = None, worker: Optional[int] = None,
            workers: Optional[int] = None, *, secret_file: Union[str, os.PathLike[str]] = "",
            connect_timeout: float = 60.0, timeout: float = 60.0) -> Client:  # fmt: skip
    """Connects a worker to all servers.

    servers           their endpoints, in the same order on all workers, or the only server's; default: the servers of
                      this job, when all `serve`
    worker, workers   this worker's number, and the number of workers; default: `cohort.role_number`, `cohort.num_workers`
    connect_timeout   seconds to wait for all servers
    timeout           seconds of a request, including reconnection

    Raises Timeout, naming the server that does not answer, PeerLost if a server has ended, Mismatch, InvalidArgument.
    """
    connect_timeout = seconds("connect", "connect_timeout", connect_timeout)
    if servers is None:
        servers = server_addresses(connect_timeout)
        if not servers:
            raise InvalidArgument("connect: this job has no servers -- start it by `cohort run --servers N`, or name them")
    return Client(
        _core.PsClient(
            _endpoints(servers),
            _core.role_number() if worker is None else integer("connect", "worker", worker),
            _core.num_workers() if workers is None else integer("connect", "workers", workers, 1),
            path("connect", "secret_file", secret_file),
            connect_timeout,
            seconds("connect", "timeout", timeout),
        )
    )


def _endpoints(servers: Any) -> list[str]:
    if isinstance(servers, str):
        servers = [servers]
    if not isinstance(servers, Sequence) or not servers:
        refuse("connect", "servers", servers, 'pass the servers\' endpoints: ["HOST:PORT", ...], or nothing for those of this job')
    for i, server in enumerate(servers):
        text("connect", f"servers[{i}]", server, 'pass an endpoint, "HOST:PORT" or "@NAME": Server(...).endpoint')
    return list(servers)


# At the end, since it imports the names above.
from cohort.ps.coordinator import (  # noqa: E402
    UNBOUNDED,
    ClusterCoordinator,
    RemoteValue,
    current_client,
    serve_functions,
)
