"""Groups of ranks that are started once and asked for measurements, and single jobs. Linux; only the standard library.

A Group owns its processes and its folder (FIFOs, flags, logs): `stop` ends and removes all of them. If this process is
killed first, the ranks end because their FIFOs do, and the folder stays in /tmp.
"""
import ctypes
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from lib import mpi_wheels

READY_SECONDS = 180  # torch is slow to import on a busy machine
# The ranks give up by themselves after 120 s; this is for what is stopped or swapped out.
ANSWER_SECONDS = 130
STOP_SECONDS = 15
FLAG_BYTES = 256 * 128
MPI = ["openmpi", "mpich", *mpi_wheels.WHEELS]
BENCH = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# glibc returns 100 MB of gradients to the kernel in some steps and not in others, whatever is measured.
KEEP_MEMORY = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"


class Failed(Exception):
    """The program that failed, with its last words."""


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def usable_cores():
    return len(os.sched_getaffinity(0))


def program(build, name):
    path = os.path.join(os.path.abspath(build), "bin", name)
    return path if os.access(path, os.X_OK) else None


def needed(build, *names):
    """Ends the command where a build lacks a program."""
    for name in names:
        if not program(build, name):
            sys.exit(f"bench/compare: no {build}/bin/{name} -- `cmake --build {build}` builds it where COHORT_BUILD_BENCH is ON "
                     "(the preset `release`; what trains needs libtorch); or give --build, --against")


def python_path(build):
    """The environment in which Python finds the build's package."""
    return {"PYTHONPATH": os.pathsep.join([os.path.join(os.path.abspath(build), "python"),
                                           *filter(None, [os.environ.get("PYTHONPATH")])])}


def has_torch(python):
    looks = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"  # importing it takes seconds
    return subprocess.run([python, "-c", looks], capture_output=True, check=False).returncode == 0


def cohort_run(build, *words):
    return [program(build, "cohort"), "run", "-q", *words]


def mpi_programs(build, library):
    """mpirun and the peer of an MPI library: Debian's, or a wheel's. None where one is not there."""
    if library in mpi_wheels.WHEELS:
        found = [mpi_wheels.program(build, library, name) for name in ("mpirun", "mpi_peer")]
    else:
        found = [shutil.which(f"mpirun.{library}"), program(build, f"{library}_peer")]
    return found if all(found) else None


def mpi_command(build, library, ranks):
    """Without -np N PROGRAM. Ranks are not bound: pinned to cores, Open MPI puts ranks of an oversubscribed host onto the
    same one."""
    programs = mpi_programs(build, library)
    if not programs:
        return None
    if library.startswith("mpich"):
        return [programs[0], "-bind-to", "none"]
    start = [programs[0], "--bind-to", "none"]
    start += ["--map-by", ":oversubscribe"] if library == "openmpi5" else ["--oversubscribe"]
    start += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    start += mpi_wheels.options(library)
    return start + (["--mca", "mpi_yield_when_idle", "1"] if ranks > usable_cores() else [])


def rank_commands(first_words, ranks, folder):
    """All ranks in one session, as mpirun has them: where the kernel groups what it schedules by session (autogroup),
    ranks in sessions of their own could not yield to each other."""
    script = ('ranks=$1; folder=$2; shift 2; rank=0; '
              'while [ $rank -lt $ranks ]; do "$@" "$folder" $rank $ranks & rank=$((rank + 1)); done; wait')
    return [["sh", "-c", script, "sh", str(ranks), folder] + first_words]


def peer_commands(library, build, ranks, folder):
    """The command lines of a library's ranks on this host; None where it is not there."""
    if library in MPI:
        start = mpi_command(build, library, ranks)
        return start and [start + ["-np", str(ranks), mpi_programs(build, library)[1], folder]]
    if library == "torch":
        return rank_commands([sys.executable, f"{BENCH}/peers/torch_gloo_peer.py"], ranks, folder)
    binary = program(build, f"{library}_peer")
    return rank_commands([binary], ranks, folder) if binary else None


def environment_with(more):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(variable, None)
    return environment


class Group:
    """`commands(folder)` gives the command lines that make up the ranks."""

    def __init__(self, name, ranks, commands, environment=None):
        self.name, self.ranks = name, ranks
        self.folder = tempfile.mkdtemp(prefix=f"cohort-peer-{name.replace('/', '-')}-")
        self.children, self.inputs, self.outputs = [], [], []
        self.pending = [b""] * ranks
        try:
            self._start(commands, environment or {})
        except BaseException:
            self.stop()
            raise

    def _start(self, commands, environment):
        with open(f"{self.folder}/flags", "wb") as file:
            file.write(bytes(FLAG_BYTES))
        for rank in range(self.ranks):
            for direction, ends in (("in", self.inputs), ("out", self.outputs)):
                path = f"{self.folder}/{direction}.{rank}"
                os.mkfifo(path, 0o600)
                # Both ends, so that neither side has to wait for the other to open it.
                ends.append(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        with open(f"{self.folder}/log", "wb") as log:
            for command in commands(self.folder):
                self.children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                      env=environment_with({"TMPDIR": self.folder, **environment}),
                                                      start_new_session=True, preexec_fn=die_with_parent))
        self.version = self._answers(READY_SECONDS)[0]["name"]

    def _fail(self, why):
        with open(f"{self.folder}/log", encoding="utf-8", errors="replace") as log:
            words = log.read()[-2000:].strip()
        raise Failed(f"{self.name} on {self.ranks} ranks: {why}" + (f"; it said:\n{words}" if words else ""))

    def _answers(self, seconds):
        """One line of every rank."""
        deadline = time.monotonic() + seconds
        answers = [None] * self.ranks
        while None in answers:
            waiting = [self.outputs[rank] for rank in range(self.ranks) if answers[rank] is None]
            ready, _, _ = select.select(waiting, [], [], 0.5)
            for fd in ready:
                rank = self.outputs.index(fd)
                self.pending[rank] += os.read(fd, 1 << 16)
                line, end, rest = self.pending[rank].partition(b"\n")
                if end:
                    self.pending[rank] = rest
                    answers[rank] = json.loads(line)
            if not ready and any(child.poll() is not None for child in self.children):
                self._fail("a process has ended")
            if time.monotonic() > deadline:
                missing = [rank for rank in range(self.ranks) if answers[rank] is None]
                self._fail(f"no answer of rank {missing[0]} after {seconds} s")
        return answers

    def ask(self, *words):
        """Every rank's answer, or None where it is not supported."""
        line = " ".join(map(str, words)) + "\n"
        for fd in self.inputs:
            os.write(fd, line.encode())
        answers = self._answers(ANSWER_SECONDS)
        return answers if all(answer["ok"] for answer in answers) else None

    def stop(self):
        for fd in self.inputs:
            try:
                os.write(fd, b"quit\n")
            except OSError:
                pass
        deadline = time.monotonic() + 5
        for child in self.children:
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        for fd in self.inputs + self.outputs:
            os.close(fd)
        self.inputs, self.outputs, self.children = [], [], []
        shutil.rmtree(self.folder, ignore_errors=True)


def run(command, environment=None, limit=600, cwd=None):
    """Runs a job to its end and returns its standard output. Launchers end their ranks on SIGTERM; ranks of a launcher
    that had to be killed end with it."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complaints:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=complaints, cwd=cwd,
                                 env=environment_with(environment or {}), start_new_session=True,
                                 preexec_fn=die_with_parent)
        try:
            status = f"exit status {child.wait(limit)}"
        except subprocess.TimeoutExpired:
            status = f"no end after {limit:g} s"
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        texts = []
        for file in (said, complaints):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        if status != "exit status 0":
            raise Failed(f"{' '.join(command)}: {status}; it said:\n{''.join(texts)[-3000:].strip()}")
        return texts[0]


class CoreDistance:
    """Nanoseconds of a cache line there and back between the first two cores."""

    def __init__(self, build):
        self.child = subprocess.Popen([program(build, "core_distance")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      text=True, preexec_fn=die_with_parent)

    def measure(self):
        self.child.stdin.write("trip\n")
        self.child.stdin.flush()
        return json.loads(self.child.stdout.readline())["round_trip_ns"]

    def stop(self):
        self.child.stdin.close()
        self.child.wait(10)


def busy_cores(seconds=0.3):
    """Number of cores that others keep busy now, from /proc/stat."""
    def read():
        with open("/proc/stat", encoding="ascii") as file:
            fields = [int(word) for word in file.readline().split()[1:9]]
        return sum(fields) - fields[3] - fields[4]
    begin = read()
    time.sleep(seconds)
    return (read() - begin) / os.sysconf("SC_CLK_TCK") / seconds


def slowest(answers, key="us"):
    """The median over all calls of the slowest rank's time."""
    return statistics.median(max(times) for times in zip(*(answer[key] for answer in answers)))
