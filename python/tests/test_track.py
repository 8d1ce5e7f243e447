"""Records of runs that Python writes, on all ranks of `cohort run -np N` where there are several."""

import array
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import unittest

import cohort
from support import torch


def setUpModule():
    cohort.init()


def tearDownModule():
    cohort.shutdown()


class Record(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.file = self.folder / "new" / "run.jsonl"

    def lines(self):
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def test_has_what_was_written(self):
        record = cohort.track.RunRecord(self.file, program="digits", world_size=2, parameters={"lr": 0.1, "seed": 7, "out": self.file})
        self.assertEqual(record.file, self.file)
        record.write("step", step=3, train_loss=0.5, best=True, note="half", nothing=math.nan)
        start, step = self.lines()
        self.assertEqual((start["event"], start["program"], start["world_size"]), ("start", "digits", 2))
        self.assertEqual(start["parameters"], {"lr": 0.1, "seed": 7, "out": str(self.file)})
        del step["time"]
        self.assertEqual(step, {"event": "step", "step": 3, "train_loss": 0.5, "best": True, "note": "half", "nothing": "NaN"})
        with self.assertRaisesRegex(cohort.InvalidArgument, "'layers' is a list"):
            record.write("step", layers=[1, 2])
        del record
        cohort.track.RunRecord(self.file).write("end")  # goes on in it
        self.assertEqual([line["event"] for line in self.lines()], ["start", "step", "start", "end"])

    @unittest.skipIf(torch is None, "needs torch")
    def test_takes_numbers_of_torch(self):
        cohort.track.RunRecord(self.file).write("step", loss=torch.tensor(0.25), step=torch.tensor(7), rate=torch.ones(1).double())
        self.assertEqual([self.lines()[1][name] for name in ("loss", "step", "rate")], [0.25, 7, 1.0])

    def test_adds_up_what_a_world_does(self):
        record = cohort.track.RunRecord(self.file)
        record.observe(cohort.world())
        values = array.array("d", range(1000))
        for _ in range(3):
            cohort.world().all_reduce(values)
        record.step(3, 96, 0.5, 0.125)
        record.write_communication()
        record.write_communication()  # nothing new
        found = [line for line in self.lines() if line["event"] == "communication"]
        self.assertEqual(len(found), 1)
        self.assertEqual(found[0]["steps"], 1)
        if cohort.size() > 1:
            self.assertEqual(found[0]["operations"]["all_reduce"]["count"], 3, found)
            self.assertEqual(found[0]["operations"]["all_reduce"]["bytes"], 24000)
        del record  # the world may still tell it
        cohort.world().all_reduce(values)

    def test_is_drawn(self):
        record = cohort.track.RunRecord(self.file)
        for step in range(1, 5):
            record.write("step", step=step, epoch=step / 2, train_loss=1.0 / step)
        cohort.track.plot(self.file, self.folder / "curves.svg")
        self.assertIn("<svg", (self.folder / "curves.svg").read_text())
        with self.assertRaises(cohort.Unavailable):
            cohort.track.plot(self.folder / "none.jsonl", self.folder / "none.svg")

    def test_progress_is_lines_where_there_is_no_terminal(self):
        script = """
import cohort.track
print("before")
progress = cohort.track.Progress(steps_per_epoch=2, epochs=2, interval=0)
progress.line("begun")
for step in range(1, 5):
    progress.update(step, 1.0 / step, 32)
progress.finish()
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        self.assertEqual(lines[:2], ["before", "begun"])
        self.assertRegex(lines[-1], r"epoch 2/2.*0\.25")


if __name__ == "__main__":
    unittest.main()
