"""Warnings of `cohort run`: each condition is caused, and is told on stderr, in warnings.jsonl and to --on-warning."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import unittest
import xml.etree.ElementTree

COMMAND = os.environ.get("COHORT_COMMAND") or shutil.which("cohort")
SECONDS = 100

PEER = os.environ.get("COHORT_WARNING_PEER")
HOOK = 'cat > "$COHORT_RUN_DIR/stdin"; env | grep ^COHORT_ > "$COHORT_RUN_DIR/env"; echo told'


class Runs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.run_folder = self.folder / "run"

    def cohort_run(self, how, *options, np=1):
        words = [COMMAND, "run", "-np", str(np), "--run-dir", self.run_folder, *options, PEER, how]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def warnings(self):
        return [json.loads(line) for line in (self.run_folder / "warnings.jsonl").read_text().splitlines()]


@unittest.skipIf(COMMAND is None or PEER is None, "needs the command and a program: COHORT_COMMAND, COHORT_WARNING_PEER")
class Warnings(Runs):
    def test_a_loss_that_is_no_number_is_told_to_everybody(self):
        done = self.cohort_run("nan", "--on-warning", HOOK)  # it ends at once: what it has told counts
        told = "train_loss is NaN at step 7, reported by rank 0"
        self.assertEqual(done.stderr.count(told), 1, done.stderr)
        (warning,) = self.warnings()
        self.assertEqual([warning[key] for key in ("event", "kind", "rank", "step")], ["warning", "not_finite", 0, 7])
        self.assertTrue(warning["text"].startswith(told))
        self.assertLess(abs(time.time() - warning["time"]), SECONDS)
        self.assertEqual(json.loads((self.run_folder / "stdin").read_text()), warning)
        variables = dict(line.split("=", 1) for line in (self.run_folder / "env").read_text().splitlines())
        self.assertEqual(variables["COHORT_WARNING_TEXT"], warning["text"])
        self.assertEqual(pathlib.Path(variables["COHORT_RUN_DIR"]), self.run_folder)
        self.assertEqual((self.run_folder / "on-warning.log").read_text(), "told\n")
        subprocess.run([COMMAND, "plot", self.run_folder], check=True, capture_output=True, timeout=SECONDS)
        picture = xml.etree.ElementTree.parse(self.run_folder / "curves.svg").getroot()
        self.assertIn(warning["text"], [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")])

    def test_a_standstill_is_told(self):
        done = self.cohort_run("still", "--warn-no-step", "1", "--json", np=2)
        events = [json.loads(line) for line in done.stdout.splitlines()]
        (warning,) = [event for event in events if event["event"] == "warning"]
        self.assertEqual((warning["kind"], warning["step"]), ("no_step", 20))
        self.assertEqual([told["kind"] for told in self.warnings()], ["no_step"])

    def test_a_late_rank_is_told(self):
        self.cohort_run("late", np=3)
        late = [warning for warning in self.warnings() if warning["kind"] == "late_rank"]
        self.assertEqual([warning["rank"] for warning in late], [1])

    def test_a_command_that_hangs_or_fails_harms_nothing(self):
        mark = f"29{os.getpid()}"
        begin = time.monotonic()
        done = self.cohort_run("infinite", "--on-warning", f"sleep {mark} & sleep {mark}")
        self.assertLess(time.monotonic() - begin, 60)
        self.assertIn("the job has ended, and it has not, 5 s later", done.stderr)
        left = subprocess.run(["pgrep", "-f", f"sleep {mark}"], capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual(left.stdout, "")
        shutil.rmtree(self.run_folder)
        done = self.cohort_run("infinite", "--on-warning", "cat >&2; exit 3")
        self.assertEqual(done.stderr.count("the command of --on-warning: it failed: exit code 3"), 1, done.stderr)
        self.assertIn('"kind":"not_finite"', (self.run_folder / "on-warning.log").read_text())

    @unittest.skipIf(os.geteuid() != 0, "needs root: a file system of its own")
    def test_a_disk_that_fills_is_told(self):
        self.run_folder.mkdir()
        script = f"mount -t tmpfs -o size=4m,mode=700 none {self.run_folder} && \"$@\"; status=$?; cat {self.run_folder}/warnings.jsonl; exit $status"
        words = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", COMMAND, "run", "-np", "1", "--no-logs",
                 "--run-dir", self.run_folder, PEER, "fills"]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=SECONDS)
        if "unshare" in done.stderr:
            self.skipTest(done.stderr)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr.count("checkpoints and logs may not fit"), 1, done.stderr)
        self.assertEqual([json.loads(line)["kind"] for line in done.stdout.splitlines() if line.startswith("{")], ["disk_full"])


@unittest.skipIf(COMMAND is None or PEER is None, "needs the command and a program: COHORT_COMMAND, COHORT_WARNING_PEER")
class SlowSteps(Runs):
    """About 15 s: a median has to be there before anything is slow."""

    def test_steps_that_take_twice_as_long_are_told(self):
        self.cohort_run("slow")
        (warning,) = [told for told in self.warnings() if told["kind"] == "step_time"]
        self.assertGreater(warning["step"], 400)


if __name__ == "__main__":
    unittest.main()
