"""Records of runs that Python writes, on all ranks of `cohort run -np N` where there are several."""

import array
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import cohort
from support import torch

OF_THE_JOB = ("COHORT_", "RANK", "WORLD_", "LOCAL_", "MASTER_")


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

    @unittest.skipIf(torch is None, "needs torch")
    def test_digests_of_weights_are_of_bytes(self):
        record = cohort.track.RunRecord(self.file)
        rows = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).t()  # not contiguous
        half, scalar = torch.ones(3, dtype=torch.bfloat16), torch.tensor(5)
        record.write_weights(1, [("w", rows), ("h", half), ("n", scalar)])
        halves = bytes([0x80, 0x3F] * 3)
        record.write_weights(2, [("w", array.array("f", [1, 2, 3, 4])), ("h", halves), ("n", array.array("q", [5]))])
        record.write_weights(3, torch.nn.BatchNorm1d(2).state_dict().items())
        first, second, third = self.lines()[1:]
        self.assertEqual((first["digest"], first["tensors"]), (second["digest"], second["tensors"]))
        self.assertEqual(list(third["tensors"]), ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"])
        pair = torch.tensor([1 + 2j, 3 - 4j])
        record.write_weights(4, [("c", pair.conj()), ("d", pair.conj().resolve_conj())])
        digests = self.lines()[-1]["tensors"]
        self.assertEqual(digests["c"], digests["d"])
        for tensor in (torch.eye(2).to_sparse(), torch.empty(2, device="meta")):
            with self.assertRaisesRegex(cohort.InvalidArgument, "write_weights: s is not dense"):
                record.write_weights(5, [("s", tensor)])
        with self.assertRaisesRegex(cohort.InvalidArgument, "two tensors are called 'w'"):
            record.write_weights(5, [("w", pair), ("w", pair)])

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

    def test_values_are_logged(self):
        record = cohort.track.RunRecord(self.file)
        self.addCleanup(cohort.track.close)
        for step in range(1, 4):
            cohort.track.log(step, loss=1.0 / step, lr=1)
        if torch is not None:
            cohort.track.log(4, loss=torch.tensor(0.25))
        with self.assertRaisesRegex(cohort.InvalidArgument, "'loss' is a str"):
            cohort.track.log(5, loss="much")
        with self.assertRaisesRegex(cohort.InvalidArgument, "mean, max"):
            cohort.track.log(5, loss=1.0, reduce="median")
        if cohort.rank() != 0:
            return self.assertEqual([line["event"] for line in self.lines()], ["start"])
        cohort.track.flush()
        found = [line for line in self.lines() if line["event"] == "metric"]
        self.assertEqual([line["step"] for line in found], [1, 2, 3, 4][: len(found)])
        self.assertEqual(found[1]["values"], {"loss": 0.5, "lr": 1.0})
        self.assertEqual(record.file, self.file)

    def test_values_of_all_ranks_are_reduced(self):
        record = cohort.track.RunRecord(self.file)
        rank, size = cohort.rank(), cohort.size()
        for step in range(1, 11):
            cohort.track.log(step, high=step + rank, reduce="max")
            cohort.track.log(step, mean=step + rank, reduce="mean")
            cohort.track.log(step, each=rank, reduce="each")
        cohort.track.close()
        if rank != 0:
            return
        found = [line for line in self.lines() if line["event"] == "metric"]
        high = [line["values"]["high"] for line in found if "high" in line["values"]]
        self.assertEqual(high, [step + size - 1 for step in range(1, 11)])
        mean = [line["values"]["mean"] for line in found if "mean" in line["values"]]
        self.assertEqual(mean, [step + (size - 1) / 2 for step in range(1, 11)])
        each = [(line["rank"], line["values"]["each"]) for line in found if "each" in line["values"]]
        self.assertEqual(each, [(r, r) for _ in range(10) for r in range(size)])
        del record

    def test_values_go_to_the_folder_of_the_run(self):
        script = """
import cohort, cohort.track
cohort.init()
for step in range(1, 4):
    cohort.track.log(step, loss=1.0 / step)
    cohort.track.log(step, high=cohort.rank(), reduce="max")
"""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_THE_JOB)}
        environment["COHORT_RUN_DIR"] = str(self.folder)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [json.loads(line) for line in (self.folder / "run.jsonl").read_text().splitlines()]
        self.assertEqual(lines[0]["event"], "start")
        values = [line["values"] for line in lines[1:]]
        self.assertEqual(len(values), 6)
        self.assertIn({"loss": 0.5}, values)
        self.assertEqual(values.count({"high": 0.0}), 3)

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
