"""For tests: a box of this process's own, and commands on its hosts. Skips where this machine cannot have one."""

import atexit
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from box.system import processes_in
from soak.processes import alive, command_of, parent_of, send, wait_for_nothing  # noqa: F401

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "cluster-box"


def tool(*words, **options):
    options.setdefault("timeout", 60)
    return subprocess.run([sys.executable, str(TOOL), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, check=False, **options)


def require(*words):
    """SkipTest with the reason where there can be no box."""
    checked = tool("check", *words)
    if checked.returncode == 77:
        raise unittest.SkipTest(checked.stderr.strip())


def end_in_order():
    """SIGTERM runs what is to be done at the end, as Ctrl-C does: a box's hosts do not stay behind."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


class InBox(unittest.TestCase):
    """One box for all tests of a class."""

    needs = ()  # environment variables, which a build sets that has what the tests need
    wanted = ()  # words of Box
    box = None

    @classmethod
    def setUpClass(cls):
        for name in cls.needs:
            if not os.environ.get(name):
                raise unittest.SkipTest(f"{name} is not set: this build does not have what it names")
        cls.box = Box(*cls.wanted)
        cls.addClassCleanup(cls.box.down)


class Box:
    def __init__(self, name, *words):
        end_in_order()
        self.name = f"{name}-{os.getpid()}"
        self.folder = pathlib.Path("/run/cohort-box") / self.name
        require(*(word for word in words if word == "--slurm"))
        done = tool("up", "--name", self.name, *words)
        if done.returncode != 0:
            raise AssertionError(f"the box does not come up: {done.stderr}")
        atexit.register(self.down)
        count = int(dict(zip(words, words[1:])).get("--hosts", 2))
        self.hosts = [f"h{number + 1}" for number in range(count)]
        self.before = set(self.all_processes())

    def down(self):
        atexit.unregister(self.down)
        return tool("down", "--name", self.name)

    def act(self, what, *words):
        done = tool(what, "--name", self.name, *words)
        if done.returncode != 0:
            raise AssertionError(done.stderr)

    def words(self, host, *command, as_user=False):
        who = ["--as-user"] if as_user else []
        return [sys.executable, str(TOOL), "exec", "--name", self.name, *who, host, "--", *map(str, command)]

    def run(self, host, *command, timeout=30, as_user=False, **options):
        return subprocess.run(self.words(host, *command, as_user=as_user), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=timeout, check=False, **options)

    def start(self, host, *command, as_user=False, **options):
        return subprocess.Popen(self.words(host, *command, as_user=as_user), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, **options)

    def run_all(self, commands, timeout=120, **options):
        """Runs (host, words) at once; returns the status of each and what it has said, in their order. None stays behind."""
        started = [self.start(host, *words, **options) for host, words in commands]
        try:
            ended = []
            for process in started:
                out, err = process.communicate(timeout=timeout)
                ended.append((process.returncode, out + err))
            return ended
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.communicate()

    def slurm_errors(self, most=12):
        """The last lines in which Slurm's daemons complain, for the text of a failure."""
        lines = []
        for path in sorted((self.folder / "slurm").glob("slurm*.log")):
            with contextlib.suppress(OSError):
                found = [line for line in path.read_text(errors="replace").splitlines() if re.search("error|fatal", line)]
                lines += [f"{path.stem}: {line}" for line in found[-most:]]
        return "\n".join(lines)

    def all_processes(self, pattern="."):
        """{pid: (host, command line)}"""
        return {pid: (host, line) for host in self.hosts for pid, line in self.processes(host, pattern).items()}

    def new_processes(self, ignored="^$"):
        """Processes that were not there when the box came up."""
        return {pid: what for pid, what in self.all_processes().items()
                if pid not in self.before and not re.search(ignored, what[1])}

    def expect_nothing_new(self, seconds=20, ignored="slurmstepd"):
        """Waits until there is none; ends those that stay, and says so."""
        left, _ = wait_for_nothing(lambda: self.new_processes(ignored), seconds)
        send(left)
        if left:
            raise AssertionError(f"left: {left}")

    def processes(self, host, pattern="."):
        """{pid: command line} of the host's processes whose command line matches."""
        lines = {pid: command_of(pid) for pid in processes_in(f"/run/netns/cb-{self.name}-{host}")}
        return {pid: line for pid, line in lines.items() if line and re.search(pattern, line)}
