"""Translates horovodrun's options to a plan of processes, variables and options, with notes on the rest."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_LOG_LEVELS = {"TRACE": "debug", "DEBUG": "debug", "INFO": "info", "WARNING": "warn", "ERROR": "error", "FATAL": "error"}

AUTOTUNE = ("log_file", "warmup_samples", "steps_per_sample", "bayes_opt_max_samples", "gaussian_process_noise")
# Options that have no effect here, with the reason.
NO_MEANING = {
    "cycle_time_ms": "there is no polling cycle: an operation starts as soon as all ranks have asked for it",
    **dict.fromkeys(("hierarchical_allreduce", "torus_allreduce"), "how a reduction goes is measured at start"),
    "hierarchical_allgather": "how a gather goes is measured at start",
    "autotune": "what the autotuner looks for is measured at start",
    **{f"autotune_{name}": "there is no autotuner" for name in AUTOTUNE},
    "mpi": "no mpirun is used: Cohort starts the ranks and carries their data itself",
    "jsrun": "no jsrun is used: Cohort starts the ranks itself",
    "mpi_args": "no mpirun is used; variables for the ranks: set them in this shell, all but a host's own (HOME) are passed on",
    "mpi_threads_disable": "no MPI is used",
    "tcp": "between hosts it is always TCP, and within one shared memory",
    "binding_args": "no mpirun is used; COHORT_RUN_BIND=core in this shell binds each rank to cores of its own",
    "num_nccl_streams": "no NCCL is used",
    "thread_affinity": "there is no background thread to bind",
    "log_with_timestamp": "lines of the log have no time; -prefix-timestamp puts one before each line",
}
# Options of an elastic job, with the options of `cohort run` for them.
ELASTIC = {
    "min_num_proc": "--min-np",
    "max_num_proc": "--max-np",
    "reset_limit": "--reset-limit",
    "elastic_timeout": "--elastic-timeout",
    "host_discovery_script": "--host-discovery-script",
    "slots_per_host": "--slots-per-host",
    "blacklist_cooldown_range": "--blacklist-cooldown-range",
}


@dataclasses.dataclass
class Plan:
    """A job as `cohort run` takes it."""

    processes: int
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    start_timeout: float = 30.0
    hosts: Any = None  # in the form of `cohort run -H`, or of `hosts` of `cohort.run`
    hostfile: str | None = None
    ways: list[str] = dataclasses.field(default_factory=list)  # options that say how hosts and ranks reach each other
    folder: str | None = None
    prefix: str = "rank"
    elastic: list[str] = dataclasses.field(default_factory=list)  # options of an elastic job
    notes: list[str] = dataclasses.field(default_factory=list)


def tell(notes: Iterable[str], who: str) -> None:
    """Prints the notes on stderr, one line each."""
    for note in notes:
        print(f"{who}: {note}", file=sys.stderr)


def plan_of(processes: int, wishes: Mapping[str, Any], spelled: Callable[[str], str] = lambda wish: wish) -> Plan:
    """Returns the plan for horovodrun's options, given by their names with "_"; None: the option was not given.

    `spelled` gives a wish's name as the user wrote it. Raises ValueError for what is wrong or cannot be done.
    """
    wanted = {name: value for name, value in wishes.items() if value is not None and value is not False}
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ValueError(f"{spelled('num_proc')}: {processes!r} processes -- at least one is needed")
    plan = Plan(processes)
    if "hosts" in wanted and "hostfile" in wanted:
        raise ValueError(f"{spelled('hosts')} and {spelled('hostfile')} were both given -- one of them says the hosts")
    for name in ("hosts", "hostfile"):
        if name in wanted and not wanted[name]:
            raise ValueError(f"{spelled(name)} is empty -- the hosts and their slots are wanted, as a:4,b:4 or a file of them")
    plan.hosts = wanted.get("hosts")
    plan.hostfile = os.fspath(wanted["hostfile"]) if "hostfile" in wanted else None
    plan.notes += [f"{spelled(name)} has no meaning here -- {NO_MEANING[name]}" for name in wanted if name in NO_MEANING]
    if "host_discovery_script" in wanted:
        wanted.setdefault("min_num_proc", processes)
    for name, option in ELASTIC.items():
        if name in wanted:
            values = wanted[name] if isinstance(wanted[name], (list, tuple)) else [wanted[name]]
            plan.elastic += [option, ",".join(map(str, values))]
    plan.ways = _ssh_ways(plan, wanted, spelled) + _network_ways(wanted, spelled)
    timeout = wanted.get("start_timeout")
    where = spelled("start_timeout")
    if timeout is None and os.environ.get("HOROVOD_START_TIMEOUT"):
        timeout, where = os.environ["HOROVOD_START_TIMEOUT"], "HOROVOD_START_TIMEOUT"
    if timeout is not None:
        plan.start_timeout = _seconds(timeout, where)
    if "output_filename" in wanted:
        plan.folder = str(wanted["output_filename"])
        link_outputs(plan.folder, processes)
    if wanted.get("prefix_output_with_timestamp"):
        plan.prefix = "full"
    plan.environment = environment_of(wishes)
    return plan


def environment_of(wishes: Mapping[str, Any]) -> dict[str, str]:
    """Returns variables for these options: those of horovodrun that have an effect here, and Cohort's own."""
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
    put("COHORT_TIMEOUT", "gloo_timeout_seconds")
    put("COHORT_LOG", "log_level", lambda value: _LOG_LEVELS[str(value).upper()])
    if wishes.get("verbose"):
        out.setdefault("COHORT_LOG", "info")
    return out


def _seconds(value: Any, where: str) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{where}: {value!r} -- a number of seconds above 0 is wanted")
    return seconds


def _ssh_ways(plan: Plan, wanted: Mapping[str, Any], spelled: Callable[[str], str]) -> list[str]:
    """Returns options for the ssh command of COHORT_RUN_SSH with the user's port and key."""
    words: list[str] = []
    if "ssh_port" in wanted:
        port = wanted["ssh_port"]
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
            raise ValueError(f"{spelled('ssh_port')}: {port!r} -- the port of the hosts' sshd is wanted, from 1 to 65535")
        words += ["-p", str(port)]
    if "ssh_identity_file" in wanted:
        path = os.path.expanduser(os.fspath(wanted["ssh_identity_file"]))
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ValueError(
                f"{spelled('ssh_identity_file')}: {path!r}: {error.strerror} -- the file of a private key is wanted, as "
                "~/.ssh/id_ed25519"
            ) from error
        words += ["-i", shlex.quote(path)]
    if not words:
        return []
    from cohort._launch.functions import goes_elsewhere

    if not goes_elsewhere(plan.hosts, plan.hostfile, os.environ):
        plan.notes += [
            f"{spelled(name)} has no meaning here -- all ranks are on this host, nothing is reached by ssh"
            for name in ("ssh_port", "ssh_identity_file")
            if name in wanted
        ]
        return []
    ways = ["--ssh", " ".join([os.environ.get("COHORT_RUN_SSH") or "ssh", *words])]
    # In a Slurm allocation the starter would be srun, which ignores port and key.
    return ways if os.environ.get("COHORT_RUN_STARTER") else [*ways, "--starter", "ssh"]


def _network_ways(wanted: Mapping[str, Any], spelled: Callable[[str], str]) -> list[str]:
    if "network_interfaces" not in wanted:
        return []
    names = wanted["network_interfaces"]
    text = names if isinstance(names, str) else ",".join(map(str, names))
    if not text.strip(", "):
        raise ValueError(f"{spelled('network_interfaces')} is empty -- names of interfaces are wanted, as eth0,ib0")
    return ["--network", text]


def link_outputs(folder: str, processes: int) -> None:
    """Makes links with Horovod's names, FOLDER/rank.NN/stdout, to the ranks' complete output that Cohort writes."""
    width = len(str(processes - 1))
    for rank in range(processes):
        own = os.path.join(folder, f"rank.{rank:0{width}d}")
        os.makedirs(own, exist_ok=True)
        for name, ending in (("stdout", "out"), ("stderr", "err")):
            path = os.path.join(own, name)
            if os.path.lexists(path):
                os.remove(path)
            os.symlink(os.path.join("..", "logs", f"rank-{rank}.{ending}"), path)
