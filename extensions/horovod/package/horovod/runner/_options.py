"""The command line of `horovodrun`: Horovod's options, by Horovod's names."""

from __future__ import annotations

import argparse
from typing import Any

from horovod.runner._launching import NO_MEANING

# The user's spelling of each option that was given, for messages.
SPELLINGS: dict[str, str] = {}


class _Given(argparse.Action):
    """Stores the value, and the user's spelling of the option."""

    def __init__(self, *args: Any, value: Any = None, **kwargs: Any) -> None:
        self.value = value
        super().__init__(*args, **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        SPELLINGS[self.dest] = option_string or self.dest
        if self.nargs == 0:
            values = self.value
        setattr(namespace, self.dest, values)


class _Added(_Given):
    """Appends one more value to an option: "a", then "a,b"."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        super().__call__(parser, namespace, values if before is None else f"{before},{values}", option_string)


def _cooldown(text: str) -> int:
    seconds = int(text)
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{seconds}: from 1 to 3600 seconds")
    return seconds


def _noise(text: str) -> float:
    noise = float(text)
    if not 0 <= noise <= 1:
        raise argparse.ArgumentTypeError(f"{noise}: from 0 to 1")
    return noise


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser. Every option's default is None (not given), so that a file of options can fill it."""
    parser = argparse.ArgumentParser(
        prog="horovodrun",
        allow_abbrev=False,  # abbreviations would also be sought among the program's own arguments
        description="Runs a Horovod program as N processes, on this host or several, over Cohort. Takes Horovod's options; "
        "of those that have no meaning here it says so.",
    )

    def option(group: Any, *names: str, action: Any = _Given, **more: Any) -> None:
        made = group.add_argument(*names, action=action, **more)
        if made.help is None and made.dest in NO_MEANING:
            made.help = f"(no meaning: {NO_MEANING[made.dest]})"

    def flag(group: Any, *names: str, value: Any = True, **more: Any) -> None:
        option(group, *names, nargs=0, value=value, **more)

    def switch(group: Any, name: str, help: str | None = None) -> None:
        dest = name.replace("-", "_")
        flag(group, f"--{name}", dest=dest, help=help)
        flag(group, f"--no-{name}", dest=dest, value=False, help=argparse.SUPPRESS)

    parser.add_argument("-v", "--version", action="store_true", help="print the version")
    parser.add_argument("-cb", "--check-build", action="store_true", help="print what can be used, and end")
    option(parser, "-np", "--num-proc", type=int, dest="num_proc", metavar="N", help="number of processes")
    flag(parser, "--disable-cache", help="(nothing is cached)")
    option(parser, "--start-timeout", type=float, metavar="SECONDS", help="for all ranks to be running (30)")
    option(parser, "--network-interfaces", metavar="A,B", help="what hosts use with each other: names, or 10.0.0.0/8 (all)")
    option(parser, "--network-interface", action=_Added, dest="network_interfaces", metavar="A", help="one of them")
    option(parser, "--output-filename", metavar="DIR", help="also write the ranks' output to DIR/rank.N/{stdout,stderr}")
    flag(parser, "--verbose", help="say more")
    option(parser, "--config-file", metavar="YAML", help="options from a file; the command line's win")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")

    group = parser.add_argument_group("ssh, to other hosts")
    option(group, "-p", "--ssh-port", type=int, metavar="PORT", help="of their sshd")
    option(group, "-i", "--ssh-identity-file", metavar="FILE", help="the private key to log in with")

    group = parser.add_argument_group("tuning")
    option(group, "--fusion-threshold-mb", type=float, metavar="MB", help="most that is reduced at once (128; 0: no fusion)")
    option(group, "--cycle-time-ms", type=float, metavar="MS")
    option(group, "--cache-capacity", type=int, metavar="N", help="operations that need no negotiation (1024)")
    for name in ("hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce"):
        switch(group, name)

    group = parser.add_argument_group("autotuning")
    switch(group, "autotune")
    option(group, "--autotune-log-file", metavar="FILE")
    option(group, "--autotune-warmup-samples", type=int, metavar="N")
    option(group, "--autotune-steps-per-sample", type=int, metavar="N")
    option(group, "--autotune-bayes-opt-max-samples", type=int, metavar="N")
    option(group, "--autotune-gaussian-process-noise", type=_noise, metavar="X")

    group = parser.add_argument_group("elastic jobs")
    option(group, "--min-np", "--min-num-proc", type=int, dest="min_num_proc", metavar="N", help="the job goes on with so many")
    option(group, "--max-np", "--max-num-proc", type=int, dest="max_num_proc", metavar="N", help="never more (no limit)")
    option(group, "--reset-limit", type=int, metavar="N", help="most changes of its ranks (no limit)")
    option(group, "--elastic-timeout", type=float, metavar="SECONDS", help="for hosts to come, where they are too few (600)")
    option(group, "--slots-per-host", type=int, metavar="N", help="of hosts that the script prints without a number (1)")
    option(group, "--blacklist-cooldown-range", type=_cooldown, nargs=2, metavar=("MIN", "MAX"),
           help="seconds until a host on which a rank has failed is used again (never)")  # fmt: skip

    group = parser.add_argument_group("timeline")
    option(group, "--timeline-filename", metavar="FILE", help="trace of the operations, for chrome://tracing")
    switch(group, "timeline-mark-cycles", "mark each cycle")

    group = parser.add_argument_group("stalls")
    flag(group, "--stall-check", dest="stall_check", help="say which ranks keep the others waiting (the default)")
    flag(group, "--no-stall-check", dest="stall_check", value=False, help="do not")
    option(group, "--stall-check-warning-time-seconds", type=int, metavar="SECONDS", help="when to say it (60)")
    option(group, "--stall-check-shutdown-time-seconds", type=int, metavar="SECONDS", help="when to end the job")

    group = parser.add_argument_group("libraries")
    switch(group, "mpi-threads-disable")
    option(group, "--mpi-args", metavar="ARGUMENTS")
    flag(group, "--tcp")
    option(group, "--binding-args", metavar="ARGUMENTS")
    option(group, "--num-nccl-streams", type=int, metavar="N")
    option(group, "--thread-affinity", metavar="CORES")
    option(group, "--gloo-timeout-seconds", type=int, metavar="SECONDS", help="deadline of an operation")

    group = parser.add_argument_group("logging")
    levels = ["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"]
    option(group, "--log-level", choices=levels, help="what is logged (WARNING)")
    flag(group, "--log-with-timestamp", dest="log_with_timestamp")
    flag(group, "--log-without-timestamp", dest="log_with_timestamp", value=False, help="(the default)")
    flag(group, "--log-hide-timestamp", dest="log_with_timestamp", value=False, help=argparse.SUPPRESS)
    flag(group, "--no-log-hide-timestamp", dest="log_with_timestamp", help=argparse.SUPPRESS)
    flag(
        group,
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="prefix_output_with_timestamp",
        help="the time before each line",
    )

    group = parser.add_argument_group("hosts")
    group = group.add_mutually_exclusive_group()
    option(group, "-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts, and how many ranks each takes (this host)")
    option(group, "-hostfile", "--hostfile", metavar="FILE", help="a file of them: lines HOST slots=N")
    option(group, "--host-discovery-script", metavar="FILE", help="prints the hosts that there are; run each second")

    group = parser.add_argument_group("how the ranks are started").add_mutually_exclusive_group()
    flag(group, "--gloo", help="(Cohort's own, as always)")
    flag(group, "--mpi")
    flag(group, "--jsrun")
    return parser
