"""Common part of the tests of resuming: attempts of `cohort run` until one ends well, each hit at some moment."""

import contextlib
import os
import pathlib
import re
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from soak import ROOT, job, processes

LEFT_LIMIT = 15.0  # seconds for all of a killed job to go, on a busy machine


class InBox(job.Here):
    """Hosts made by tools/cluster-box, reached by ssh; commands run on h1."""

    def __init__(self, hosts):
        super().__init__()
        sys.path.insert(0, str(ROOT / "tests" / "cluster"))
        import boxes

        self.box = boxes.Box("soak", "--hosts", str(hosts))

    def words(self, *words):
        return self.box.words("h1", *words)

    def processes(self):
        # Daemons of the box itself, and what sshd keeps for a connection that has just ended, are not the job's.
        return {pid: line for pid, (_, line) in self.box.new_processes("^sshd|cluster-box").items()}

    def close(self):
        self.box.down()


class Attempt(job.Job):
    """One `cohort run`. The caller decides what is killed, and when."""

    def __init__(self, place, cohort, options, program, folder, number, environment=None):
        self.name = f"attempt {number}"
        self.patterns = {"rank": "^" + re.escape(str(program[0])), "agent": r"^\S*cohort agent ", "launcher": r"^\S*cohort run "}
        logs = [] if environment is not None else ["--no-logs"]
        words = [cohort, "run", *logs, "--grace", "2", "--run-dir", f"{folder}/job-{number}", *options, "--", *program]
        super().__init__(words, folder, place, f"attempt-{number}.", {"OMP_NUM_THREADS": "1", **(environment or {})})

    def strike(self, kind, draw, *number):
        """A "rank", an "agent" (or its guard) or the "launcher"; false if there is none."""
        return super().strike(self.patterns[kind], draw, *number)

    def ended(self, seconds):
        """The exit status, once nothing of it is left: the next attempt writes the same files."""
        status = self.wait(time.monotonic() + seconds)
        assert status is not None, f"ends: {self.name} does not: {self.output()}"
        left, _ = processes.wait_for_nothing(self.place.processes, LEFT_LIMIT)
        assert not left, f"left {LEFT_LIMIT:g} s after the end: {left}"
        return status


def checkpoint_steps(folder):
    """Steps of the checkpoints that are committed in a folder: those with their final names."""
    steps = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if found := re.fullmatch(r"checkpoint-\d+-step-(\d+)", name):
                steps.append(int(found[1]))
    return sorted(steps)
