"""`cohort run --trace` over hosts of a box: one trace, on one time base. The hosts share this machine's clock, so what is
measured as their offset is the error; with libfaketime one of them has another."""

import glob
import json
import os
import pathlib
import sys

from launch_case import COHORT, Launch

PACKAGE = os.environ.get("COHORT_PYTHON_PACKAGE", "")
FAKETIME = next(iter(glob.glob("/usr/lib/*/faketime/libfaketime.so.1")), None)

PROGRAM = """
import array
import cohort, cohort.track
cohort.init()
data = array.array("f", [1.0] * 65536)
for step in range(200):
    with cohort.track.span("compute"):
        sum(range(20_000))
    cohort.world().all_reduce(data)
cohort.shutdown()
"""
# How far libfaketime puts CLOCK_MONOTONIC ahead: the system call itself it leaves alone.
AHEAD = """
import ctypes, time
libc = ctypes.CDLL(None)
buffer = (ctypes.c_int64 * 2)()
looks = []
for _ in range(100):
    before = time.monotonic_ns()
    libc.syscall(228, 1, buffer)
    after = time.monotonic_ns()
    looks.append((after - before, (before + after) // 2 - buffer[0] * 10**9 - buffer[1]))
print(min(looks)[1])
"""
# All ranks leave a barrier within this of each other, on a busy machine.
LEAVE_MICROSECONDS = 20_000


class TestTrace(Launch):
    needs = ("COHORT_COMMAND", "COHORT_PYTHON_PACKAGE")
    wanted = ("launch", "--hosts", "3")

    def traced(self):
        program = pathlib.Path(self.folder) / "program.py"
        program.write_text(PROGRAM, encoding="ascii")
        done = self.run_job("--trace", "--run-dir", "run", "-H", "h1:1,h2:1", "--env", f"PYTHONPATH={PACKAGE}",
                            sys.executable, str(program))
        self.assertEqual(done.returncode, 0, done.stderr)

    def report(self):
        done = self.box.run("h1", COHORT, "trace", "report", "run", "--json", cwd=self.folder, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def ends(self):
        """By rank: when each of its collectives had ended."""
        output = pathlib.Path(self.folder) / "all.json"
        done = self.box.run("h1", COHORT, "trace", "merge", "run", "-o", str(output), cwd=self.folder, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        events = json.loads(output.read_text(encoding="utf-8"))["traceEvents"]
        return [[e["ts"] + e["dur"] for e in events if e["name"] == "all_reduce" and e["pid"] == rank and e["ph"] == "X"] for rank in (0, 1)]

    def test_two_hosts_are_on_one_time_base(self):
        self.traced()
        first, other = self.report()["hosts"]
        self.assertEqual((first["host"], first["clock_measured"], first["uncertainty_ns"]), ("h1", True, 0))
        self.assertTrue(other["clock_measured"])
        print(f"offset {other['offset_ns']} ns, stated uncertainty {other['uncertainty_ns']} ns", file=sys.stderr)
        # The hosts have one clock: any offset is an error.
        self.assertLessEqual(abs(other["offset_ns"]), other["uncertainty_ns"])
        self.assertLess(other["uncertainty_ns"], 10_000_000)  # also on a busy machine
        here, there = self.ends()
        self.assertEqual(len(here), len(there))
        self.assertGreaterEqual(len(here), 200)
        near = sorted(abs(a - b) for a, b in zip(here, there))
        self.assertLess(near[len(near) // 2], LEAVE_MICROSECONDS)
        self.assertGreater(sum(rank["wire_bytes"] for rank in self.report()["ranks"]), 0)

    def test_a_host_with_another_clock(self):
        if FAKETIME is None:
            self.skipTest("needs libfaketime: apt-get install libfaketime")
        # The agent alone: its host's ranks would have the same clock, and Python sleeps for decades under it.
        shifted = f"LD_PRELOAD={FAKETIME} FAKETIME=+1h"
        agent = pathlib.Path(self.folder) / "cohort-there"
        agent.write_text(f'#!/bin/sh\nexec env {shifted} {COHORT} "$@"\n', encoding="ascii")
        agent.chmod(0o755)
        done = self.run_job("--trace", "--run-dir", "run", "-H", "h1:1,h2:1", "--remote-cohort", str(agent), "sleep", "1")
        self.assertEqual(done.returncode, 0, done.stderr)
        other = self.report()["hosts"][1]
        asked = self.box.run("h2", "env", *shifted.split(), sys.executable, "-c", AHEAD, timeout=60)
        error = abs(other["offset_ns"] - int(asked.stdout))
        print(f"shifted by {int(asked.stdout)} ns: error {error} ns, stated uncertainty {other['uncertainty_ns']} ns", file=sys.stderr)
        self.assertLessEqual(error, other["uncertainty_ns"] + 2_000)  # of the look itself
