"""Thin wrappers over cohort.ps with the interfaces of other parameter servers: ps-lite's KVWorker and MXNet's kv. For
programs being ported; in new ones, Client, Table and Variable offer more.

    worker = compat.KVWorker(0)                       # ps-lite
    worker.Wait(worker.Push(keys, values))            # store[key] += value
    worker.Wait(worker.Pull(keys, values))

    kv = compat.create("dist_async")                  # MXNet
    kv.set_optimizer(ps.Sgd(lr=0.1))
    kv.init(3, weights)
    kv.push(3, gradients)
    kv.pull(3, out=weights)
"""

from __future__ import annotations

import itertools
from typing import Any, Optional

import numpy

from cohort import ps
from cohort.errors import InvalidArgument

__all__ = ["KVStore", "KVWorker", "create"]


class KVWorker:
    """ps-lite's worker, with servers that add: `store[key] += value`. Values are float32, equally many for each key, in
    all calls. Push and Pull return immediately, with a number for Wait.

    app_id   the store's number: workers with the same number share it
    client   None: creates one, and `Finalize` leaves with it
    """

    def __init__(self, app_id: int = 0, customer_id: int = 0, *, client: Optional[ps.Client] = None) -> None:
        self._own = client is None
        self._client = ps.connect() if client is None else client
        self._name = f"ps-lite {app_id}"
        self._table: Optional[ps.Table] = None
        self._numbers = itertools.count()
        self._pending: dict[int, ps.Work] = {}

    def Push(self, keys: Any, vals: Any) -> int:
        """Adds `vals` (n * k numbers) to the n keys, which are unique and ascending."""
        keys, vals = self._checked(keys, vals)
        return self._started(self._rows(keys, vals).push(keys, -vals, async_op=True))

    def Pull(self, keys: Any, vals: Any) -> int:
        """Writes the keys' values into `vals`, a float32 array, before `Wait` returns."""
        keys, vals = self._checked(keys, vals, written=True)
        return self._started(self._rows(keys, vals).pull(keys, vals, async_op=True))

    def PushPull(self, keys: Any, vals: Any, outs: Any) -> int:
        """Adds `vals`, and writes the new values to `outs`."""
        keys, vals = self._checked(keys, vals)
        _, outs = self._checked(keys, outs, written=True)
        return self._started(self._rows(keys, vals).push_pull(keys, -vals, outs, async_op=True))

    def Wait(self, timestamp: int) -> None:
        """Blocks until that request is done. May be called again."""
        if work := self._pending.pop(timestamp, None):
            work.wait()

    def Finalize(self) -> None:
        """Waits for all requests and for all workers, and leaves."""
        for timestamp in list(self._pending):
            self.Wait(timestamp)
        self._client.barrier()
        if self._own:
            self._client.leave()

    def _checked(self, keys: Any, vals: Any, written: bool = False) -> tuple[Any, Any]:
        keys = numpy.ascontiguousarray(keys, numpy.uint64)
        if written and (getattr(vals, "dtype", None) != numpy.float32 or not vals.flags.c_contiguous):
            raise InvalidArgument("Pull: vals has to be a float32 array, contiguous")
        vals = vals if written else numpy.ascontiguousarray(vals, numpy.float32)
        if not keys.size or (keys[1:] <= keys[:-1]).any():
            raise InvalidArgument("KVWorker: keys have to be there, unique and ascending, as ps-lite has them")
        if not vals.size or vals.size % keys.size:
            raise InvalidArgument(f"KVWorker: {vals.size} values for {keys.size} keys -- as many for each key (no `lens`)")
        return keys, vals

    def _rows(self, keys: Any, vals: Any) -> ps.Table:
        if self._table is None:
            length = vals.size // keys.size
            self._table = self._client.table(self._name, length, optimizer=ps.Sgd(lr=1.0), consistency=ps.Async())
        return self._table

    def _started(self, work: ps.Work) -> int:
        number = next(self._numbers)
        self._pending[number] = work
        return number


class KVStore:
    """Result of `create`: MXNet's verbs, with the optimizer on the servers (`update_on_kvstore=True`).

    dist_sync    the gradients of all workers since the last pull are added, and make one step (Sync); the first pull
                 after pushes ends the worker's clock
    dist_async   each push is a step (Async)
    """

    def __init__(self, kind: str, client: Optional[ps.Client] = None) -> None:
        if kind not in ("dist_sync", "dist_async"):
            raise InvalidArgument(f"create: {kind!r} -- there are 'dist_sync' and 'dist_async'")
        self.type = kind
        self._own = client is None
        self._client = ps.connect() if client is None else client
        self._consistency = ps.Sync() if kind == "dist_sync" else ps.Async()
        self._optimizer: Optional[ps.Optimizer] = None
        self._variables: dict[str, ps.Variable] = {}
        self._pushed = False

    @property
    def rank(self) -> int:
        return self._client.worker

    @property
    def num_workers(self) -> int:
        return self._client.workers

    def set_optimizer(self, optimizer: ps.Optimizer) -> None:
        """Sets an optimizer of cohort.ps, before `init`: servers use it for keys created from now on."""
        self._optimizer = optimizer

    def init(self, key: Any, value: Any) -> None:
        """Creates the keys; all workers call it. Keys begin with worker 0's values."""
        for name, one in self._each(key, value):
            if self._optimizer is None:
                raise InvalidArgument("init: set_optimizer first -- servers step values, they do not only add gradients up")
            array = numpy.ascontiguousarray(one, numpy.float32)
            variable = self._client.variable(
                f"kv {name}", array.shape or 1, optimizer=self._optimizer, consistency=self._consistency
            )
            if self.rank == 0 and self._client.now == 0:
                variable.assign(array)
            self._variables[name] = variable
        self.barrier()

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Pushes gradients. A list of arrays for one key is summed. `priority` has no effect."""
        for name, one in self._each(key, value):
            parts = one if isinstance(one, (list, tuple)) else [one]
            total = sum((numpy.asarray(part, numpy.float32) for part in parts[1:]), numpy.asarray(parts[0], numpy.float32))
            self._variable(name).push(numpy.ascontiguousarray(total))
            self._pushed = True

    def pull(self, key: Any, out: Any, priority: int = 0) -> None:
        """Pulls the values into `out`: a float32 array, or a list of such arrays."""
        if self._pushed and self.type == "dist_sync":
            self._client.clock()
        self._pushed = False
        for name, one in self._each(key, out):
            targets = one if isinstance(one, (list, tuple)) else [one]
            values = self._variable(name).pull()
            for target in targets:
                target[...] = values.reshape(target.shape)

    def pushpull(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        self.push(key, value)
        self.pull(key, out)

    def barrier(self) -> None:
        self._client.barrier()

    def close(self) -> None:
        if self._own:
            self._client.leave()

    def _variable(self, name: str) -> ps.Variable:
        if name not in self._variables:
            raise InvalidArgument(f"key {name} has not been made -- init it")
        return self._variables[name]

    @staticmethod
    def _each(key: Any, value: Any) -> list[tuple[str, Any]]:
        if isinstance(key, (list, tuple)):
            if len(key) != len(value):
                raise InvalidArgument(f"{len(key)} keys and {len(value)} values")
            return [(str(name), one) for name, one in zip(key, value)]
        return [(str(key), value)]


def create(name: str = "dist_sync", client: Optional[ps.Client] = None) -> KVStore:
    """MXNet's `kv.create`: "dist_sync" or "dist_async", by all workers. `client` None: creates one, until `close`."""
    return KVStore(name, client)
