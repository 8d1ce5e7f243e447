"""Replaces RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT if no launcher has set them, for
env:// and for programs that read them.

They are set with the default group and removed with it, so that a process started afterwards is no rank of that group.
An elastic job's launcher (`cohort run --min-np`) sets only first values; they change with the world's members.
"""

from __future__ import annotations

import datetime
import inspect
import json
import os
import socket
import sys
import urllib.parse
import warnings
from collections.abc import MutableMapping
from typing import Any, Optional

import torch.distributed as dist

import cohort
from cohort import _core

_INIT = 'init_process_group("cohort")'
_TEXT_BYTES = 8192

# The group_name of an elastic job's world.
MEMBERS = "torch's members"

_master: dict[str, Any] = {}  # the address of the store that `meet` has made
_formed: list[cohort.Communicator] = []  # worlds for the next default group


def meet(url: str, timeout: Optional[datetime.timedelta]) -> Optional[tuple[Any, int, int]]:
    """Returns torch's store, this process's rank and the world's size, for the env:// of `url` if some of its variables
    are missing. The ranks then meet like those of cohort.init(), and rank 0 tells the others the address of its store.
    Without any sign of several ranks, forms a world of one, with a warning. Returns None if torch has to do it, or to
    report what is missing.

    Raises InvalidArgument if the program or a variable contradicts the launcher, and the errors of cohort.new_world.
    """
    query = urllib.parse.parse_qs(urllib.parse.urlparse(url).query)
    if _core.is_elastic():
        return _meet_members({name: query[name][0] for name in ("rank", "world_size") if name in query}, timeout)
    given = {name: query.get(key, [os.environ.get(name, "")])[0] for name, key in (("RANK", "rank"), ("WORLD_SIZE", "world_size"))}
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if all((*given.values(), address, port)):
        return None
    if not _core.has_launcher():
        if address or port or given["RANK"] not in ("", "0") or given["WORLD_SIZE"] not in ("", "1"):
            return None
        if not all(given.values()):
            warnings.warn(
                f"{_INIT}: no launcher has started this process, and nothing says that it is one of several: it is a world of "
                "one -- `cohort run -np 4 PROGRAM` starts four, cohort.run(function, np=4) does from a notebook",
                stacklevel=6,
            )
        return dist.HashStore(), 0, 1
    seconds = 300.0 if timeout is None else min(300.0, timeout.total_seconds())
    world = cohort.new_world(group_name="torch's store", init_timeout=max(1.0, seconds))
    try:
        for (name, said), found in zip(given.items(), (world.rank(), world.size())):
            if said and int(said) != found:
                raise cohort.InvalidArgument(
                    f"{_INIT}: {name} is {said}, as the program or the environment says, and the launcher says {found} -- give "
                    "both rank and world_size (with MASTER_ADDR and MASTER_PORT), or neither"
                )
        return _store(world, address, int(port or 0), seconds), world.rank(), world.size()
    except Exception as error:
        world.abort(f"{_INIT}, rank {world.rank()}: {error}")
        raise
    finally:
        world.leave()


def _forget_earlier_hook() -> None:
    """Removes the hook that torch puts around sys.excepthook for each default group, to print "[rank0]: " in each line."""
    hook: Any = sys.excepthook
    if getattr(hook, "__name__", "") == "_distributed_excepthook":
        sys.excepthook = inspect.getclosurevars(hook).nonlocals.get("old_hook", hook)


def _meet_members(said: dict[str, str], timeout: Optional[datetime.timedelta]) -> tuple[Any, int, int]:
    """Meets in the elastic job's latest epoch. The default group uses its world; the store is of this epoch only."""
    _forget_earlier_hook()
    while True:
        world = cohort.new_world(group_name=MEMBERS, timeout=timeout)
        try:
            for name, found in (("rank", world.rank()), ("world_size", world.size())):
                if int(said.get(name, found)) != found:
                    raise cohort.InvalidArgument(
                        f"{_INIT}: the program says that {name} is {said[name]}, and it is {found} in epoch "
                        f"{_core.formed_epoch(MEMBERS)} of this elastic job -- leave rank and world_size away"
                    )
            try:
                store = _store(world, "", 0, 30.0)
            except RuntimeError:
                world.barrier(timeout=30.0)  # rank 0 may have ended, with its store
                raise
        except (cohort.PeerLost, cohort.Aborted):
            world.leave()  # the others form the next epoch's world, and so does this process
        except BaseException as error:
            world.abort(f"{_INIT}, rank {world.rank()}: {error}")
            world.leave()
            raise
        else:
            _formed[:] = [world]
            return store, world.rank(), world.size()


def take_formed() -> Optional[cohort.Communicator]:
    """Returns the world that `meet` has formed in an elastic job; later calls return None."""
    return _formed.pop() if _formed else None


def _store(world: cohort.Communicator, address: str, port: int, seconds: float) -> Any:
    if world.size() == 1:
        return dist.HashStore()
    how: dict[str, Any] = {"timeout": datetime.timedelta(seconds=seconds), "wait_for_workers": False}
    text = bytearray(_TEXT_BYTES)
    if world.rank() == 0:
        store = dist.TCPStore(address or "localhost", port, world.size(), True, **how)
        addresses = [address] if address else _core.offered_addresses() if world.cross_size() > 1 else ["localhost"]
        said = json.dumps([addresses, store.port]).encode()
        text[: len(said)] = said
    world.broadcast(text, root=0)
    addresses, port = json.loads(text.rstrip(b"\0"))
    if world.rank() == 0:
        address = addresses[0]
    else:
        address = _reachable(addresses, port, world)
        store = dist.TCPStore(address, port, world.size(), False, **how)
    world.barrier()
    _master.update(MASTER_ADDR=address, MASTER_PORT=port)
    return store


def _reachable(addresses: list[str], port: int, world: cohort.Communicator) -> str:
    """Returns the first address at which rank 0's store listens. torch's own attempts would take its whole timeout."""
    tried = []
    for address in addresses:
        try:
            socket.create_connection((address, port), 5.0).close()
            return address
        except OSError as error:
            tried.append(f"{address}: {error}")
    raise cohort.Unavailable(
        f"{_INIT}: rank {world.rank()} does not reach rank 0's store at port {port}: {'; '.join(tried) or 'no address'} -- open "
        "the port, name the network with COHORT_NETWORK, or set MASTER_ADDR and MASTER_PORT for all ranks"
    )


def fill(communicator: cohort.Communicator, elastic: bool = False) -> list[tuple[str, str]]:
    """Sets variables that are missing, and returns them. For an elastic job's world, also updates those that change with
    it (not LOCAL_RANK, by which a process selects its GPU)."""
    if elastic:
        now = {"RANK": communicator.rank(), "WORLD_SIZE": communicator.size(), **_master}
        os.environ.update((name, str(value)) for name, value in now.items())
        _master.clear()
        return []
    values = {
        "RANK": communicator.rank(),
        "WORLD_SIZE": communicator.size(),
        "LOCAL_RANK": communicator.local_rank(),
        "LOCAL_WORLD_SIZE": communicator.local_size(),
        **_master,
    }
    _master.clear()
    filled = [(name, str(value)) for name, value in values.items() if not os.environ.get(name)]
    os.environ.update(filled)
    return filled


def take_back(filled: list[tuple[str, str]], environment: MutableMapping[str, str] = os.environ) -> None:
    while filled:
        name, value = filled.pop()
        if environment.get(name) == value:
            del environment[name]
