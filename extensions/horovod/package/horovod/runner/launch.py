"""The command `horovodrun`: turns Horovod's options into `cohort run --as-horovod`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import Any

import horovod
from horovod.runner import _config, _launching, _options

_USAGE_STATUS = 2


def check_build() -> str:
    """Returns the output of `--check-build`: Horovod's three lists, with what Cohort has."""

    def speaks(framework: str) -> bool:
        return all(importlib.util.find_spec(name) is not None for name in (framework, "cohort"))

    def row(here: bool, name: str) -> str:
        return f"    [{'X' if here else ' '}] {name}"

    version, nccl = "not installed", False
    if importlib.util.find_spec("cohort") is not None:
        import cohort
        from cohort import _core
        from cohort._process import gpus as _gpus

        version = cohort.__version__
        nccl = _gpus.of_host() > 0 and _core.nccl_version() > 0  # then NCCL carries tensors on GPUs
    here = version != "not installed"
    return "\n".join(
        [
            f"Horovod v{horovod.__version__}:",
            "",
            "Available Frameworks:",
            row(speaks("tensorflow"), "TensorFlow"),
            row(speaks("torch"), "PyTorch"),
            row(False, "MXNet"),
            "",
            "Available Controllers:",
            row(here and shutil.which("mpirun") is not None, "MPI"),
            row(here, "Gloo"),
            "",
            "Available Tensor Operations:",
            row(nccl, "NCCL"),
            row(False, "DDL"),
            row(False, "CCL"),
            row(False, "MPI"),
            row(here, "Gloo"),
            "",
            f"This is Cohort ({version}); what Horovod calls Gloo is its own. Of MPI it takes mpirun as a launcher.",
        ]
    )


def command_of(words: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Returns (arguments of `cohort`, variables, notes) for the arguments of `horovodrun`.

    Raises ValueError for what is wrong or cannot be done; ends the process (SystemExit) as argparse does.
    """
    parser = _options.make_parser()
    options: dict[str, Any] = vars(parser.parse_args(list(words)))
    program = options.pop("command")
    if program[:1] == ["--"]:
        program = program[1:]
    options.pop("version")
    options.pop("check_build")
    path = options.pop("config_file")
    if path is not None:
        for name, value in _config.read(path).items():
            if name in ("gloo", "mpi", "jsrun") and any(options[other] for other in ("gloo", "mpi", "jsrun")):
                continue  # the command line has chosen
            if options.get(name) is None:
                options[name] = value
    if not program:
        raise ValueError("no program to run; for example: horovodrun -np 2 python train.py")
    processes = options.pop("num_proc")
    if processes is None:
        raise ValueError("-np N, the number of processes, is missing")
    plan = _launching.plan_of(
        processes, options, lambda wish: _options.SPELLINGS.get(wish, "-np" if wish == "num_proc" else wish)
    )
    arguments = ["run", "--as-horovod", "-np", str(plan.processes), "--prefix", plan.prefix]
    arguments += ["--start-timeout", str(plan.start_timeout)]
    if plan.hosts is not None:
        arguments += ["-H", plan.hosts]
    if plan.hostfile is not None:
        arguments += ["--hostfile", plan.hostfile]
    arguments += plan.ways + plan.elastic
    if plan.folder is not None:
        arguments += ["--run-dir", plan.folder]
    return [*arguments, "--", *program], plan.environment, plan.notes


def run_commandline() -> int:
    """Runs `horovodrun`: becomes `cohort run`, or returns an exit status."""
    words = sys.argv[1:]
    first = words[: next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))]
    if "-v" in first or "--version" in first:
        print(horovod.__version__)
        return 0
    if "-cb" in first or "--check-build" in first:
        print(check_build())
        return 0
    try:
        arguments, environment, notes = command_of(words)
        from cohort._launch import command as _command

        command = _command.find()
    except (ValueError, RuntimeError) as error:
        print(f"horovodrun: {error}\n(try `horovodrun --help`)", file=sys.stderr)
        return _USAGE_STATUS
    except ImportError as error:
        print(
            f"horovodrun: the package cohort cannot be used -- {error} -- `pip install .` in a clone of Cohort installs it",
            file=sys.stderr,
        )
        return 1
    _launching.tell(notes, "horovodrun")
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and an exec'd program would, too
        signal.signal(number, signal.SIG_DFL)
    os.execve(command, [command, *arguments], {**os.environ, **environment})


if __name__ == "__main__":
    sys.exit(run_commandline())
