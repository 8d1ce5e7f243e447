"""What Horovod's wishes for a job mean here: a plan of processes, variables and options, and words about the rest."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_HOST = re.compile(r"^([\w.-]+|\[[0-9a-fA-F:]+\]):([0-9]+)$")
_LOG_LEVELS = {"TRACE": "debug", "DEBUG": "debug", "INFO": "info", "WARNING": "warn", "ERROR": "error", "FATAL": "error"}

# Wishes that change nothing here, and why.
NO_MEANING = {
    "network_interfaces": "the ranks of one host meet in its memory, no network is used",
    "ssh_port": "all ranks are on this host, nothing is reached by ssh",
    "ssh_identity_file": "all ranks are on this host, nothing is reached by ssh",
    "cycle_time_ms": "there is no polling cycle: an operation starts as soon as all ranks have asked for it",
    "hierarchical_allreduce": "how a reduction goes is measured at start",
    "hierarchical_allgather": "how a gather goes is measured at start",
    "torus_allreduce": "how a reduction goes is measured at start",
    "autotune": "what the autotuner looks for is measured at start",
    "autotune_log_file": "there is no autotuner",
    "autotune_warmup_samples": "there is no autotuner",
    "autotune_steps_per_sample": "there is no autotuner",
    "autotune_bayes_opt_max_samples": "there is no autotuner",
    "autotune_gaussian_process_noise": "there is no autotuner",
    "mpi": "no mpirun is used: Cohort starts the ranks and carries their data itself",
    "jsrun": "no jsrun is used: Cohort starts the ranks itself",
    "mpi_args": "no mpirun is used; variables for the ranks: set them in this shell, all of its environment is passed on",
    "mpi_threads_disable": "no MPI is used",
    "tcp": "the ranks of one host meet in its memory",
    "binding_args": "ranks are not bound to cores; `taskset` or `numactl` before the program does it",
    "num_nccl_streams": "no NCCL is used",
    "thread_affinity": "there is no background thread to bind",
    "log_with_timestamp": "lines of the log have no time; -prefix-timestamp puts one before each line",
}
# Wishes that would make it another job than the one that was meant.
NOT_YET = {
    "min_num_proc": "elastic jobs are not there yet; -np alone starts a job of fixed size",
    "max_num_proc": "elastic jobs are not there yet; -np alone starts a job of fixed size",
    "slots_per_host": "elastic jobs are not there yet; -np alone starts a job of fixed size",
    "elastic_timeout": "elastic jobs are not there yet; -np alone starts a job of fixed size",
    "reset_limit": "elastic jobs are not there yet; -np alone starts a job of fixed size",
    "blacklist_cooldown_range": "elastic jobs are not there yet; -np alone starts a job of fixed size",
    "host_discovery_script": "elastic jobs are not there yet; -np alone starts a job of fixed size",
}


@dataclasses.dataclass
class Plan:
    """A job as `cohort run` takes it."""

    processes: int
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    start_timeout: float = 30.0
    folder: str | None = None
    prefix: str = "rank"
    notes: list[str] = dataclasses.field(default_factory=list)


def tell(notes: Iterable[str], who: str) -> None:
    """On stderr, a line each."""
    for note in notes:
        print(f"{who}: {note}", file=sys.stderr)


def plan_of(
    processes: int, wishes: Mapping[str, Any], spelled: Callable[[str], str] = lambda wish: wish
) -> Plan:
    """The plan for Horovod's wishes, by the names of horovodrun's options with "_"; None is no wish.

    `spelled` gives a wish's name as the user wrote it. Raises ValueError for what is wrong or cannot be done.
    """
    wanted = {name: value for name, value in wishes.items() if value is not None and value is not False}
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ValueError(f"{spelled('num_proc')}: {processes!r} processes -- at least one is needed")
    for name in wanted:
        if name in NOT_YET:
            raise ValueError(f"{spelled(name)}: {NOT_YET[name]}")
    plan = Plan(processes)
    if "hosts" in wanted and "hostfile" in wanted:
        raise ValueError(f"{spelled('hosts')} and {spelled('hostfile')} were both given -- one of them says the hosts")
    if "hosts" in wanted:
        _check_hosts(spelled("hosts"), hosts_of(wanted["hosts"]), processes)
    if "hostfile" in wanted:
        _check_hosts(wanted["hostfile"], read_hostfile(wanted["hostfile"]), processes)
    plan.notes += [f"{spelled(name)} has no meaning here -- {NO_MEANING[name]}" for name in wanted if name in NO_MEANING]

    if "start_timeout" in wanted:
        plan.start_timeout = float(wanted["start_timeout"])
    if "output_filename" in wanted:
        plan.folder = str(wanted["output_filename"])
        link_outputs(plan.folder, processes)
    if wanted.get("prefix_output_with_timestamp"):
        plan.prefix = "full"
    plan.environment = environment_of(wishes)
    return plan


def environment_of(wishes: Mapping[str, Any]) -> dict[str, str]:
    """The variables that horovodrun sets for these wishes and that mean something here, and Cohort's own for them."""
    out: dict[str, str] = {}

    def put(name: str, wish: str, text: Callable[[Any], str] = str) -> None:
        if wishes.get(wish) is not None:
            out[name] = text(wishes[wish])

    def flag(value: Any) -> str:
        return "1" if value else "0"

    put("HOROVOD_FUSION_THRESHOLD", "fusion_threshold_mb", lambda value: str(int(float(value) * 1024 * 1024)))
    put("HOROVOD_CACHE_CAPACITY", "cache_capacity")
    put("HOROVOD_TIMELINE", "timeline_filename")
    put("HOROVOD_TIMELINE_MARK_CYCLES", "timeline_mark_cycles", flag)
    put("HOROVOD_STALL_CHECK_DISABLE", "stall_check", lambda value: flag(not value))
    put("HOROVOD_STALL_CHECK_TIME_SECONDS", "stall_check_warning_time_seconds")
    put("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "stall_check_shutdown_time_seconds")
    put("HOROVOD_GLOO_TIMEOUT_SECONDS", "gloo_timeout_seconds")
    put("COHORT_TIMEOUT", "gloo_timeout_seconds")
    put("HOROVOD_LOG_LEVEL", "log_level")
    put("COHORT_LOG", "log_level", lambda value: _LOG_LEVELS[str(value).upper()])
    if wishes.get("verbose"):
        out.setdefault("COHORT_LOG", "info")
    return out


def hosts_of(text: str) -> list[tuple[str, int]]:
    """"a:2,b:2" as [("a", 2), ("b", 2)]. Raises ValueError, which names the item that is wrong."""
    hosts = []
    for item in text.split(","):
        match = _HOST.match(item.strip())
        if not match or int(match[2]) < 1:
            raise ValueError(f"host {item.strip()!r}: NAME:SLOTS is wanted, e.g. localhost:4")
        hosts.append((match[1].strip("[]"), int(match[2])))
    return hosts


def read_hostfile(path: str) -> list[tuple[str, int]]:
    """Lines "NAME slots=N" (N is 1 where it is not said); "#" begins a comment. Raises ValueError with the line's number."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"hostfile {path}: {getattr(error, 'strerror', None) or error}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        slots = [re.fullmatch(r"slots=(\d+)", word) for word in words[1:]]
        if len(words) > 2 or not all(slots) or any(int(match[1]) < 1 for match in slots if match):
            raise ValueError(f"hostfile {path}, line {number}: {line.strip()!r} -- NAME slots=N is wanted")
        hosts.append((words[0], int(slots[0][1]) if slots and slots[0] else 1))
    if not hosts:
        raise ValueError(f"hostfile {path}: it names no host")
    return hosts


def _is_here(name: str) -> bool:
    own = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.gethostname().split(".")[0], socket.getfqdn()}
    if name in own:
        return True
    try:
        return socket.gethostbyname(name).startswith("127.")
    except OSError:
        return False


def _check_hosts(where: str, hosts: list[tuple[str, int]], processes: int) -> None:
    total = sum(slots for _, slots in hosts)
    if total < processes:
        raise ValueError(f"{where}: {processes} processes do not fit the {total} slots of {len(hosts)} host(s)")
    needed = 0
    for name, slots in hosts:
        if needed >= processes:
            break
        needed += slots
        if not _is_here(name):
            raise ValueError(
                f"{where}: host {name} is not this one, and jobs on several hosts are not there yet -- "
                f"-H localhost:{processes} runs all ranks here"
            )


def link_outputs(folder: str, processes: int) -> None:
    """Horovod's names for the ranks' complete output, FOLDER/rank.NN/stdout, as links to where Cohort writes it."""
    width = len(str(processes - 1))
    for rank in range(processes):
        own = os.path.join(folder, f"rank.{rank:0{width}d}")
        os.makedirs(own, exist_ok=True)
        for name, ending in (("stdout", "out"), ("stderr", "err")):
            path = os.path.join(own, name)
            if os.path.lexists(path):
                os.remove(path)
            os.symlink(os.path.join("..", "logs", f"rank-{rank}.{ending}"), path)
