"""Programs as articles show them (articles/README.md) on one host, with the edits that a machine without a GPU needs."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from articles import edits
from keras_support import MISSING, environment as keras_environment, finish, place_of
from support_distributed import TORCH_2, environment, free_port
from support import needs_torch

COMMAND = os.environ.get("COHORT_COMMAND", "cohort")
SECONDS = 240


@needs_torch
class Articles(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        edits.put_into(self.folder)
        self.environment = environment()
        if not TORCH_2:  # 1.13's own launcher is broken under Python 3.11 unless output is redirected
            self.environment.update(PET_REDIRECTS="1", PET_TEE="1")

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

    def start(self, *command, **more):
        return subprocess.Popen(
            command, cwd=self.folder, env=dict(self.environment, **more), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )

    def run_alone(self, *command, **more):
        return self.finish(self.start(sys.executable, *command, **more))

    def run_ranks(self, *command, options=()):
        return self.finish(
            self.start(COMMAND, "run", "-q", "-np", "2", "--prefix", "none", "--run-dir", f"{self.folder}/run",
                       "--timeout", str(SECONDS - 20), *options, "--", sys.executable, *command)
        )


class Mnist(Articles):
    def learnt(self, text, epoch=3):
        found = re.search(r"accuracy: ([\d.]+)", text)
        self.assertIsNotNone(found, text)
        self.assertGreater(float(found[1]), 0.8, text)
        self.assertTrue(os.path.exists(f"{self.folder}/checkpoint-{epoch}.pth.tar"))

    def test_mnist_in_one_process(self):
        self.learnt(self.run_alone("mnist_single.py", self.folder, CUDA_VISIBLE_DEVICES=""))

    def test_mnist_with_ddp(self):
        text = self.run_ranks("mnist_ddp.py", self.folder)
        self.learnt(text)
        for rank in range(2):
            self.assertIn(f"Running on rank {rank} (local {rank})", text)

    def test_mnist_with_distributor(self):
        text = self.run_alone("mnist_distributor.py", self.folder)
        self.learnt(text)
        self.assertIn("output 'finished'", text)
        for rank in range(2):
            self.assertIn(f"Running on rank {rank} (local {rank})", text)

    def test_horovod_mnist(self):
        self.learnt(self.run_ranks("horovod_mnist.py", self.folder, options=["--as-horovod"]), epoch=4)


class Keras(unittest.TestCase):
    """The first article's program, under horovodrun. Its data are the one edit."""

    def test_keras_mnist_by_horovodrun(self):
        if place_of("tensorflow") is None:
            self.skipTest(MISSING.format("tensorflow"))
        with tempfile.TemporaryDirectory() as folder:
            edits.put_into(folder)
            program = pathlib.Path(folder, "keras_mnist.py")
            text = program.read_text() + WEIGHTS
            self.assertIn('__import__("bars")', text)
            program.write_text(text)
            horovodrun = pathlib.Path(shutil.which(COMMAND)).parent / "horovodrun"
            words = [sys.executable, horovodrun, "-np", "2", "-H", "localhost:2", "--output-filename", f"{folder}/out",
                     place_of("tensorflow")[0], "keras_mnist.py"]  # fmt: skip
            status, said = finish([str(word) for word in words], folder, keras_environment("tensorflow"), 2 * SECONDS)
            self.assertEqual(status, 0, said[-6000:])
            weights = re.findall(r"WEIGHTS (\d) (\w+) ([\d.]+)", said)
            self.assertEqual(sorted(rank for rank, _, _ in weights), ["0", "1"], said[-6000:])
            self.assertEqual(len({digest for _, digest, _ in weights}), 1, weights)
            self.assertGreater(min(float(accuracy) for _, _, accuracy in weights), 0.9)
            self.assertIn("compile(experimental_run_tf_function=...) means nothing to Keras 3", said)
            self.assertEqual(len(list(pathlib.Path(folder).glob("checkpoint-*.h5"))), 24)


WEIGHTS = """
import hashlib
digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in mnist_model.weights)).hexdigest()
print("WEIGHTS", hvd.rank(), digest, mnist_model.history.history["accuracy"][-1], flush=True)
"""


class Smallest(Articles):
    def trained(self, text, size=2):
        """Every rank has learnt, and has the weights of all others though it has seen other samples."""
        found = re.findall(r"rank (\d) of (\d), local (\d): loss (\S+), weights ([\d.]+)", text)
        self.assertEqual(sorted(line[:3] for line in found), [(str(rank), str(size), str(rank)) for rank in range(size)], text)
        self.assertLess(max(float(line[3]) for line in found), 0.1, text)
        self.assertEqual(len({line[4] for line in found}), 1, text)

    def by_hand(self, size, *command, words_of=lambda rank: (), **variables):
        def start(rank):
            return self.start(sys.executable, *command, *words_of(rank), **{name: value.format(rank=rank) for name, value in variables.items()})

        return self.finish(*map(start, range(size)))

    def test_ddp_under_cohort_run(self):
        self.trained(self.run_ranks("smallest_ddp.py"))

    def test_ddp_under_torchrun(self):
        port = f"--master_port={free_port()}"
        self.trained(self.run_alone("-m", "torch.distributed.run", "--nproc_per_node=2", port, "smallest_ddp.py"))

    def test_ddp_under_launch(self):
        port = f"--master_port={free_port()}"
        self.trained(self.run_alone("-m", "torch.distributed.launch", "--nproc_per_node=2", port, "ddp_arguments.py"))

    def test_ddp_by_spawn(self):
        address = f"tcp://127.0.0.1:{free_port()}"
        self.trained(self.run_alone("ddp_spawn.py", "--multiprocessing-distributed", "--dist-url", address))

    def test_ddp_in_four_processes_by_hand(self):
        self.trained(self.by_hand(4, "smallest_ddp.py", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="4",
                                  RANK="{rank}", LOCAL_RANK="{rank}"), size=4)

    def at(self, address):
        return self.by_hand(2, "ddp_arguments.py", "--init_method", address, "--world_size", "2",
                            words_of=lambda rank: ("--rank", str(rank), "--local_rank", str(rank)))

    def test_ddp_at_an_address(self):
        self.trained(self.at(f"tcp://127.0.0.1:{free_port()}"))

    def test_ddp_at_a_file(self):
        self.trained(self.at(f"file://{self.folder}/meeting"))

    def test_horovod(self):
        self.trained(self.run_ranks("smallest_horovod.py", options=["--as-horovod"]))


if __name__ == "__main__":
    unittest.main()
