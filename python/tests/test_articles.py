"""Programs as articles show them (articles/README.md), run as they stand."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import unittest

import support

PROGRAMS = pathlib.Path(__file__).resolve().parent / "articles"
COMMAND = os.environ.get("COHORT_COMMAND", "cohort")
SECONDS = 240


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@unittest.skipUnless(support.torch, "needs torch")
class Articles(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def finish(self, *processes):
        texts = []
        try:
            for process in processes:
                texts.append(process.communicate(timeout=SECONDS)[0])
        finally:
            for process in processes:
                process.kill()
        for process, text in zip(processes, texts):
            self.assertEqual(process.returncode, 0, text)
        return "".join(texts)

    def start(self, *command):
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run_alone(self, *command):
        return self.finish(self.start(sys.executable, *command))

    def run_ranks(self, *command, options=()):
        return self.finish(
            self.start(COMMAND, "run", "-q", "-np", "2", "--prefix", "none", "--run-dir", f"{self.folder}/run",
                       "--timeout", str(SECONDS - 20), *options, "--", sys.executable, *command)
        )

    def accuracy_in(self, text):
        found = re.search(r"accuracy: ([\d.]+)", text)
        self.assertIsNotNone(found, text)
        return float(found[1])

    def learnt(self, text, epoch=3):
        self.assertGreater(self.accuracy_in(text), 0.8, text)
        self.assertTrue(os.path.exists(f"{self.folder}/checkpoint-{epoch}.pth.tar"))

    def test_mnist_in_one_process(self):
        self.learnt(self.run_alone(str(PROGRAMS / "mnist_single.py"), self.folder))

    def test_mnist_with_ddp(self):
        text = self.run_ranks(str(PROGRAMS / "mnist_ddp.py"), self.folder)
        self.learnt(text)
        for rank in range(2):
            self.assertIn(f"Running on rank {rank} (local {rank})", text)

    def test_mnist_with_distributor(self):
        text = self.run_alone(str(PROGRAMS / "mnist_distributor.py"), self.folder)
        self.learnt(text)
        self.assertRegex(text, r"returned loss \d")

    def test_smallest_ddp_by_the_environment(self):
        text = self.run_ranks(str(PROGRAMS / "smallest_ddp.py"))
        self.assertIn("rank 1 of 2 done", text)

    def smallest_by_hand(self, address):
        text = self.finish(*(
            self.start(sys.executable, str(PROGRAMS / "smallest_ddp.py"), "--init-method", address, "--rank", str(rank),
                       "--world-size", "2")
            for rank in range(2)
        ))
        for rank in range(2):
            self.assertIn(f"rank {rank} of 2 done", text)

    def test_smallest_ddp_by_address(self):
        self.smallest_by_hand(f"tcp://127.0.0.1:{free_port()}")

    def test_smallest_ddp_by_file(self):
        self.smallest_by_hand(f"file://{self.folder}/meeting")

    def test_smallest_horovod(self):
        text = self.run_ranks(str(PROGRAMS / "smallest_horovod.py"), options=["--as-horovod"])
        for rank in range(2):
            self.assertIn(f"rank {rank} of 2, local rank {rank} of 2", text)

    def test_horovod_mnist(self):
        self.learnt(self.run_ranks(str(PROGRAMS / "horovod_mnist.py"), self.folder, options=["--as-horovod"]), epoch=4)


if __name__ == "__main__":
    unittest.main()
