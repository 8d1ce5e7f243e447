"""Tests that the fault harness detects the problems it checks for. Needs no box."""

import contextlib
import io
import os
import pathlib
import subprocess
import time
import types
import unittest
import unittest.mock

import faults

NOTICE = "cohort: 4 processes on 2 hosts (h1: ranks 0-1, h2: ranks 2-3)"


def plan(**more):
    made = faults.Plan("1", 0, ["cut"])
    made.host, made.shell, made.restarts, made.layout, made.launcher = "h2", None, 0, "h1:2,h2:2", "ssh"
    for name, value in more.items():
        setattr(made, name, value)
    return made


def job_that_said(*lines):
    job = faults.Job(types.SimpleNamespace(box=None, options=None), plan(), "/nonexistent/cohort-faults")
    job.struck, job.lines = 10.0, list(lines)
    return job


class Naming(unittest.TestCase):
    def test_the_notice_of_the_start_names_nobody(self):
        for at in (9.0, 10.1):
            job = job_that_said((at, "err", NOTICE), (11.0, "err", "cohort: something is wrong"))
            self.assertIsNone(job.named_after())
            job.judge("cut", True, False, 1, "")
            self.assertRegex(job.problems[0], "it does not say")

    def test_who_speaks_is_not_whom_it_speaks_of(self):
        job = job_that_said((11.0, "err", "h2:2 | lost somebody"), (12.0, "out", "h2"))
        self.assertIsNone(job.named_after())
        job = job_that_said((11.0, "err", "h1:0 | lost rank 2 (host h2)"))
        self.assertEqual(job.named_after(), 1.0)
        job.judge("cut", True, False, 1, "")
        self.assertEqual(job.problems, [])


class Beginning(unittest.TestCase):
    def test_ranks_have_begun_once_all_have_been_there_for_a_moment(self):
        with subprocess.Popen(["sleep", "1000"]) as child:
            self.addCleanup(child.kill)
            there = {"h1": {os.getpid(): "peer x12"}, "h2": {}}
            job = job_that_said()
            job.plan.layout = "h1,h2"
            job.box = types.SimpleNamespace(processes=lambda host, pattern: there.get(host, {}))
            job.ground.options = types.SimpleNamespace(peer="peer")
            self.assertFalse(job.all_have_begun())
            there["h2"] = {child.pid: "peer x12"}
            time.sleep(0.5)
            self.assertTrue(job.all_have_begun())
            with unittest.mock.patch.object(faults, "BEGUN", 1e9):
                self.assertFalse(job.all_have_begun())
            child.kill()


class Plans(unittest.TestCase):
    def test_the_same_number_is_the_same_job(self):
        for number in range(50):
            self.assertEqual(str(faults.Plan("7", number, faults.HARMS)), str(faults.Plan("7", number, faults.HARMS)))

    def test_only_launchers_that_are_there(self):
        there = [name for name in faults.ALL if name not in ("slurm", "srun")]
        harms = faults.possible(["slurmd", "step", "orted"], there)
        self.assertEqual(harms, ["orted"])
        for number in range(50):
            self.assertEqual(faults.Plan("7", number, harms, there).launcher, "mpirun")
        self.assertEqual(faults.possible(["slurmd"], there), [])


class Runs(unittest.TestCase):
    def harness(self, **more):
        options = types.SimpleNamespace(**{"seed": "1", "count": 3, "only": [], "jobs": 1, "harm": [], "state": None,
                                           "keep": None, "build": "build",
                                           "cohort": "cohort", "peer": "peer", **more})
        return faults.Harness(options)

    @staticmethod
    def result(number, harm):
        return {"number": number, "harm": harm, "status": 0, "seconds": 1.0, "named": None, "left_seconds": 0.0, "problems": []}

    def test_jobs_that_came_to_no_harm_show_nothing(self):
        harness = self.harness()
        harness.series.results = {number: self.result(number, "cut" if number < 2 else "none") for number in range(5)}
        with contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(harness.table(), 1)
        self.assertIn("only 2 of 5 jobs", said.getvalue())
        harness.series.results[4] = self.result(4, "cut")
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(harness.table(), 0)

    def test_a_job_that_was_over_is_harmed_earlier(self):
        moments = []

        class Job:
            def __init__(self, ground, plan, folder):
                moments.append(plan.moment)

            def run(self):
                return Runs.result(0, "none" if len(moments) < 3 else "cut")

        with unittest.mock.patch.object(faults, "Job", Job):
            self.assertEqual(faults.Harness.struck(None, plan(moment=1.0), pathlib.Path("nowhere"))["harm"], "cut")
        self.assertEqual(moments, [1.0, 0.5, 0.25])

    def test_a_ground_outlives_whatever_fails(self):
        class Ground:
            slurm = False
            box = types.SimpleNamespace(name="x")

            def __init__(self, name, options):
                pass

            def renew(self):
                raise unittest.SkipTest("no box any more")

            def abandon(self):
                self.box = None

        harness = self.harness()
        failing = unittest.mock.Mock(side_effect=RuntimeError("no folder"))
        with unittest.mock.patch.object(faults, "Ground", Ground), unittest.mock.patch.object(faults, "Job", failing), \
                contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(harness.run(), 1)
        self.assertEqual(len(harness.series.results), 3)
        self.assertRegex(said.getvalue(), "(?s)RuntimeError: no folder.*no box any more.*no box any more")

    def test_harms_that_need_slurm_are_skipped_without_it(self):
        ground = unittest.mock.Mock(slurm=False)
        with unittest.mock.patch.object(faults, "Ground", return_value=ground), contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(self.harness(harm=["slurmd"]).run(), 0)
        self.assertIn("OK (skipped=1)", said.getvalue())
        ground.abandon.assert_called_once()


if __name__ == "__main__":
    unittest.main()
