"""The digits program in ChainerMN's form is as accurate with eight processes as with one, on one host and on two."""

import os
import pathlib
import re
import subprocess
import sys
import unittest

import support

PROGRAM = pathlib.Path(__file__).resolve().parents[3] / "examples" / "03-horovod" / "digits_chainermn.py"
COMMAND = os.environ.get("COHORT_COMMAND", "cohort")


@unittest.skipUnless(support.torch, "needs torch")
class Digits(unittest.TestCase):
    def train(self, ranks, hosts):
        """Returns the accuracy after 2 epochs."""
        done = subprocess.run(
            [COMMAND, "run", "-q", "-np", str(ranks), "--timeout", "200", "--no-logs", "--prefix", "none", "--env", "OMP_NUM_THREADS=1",
             "--", sys.executable, str(PROGRAM), "--epochs", "2", "--same-batches"],
            env=dict(os.environ, COHORT_PRETEND_HOSTS=str(hosts)), capture_output=True, text=True, timeout=240,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn(f"{ranks} processes on {hosts} hosts", done.stdout)
        return float(re.findall(r"epoch 2: .*accuracy ([\d.]+)", done.stdout)[-1])

    def test_one_process_and_eight_on_one_host_and_two(self):
        alone = self.train(1, 1)
        self.assertGreater(alone, 0.9)
        for hosts in (1, 2):
            # Sums are rounded in a different order, which may change one or two of 359 images.
            self.assertAlmostEqual(self.train(8, hosts), alone, delta=0.006)


if __name__ == "__main__":
    unittest.main()
