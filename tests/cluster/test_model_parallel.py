"""The GPT of the examples on 2 x 2 x 2 ranks of two hosts: the losses of one process, and the same bits after kill -9."""

import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time
import unittest

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")
GPT = os.environ.get("COHORT_GPT", "")
STEPS = 100


def losses_of(text):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


class Gpt(boxes.InBox):
    needs = ("COHORT_GPT",)
    wanted = ("gpt", "--hosts", "2")

    def words(self, folder, *more):
        mesh = ["--dp", "2", "--pp", "2", "--tp", "2", "--sharding", "parameters"]
        return [COHORT, "run", "-q", "-H", "h1:4,h2:4", "--run-dir", f"{folder}/run", GPT, *mesh, "--steps", str(STEPS),
                "--folder", f"{folder}/checkpoints", "--save-every", "20", *more]  # fmt: skip

    def run_on_hosts(self, folder, *more):
        done = self.box.run("h1", *self.words(folder, *more), cwd=folder, timeout=300)
        self.assertEqual(done.returncode, 0, f"{done.stdout}{done.stderr}")
        return losses_of(done.stdout)

    def weights(self, folder):
        out = pathlib.Path(folder, "weights.safetensors")
        subprocess.run([COHORT, "export", f"{folder}/checkpoints", str(out)], check=True, stdout=subprocess.DEVNULL)
        return out.read_bytes()

    def test_losses_of_one_process_and_the_same_bits_after_a_kill(self):
        one = losses_of(subprocess.run([GPT, "--steps", str(STEPS)], stdout=subprocess.PIPE, text=True, check=True).stdout)
        with tempfile.TemporaryDirectory(prefix="cohort-gpt-") as top:
            whole, killed = pathlib.Path(top, "whole"), pathlib.Path(top, "killed")
            whole.mkdir()
            killed.mkdir()
            ours = self.run_on_hosts(whole)
            self.assertEqual(list(ours), list(one))
            for step, loss in one.items():
                self.assertAlmostEqual(ours[step], loss, delta=1e-4, msg=f"step {step}")

            job = self.box.start("h1", *self.words(killed), cwd=killed)
            deadline = time.monotonic() + 120
            while not list(killed.glob("checkpoints/checkpoint-*-step-40")) and time.monotonic() < deadline:
                time.sleep(0.05)
            ranks = self.box.processes("h2", f"^{re.escape(GPT)} ")
            self.assertEqual(len(ranks), 4, ranks)
            os.kill(min(ranks), signal.SIGKILL)
            out, err = job.communicate(timeout=60)
            self.assertNotEqual(job.returncode, 0)
            self.assertIn("killed by SIGKILL", out + err)
            resumed = self.run_on_hosts(killed, "--resume")
            self.assertGreater(min(resumed), 40)
            self.assertEqual(self.weights(killed), self.weights(whole))


if __name__ == "__main__":
    unittest.main()
