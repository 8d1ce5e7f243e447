"""The digits on two hosts of a box, under every launcher: the same weights, to the bit."""

import os
import pathlib
import tempfile
import unittest

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")
DIGITS = os.environ.get("COHORT_DIGITS", "")
DATA = os.environ.get("COHORT_DIGITS_DATA", "")


class Training(boxes.InBox):
    needs = ("COHORT_DIGITS",)
    wanted = ("train", "--slurm", "--hosts", "2")

    def test_digits_on_two_hosts_by_ssh_slurm_and_mpi_give_the_same_bits(self):
        weights = {}
        with tempfile.TemporaryDirectory(prefix="cohort-train-") as folder:
            program = [DIGITS, "--data", DATA, "--epochs", "1", "--threads", "1", "--out"]
            ways = {
                "ssh": [COHORT, "run", "-q", "-H", "h1:2,h2:2", "--run-dir", f"{folder}/run", *program],
                "slurm": ["srun", "-N", "2", "--ntasks-per-node=2", "-n", "4", *program],
                "open-mpi": ["mpirun.openmpi", "--allow-run-as-root", "--bind-to", "none", "-np", "4", "-H", "h1:2,h2:2", *program],
                "mpich": ["mpiexec.mpich", "-np", "4", "-hosts", "h1:2,h2:2", *program],
            }
            for way, words in ways.items():
                done = self.box.run("h1", *words, f"{folder}/{way}", cwd=folder, timeout=200)
                self.assertEqual(done.returncode, 0, f"{way}: {done.stdout}{done.stderr}")
                weights[way] = {path.name: path.read_bytes() for path in pathlib.Path(folder, way).rglob("*.safetensors")}
                self.assertTrue(weights[way], way)
            for way, found in weights.items():
                self.assertEqual(found, weights["ssh"], way)


if __name__ == "__main__":
    unittest.main()
