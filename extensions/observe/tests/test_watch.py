"""A run that goes on, as `cohort watch` shows it: in a terminal (read by pyte), as lines, on a page (and in Chromium).

Tests whose reader is not installed are left out, and say so.
"""

import array
import contextlib
import fcntl
import http.client
import itertools
import json
import os
import pathlib
import pty
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import unittest

import cohort.track
from tiers import slow

try:
    import pyte
except ImportError:
    pyte = None

COMMAND = os.environ.get("COHORT_COMMAND") or shutil.which("cohort")
CHROMIUM = shutil.which("chromium")
SECONDS = 60
# Latency of live data: 1 s is promised; the rest allows for other tests on the same two cores.
LATENCY = 3.0

# Rank 1 is late by 60 ms of each step. `when`, if given, gets the time of each step.
TRAINING = """
import sys, time
import cohort, cohort.track
from array import array
from cohort._core import count_step
comm = cohort.new_world()
rank = comm.rank()
if rank == 0:
    record = cohort.track.RunRecord(sys.argv[1] + "/run.jsonl", program="peer", world_size=2, parameters={"steps": 4000})
    when = open(sys.argv[1] + "/when", "w", buffering=1)
values = array("f", [1.0] * 1000)
for step in range(1, 4001):
    time.sleep(0.09 if rank == 1 else 0.03)
    comm.all_reduce(values, op="max")
    count_step()
    if rank == 0:
        print(step, time.time(), file=when)
        cohort.track.log(step, loss=1.0 / step, lr=0.1)
    if step % 10 == 0:
        print(f"rank {rank} has done step {step}")
        sys.stdout.flush()
"""


def page_of(process):
    """Returns its port and token."""
    line = process.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=([0-9a-f]{64})", line)
    assert found, line
    return int(found[1]), found[2]


def ask(port, path, timeout=20, **headers):
    """(status, headers, body)"""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.putrequest("GET", path, skip_host="host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


class Terminal:
    """A program in its own terminal, which a real emulator reads."""

    def __init__(self, command, columns=80, rows=24, **environment):
        self.screen = pyte.Screen(columns, rows)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8", **environment},
            start_new_session=True,
        )
        self.slave = slave

    def resize(self, columns, rows):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def read(self, seconds=0.1):
        ready, _, _ = select.select([self.master], [], [], seconds)
        if not ready:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return False
        self.raw += data
        self.stream.feed(data)
        return bool(data)

    def until(self, condition, what):
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            self.read()
            if condition("\n".join(self.screen.display)):
                return
        raise AssertionError(f"{what} did not come; the screen:\n" + "\n".join(self.screen.display))

    def type(self, keys):
        os.write(self.master, keys.encode())

    def end(self):
        """Returns the exit status, once all output is read."""
        deadline = time.monotonic() + SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read(0.05)
        while self.read(0.1):
            pass
        return self.process.wait(5)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.slave)
        os.close(self.master)


class Watched(unittest.TestCase):
    """A training of two ranks, and its watchers."""

    @classmethod
    def setUpClass(cls):
        cls.stack = contextlib.ExitStack()
        cls.addClassCleanup(cls.stack.close)
        cls.folder = pathlib.Path(cls.stack.enter_context(tempfile.TemporaryDirectory(prefix="watch-")))
        cls.run_folder = cls.folder / "run"
        program = cls.folder / "peer.py"
        program.write_text(TRAINING)
        # A fake NVML that has two GPUs; nothing else of them exists.
        fake = pathlib.Path(COMMAND).resolve().parent.parent / "fake" / "libnvidia-ml.so.1"
        (cls.folder / "lib").mkdir()
        (cls.folder / "lib" / fake.name).symlink_to(fake)
        environment = {**os.environ, "LD_LIBRARY_PATH": f"{cls.folder}/lib:{os.environ.get('LD_LIBRARY_PATH', '')}"}
        cls.has_gpus = fake.exists()
        cls.job = subprocess.Popen(
            [COMMAND, "run", "-q", "-np", "2", "--run-dir", str(cls.run_folder), sys.executable, str(program), str(cls.run_folder)],
            stdout=subprocess.DEVNULL,
            env=environment,
        )
        cls.stack.callback(cls.end_job)
        cls.wait_until(lambda: cls.live() and cls.live()[1][0]["step"] > 30, "the first steps")
        cls.wait_until(lambda: "loss" in (cls.run_folder / "run.jsonl").read_text(), "the first loss")

    @classmethod
    def end_job(cls):
        cls.job.terminate()
        cls.job.wait(SECONDS)

    @classmethod
    def wait_until(cls, condition, what):
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            value = condition()
            if value:
                return value
            time.sleep(0.02)
        raise AssertionError(f"{what} did not come")

    @classmethod
    def live(cls):
        """live.json: the run, and its ranks by column."""
        try:
            run = json.loads((cls.run_folder / "live.json").read_text())
        except FileNotFoundError:
            return None
        ranks = [dict(zip(run["columns"], row)) for row in run["ranks"]]
        return (run, ranks) if ranks else None

    def serve(self, *options):
        process = subprocess.Popen(
            [COMMAND, "watch", str(self.run_folder), "--page", *options], stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)
        return process, *page_of(process)

    def data(self, port, token, path="/data"):
        status, _, body = ask(port, path, authorization=f"Bearer {token}")
        self.assertEqual(status, 200, body)
        head, _, run = body.partition("\n")
        run = json.loads(run)
        return json.loads(head), run, [dict(zip(run["columns"], row)) for row in run["ranks"]]


class Figures(Watched):
    def test_who_is_late_is_known(self):
        def known():
            run, (first, late) = self.live()
            ours = min(first["waited"], first["exposed"]) > 0.3 and first["steps_per_second"] > 1 and first["cpu"] > 0
            return (run, (first, late)) if late["waited_for"] > 0.3 and first["waited_for"] < 0.1 and ours else None

        run, ranks = self.wait_until(known, "rank 1 as the late one, and what rank 0 does")
        self.assertEqual(run["state"], "running")
        self.assertGreater(ranks[0]["memory"], 1 << 20)
        self.assertRegex(ranks[1]["line"], r"rank 1 has done step \d+")
        self.assertEqual((self.run_folder / "live.json").stat().st_mode & 0o777, 0o600)

    def test_what_cpus_and_gpus_do_is_recorded(self):
        usage = self.run_folder / "usage.jsonl"

        def busy():
            """The first whole line in which the ranks have used CPU time."""
            lines = usage.read_text().split("\n")[:-1] if usage.exists() else []
            return next((line for line in map(json.loads, lines) if line["values"]["system/cpu"] > 0), None)

        line = self.wait_until(busy, "usage.jsonl")
        self.assertEqual((line["event"], usage.stat().st_mode & 0o777), ("metric", 0o600))
        self.assertGreater(line["values"]["system/memory"], 1 << 21)
        if not self.has_gpus:
            self.skipTest("the fake NVML is not built")
        self.assertEqual((line["values"]["system/gpu0"], line["values"]["system/gpu1"]), (0, 0.8))
        self.assertEqual(line["values"]["system/gpu1_memory"], 3 << 30)
        host = self.wait_until(lambda: next((host for host in self.live()[0]["hosts"] if host["gpus"] > 0), None), "the GPUs of a host")
        self.assertEqual((host["gpus"], host["gpu"], host["gpu_memory"]), (2, 0.4, 4 << 30))

    def test_lines_where_there_is_no_terminal(self):
        watch = subprocess.run(
            [COMMAND, "watch", str(self.run_folder), "--once", "--ascii"], capture_output=True, text=True, timeout=SECONDS
        )
        self.assertEqual(watch.returncode, 0, watch.stderr)
        self.assertIn("2 ranks on 1 host", watch.stdout)
        self.assertRegex(watch.stdout, r"step \d+/4000 .* left .* steps/s  loss 0\.")
        self.assertRegex(watch.stdout, r"\n1 +\w+ +\d+ .*rank 1 has done step")
        self.assertTrue(watch.stdout.isascii())
        self.assertNotIn("\033", watch.stdout)
        lines = subprocess.Popen(
            [COMMAND, "watch", str(self.run_folder), "--interval", "0.3"], stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(lines.stdout.close)
        steps = (int(re.search(r"step (\d+)", line)[1]) for line in lines.stdout)
        first = next(steps)
        later = next((step for step in itertools.islice(steps, 100) if step != first), first)  # on a busy machine not the next
        self.assertGreater(later, first)
        lines.terminate()
        self.assertEqual(lines.wait(SECONDS), 0)

    def test_nothing_to_watch(self):
        for arguments, said in (
            ([str(self.folder / "none")], "there is no such folder"),
            (["--port", "4"], "--page"),
            ([str(self.run_folder), "--token-file", "x"], "--token-file is for --page"),
        ):
            watch = subprocess.run(
                [COMMAND, "watch", *arguments], cwd=self.folder, capture_output=True, text=True, timeout=SECONDS
            )
            self.assertNotEqual(watch.returncode, 0)
            self.assertIn(said, watch.stderr)


class Runs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="runs-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.environment = {**os.environ, "TZ": "UTC"}

    def cohort(self, *arguments, status=0):
        done = subprocess.run(
            [COMMAND, *arguments], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=SECONDS
        )
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def listed(self):
        return {run["name"].split("-")[2]: run for run in json.loads(self.cohort("runs", "--json"))}

    def job(self, name, script):
        """A program of this name; the run's folder is named after it."""
        program = self.folder / name
        program.write_text("#!/bin/sh\n" + script)
        program.chmod(0o755)
        return [COMMAND, "run", "-q", "-np", "1", f"./{name}"]

    def test_they_are_listed_with_state_values_and_size_and_removed(self):
        line = '{"event":"metric","time":%d,"step":%d,"values":{"lr":0.1,"valid_loss":%s}}\\n'
        values = "".join(line % (step, step, 1 / step) for step in range(1, 20000)) + line % (20000, 20000, '"NaN"')
        (self.folder / "values").write_text(values.replace("\\n", "\n"))
        for name, script, status in (
            ("good", 'cp values "$COHORT_RUN_DIR/run.jsonl"', 0), ("bad", "exit 3", 3), ("saved", "exit 75", 75),
        ):  # fmt: skip
            done = subprocess.run(self.job(name, script), cwd=self.folder, capture_output=True, timeout=SECONDS)
            self.assertEqual(done.returncode, status, done.stderr)
        going = subprocess.Popen(self.job("going", "while :; do sleep 0.1; done"), cwd=self.folder, stdout=subprocess.DEVNULL)
        self.addCleanup(going.wait)
        self.addCleanup(going.terminate)
        Watched.wait_until(lambda: "going" in self.listed() and self.listed()["going"]["ranks"] == 1, "the run that goes on")
        # A run whose launcher is gone without a report of its end, and folders that are no runs.
        lost = self.folder / "runs" / "1-1-lost-1"
        shutil.copytree(self.folder / "runs" / "latest", lost)
        live = json.loads((lost / "live.json").read_text())
        live.update(state="running", time=live["time"] - 3600, start=live["time"] - 3700)
        (lost / "live.json").write_text(json.dumps(live))
        job = json.loads((lost / "job.json").read_text())
        job["launcher"]["start_time"] -= 1  # another process has its pid
        (lost / "job.json").write_text(json.dumps(job))
        (self.folder / "runs" / "notes").mkdir()

        runs = self.listed()
        self.assertEqual({name: run["state"] for name, run in runs.items()},
                         {"good": "finished", "bad": "failed", "saved": "preempted", "going": "running", "lost": "lost"})  # fmt: skip
        self.assertEqual((runs["bad"]["exit_status"], runs["good"]["ranks"], runs["good"]["step"]), (3, 1, 20000))
        self.assertEqual(runs["good"]["values"], {"valid_loss": "NaN", "lr": 0.1})
        self.assertGreater(runs["good"]["bytes"], len(values) // 2)  # (some data may have no blocks on the disk yet)
        self.assertEqual(runs["lost"]["seconds"], 100)
        table = self.cohort("runs")
        self.assertRegex(table, r"-good-\w+ +finished +2\d\d\d-\d\d-\d\d \d\d:\d\d +0:\d\d +1 +20000 +\S+  valid_loss nan  lr 0\.1\n")

        # With refused arguments, nothing else is removed either.
        names = {name: run["name"] for name, run in runs.items()}
        for arguments, said in (
            ([names["going"], names["bad"]], "it goes on"),
            ([names["bad"], "notes"], "notes is no run"),
            (["values"], "is no run"),
            ([], "which runs?"),
            (["--keep", "1", names["bad"]], "give one"),
            (["--older-than", "3 fortnights"], "is no time"),
        ):
            self.assertIn(said, self.cohort("runs", "rm", *arguments, status=2))
        self.assertEqual(len(self.listed()), 5)
        self.assertIn("would remove", self.cohort("runs", "rm", "--older-than", "30m", "--dry-run"))
        self.assertEqual(len(self.listed()), 5)
        self.assertRegex(self.cohort("runs", "rm", "--older-than", "30m"), r"removed \S+lost-1 \(lost, \S+\)\n1 run, ")
        self.assertEqual(sorted(self.listed()), ["bad", "going", "good", "saved"])
        self.cohort("runs", "rm", "--keep", "2")  # running ones stay, whatever their age
        self.assertEqual(sorted(self.listed()), ["going", "saved"])
        going.terminate()
        going.wait(SECONDS)
        self.cohort("runs", "rm", f"runs/{names['going']}", names["saved"])
        self.assertEqual(sorted(path.name for path in (self.folder / "runs").iterdir()), ["notes"])

    def record(self, name, steps, tensors=("fc.weight", "fc.bias"), **changed):
        """A record of tensors; at_N=VALUES: those that have other values at step N. -N: resumes after step N."""
        record = cohort.track.RunRecord(self.folder / "runs" / name / "run.jsonl")
        for step in steps:
            if step < 0:
                record.write("resume", step=-step)
                continue
            values = {**dict.fromkeys(tensors, 0.5), **changed.get(f"at_{step}", {})}
            record.write_weights(step, [(key, array.array("f", [value, step])) for key, value in values.items()])

    def test_weights_of_two_are_compared(self):
        self.record("one", range(1, 10))
        self.record("same", range(3, 13, 2))
        self.record("other", range(1, 10), at_5={"fc.bias": 0.50000006}, at_6={"fc.weight": 3, "fc.bias": 2})
        self.record("more", [4], at_4={"fc.more": 1.0})
        self.record("wrapped", range(1, 4), ["module.fc.weight"])
        self.record("turned", range(1, 10), ["fc.bias", "fc.weight"])
        self.record("nothing", [])
        self.record("early", [0])
        # Step 5 was repeated, rightly, by a run that resumed.
        self.record("resumed", [4, 5], at_5={"fc.bias": 7.0})
        self.record("resumed", [-4, 5, 6])

        def compare(*runs, status=0):
            return self.cohort("runs", "compare", *runs, status=status)

        self.assertIn("equal to the bit at every step that both runs have (4 of them, 3 to 9)", compare("one", "same"))
        self.assertIn("(9 of them, 1 to 9)", compare("one", "turned"))
        self.assertIn("(3 of them, 4 to 6)", compare("one", "resumed"))
        self.assertIn("no tensor in common at step 1, but fc.weight, fc.bias, module.fc.weight", compare("one", "wrapped", status=2))
        said = compare("one", "runs/other", status=1)
        self.assertIn("equal to the bit until step 4, not at 5: 1 of 2 tensors differ, fc.bias\n", said)
        said = compare("one", "more", status=1)
        self.assertIn("differ from the first step that both runs have, 4: 0 of 2 tensors differ; one run alone has fc.more\n", said)
        self.assertIn("nothing/run.jsonl has no digests of weights", compare("one", "nothing", status=2))
        self.assertIn("no step in common", compare("one", "early", status=2))
        self.assertIn("values", compare("one", "values", status=2))
        shown = json.loads(self.cohort("runs", "compare", "one", "other", "--json", status=1))
        self.assertEqual((shown["equal"], shown["equal_until"], shown["differ"], shown["names"]), (False, 4, 5, ["fc.bias"]))

    def test_one_whose_launcher_was_killed_is_lost_when_its_agent_has_ended(self):
        going = subprocess.Popen(self.job("going", "while :; do sleep 0.1; done"), cwd=self.folder, stdout=subprocess.DEVNULL)
        self.addCleanup(going.kill)
        Watched.wait_until((self.folder / "runs/latest/live.json").exists, "the run")
        Watched.wait_until(lambda: self.listed()["going"]["ranks"] == 1, "the run that goes on")
        going.kill()
        going.wait(SECONDS)
        killed = time.monotonic()
        Watched.wait_until(lambda: self.listed()["going"]["state"] == "lost", "the run that is lost")
        self.assertLess(time.monotonic() - killed, 10)  # its live.json is younger than 15 s

    def test_how_one_ended_is_there_on_a_full_disk_too(self):
        disk = self.folder / "disk"
        disk.mkdir()
        script = f"mount -t tmpfs -o size=256k tmpfs {disk} && cd {disk} && exec 9>&1 >&2 || exit 77\n"
        fill = "until [ -e runs/latest/live.json -a -e runs/latest/job.json ]; do sleep 0.1; done; ! cat /dev/zero >fill; exit 3"
        script += f"{COMMAND} run -q -np 1 sh -c '{fill}'; {COMMAND} runs --json >&9"
        done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=SECONDS)
        if done.returncode in (1, 77):
            self.skipTest("no file system can be mounted here")
        run = json.loads(done.stdout)[0]
        self.assertEqual((run["state"], run["exit_status"]), ("failed", 3), done.stderr)

    def test_a_folder_that_is_more_than_a_run_stays(self):
        subprocess.run([*self.job("here", "true")[:-1], "--run-dir", ".", "./here"], cwd=self.folder, check=True, timeout=SECONDS)
        self.assertIn("the working directory", self.cohort("runs", "rm", ".", status=2))
        done = subprocess.run([COMMAND, "runs", "rm", str(self.folder)], capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual(done.returncode, 2)
        self.assertIn("its command was started in that folder", done.stderr)
        # The run's files move to another folder.
        (self.folder / "project").mkdir()
        for path in self.folder.iterdir():
            if path.name != "project":
                path.rename(self.folder / "project" / path.name)
        self.assertIn("it holds what no run makes: here", self.cohort("runs", "rm", "project", status=2))
        self.assertTrue((self.folder / "project" / "here").exists())

    def run_in(self, folder, script="true"):
        subprocess.run([*self.job("job", script)[:-1], "--run-dir", folder, "./job"], cwd=self.folder, check=True, timeout=SECONDS)

    def test_runs_within_runs_and_files_of_others_stay(self):
        self.run_in("runs/exp")
        self.run_in("runs/exp")
        self.run_in("runs/exp/logs/b")
        (self.folder / "runs" / "other").mkdir()
        (self.folder / "runs" / "other" / "results.csv").write_text("mine")
        self.run_in("runs/other")
        self.assertIn("the run logs/b is in it", self.cohort("runs", "rm", "exp", status=2))
        self.assertIn("no run makes: results.csv", self.cohort("runs", "rm", "exp/logs/b", "other", status=2))
        self.assertIn("no run makes: results.csv", self.cohort("runs", "rm", "--keep", "0"))
        self.assertEqual(sorted(path.name for path in (self.folder / "runs").iterdir()), ["exp", "other"])
        self.cohort("runs", "rm", "exp/logs/b")
        # A run is removed once, however often it is named. The rest of a killed removal is no run, and does not hinder.
        shutil.copytree(self.folder / "runs" / "exp", self.folder / "runs" / ".removed-exp")
        self.assertEqual([run["name"] for run in json.loads(self.cohort("runs", "--json"))], ["exp", "other"])
        self.assertIn("1 run,", self.cohort("runs", "rm", "exp", "runs/exp", "exp/earlier-1", "exp"))
        self.assertEqual([path.name for path in (self.folder / "runs").iterdir()], ["other"])
        # In a folder that `cohort run` has named, everything belongs to the run.
        subprocess.run(self.job("own", 'touch "$COHORT_RUN_DIR/model.pt"'), cwd=self.folder, check=True, timeout=SECONDS)
        self.cohort("runs", "rm", "latest")
        self.assertEqual([path.name for path in (self.folder / "runs").iterdir()], ["other"])

    def test_a_run_of_another_host_is_lost_after_an_hour(self):
        self.run_in("runs/exp")
        live, job = self.folder / "runs/exp/live.json", self.folder / "runs/exp/job.json"
        job.write_text(json.dumps({**json.loads(job.read_text()), "host": "another", "launcher": {"host_id": "another"}}))
        run = json.loads(live.read_text())

        def state(silence):
            live.write_text(json.dumps({**run, "state": "running", "time": time.time() - silence, "start": 1e300}))
            self.assertRegex(self.cohort("runs"), r"\nexp +\w+ +- +0")  # (no calendar has that start)
            return json.loads(self.cohort("runs", "--json"))[0]["state"]

        self.assertEqual(state(1800), "running")
        self.assertIn("0 runs", self.cohort("runs", "rm", "--older-than", "1s"))
        self.assertIn("it goes on", self.cohort("runs", "rm", "exp", status=2))
        self.assertEqual(state(4000), "lost")
        self.assertIn("0 runs", self.cohort("runs", "rm", "--older-than", "1s"))
        live.unlink()  # from now on it counts from its job.json
        self.assertEqual(json.loads(self.cohort("runs", "--json"))[0]["state"], "running")
        os.utime(job, (time.time() - 4000,) * 2)
        self.cohort("runs", "rm", "exp")
        self.assertFalse(live.parent.exists())


class Page(Watched):
    def test_all_logged_values_and_what_is_used_are_there(self):
        _, port, token = self.serve()
        self.wait_until(lambda: len(self.data(port, token)[0]["usage"]) >= 2, "what is used")
        head, _, _ = self.data(port, token)
        values = {value["name"]: value for value in head["values"]}
        self.assertEqual(list(values), ["loss", "lr"])
        self.assertEqual(values["lr"]["last"], 0.1)
        self.assertGreater(len(values["lr"]["points"]), 1)
        self.assertLessEqual({"system/cpu", "system/memory"}, {value["name"] for value in head["usage"]})

    def test_steps_are_seen_in_time(self):
        _, port, token = self.serve()
        seen = {}
        end = time.monotonic() + 8
        while time.monotonic() < end:
            _, _, ranks = self.data(port, token)
            seen.setdefault(ranks[0]["step"], time.time())
            time.sleep(0.05)
        happened = dict(line.split() for line in (self.run_folder / "when").read_text().splitlines())
        # Each step was the newest when it was shown. Measures how old it was by then.
        late = [at - float(happened[str(step + 1)]) for step, at in seen.items() if str(step + 1) in happened]
        self.assertGreater(len(late), 5)
        print(f"from a step to the page: at most {max(late):.2f} s, mean {sum(late) / len(late):.2f} s", file=sys.stderr)
        self.assertLess(sorted(late)[len(late) // 2], LATENCY)  # (a busy machine may hold up this process for one of them)

    def test_without_the_token_nothing_is_shown(self):
        _, port, token = self.serve()
        for path, headers in (
            ("/", {}),
            ("/data", {}),
            ("/log?rank=0", {}),
            ("/data?token=" + "0" * 64, {}),
            ("/data?token=" + token[:-1], {}),
            ("/data", {"authorization": "Bearer " + "f" * 64}),
            ("/data", {"cookie": f"cohort_{port}="}),
            ("/data", {"cookie": f"cohort_{port + 1}={token}"}),
        ):
            status, answer, body = ask(port, path, **headers)
            self.assertEqual(status, 403, path)
            self.assertNotIn("peer", body)
            self.assertNotIn("Set-Cookie", answer)
        # Somebody else's name that leads to this address, with or without a token.
        for host in ("evil.example", "127.0.0.1.evil.example", f"evil.example:{port}", ""):
            self.assertIn(ask(port, f"/data?token={token}", host=host)[0], (400, 421), host)
        for host in ("localhost", f"127.0.0.1:{port}", "LOCALHOST:9", "[::1]:80"):
            self.assertEqual(ask(port, f"/data?token={token}", host=host)[0], 200, host)

    def test_the_first_visit_leaves_a_cookie_and_no_token_in_the_address(self):
        _, port, token = self.serve()
        status, headers, _ = ask(port, f"/?token={token}")
        self.assertEqual((status, headers["Location"]), (303, "/"))
        cookie, *attributes = headers["Set-Cookie"].split("; ")
        self.assertEqual(set(attributes), {"HttpOnly", "SameSite=Strict", "Path=/"})
        status, headers, body = ask(port, "/", cookie=cookie)
        self.assertEqual(status, 200)
        self.assertNotIn(token, body)
        policy = headers["Content-Security-Policy"]
        self.assertTrue(policy.startswith("default-src 'none'; "))
        self.assertNotIn("unsafe", policy)
        nonce = re.search(r"script-src 'nonce-(\w+)'", policy)[1]
        self.assertEqual(body.count(f'nonce="{nonce}"'), 2)
        self.assertNotEqual(re.search(r"nonce-(\w+)", ask(port, "/", cookie=cookie)[1]["Content-Security-Policy"])[1], nonce)
        # The page loads nothing from elsewhere (SVG's namespace is no address).
        self.assertEqual(set(re.findall(r"https?://[^\"' )]+", body)), {"http://www.w3.org/2000/svg"})
        self.assertEqual(headers["Cache-Control"], "no-store")

    def test_logs_and_what_is_asked_wrongly(self):
        _, port, token = self.serve()
        text = ask(port, "/log?rank=1", authorization=f"Bearer {token}")[2]
        self.assertIn("rank 1 has done step 10\n", text)
        for path in ("/log?rank=2", "/log?rank=-1", "/log?rank=../../x", "/log", "/other", "/log?rank=1%00"):
            self.assertEqual(ask(port, path, authorization=f"Bearer {token}")[0], 404, path)
        for request, status in (
            (b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"405"),
            (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 9000 + b"\r\n\r\n", b"431"),
            (b"\x16\x03\x01 not http \r\n\r\n", b"400"),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                connection.sendall(request)
                self.assertIn(status, connection.recv(100))

    def test_a_thousand_clients_harm_nobody(self):
        process, port, token = self.serve()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard < 1200:
            self.skipTest("needs 1200 open files")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        before = self.live()[1][0]["step"], time.monotonic()
        with contextlib.ExitStack() as stack:
            crowd = []
            for i in range(1000):
                client = stack.enter_context(socket.socket())
                client.settimeout(20)
                client.connect(("127.0.0.1", port))
                if i % 3 == 0:
                    client.sendall(b"GET /data HTTP/1.1\r\nHost: loc")
                if i % 3 == 1:
                    client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                crowd.append(client)
            begin = time.monotonic()
            self.data(port, token)
            took = time.monotonic() - begin
            # No more connections are held open than the page allows itself.
            files = len(os.listdir(f"/proc/{process.pid}/fd"))
            self.assertLess(files, 90)
            self.wait_until(lambda: self.live()[1][0]["step"] >= before[0] + 20, "further steps")
        speed = (self.live()[1][0]["step"] - before[0]) / (time.monotonic() - before[1])
        print(f"behind 1000 clients: answered in {took * 1e3:.0f} ms; {speed:.1f} steps/s went on", file=sys.stderr)
        self.assertIsNone(self.job.poll())
        self.assertIsNone(process.poll())
        self.data(port, token)

    def test_another_terminal_watches_the_page(self):
        _, port, token = self.serve()
        for text in (token, f"http://127.0.0.1:{port}/?token={token}"):
            watch = subprocess.run(
                [COMMAND, "watch", f"127.0.0.1:{port}", "--once"], input=text + "\n", capture_output=True, text=True, timeout=SECONDS
            )
            self.assertEqual(watch.returncode, 0, watch.stderr)
            self.assertRegex(watch.stdout, r"\n1 +\w+ +\d+ .*rank 1 has done step")
        for token_given, said in (("0" * 64, "it answers 403"), ("none", "64 hexadecimal digits")):
            watch = subprocess.run(
                [COMMAND, "watch", f"localhost:{port}", "--once"],
                env={**os.environ, "COHORT_PAGE_TOKEN": token_given},
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
            self.assertNotEqual(watch.returncode, 0)
            self.assertIn(said, watch.stderr)

    def test_a_page_that_answers_byte_by_byte_is_not_waited_for(self):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def drip() -> None:
                client = server.accept()[0]
                with contextlib.suppress(OSError):
                    while True:
                        client.sendall(b"H")
                        time.sleep(0.1)

            threading.Thread(target=drip, daemon=True).start()
            watch = subprocess.run(
                [COMMAND, "watch", f"127.0.0.1:{server.getsockname()[1]}", "--once"],
                input="0" * 64 + "\n", capture_output=True, text=True, timeout=SECONDS,
            )  # fmt: skip
        self.assertNotEqual(watch.returncode, 0)
        self.assertIn("does not answer as a page", watch.stderr)

    def test_a_token_of_ones_own(self):
        secret = self.folder / "token"
        subprocess.run([COMMAND, "secret", str(secret)], check=True, stdout=subprocess.DEVNULL)
        self.addCleanup(secret.unlink)
        _, port, token = self.serve("--token-file", str(secret))
        self.assertEqual(token, secret.read_text().strip())
        watch = subprocess.run(
            [COMMAND, "watch", f"127.0.0.1:{port}", "--once", "--token-file", str(secret)], capture_output=True, timeout=SECONDS
        )
        self.assertEqual(watch.returncode, 0, watch.stderr)


class RunPage(unittest.TestCase):
    def test_the_page_lives_as_long_as_the_job(self):
        with tempfile.TemporaryDirectory() as folder:
            job = subprocess.Popen(
                [COMMAND, "run", "--page", "-np", "1", "--run-dir", folder + "/run", "sh", "-c", "echo here; read x"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            with job:
                # The address is not on stderr, which is no terminal here, since others may read a batch system's file.
                for line in job.stderr:
                    self.assertNotIn("token=", line)
                    if "page.url" in line:
                        break
                file = pathlib.Path(folder) / "run/page.url"
                self.assertEqual(file.stat().st_mode & 0o777, 0o600)
                found = re.match(r"http://127\.0\.0\.1:(\d+)/\?token=([0-9a-f]{64})$", file.read_text())
                port, token = int(found[1]), found[2]
                self.assertEqual(ask(port, f"/data?token={token}")[0], 200)
                job.stdin.write("\n")
                job.stdin.close()
                self.assertEqual(job.wait(SECONDS), 0)
            with self.assertRaises(OSError):
                ask(port, "/")
            # The page's address is in no file of the run.
            files = {path.name: path.read_text() for path in (pathlib.Path(folder) / "run").rglob("*") if path.is_file()}
            self.assertEqual([name for name, text in files.items() if token in text], [])
            run = json.loads(files["live.json"])
            self.assertEqual((run["state"], run["exit_status"]), ("ended", 0))


@unittest.skipIf(pyte is None, "needs pyte: pip install pyte")
class InATerminal(Watched):
    def open(self, *command, **options):
        terminal = Terminal(command, **options)
        self.addCleanup(terminal.close)
        return terminal

    def watch(self, **options):
        return self.open(COMMAND, "watch", str(self.run_folder), **options)

    def test_80_by_24(self):
        terminal = self.watch()
        terminal.until(lambda text: "rank 1 has" in text and "q quit" in text, "the table")
        lines = terminal.screen.display
        self.assertRegex(lines[0], r"^peer-\S*  running \d:\d\d  2 ranks on 1 host *$")
        self.assertRegex(lines[1], r"^step \d+/4000  .* left  .* steps/s  loss 0\.\d+  [▁▂▃▄▅▆▇█]+ *$")
        self.assertRegex(lines[3], r"^rank +state +step +step/s +samples/s +exposed +waits +late +memory +last line")
        self.assertRegex(lines[4], r"^0 +(running|waiting) +\d+ ")
        self.assertRegex(lines[23], r"^q quit  s sort: rank")
        step = int(re.search(r"step (\d+)", lines[1])[1])
        terminal.until(lambda text: int(re.search(r"step (\d+)", text)[1]) > step, "a further step")
        # After sorting, the late rank is first.
        terminal.type("s")
        terminal.until(lambda text: "sort: late" in text and re.match(r"1 ", text.split("\n")[4]), "rank 1 in the first row")
        # While the view is frozen, nothing moves.
        terminal.type("f")
        terminal.until(lambda text: "frozen" in text, "the word")
        for _ in range(5):
            terminal.read()  # the rest of that picture
        shown = list(terminal.screen.display)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            terminal.read()
        self.assertEqual(shown, terminal.screen.display)
        terminal.type("f")
        # Shows a rank's log, and goes back.
        terminal.type("\r")
        terminal.until(lambda text: "rank-1.out" in text and "rank 1 has done step" in text, "the log of rank 1")
        terminal.type("e")
        terminal.until(lambda text: "rank-1.err" in text, "its stderr")
        terminal.type("\033")
        terminal.until(lambda text: "last line" in text, "the table")
        terminal.resize(200, 60)
        terminal.process.send_signal(signal.SIGWINCH)
        terminal.until(lambda text: "q quit" in text.split("\n")[59], "the last line at its new place")
        self.assertRegex(terminal.screen.display[4], r"rank \d has done step \d+ *$")
        terminal.type("q")
        self.assertEqual(terminal.end(), 0)
        self.assert_restored(terminal)

    def assert_restored(self, terminal):
        self.assertTrue(terminal.raw.endswith(b"\033[?7h\033[?25h\033[?1049l"), terminal.raw[-60:])
        self.assertEqual(termios.tcgetattr(terminal.slave), terminal.before)

    def test_signals_leave_the_terminal_as_it_was(self):
        for number, status in ((signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)):
            terminal = self.watch()
            terminal.until(lambda text: "q quit" in text, "the table")
            terminal.process.send_signal(number)
            self.assertEqual(terminal.end(), status)
            self.assert_restored(terminal)

    def test_no_colour_ascii_and_a_dumb_terminal(self):
        terminal = self.watch(NO_COLOR="1", LC_ALL="C")
        terminal.until(lambda text: "q quit" in text, "the table")
        self.assertNotRegex(terminal.raw, rb"\033\[[0-9;]*m")
        self.assertTrue(terminal.raw.isascii())
        terminal.type("q")
        terminal.end()
        dumb = self.watch(TERM="dumb")
        dumb.until(lambda text: "running" in text, "a line")
        self.assertNotIn(b"\033", dumb.raw)


@unittest.skipIf(pyte is None, "needs pyte: pip install pyte")
class StatusLine(unittest.TestCase):
    PROGRAM = """
import os, sys, time
rank = os.environ["RANK"]
for i in range(int(os.environ.get("LINES_TO_SAY", 60))):
    stream = sys.stdout if i % 3 else sys.stderr
    stream.write(f"<{rank}/{i}/{'x' * (i % 30)}>\\n")
    stream.flush()
    time.sleep(0.05)
sys.stdout.write("a question? ")
sys.stdout.flush()
time.sleep(0.5)
sys.stdout.write("answered\\n")
"""

    def run_job(self, *options, **environment):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        program = pathlib.Path(folder.name) / "talks.py"
        program.write_text(self.PROGRAM)
        terminal = Terminal(
            [COMMAND, "run", "-np", "3", *options, "--run-dir", folder.name + "/run", sys.executable, str(program)],
            columns=200,
            rows=400,
            **environment,
        )
        self.addCleanup(terminal.close)
        return terminal

    def test_is_below_all_lines_and_garbles_none(self):
        terminal = self.run_job()
        found = re.compile(r"^running \d:\d\d *$", re.M)
        terminal.until(found.search, "the status")
        last = [line.rstrip() for line in terminal.screen.display if line.strip()][-1]
        self.assertEqual(terminal.end(), 0)
        lines = [line.rstrip() for line in terminal.screen.display if line.strip()]
        self.assertRegex(last, r"^running \d:\d\d$|<\d/")
        for rank in range(3):
            shown = [re.search(rf"\| (<{rank}/(\d+)/x*>)$", line) for line in lines]
            texts = [match[1] for match in shown if match]
            self.assertEqual(sorted(texts), sorted(f"<{rank}/{i}/{'x' * (i % 30)}>" for i in range(60)))
        # There are whole lines of ranks and of the command, and nothing else, since the status is gone.
        for line in lines:
            self.assertRegex(line, r"^(\S+:\d +\| (<\d/\d+/x*>|a question\? answered)|\[[0-9-]+\] +\| a question\? answered|cohort: .*|.*runs?/.*)$")

    @slow
    def test_is_off_where_nobody_wants_it(self):
        for options, environment in (
            (["-q"], {}),
            (["--prefix", "none"], {}),
            (["--json"], {}),
            ([], {"TERM": "dumb"}),
        ):
            terminal = self.run_job(*options, LINES_TO_SAY="20", **environment)
            self.assertEqual(terminal.end(), 0)
            self.assertNotRegex(terminal.raw, rb"running \d:\d\d")


@unittest.skipIf(CHROMIUM is None, "needs Chromium")
class Browser(Watched):
    def open(self, url, *options):
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        done = subprocess.run(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                f"--user-data-dir={folder.name}", "--virtual-time-budget=5000", "--enable-logging=stderr",
                *options, url,
            ],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def test_shows_the_run(self):
        _, port, token = self.serve()
        done = self.open(f"http://127.0.0.1:{port}/?token={token}", "--dump-dom")
        self.assertRegex(done.stdout, r"<title>python\S* · Cohort</title>")
        self.assertRegex(done.stdout, r'<span id="state" class="state running">running</span>')
        self.assertRegex(done.stdout, r"<td[^>]*>rank 1 has done step \d+</td>")
        self.assertRegex(done.stdout, r'<path d="M0\.0 ')
        self.assertIn("The others wait for rank 1.", done.stdout)
        # The browser reports there what its policy refuses and what its script gets wrong.
        self.assertNotRegex(done.stderr, r"CONSOLE")

    def test_shows_nothing_without_the_token(self):
        _, port, _ = self.serve()
        done = self.open(f"http://127.0.0.1:{port}/", "--dump-dom")
        self.assertIn("the token is missing or wrong", done.stdout)


if __name__ == "__main__":
    unittest.main()
