"""Jobs of a real Slurm that are preempted: at the end of their time, and when somebody wants their machines. They are queued
again, go on where they were, and end with what an undisturbed training ends with."""

import json
import os
import pathlib
import re
import tempfile
import time
import unittest

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")
PEER = os.environ.get("COHORT_LEDGER_PEER", "")

# As in docs/reference/run.md.
SCRIPT = """#!/bin/bash
trap 'kill -USR1 $!' USR1
{cohort} run -q --no-logs --run-dir {folder}/job --per-node 2 {program} &
wait $!
while kill -0 $! 2>/dev/null; do wait $!; done
wait $!; status=$?
echo "ended with $status"
[ $status -eq 75 ] && exec scontrol requeue "$SLURM_JOB_ID"
exit $status
"""
DIRECT = """#!/bin/bash
srun --ntasks-per-node=2 -n 4 --overcommit {program}
status=$?
echo "ended with $status"
[ $status -eq 75 ] && exec scontrol requeue "$SLURM_JOB_ID"
exit $status
"""
STEPS = 320


class Preemption(boxes.InBox):
    needs = ("COHORT_LEDGER_PEER",)
    wanted = ("room", "--slurm", "--hosts", "2")

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="cohort-room-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "ledger").mkdir()
        self.waits_since = None  # queued again, and nothing of it runs any more

    def program(self, folder, pace):
        # 16 samples a step, on 4 ranks.
        return f"{PEER} {folder} x size={STEPS * 4} epochs=4 batch=4 save-every=1000 pace-ms={pace}"

    def submit(self, script, *options, pace=100):
        path = self.folder / "job.sh"
        path.write_text(script.format(cohort=COHORT, folder=self.folder, program=self.program(self.folder, pace)))
        done = self.box.run("h1", "sbatch", "--parsable", "-N", "2", "--ntasks-per-node=2", "--requeue", "--open-mode=append",
                            f"--output={self.folder}/out", *options, path, cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.job = done.stdout.strip()
        self.addCleanup(self.box.run, "h1", "scancel", "-s", "KILL", "--full", self.job)

    def output(self):
        path = self.folder / "out"
        return path.read_text() if path.exists() else ""

    def told(self):
        """By the job and by Slurm."""
        return f"{self.output()}\n{self.box.slurm_errors()}"

    def state(self):
        done = self.box.run("h1", "scontrol", "-o", "show", "job", self.job)
        return dict(re.findall(r"(\S+?)=(\S*)", done.stdout))

    def steps(self):
        """Optimizer steps that rank 0 has done so far, over all attempts."""
        path = self.folder / "ledger" / "x.0"
        return path.read_text().count('"step"') if path.exists() else 0

    def wait_for(self, condition, what, seconds):
        limit = time.monotonic() + seconds
        while not (value := condition()):
            self.assertLess(time.monotonic(), limit, f"{what}: {self.state()} {self.told()}")
            time.sleep(0.2)
        return value

    def hurry(self, state):
        """Slurm lets a job that is queued again wait for two minutes: it is told not to. Not at once, though: its daemons refuse
        credentials of the job that are not younger, by whole seconds, than the end of the last run on their host, which may come
        after the job is queued."""
        if state.get("JobState") != "PENDING" or state.get("Restarts") == "0":
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = time.monotonic()
        elif time.monotonic() - self.waits_since > 3:
            self.box.run("h1", "scontrol", "update", f"JobId={self.job}", "StartTime=now")

    def until_done(self, seconds):
        def done():
            state = self.state()
            self.hurry(state)
            return state.get("JobState") not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED") and state

        return self.wait_for(done, "the job ends", seconds)

    def expect_as_undisturbed(self):
        whole = self.folder / "whole"
        (whole / "ledger").mkdir(parents=True)
        done = self.box.run("h1", COHORT, "run", "-q", "--no-logs", "--run-dir", f"{whole}/job", "-H", "h1:2,h2:2", *self.program(whole, 0).split(),
                            cwd=self.folder, timeout=90)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        last = [sorted((folder / "checkpoints").glob("checkpoint-*"))[-1] for folder in (whole, self.folder)]
        tensors = [{path.name: path.read_bytes() for path in folder.rglob("*.safetensors")} for folder in last]
        self.assertTrue(tensors[0])
        self.assertEqual(*tensors)
        self.assertEqual(json.loads((self.folder / "used.json").read_text()), [4] * (STEPS * 4))
        # Nothing was done twice: each attempt saved its very last step.
        self.assertEqual(self.steps(), STEPS)

    def test_the_end_of_the_time_is_told_to_the_batch_script(self):
        self.submit(SCRIPT, "--time=1", "--signal=B:USR1@50")
        state = self.until_done(240)
        self.assertEqual(state["JobState"], "COMPLETED", self.told())
        self.assertGreaterEqual(int(state["Restarts"]), 1, self.output())
        self.assertRegex(self.output(), r"asked to end by SIGUSR1; all 4 ranks have saved and ended, after .* exit status 75")
        self.assertEqual(self.output().count("ended with 75"), int(state["Restarts"]))
        self.expect_as_undisturbed()

    def test_a_signal_to_the_steps_reaches_agents_and_ranks(self):
        self.submit(SCRIPT, "--time=5", pace=40)  # it must not be over before it is told the second time
        for signal in ("USR1", "TERM"):
            before = self.steps()
            self.wait_for(lambda: self.steps() > before + 5, "it trains", 60)
            restarts = int(self.state()["Restarts"])
            done = self.box.run("h1", "scancel", "-s", signal, self.job)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.wait_for(lambda: f"asked to end by SIG{signal}" in self.output(), "it is preempted", 30)
            self.wait_for(lambda: self.until_running(restarts + 1), "it runs again", 60)
        self.assertEqual(self.until_done(60)["JobState"], "COMPLETED", self.told())
        self.assertNotIn("failed", self.output())
        self.expect_as_undisturbed()

    def until_running(self, restarts):
        state = self.state()
        self.hurry(state)
        return state["JobState"] in ("RUNNING", "COMPLETED") and int(state["Restarts"]) == restarts

    def test_ranks_that_srun_has_started(self):
        self.submit(DIRECT, "--time=5", pace=40)
        self.wait_for(lambda: self.steps() > 5, "it trains", 60)
        self.assertEqual(self.box.run("h1", "scancel", "-s", "USR1", self.job).returncode, 0)
        self.assertEqual(self.until_done(90)["JobState"], "COMPLETED", self.told())
        self.assertIn("ended with 75", self.output())
        self.expect_as_undisturbed()


if __name__ == "__main__":
    unittest.main()
