"""The programs of examples/, as a user starts them."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import unittest

import support

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
COMMAND = os.environ.get("COHORT_COMMAND", "cohort")


@unittest.skipUnless(support.torch, "needs torch")
class Digits(unittest.TestCase):
    def learns(self, program, *options):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = pathlib.Path(folder, "checkpoint.pt")
            done = subprocess.run(
                [COMMAND, "run", "-q", "-np", "2", "--timeout", "200", "--run-dir", f"{folder}/run", "--prefix", "none",
                 "--env", "OMP_NUM_THREADS=1", "--", sys.executable, str(EXAMPLES / program), "--epochs", "3",
                 "--checkpoint", str(checkpoint), *options],
                capture_output=True, text=True, timeout=240,
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)", done.stdout)]
            self.assertEqual(len(accuracies), 3, done.stdout)
            self.assertGreater(accuracies[-1], 0.85, done.stdout)
            model = support.torch.load(checkpoint)["model"]
            self.assertEqual(sorted(model), sorted(f"{layer}.{kind}" for layer in ("conv1", "conv2", "fc1", "fc2")
                                                   for kind in ("weight", "bias")))

    def test_horovod(self):
        self.learns("03-horovod/digits_horovod.py")

    def test_distributed_data_parallel(self):
        self.learns("02-digits-python/digits_ddp.py")

    def test_chainermn(self):
        self.learns("03-horovod/digits_chainermn.py", "--lr", "0.01")

    def test_chainermn_resumed(self):
        with tempfile.TemporaryDirectory() as folder:

            def last_line(out, epochs):
                done = subprocess.run(
                    [COMMAND, "run", "-q", "-np", "2", "--timeout", "200", "--no-logs", "--prefix", "none", "--env", "OMP_NUM_THREADS=1",
                     "--", sys.executable, str(EXAMPLES / "03-horovod/digits_chainermn.py"), "--epochs", epochs,
                     "--out", f"{folder}/{out}"],
                    capture_output=True, text=True, timeout=240,
                )
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                return done.stdout, re.findall(r"^epoch .* accuracy [\d.]+", done.stdout, re.M)[-1]

            whole = last_line("whole", "2")[1]
            last_line("cut", "1")
            text, cut = last_line("cut", "2")
            self.assertIn("going on after epoch 1", text)
            self.assertEqual(cut, whole)

    def test_preempted_and_resumed(self):
        with tempfile.TemporaryDirectory() as folder:

            def start(out, epochs, ranks, *more):
                return subprocess.Popen(
                    [COMMAND, "run", "-np", str(ranks), "--timeout", "200", "--run-dir", f"{folder}/run-{out}", "--prefix", "none",
                     "--env", "OMP_NUM_THREADS=1", "--", sys.executable, str(EXAMPLES / "06-checkpoints/digits_resume.py"),
                     "--epochs", epochs, "--out", f"{folder}/{out}", *more],
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )

            def end(job, status):
                text = job.communicate(timeout=240)[0]
                self.assertEqual(job.returncode, status, text)
                return text

            end(start("whole", "3", 2), 0)
            job = start("cut", "3", 2)
            for line in job.stdout:
                if line.startswith("epoch 1"):
                    break
            job.send_signal(signal.SIGUSR1)
            self.assertIn("preempted at step ", end(job, 75))
            self.assertIn("going on after step ", end(start("cut", "3", 2), 0))
            whole, cut = (pathlib.Path(folder, out, "weights.safetensors").read_bytes() for out in ("whole", "cut"))
            self.assertEqual(whole, cut, "the resumed training differs")
            text = end(start("cut", "4", 3), 0)  # further, on another number of ranks
            self.assertIn("epoch 4", text)
            before = pathlib.Path(folder, "cut/weights.safetensors").read_bytes()
            end(start("cut", "5", 2, "--lr", "0"), 0)
            self.assertEqual(before, pathlib.Path(folder, "cut/weights.safetensors").read_bytes(), "--lr does not count")


@unittest.skipUnless(support.torch, "needs torch")
class ParameterServer(unittest.TestCase):
    FOLDER = EXAMPLES / "10-parameter-server"

    def output(self, *command):
        with tempfile.TemporaryDirectory() as folder:
            command = [part.replace("FOLDER", folder) for part in command]
            done = subprocess.run(
                [COMMAND, "run", "-q", "-np", "2", "--timeout", "200", "--run-dir", f"{folder}/run", "--prefix", "rank",
                 "--env", "OMP_NUM_THREADS=1", *command],
                capture_output=True, text=True, timeout=240,
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            return done.stdout

    def auc(self, *options, servers="2"):
        text = self.output("--servers", servers, "--", sys.executable, str(self.FOLDER / "clicks.py"), *options)
        return float(re.search(r"AUC ([\d.]+)", text)[1])

    def test_clicks_are_learnt_alike_however_the_tables_are_read(self):
        there = self.auc()
        self.assertGreater(there, 0.78)
        for options in (["--async"], ["--bounded", "4"]):
            self.assertLess(abs(self.auc(*options) - there), 0.002, options)
        self.assertLess(abs(self.auc("--local", servers="0") - there), 0.005)

    def test_asynchronous_digits(self):
        program = f"{sys.executable} {self.FOLDER / 'digits_async.py'} --out FOLDER/async --epochs 4"
        text = self.output("--servers", "2", "--evaluator", program, "--", *program.split())
        found = float(re.search(r"at the end: accuracy ([\d.]+)", text)[1])
        self.assertGreater(found, 0.75, text)
        followed = re.findall(r"epoch (\d+), step \d+: accuracy ([\d.]+)", text)
        self.assertEqual((int(followed[-1][0]), float(followed[-1][1])), (4, found), text)


if __name__ == "__main__":
    unittest.main()
