"""A job that is to come to harm: a command on this machine, or wherever its place starts it."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import time
import uuid

from . import processes

MARK = "HARM_MARK"
#: of another launcher, or of another job
FOREIGN = re.compile(r"(COHORT_(?!BOX$)|HOROVOD_|OMPI_|PMI|SLURM_)|(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$")


class Here:
    """This machine. Leftovers of jobs are found by a mark in their environment."""

    def __init__(self):
        self.mark = f"{MARK}={uuid.uuid4().hex}"

    def words(self, *words):
        return [*map(str, words)]

    def environment(self, **more):
        kept = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
        return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **more, MARK: self.mark.partition("=")[2]}

    def processes(self):
        """{pid: command line} of what is there of its jobs."""
        return processes.marked(self.mark)

    def close(self):
        pass


class Job:
    """A job whose output goes to files of its folder. It ends with its `with` block, by force if need be."""

    def __init__(self, words, folder, place=None, name="", environment=None, popen=subprocess.Popen, **options):
        self.place = place or Here()
        self.out, self.err = (pathlib.Path(folder, name + each) for each in ("out", "err"))
        if "process_group" not in options:
            options["start_new_session"] = True  # a Ctrl-C is the harness's alone
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            self.process = popen(self.place.words(*words), stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=folder,
                                 env=self.place.environment(**(environment or {})), **options)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.end()

    def running(self):
        return self.process.poll() is None

    def said(self):
        return self.out.read_text(errors="replace")

    def complaints(self):
        return self.err.read_text(errors="replace")

    def output(self):
        return self.said() + self.complaints()

    def until(self, ready, deadline, every=0.002):
        """Returns the first true result of `ready`; None if the job ends before, or at the deadline."""
        while not (found := ready()):
            if not self.running() or time.monotonic() > deadline:
                return None
            time.sleep(every)
        return found

    def wait(self, deadline):
        """The exit status; None at the deadline (time.monotonic)."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(max(0.1, deadline - time.monotonic()))
        return None

    def strike(self, pattern, draw, number=signal.SIGKILL):
        """Strikes one of its processes with such a command line; false if there is none."""
        found = sorted(pid for pid, line in self.place.processes().items() if re.search(pattern, line))
        return bool(found and processes.send([draw.choice(found)], number))

    def end(self):
        left, _ = processes.wait_for_nothing(lambda: processes.send(self.place.processes()), 5)
        if self.running():
            self.process.kill()
        self.process.wait(30)
        return left
