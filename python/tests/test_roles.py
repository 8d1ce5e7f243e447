"""The role of a process: cohort.role() and its like, ClusterSpec, and an evaluator that follows checkpoints; over the
real command."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

from support import SECONDS, needs_torch

import cohort
from tiers import slow

COMMAND = os.environ.get("COHORT_COMMAND", "")
DESCRIBED = """
import json, cohort
print(json.dumps([cohort.role(), cohort.role_number(), cohort.num_workers(), cohort.num_servers()]))
"""
CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "b:2"], "ps": ["c:1", "d:1"]}


def described(**variables):
    """Returns the findings of a program that is started with these variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COHORT_", "TF_", "DMLC_"))}
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBED], env=dict(environment, **variables), capture_output=True, text=True, timeout=SECONDS
    )
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr.splitlines()[-1]


class Asked(unittest.TestCase):
    def test_without_a_launcher_it_is_the_only_worker(self):
        self.assertEqual(described(), ["worker", 0, 1, 0])

    def test_of_tf_config(self):
        spec = cohort.ClusterSpec(CLUSTER)
        said = {task: described(TF_CONFIG=spec.to_tf_config(*task))
                for task in (("chief", 0), ("worker", 1), ("ps", 1), ("evaluator", 0))}
        self.assertEqual(said, {("chief", 0): ["worker", 0, 3, 2], ("worker", 1): ["worker", 2, 3, 2],
                                ("ps", 1): ["server", 1, 3, 2], ("evaluator", 0): ["evaluator", 0, 3, 2]})

    def test_servers_of_tf_config_are_where_it_says(self):
        program = "import cohort, json; print(json.dumps(cohort.server_addresses()))"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COHORT_")}
        environment["TF_CONFIG"] = cohort.ClusterSpec(CLUSTER).to_tf_config("worker", 0)
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual(json.loads(done.stdout), CLUSTER["ps"], done.stderr)

    def test_of_ps_lites_variables(self):
        job = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "localhost", "DMLC_PS_ROOT_PORT": "4711"}
        self.assertEqual(described(DMLC_ROLE="worker", DMLC_WORKER_ID="1", **job), ["worker", 1, 2, 1])
        self.assertEqual(described(DMLC_ROLE="server", **job), ["server", 0, 2, 1])
        self.assertIn("DMLC_WORKER_ID", described(DMLC_ROLE="worker", **job))
        self.assertIn("scheduler", described(DMLC_ROLE="scheduler", **job))


class Spec(unittest.TestCase):
    def test_says_who_is_where(self):
        spec = cohort.ClusterSpec(CLUSTER)
        self.assertEqual(spec.jobs, ["chief", "ps", "worker"])
        self.assertEqual(spec.as_dict(), CLUSTER)
        self.assertEqual((spec.num_tasks("ps"), spec.task_address("ps", 1)), (2, "d:1"))
        self.assertEqual(spec.job_tasks("worker"), ["b:1", "b:2"])
        self.assertEqual(spec, cohort.ClusterSpec(spec))
        self.assertTrue(spec)
        self.assertFalse(cohort.ClusterSpec({}))

    def test_some_tasks_may_not_be_named(self):
        spec = cohort.ClusterSpec({"worker": {0: "a:1", 2: "c:1"}, "ps": ["p:1"]})
        self.assertEqual(spec.job_tasks("worker"), ["a:1", None, "c:1"])
        self.assertEqual(spec.task_indices("worker"), [0, 2])
        self.assertEqual(spec.as_dict(), {"worker": {0: "a:1", 2: "c:1"}, "ps": ["p:1"]})
        self.assertEqual(cohort.ClusterSpec.from_tf_config(spec.to_tf_config("ps", 0)), spec)

    def test_errors_name_the_place(self):
        spec = cohort.ClusterSpec(CLUSTER)
        with self.assertRaisesRegex(ValueError, "no job 'master'; the jobs are: chief, ps, worker"):
            spec.num_tasks("master")
        with self.assertRaisesRegex(ValueError, "no task 7 of job 'ps'"):
            spec.task_address("ps", 7)
        with self.assertRaisesRegex(ValueError, "ps 1: "):
            cohort.ClusterSpec({"ps": ["a:1", "b"]})
        with self.assertRaisesRegex(ValueError, "TF_CONFIG: no JSON"):
            cohort.ClusterSpec.from_tf_config("{")
        for wrong in ([], {"ps": "a:1"}, {"ps": [1]}):
            with self.assertRaises(TypeError):
                cohort.ClusterSpec(wrong)


@unittest.skipUnless(COMMAND, "the command is not there")
class Started(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()) if hasattr(self, "enterContext")
                                   else tempfile.mkdtemp())

    def program(self, name, text):
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    def run_job(self, *words):
        return subprocess.run([COMMAND, "run", "-q", "--timeout", "100", *words], cwd=self.folder, capture_output=True,
                              text=True, timeout=120)

    def test_ranks_are_numbered_without_the_servers(self):
        program = self.program("both.py", """
            import os, signal, time, cohort
            if cohort.role() == "server":
                print("server", cohort.role_number(), cohort.num_workers(), cohort.num_servers())
                try:
                    cohort.init()
                except cohort.InvalidArgument as error:
                    print("refused:", error, flush=True)
                open(f"said.{cohort.role_number()}", "w").close()
                signal.pause()
            cohort.init()
            print("worker", cohort.rank(), cohort.size(), cohort.role_number(), cohort.num_servers())
            while not (os.path.exists("said.0") and os.path.exists("said.1")):  # servers end with the workers
                time.sleep(0.05)
            cohort.world().barrier()
        """)
        done = self.run_job("-np", "2", "--servers", "2", program)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = sorted(line.split(" | ")[1] for line in done.stdout.splitlines())
        self.assertEqual([line for line in lines if not line.startswith("refused")],
                         ["server 0 2 2", "server 1 2 2", "worker 0 2 0 2", "worker 1 2 1 2"])
        refused = [line for line in lines if line.startswith("refused")]
        self.assertEqual(len(refused), 2, done.stdout)
        self.assertIn("COHORT_ROLE=server", refused[0])
        self.assertIn("a parameter server is no rank and forms no world", refused[0])

    def test_ranks_wait_for_servers_that_come_late(self):
        program = self.program("late.py", """
            import signal, sys, time, cohort
            if cohort.role() == "server":
                time.sleep(0.3 * cohort.role_number())
                cohort.announce_server(f"here:{4000 + cohort.role_number()}")
                signal.pause()
            print(cohort.server_addresses(60))
            try:
                cohort.announce_server("x:1")
            except cohort.InvalidArgument as error:
                print(error)
        """)
        done = self.run_job("-np", "1", "--servers", "2", program)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("['here:4000', 'here:4001']", done.stdout)
        self.assertIn("this process is no server but a worker", done.stdout)

    def test_servers_that_do_not_come_are_named(self):
        program = self.program("never.py", """
            import signal, cohort
            if cohort.role() == "server":
                if cohort.role_number() == 1:
                    cohort.announce_server("here:1")
                signal.pause()
            cohort.server_addresses(2)
        """)
        done = self.run_job("-np", "1", "--servers", "3", program)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("servers 0, 2 of 3 have not said within 2 s where they listen", done.stderr)

    def test_a_server_that_ends_before_it_has_said_where_it_listens_is_named(self):
        program = self.program("early.py", """
            import signal, cohort
            if cohort.role() == "server":
                if cohort.role_number() == 1:
                    raise SystemExit(0)
                cohort.announce_server("here:1")
                signal.pause()
            cohort.server_addresses(60)
        """)
        done = self.run_job("-np", "1", "--servers", "2", program)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, r"Unavailable: .*server 1 of 2 has ended \(exit code 0 after .* s\), and had not said where")

    @slow
    @needs_torch
    def test_an_evaluator_sees_the_last_checkpoint(self):
        evaluator = self.program("evaluate.py", """
            import torch, cohort, cohort.checkpoint as ck
            assert cohort.role() == "evaluator"
            model, folder = torch.nn.Linear(1, 1), ck.CheckpointFolder("saved")
            for info in ck.follow("saved", look_every=0.05):
                info = folder.load_latest(model) or info
                print("evaluated", info.progress.step, model.weight.item(), flush=True)
                open(f"seen-{info.progress.step}", "w").close()
            print("over")
        """)
        training = self.program("train.py", """
            import os, time, torch, cohort, cohort.checkpoint as ck
            cohort.init()
            model, folder = torch.nn.Linear(1, 1), ck.CheckpointFolder("saved")
            for step in range(1, 4):
                torch.nn.init.constant_(model.weight, float(step))
                folder.save(model, step=step)
                limit = time.monotonic() + 60
                while step == 1 and not os.path.exists("seen-1") and time.monotonic() < limit:
                    time.sleep(0.02)
        """)
        done = self.run_job("-np", "2", "--evaluator", f"{evaluator}", training)
        self.assertEqual(done.returncode, 0, done.stderr)
        log = next(self.folder.glob("runs/*/logs/evaluator.out")).read_text().splitlines()
        self.assertEqual((log[0], log[-2:]), ("evaluated 1 1.0", ["evaluated 3 3.0", "over"]))


if __name__ == "__main__":
    unittest.main()
