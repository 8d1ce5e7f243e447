"""`cohort bench training` over the hosts of a box."""

import json
import os
import pathlib
import tempfile
import unittest

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")


class Bench(boxes.InBox):
    wanted = ("bench", "--hosts", "2")

    def test_the_command_may_be_elsewhere_on_other_hosts(self):
        # /dev/shm is each host's own, so this path leads nowhere on h2.
        own = "/dev/shm/here/cohort"
        done = self.box.run("h1", "sh", "-c", f"mkdir /dev/shm/here && cp {COHORT} {COHORT}-bench /dev/shm/here")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.addCleanup(self.box.run, "h1", "rm", "-r", "/dev/shm/here")
        with tempfile.TemporaryDirectory(prefix="cohort-bench-test-") as folder:
            rows = pathlib.Path(folder, "rows.json")
            done = self.box.run("h1", own, "bench", "training", "-H", "h1:1,h2:1", "--processes", "2", "--hosts", "2",
                                "--layers", "64,32,4", "--seconds", "0.1", "--repetitions", "1", "--remote-cohort", COHORT,
                                "--json", rows, cwd=folder, timeout=60)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            first, last = (json.loads(line) for line in rows.read_text().splitlines())
            self.assertEqual((first["hosts"], first["processes"], last["event"]), (2, 2, "verdict"))
            self.assertGreater(first["wire_bytes"], 4 * 2212)

    def test_a_plan_of_a_program_and_of_a_run(self):
        with tempfile.TemporaryDirectory(prefix="cohort-bench-test-") as folder:
            rows, run = pathlib.Path(folder, "rows.json"), pathlib.Path(folder, "run")
            small = ["--layers", "64,256,4", "--seconds", "0.5"]
            done = self.box.run("h1", COHORT, "bench", "plan", "-H", "h1:1,h2:1", *small, "--json", rows, cwd=folder, timeout=60)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            said = [json.loads(line) for line in rows.read_text().splitlines()]
            changes = {row["text"]: row for row in said if row["event"] == "change"}
            for form in ("bfloat16", "int8", "int4"):
                self.assertLess(changes[f"{form} on the wire"]["step_s"], 10)
            self.assertEqual(said[-1]["event"], "verdict")
            # Over several hosts a run measures by itself.
            done = self.box.run("h1", COHORT, "run", "-H", "h1:1,h2:1", "--run-dir", run, "--", COHORT, "bench", "trainee",
                                *small, cwd=folder, timeout=60)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertEqual(len(json.loads(pathlib.Path(run, "job.json").read_text())["trained"]), 2)
            done = self.box.run("h1", COHORT, "bench", "plan", run, cwd=folder, timeout=60)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn("int8 on the wire", done.stdout)


if __name__ == "__main__":
    unittest.main()
