"""What the tests of resuming share: attempts of `cohort run` that are struck at some moment, on this machine or on the hosts
of a box; a state file, so that an interrupted series goes on; and what is printed at its end."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
MARK = "COHORT_RESUME_TEST"
LEFT_LIMIT = 15.0  # seconds for all of a killed job to go, on a busy machine


def environment(mark):
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("COHORT_", "SLURM_", "OMPI_", "PMI")) or name == "COHORT_BOX"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    kept.update({MARK: mark, "OMP_NUM_THREADS": "1"})
    return kept


def command_of(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


class Here:
    """This machine."""

    def __init__(self):
        self.mark = uuid.uuid4().hex

    def words(self, *words):
        return list(words)

    def processes(self):
        """{pid: command line} of what is left of the attempts of this series."""
        wanted = f"{MARK}={self.mark}".encode()
        found = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with contextlib.suppress(OSError):
                    if wanted in pathlib.Path(f"/proc/{name}/environ").read_bytes():
                        found[int(name)] = command_of(name)
        return {pid: line for pid, line in found.items() if line}  # a zombie has none

    def close(self):
        pass


class InBox:
    """Two hosts made by tools/cluster-box, reached by ssh; commands run on h1."""

    def __init__(self):
        sys.path.insert(0, str(ROOT / "tests" / "cluster"))
        import boxes

        self.mark = uuid.uuid4().hex
        self.box = boxes.Box("resume", "--hosts", "2")
        self.before = set(self._all())

    def _all(self):
        return {pid: line for host in ("h1", "h2") for pid, line in self.box.processes(host).items()}

    def words(self, *words):
        return self.box.words("h1", *words)

    def processes(self):
        # Daemons of the box itself, and what sshd keeps for a connection that has just ended, are not the job's.
        return {pid: line for pid, line in self._all().items()
                if pid not in self.before and not line.startswith("sshd") and "cluster-box" not in line}

    def close(self):
        self.box.down()


class Attempt:
    """One `cohort run`. What is killed and when is the caller's."""

    def __init__(self, place, cohort, options, program, folder, number):
        self.place, self.program = place, str(program[0])
        self.log = pathlib.Path(folder, f"attempt-{number}.txt")
        words = [str(cohort), "run", "--no-logs", "--grace", "2", "--run-dir", f"{folder}/job-{number}", *options, "--",
                 *map(str, program)]
        with open(self.log, "wb") as out:
            # A session of its own: a Ctrl-C is the harness's alone.
            self.process = subprocess.Popen(place.words(*words), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                            env=environment(place.mark), cwd=folder, start_new_session=True)

    def running(self):
        return self.process.poll() is None

    def output(self):
        return self.log.read_text(errors="replace")

    def victims(self, kind):
        """Processes of a kind: "rank", "agent" (agents and their guards) or "launcher"."""
        pattern = {"rank": "^" + re.escape(self.program), "agent": r"^\S*cohort agent ", "launcher": r"^\S*cohort run "}[kind]
        return sorted(pid for pid, line in self.place.processes().items() if re.search(pattern, line))

    def strike(self, kind, draw, number=signal.SIGKILL):
        """False if there is nobody of that kind."""
        found = self.victims(kind)
        if not found:
            return False
        try:
            os.kill(draw.choice(found), number)
        except ProcessLookupError:
            return False
        return True

    def wait(self, deadline):
        """The exit status; None if it had to be killed at the deadline (time.monotonic)."""
        try:
            return self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def wait_for_nothing(self):
        """Seconds until nothing of it was left; raises where something stays. The next attempt writes the same files."""
        since = time.monotonic()
        while left := self.place.processes():
            if time.monotonic() - since > LEFT_LIMIT:
                raise AssertionError(f"left {LEFT_LIMIT:g} s after the end: {left}")
            time.sleep(0.02)
        return time.monotonic() - since

    def end(self):
        """By force, whatever happened."""
        for _ in range(50):
            left = self.place.processes()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.running():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.1)
            if not left and not self.running():
                return
            time.sleep(0.05)


def checkpoint_steps(folder):
    """Steps of the checkpoints that are committed in a folder: those with their final names."""
    steps = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if found := re.fullmatch(r"checkpoint-\d+-step-(\d+)", name):
                steps.append(int(found[1]))
    return sorted(steps)


class Series:
    """Runs 1..count of a seed, those in the state file left out."""

    def __init__(self, options, title):
        self.options, self.title = options, title
        self.done = {}
        if options.state and pathlib.Path(options.state).exists():
            for line in pathlib.Path(options.state).read_text().splitlines():
                with contextlib.suppress(ValueError):  # a torn last line
                    result = json.loads(line)
                    if result["key"] == self.key(result["run"]):
                        self.done[result["run"]] = result
        self.began = time.monotonic()

    def key(self, number):
        return f"{self.title}/{self.options.seed}/{number}"

    def numbers(self):
        wanted = self.options.only or range(1, self.options.count + 1)
        return [number for number in wanted if number not in self.done or self.options.only]

    def run(self, one):
        """`one(number, folder)` gives a dict of counts, or raises. Returns the exit status of the command."""
        for number in self.numbers():
            folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{self.title}-{number}-", dir=self.options.keep or None))
            since = time.monotonic()
            result = {"key": self.key(number), "run": number}
            try:
                result.update(one(number, folder), problem="")
            except AssertionError as problem:
                result["problem"] = str(problem)
            except Exception:  # of the harness, or of files that no run should leave: this run's, and the series goes on
                result["problem"] = traceback.format_exc()
            result["seconds"] = round(time.monotonic() - since, 2)
            self.done[number] = result
            if result["problem"]:
                kept = f"; its folder: {folder}" if self.options.keep else ""
                print(f"run {number}: {result['problem']}{kept}\n  again: {sys.argv[0]} --seed {self.options.seed} --only {number}",
                      flush=True)
            if not (result["problem"] and self.options.keep):
                shutil.rmtree(folder, ignore_errors=True)
            if self.options.state:
                with open(self.options.state, "a") as state:
                    state.write(json.dumps(result) + "\n")
            if len(self.done) % 20 == 0:
                print(f"{len(self.done)} runs, {sum(bool(r['problem']) for r in self.done.values())} with problems, "
                      f"{time.monotonic() - self.began:.0f} s", flush=True)
        return self.report()

    def report(self):
        results = self.done.values()
        wrong = [result["run"] for result in results if result["problem"]]
        totals = {}
        for result in results:
            for name, value in result.items():
                if isinstance(value, (int, float)) and name not in ("run", "seconds"):
                    totals[name] = totals.get(name, 0) + value
        figures = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in totals.items())
        print(f"{self.title}: {len(self.done)} runs ({figures}): {len(wrong)} with problems{f': {wrong}' if wrong else ''}")
        return 1 if wrong else 0


def add_options(parser):
    parser.add_argument("--build", default=str(ROOT / "build" / "release"), help="the build folder [build/release]")
    parser.add_argument("--count", type=int, default=20, help="runs [20]")
    parser.add_argument("--seed", type=int, default=1, help="run N of a seed is always the same one [1]")
    parser.add_argument("--only", type=int, action="append", help="this run alone; repeatable")
    parser.add_argument("--state", help="file that keeps what is done: the same command goes on where it was")
    parser.add_argument("--deadline", type=float, default=120, help="seconds for one attempt to end [120]")
    parser.add_argument("--keep", help="folder that keeps those of runs with problems")
