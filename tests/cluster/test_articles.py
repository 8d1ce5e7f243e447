"""Programs and scripts as articles show them (python/tests/articles) on two hosts of a box: in its Slurm, by mpirun and by hand."""

import os
import pathlib
import re
import shutil
import sys
import time
import unittest

from python_case import PACKAGE, PythonCase

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python" / "tests"))
from articles import edits

BUILD = pathlib.Path(PACKAGE).parent
HOSTS = ("h1", "h2")


class Articles(PythonCase):
    by_user = False  # with the Python of this test, which other users may not reach

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        edits.put_into(cls.folder)
        # The commands as the articles say them; those that Python installs, of this Python.
        commands = {"python": f"{cls.python} -B", "torchrun": f"{cls.python} -B -m torch.distributed.run",
                    "horovodrun": f"{cls.python} -B {BUILD}/bin/horovodrun", "mpirun": shutil.which("mpirun.openmpi")}
        (cls.folder / "bin").mkdir()
        for name, command in commands.items():
            path = cls.folder / "bin" / name
            path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            path.chmod(0o755)
        cls.environment = ["OMP_NUM_THREADS=1", f"PATH={cls.folder}/bin:{os.environ['PATH']}", "LD_LIBRARY_PATH=",
                           f"PYTHONPATH={PACKAGE}:{BUILD}/share/cohort/as-horovod",
                           "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]
        if "dist-packages" in cls.torch:  # 1.13's launcher is broken under Python 3.11 unless output is redirected
            cls.environment += ["PET_REDIRECTS=1", "PET_TEE=1"]

    def on_h1(self, *words):
        done = self.box.run("h1", "env", *self.environment, *words, timeout=120, cwd=self.folder)
        self.assertEqual(done.returncode, 0, f"{words}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def batch(self, script):
        """Output of a batch script. `sbatch --wait` looks seldom: after 20, 30, 42 seconds."""
        out = self.folder / f"{script}.out"
        job = self.on_h1("sbatch", "--parsable", "-o", out, script).strip()
        limit = time.monotonic() + 120
        while not (ended := re.search(r"JobState=(?!PENDING|CONFIGURING|RUNNING|COMPLETING)(\w+)", self.on_h1("scontrol", "show", "job", job))):
            self.assertLess(time.monotonic(), limit, f"{script} does not end: {out.read_text() if out.exists() else ''}")
            time.sleep(0.5)
        said = out.read_text() if out.exists() else ""
        self.assertEqual(ended[1], "COMPLETED", f"{script}: {said}{self.box.slurm_errors()}")
        return said

    def by_hand(self, command_of):
        """Starts on each host the commands that `command_of` has for it; waits for all."""
        ended = self.box.run_all([(host, ["env", *self.environment, *words]) for node, host in enumerate(HOSTS)
                                  for words in command_of(node)], cwd=self.folder)
        said = "\n".join(output for _, output in ended)
        self.assertEqual([status for status, _ in ended], [0] * len(ended), said)
        return said

    def weights(self, said, times=1):
        """Weights learnt by all four ranks: the same, to the bit, on each, and in each of `times` trainings."""
        found = re.findall(r"rank (\d) of (\d), local (\d): loss (\S+), weights ([\d.]+)", said)
        self.assertEqual(sorted(line[:3] for line in found),
                         sorted([("0", "4", "0"), ("1", "4", "1"), ("2", "4", "0"), ("3", "4", "1")] * times), said)
        self.assertLess(max(float(line[3]) for line in found), 0.2, said)
        self.assertEqual(len({line[4] for line in found}), 1, said)
        return found[0][4]

    def test_ddp_in_slurm_and_by_hand(self):
        ranks = [(node, local, 2 * node + local) for node in range(2) for local in range(2)]

        def with_variables(node):
            return [["env", "MASTER_ADDR=h1", "MASTER_PORT=29511", f"RANK={rank}", "WORLD_SIZE=4", f"LOCAL_RANK={local}",
                     "python", "smallest_ddp.py"] for host, local, rank in ranks if host == node]

        def at(address):
            return lambda node: [["python", "ddp_arguments.py", "--init_method", address, "--rank", str(rank), "--world_size", "4",
                                  "--local_rank", str(local)] for host, local, rank in ranks if host == node]

        def spawn(node):
            return [["python", "ddp_spawn.py", "--dist-url", "tcp://h1:29512", "--world-size", "2", "--rank", str(node),
                     "--multiprocessing-distributed"]]

        ways = {
            "a launcher for each node": (2, lambda: self.batch("launchers.sbatch")),
            "a task for each process": (1, lambda: self.batch("tasks.sbatch")),
            "the same without exports": (1, lambda: self.on_h1("srun", "-N2", "-n4", "--overcommit", "python", "smallest_ddp.py")),
            "spawn on each host, tcp://": (1, lambda: self.by_hand(spawn)),
            "four processes, env://": (1, lambda: self.by_hand(with_variables)),
            "four processes, file://": (1, lambda: self.by_hand(at(f"file://{self.folder}/meeting"))),
        }
        learnt = {}
        for way, (times, start) in ways.items():
            with self.subTest(way):
                learnt[way] = self.weights(start(), times)
        self.assertEqual(len(set(learnt.values())), 1, learnt)

    def test_horovod_by_mpirun_in_a_batch_script(self):
        self.weights(self.batch("horovod.sbatch"))

    def learnt(self, epochs, *command):
        """A training whose rank 0 keeps checkpoints, from which the model is tested at the end."""
        folder = self.folder / f"{command[-1]}.checkpoints"
        folder.mkdir()
        said = self.on_h1(*command, str(folder))
        found = re.findall(r"accuracy: ([\d.]+)", said)
        self.assertEqual(len(found), 1, said)
        self.assertGreater(float(found[0]), 0.6, said)
        self.assertEqual(sorted(path.name for path in folder.iterdir()),
                         [f"checkpoint-{number}.pth.tar" for number in range(1, epochs + 1)])
        return said

    def test_mnist_by_the_distributor(self):
        said = self.learnt(3, "python", "mnist_distributor_nodes.py")
        self.assertIn("output 'finished'", said)
        found = re.findall(r"Running on rank (\d) \(local (\d)\)", said)
        self.assertEqual(sorted(found), [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")])

    def test_horovod_mnist_by_horovodrun(self):
        self.learnt(2, "horovodrun", "-np", "4", "-H", "h1:2,h2:2", "python", "horovod_mnist.py")


if __name__ == "__main__":
    unittest.main()
