"""Where a job's servers listen: each says it, and whoever needs them waits until all have."""

from __future__ import annotations

import os
import time

from cohort import _core
from cohort.errors import InvalidArgument, Timeout

# For the job's store, which answers at once.
_STORE_SECONDS = 30.0


def _key(number: int) -> str:
    # Servers that are started again listen somewhere else.
    return f"servers/{os.environ.get('COHORT_RESTART', '0')}/{number}"


def _listed() -> list[str] | None:
    """What TF_CONFIG says, where there is no job of `cohort run` (whose own --tf-config says the same)."""
    text = os.environ.get("TF_CONFIG", "")
    if os.environ.get("COHORT_STORE") or not text:
        return None
    spec = _core.ClusterSpec.from_tf_config(text)
    return [spec.task_address("ps", index) for index in spec.task_indices("ps")] if "ps" in spec.jobs else []


def announce_server(address: str) -> None:
    """Says where this server listens, for `server_addresses` of the job's other processes; once it does.

    address  what others reach it by, e.g. "10.0.0.7:4711"

    Raises InvalidArgument in a process that is no server, Unavailable without `cohort run`. Under TF_CONFIG alone the
    cluster says it, and nothing is to be done.
    """
    role = _core.role()
    if role != "server":
        raise InvalidArgument(f"announce_server: this process is no server but a {role} -- see `cohort run --servers`")
    if not address:
        raise InvalidArgument("announce_server: the address is empty -- give HOST:PORT")
    if _listed() is None:
        _core.JobStore(_STORE_SECONDS).put(_key(_core.role_number()), address.encode())


def earlier_address() -> str | None:
    """Where this server has listened before `cohort run --server-restarts` started it again, and where the others look for
    it. None: it has not been started before, or had not said it."""
    if not _core.environment_value("COHORT_SERVER_RESTART") or not os.environ.get("COHORT_STORE"):
        return None
    found = _core.JobStore(_STORE_SECONDS).get(_key(_core.role_number()), _STORE_SECONDS)
    return None if found is None else found.decode()


def server_addresses(timeout: float = 60.0) -> list[str]:
    """Where the job's servers listen, by number, once all have said so; [] where there are none.

    Under TF_CONFIG, without `cohort run`, the addresses of its ps tasks. Raises Timeout after `timeout` seconds, naming the
    servers that have not said it.
    """
    listed = _listed()
    if listed is not None:
        return listed
    found: list[str] = []
    missing: list[int] = []
    if _core.num_servers() == 0:
        return found
    end = time.monotonic() + timeout
    store = _core.JobStore(_STORE_SECONDS)
    for number in range(_core.num_servers()):
        try:
            found.append(store.wait(_key(number), max(end - time.monotonic(), 0.01)).decode())
        except Timeout:
            missing.append(number)
    if missing:
        who = ", ".join(map(str, missing))
        raise Timeout(
            f"server_addresses: server{'s' if len(missing) > 1 else ''} {who} of {_core.num_servers()} "
            f"{'have' if len(missing) > 1 else 'has'} not said within {timeout:g} s where {'they listen' if len(missing) > 1 else 'it listens'} "
            "-- is the program of servers one that calls announce_server?"
        )
    return found
