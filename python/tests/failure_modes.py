"""For tests of the failure modes F1 to F24 of docs/failures.md: a job with a fault, when the fault was named, and a
table.

A rank reports the time of the fault, by `harm()`; the clock is CLOCK_MONOTONIC, the same for all processes of this
machine.
"""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

COHORT = os.environ.get("COHORT_COMMAND", "")
LIMIT = 30.0  # seconds: nothing may take longer to be named
PATIENCE = 100.0  # until a test gives up: a loaded machine takes long to start interpreters

HARM = """
import os, signal, sys, time
def harm():
    print(f"HARM {time.monotonic()}", flush=True)
"""
START = (
    HARM
    + """
import cohort
cohort.init()
world, rank, size = cohort.world(), cohort.rank(), cohort.size()
world.barrier()
"""
)

_rows = {}


def tell(number, name, seconds, message):
    """A row of the table, for those who read the test's output."""
    _rows[number] = f"F{number:<3} {name:<46} {seconds:8.3f} s  {' '.join(message.split())[:150]}"


def print_table():
    for number in sorted(_rows):
        print(_rows[number], flush=True)


class Process:
    """A process whose output is read as it comes, each line with its time. Ended, with all that it started, by `close`."""

    def __init__(self, words, folder, environment):
        self.lines = []  # (time, text)
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [str(word) for word in words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self._changed:
                self.lines.append((time.monotonic(), line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def text(self):
        return "".join(line for _, line in self.lines)

    def when(self, pattern, seconds=PATIENCE):
        """Returns the time of a line that the pattern matches, and the match."""
        limit = time.monotonic() + seconds
        looked = 0
        with self._changed:
            while True:
                for at, line in self.lines[looked:]:
                    found = re.search(pattern, line)
                    if found:
                        return at, found
                looked = len(self.lines)
                if time.monotonic() >= limit or (self.process.poll() is not None and not self._reader.is_alive()):
                    raise AssertionError(f"nothing says {pattern!r}:\n{self.text}")
                self._changed.wait(0.2)

    def harmed(self):
        return float(self.when(r"HARM ([\d.]+)")[1][1])

    def ends(self, seconds=PATIENCE):
        status = self.process.wait(seconds)
        self._reader.join(seconds)
        return status

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()  # `cohort run` takes its ranks along
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        self.process.stdout.close()


class Modes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="cohort-modes-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def start(self, *words, **environment):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("COHORT_", "RANK", "WORLD_", "LOCAL_", "MASTER_"))}
        process = Process(words, self.folder, {**kept, "COHORT_TIMEOUT": "60", "PYTHONUNBUFFERED": "1", **environment})
        self.addCleanup(process.close)
        return process

    def script(self, text, name="program.py"):
        path = self.folder / name
        path.write_text(text)
        return path

    def job(self, text, *options, ranks=2, **environment):
        """The script on ranks of `cohort run`."""
        words = (COHORT, "run", "-q", "--no-logs", "-np", ranks, *options, "--", sys.executable, self.script(text))
        return self.start(*words, **environment)

    def alone(self, text, **environment):
        return self.start(sys.executable, self.script(text), **environment)

    def named(self, number, name, process, pattern, since=None):
        """The message came, and in time: a row of the table. Returns the match."""
        at, found = process.when(pattern)
        seconds = at - (process.harmed() if since is None else since)
        line = next(line for when, line in process.lines if when == at and re.search(pattern, line))
        tell(number, name, seconds, line)
        self.assertLess(seconds, LIMIT, line)
        return found

    @staticmethod
    def gone(pids, seconds=LIMIT):
        """Waits until none of these processes lives (a zombie does not)."""
        limit = time.monotonic() + seconds
        while True:
            left = [pid for pid in pids if alive(pid)]
            if not left:
                return
            if time.monotonic() > limit:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"left: {left}")
            time.sleep(0.005)


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
