"""Creates a world of Cohort for a process group of torch.distributed: torch calls this module for each group.

The ranks of a group meet through torch's store, which anyone who reaches it can read and write. Every rank claims its
number once; rank 0 reads all claims and publishes the address. On one host that is a Unix socket's name; the core
admits only this user's processes, with the job's secret if it has one. On several hosts rank 0 listens and admits ranks
by the first of these that all have: the job's secret, the launcher's own rendezvous (PMI, PMIx, MUNGE), a fresh secret
in torch's store.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import shlex
import socket
import time
from dataclasses import dataclass
from typing import Any, Optional


import torch.distributed as dist

import cohort
from cohort import _core
from cohort._process import torchrun as _torchrun
from cohort.distributed import beside, environment
from cohort.distributed.group import ProcessGroup

# As long as torch's stores wait for a key by default, and cohort.new_world for ranks.
_LONGEST_MEETING = 300.0


def create(options: Any, backend_options: Any) -> ProcessGroup:
    """For torch: returns the group described by `options` (a _DistributedBackendOptions). Raises cohort.Error."""
    rank, size, name = options.group_rank, options.group_size, str(options.group_id)
    timeout = _seconds(options.timeout)
    ranks = list(options.global_ranks_in_group)
    others = beside.asked_for()
    members = None if ranks else environment.take_formed()
    world: Any = dist.group.WORLD if ranks else None
    elastic = members is not None or (isinstance(world, ProcessGroup) and world.elastic)
    if members is not None:
        communicator = members
    elif size == 1:
        communicator = cohort.new_world(alone=True, timeout=timeout)
    elif elastic:
        patience = min(timeout, _LONGEST_MEETING)
        try:
            communicator = _core.init_part(environment.MEMBERS, world.name_of_part(ranks), rank, size, patience, timeout)
        except cohort.Error as error:
            world.note_failure(error)
            raise
    else:
        meeting = _Meeting(options.store, name, rank, size, min(timeout, _LONGEST_MEETING))
        communicator = meeting.hold(timeout)
    group = ProcessGroup(communicator, ranks, others, elastic)
    beside.attach(group, others, options, backend_options)
    return group


def _seconds(timeout: Optional[datetime.timedelta]) -> float:
    if not isinstance(timeout, datetime.timedelta):
        return 1800.0
    if timeout <= datetime.timedelta(0):
        raise cohort.InvalidArgument(f'init_process_group("cohort"): a timeout of {timeout} has no meaning -- give one above 0')
    return timeout.total_seconds()


def _file_of(store: Any) -> str:
    """Returns the path at which a store of torch's keeps its keys; "" for another kind of store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(store.path) if isinstance(store, dist.FileStore) else ""


@dataclass
class _Claim:
    """A rank's description of itself."""

    process: str  # identifies the process: pid, start time, pid namespace, and a token
    host: str  # equal for processes that share abstract Unix names
    where: str  # for messages
    way: str  # method for meeting other hosts: _core.rendezvous_method

    @staticmethod
    def mine(rank: int, size: int) -> "_Claim":
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            host = f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
        return _Claim(
            _PROCESS(), host, f"host {socket.gethostname()}, pid {os.getpid()}", _core.rendezvous_method(rank, size)
        )

    def encode(self) -> bytes:
        return json.dumps([self.process, self.host, self.where, self.way]).encode()

    @staticmethod
    def decode(data: bytes) -> "_Claim":
        try:
            process, host, where, way = json.loads(data)
            return _Claim(str(process), str(host), str(where), str(way))
        except (ValueError, TypeError) as error:
            raise cohort.Corrupt(
                f'init_process_group("cohort"): {data[:80]!r} in torch\'s store is no claim of Cohort\'s -- another program '
                "uses the store, or another version of Cohort"
            ) from error

    def has_ended(self, here: "_Claim") -> bool:
        """Returns True if that process has surely ended; processes of other hosts or containers cannot be checked."""
        parts = self.process.split()
        if self.host != here.host or len(parts) != 4 or parts[2] != here.process.split()[2]:
            return False
        try:
            os.kill(int(parts[0]), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return _start_time(parts[0]) not in ("", parts[1])


_token: tuple[int, str] = (0, "")


def _PROCESS() -> str:
    global _token
    if _token[0] != os.getpid():  # a forked child is a separate process
        _token = (os.getpid(), secrets.token_hex(8))
    return f"{os.getpid()} {_start_time('self')} {os.readlink('/proc/self/ns/pid')} {_token[1]}"


def _start_time(pid: str) -> str:
    """Returns when the process started, in clock ticks since the host's start; "" if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


class _Meeting:
    """The ranks of one group, from their claims to the world."""

    def __init__(self, store: Any, name: str, rank: int, size: int, patience: float) -> None:
        self.store, self.name, self.rank, self.size = store, name, rank, size
        self.until = time.monotonic() + patience
        self.patience = patience
        self.claim = _Claim.mine(rank, size)
        # torchrun's agent keeps its store over restarts, and so the claims of ranks that have ended.
        self.attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def hold(self, timeout: float) -> cohort.Communicator:
        number = self._claim_rank()
        address = self._call(number) if self.rank == 0 else self._hear(number)
        scheme, _, token = address.partition("://")
        name = f"torch {self.name}"[:150]
        options: dict[str, Any] = dict(init_timeout=max(1.0, self._left()), timeout=timeout)
        if scheme == "launcher":
            return cohort.new_world(group_name=name, **options)
        options.update(rank=self.rank, world_size=self.size)
        if scheme == "store":
            share = _torchrun.through(self.store, self.rank)
            return cohort.new_world(share=share, share_name="torch's store", group_name=f"{name} {token}", **options)
        return cohort.new_world(address, group_name=name, **options)

    def _left(self) -> float:
        return self.until - time.monotonic()

    def _key(self, what: str, number: int, rank: int = 0) -> str:
        return f"cohort/{self.attempt}/{number}/{what}/{rank}"

    def _claim_rank(self) -> int:
        """Counts the claims to this rank of the group. More than one is valid only if the same process has destroyed
        its group and forms it again in a store that still exists (that of torchrun's agent)."""
        number = int(self.store.add(f"cohort/{self.attempt}/claims/{self.rank}", 1))
        self._put(self._key("claim", number, self.rank), self.claim.encode())
        if number == 1:
            return number
        previous = self._get(self._key("claim", number - 1, self.rank), 2.0)
        holder = _Claim.decode(previous) if previous is not None else None
        if holder is not None and holder.process == self.claim.process:
            return number
        path = _file_of(self.store)
        left_behind = path and holder is not None and holder.has_ended(self.claim)
        store, way_out = f"the file {path}" if path else "this store", "give each process a rank of its own"
        if left_behind:
            way_out = f"the file is an earlier job's: remove it, rm {shlex.quote(path)}, or name a fresh one for each job"
        elif path:
            way_out += "; or if the file is an earlier job's, name a fresh one for each job"
        reason = (
            f"rank {self.rank} is taken: {holder.where if holder else 'another process'}{', which has ended,' if left_behind else ''} "
            f"has claimed it in {store}, and this process ({self.claim.where}) claims it too"
        )
        # Passes the error to ranks that wait in vain for this process, or for an earlier one with this rank.
        for waited_for in range(max(1, number - 1), number + 1):
            self._verdict(waited_for, error=reason)
        raise cohort.InvalidArgument(f'init_process_group("cohort"), group "{self.name}": {reason} -- {way_out}')

    def _put(self, key: str, value: bytes) -> None:
        self.store.set(key, value)
        self.store.add(f"{key}/there", 1)

    def _get(self, key: str, seconds: float) -> Optional[bytes]:
        """Returns None if the key does not appear in time."""
        if not hasattr(self.store, "check"):
            # torch 1.13: a wait that has timed out makes the store's connection unusable.
            until, pause = time.monotonic() + seconds, 0.001
            while int(self.store.add(f"{key}/there", 0)) == 0:
                if time.monotonic() > until:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
        else:
            try:
                self.store.wait([key], datetime.timedelta(seconds=max(0.001, seconds)))
            except RuntimeError as error:
                # A file store uses another exception class than the other stores.
                if isinstance(error, dist.DistStoreError) or "timeout" in str(error).lower():
                    return None
                raise
        return bytes(self.store.get(key))

    def _verdict(self, number: int, address: str = "", error: str = "") -> str:
        """Publishes the verdict; the first one stands. Returns the address in it, or raises its error."""
        key, mine = self._key("verdict", number), json.dumps([address, error])
        said = bytes(self.store.compare_set(key, "", mine)).decode() or mine
        self._put(key, said.encode())  # repeated: in some stores, compare_set wakes no waiting rank
        return self._take(said) if address else ""

    def _take(self, said: str) -> str:
        address, error = json.loads(said)
        if error:
            raise cohort.Aborted(
                f'init_process_group("cohort"), group "{self.name}", rank {self.rank} ({self.claim.where}): {error}'
            )
        # The store cannot weaken this: on one host only this user's processes are met, elsewhere holders of the secret.
        if str(address).partition("://")[0] not in ("unix", "launcher", "store"):
            raise cohort.Corrupt(f"torch's store says to meet at {address!r}, which is no address of Cohort's")
        return str(address)

    def _call(self, number: int) -> str:
        """On rank 0: returns the address, when all ranks have claimed."""
        missing: list[int] = []
        claims = [self.claim]
        for rank in range(1, self.size):
            said = self._get(self._key("claim", number, rank), self._left() if not missing else 0.001)
            if said is None:
                missing.append(rank)
                continue
            claims.append(_Claim.decode(said))
        if missing:
            some = ", ".join(map(str, missing[:32])) + (", ..." if len(missing) > 32 else "")
            reason = f"{len(missing)} of {self.size} ranks did not come within {self.patience:g} s: {some}"
            self._verdict(number, error=reason)
            raise cohort.Timeout(
                f'init_process_group("cohort"), group "{self.name}", rank 0 ({self.claim.where}): {reason} -- were all '
                "started, with the same address, and do all call it?"
            )
        token = secrets.token_hex(16)
        if all(claim.host == self.claim.host for claim in claims):
            return self._verdict(number, address=f"unix://torch {token}")
        if all(claim.way == "launcher" for claim in claims):
            return self._verdict(number, address="launcher://")
        without = next((rank for rank, claim in enumerate(claims) if claim.way != "secret"), None)
        if without is not None and any(claim.way == "secret" for claim in claims):
            having = next(rank for rank, claim in enumerate(claims) if claim.way == "secret")
            reason = (
                f"rank {having} ({claims[having].where}) has a secret and rank {without} ({claims[without].where}) has none"
            )
            self._verdict(number, error=reason)
            raise cohort.Mismatch(
                f'init_process_group("cohort"), group "{self.name}": {reason} -- give all of them the same '
                "COHORT_SECRET_FILE, or none"
            )
        return self._verdict(number, address=f"store://{token}")

    def _hear(self, number: int) -> str:
        """On other ranks: returns the address that rank 0 has published."""
        # Rank 0 ends a late meeting; its verdict may take a moment longer.
        said = self._get(self._key("verdict", number), self._left() + 3.0)
        if said is None:
            raise cohort.Timeout(
                f'init_process_group("cohort"), group "{self.name}", rank {self.rank} ({self.claim.where}): rank 0 did not '
                f"say within {self.patience:g} s where to meet -- has it been started, and does it call it?"
            )
        return self._take(said.decode())
