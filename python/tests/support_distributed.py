"""Shared by the tests that start processes with groups of torch.distributed."""

import os
import pathlib
import re
import socket
import subprocess
import tempfile
import unittest

from support import SECONDS, World, needs_torch, torch

TORCH_2 = torch is not None and int(torch.__version__.split(".")[0]) >= 2

SMALLEST = """
import datetime, os, sys
import torch
import torch.distributed as dist
import cohort

PATIENCE = datetime.timedelta(seconds=30)

def check(expected_size=2):
    assert dist.get_backend() == "cohort" and dist.get_world_size() == expected_size
    tensor = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(1, expected_size + 1))] * 2, tensor
"""
GOOD = """
check()
for name in ("RANK", "LOCAL_RANK"):
    assert os.environ[name] == str(dist.get_rank()), (name, os.environ.get(name))
assert os.environ["WORLD_SIZE"] == "2"
os.write(1, b"good %d\\n" % dist.get_rank())  # in one piece: ranks share it
dist.destroy_process_group()
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment():
    names = ("COHORT_", "RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC")
    return dict({k: v for k, v in os.environ.items() if not k.startswith(names)}, OMP_NUM_THREADS="1")


@needs_torch
class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="cohort-distributed-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def script(self, text):
        path = self.folder / "script.py"
        path.write_text(text)
        return str(path)

    def run_it(self, *command, **more):
        done = subprocess.run(
            command, env=dict(environment(), **more), capture_output=True, text=True, timeout=4 * SECONDS, cwd=self.folder
        )
        return done.returncode, done.stdout + done.stderr

    def two_are_good(self, *command, **more):
        status, output = self.run_it(*command, **more)
        self.assertEqual(status, 0, output)
        self.assertEqual(sorted(re.findall(r"good (\d)", output)), ["0", "1"], output)

    def world(self, script, size=2, **more):
        more.setdefault("OMP_NUM_THREADS", "1")
        return World(SMALLEST + "rank = int(sys.argv[1])\n" + script, size, arguments=True, **more).ends(4 * SECONDS)

    def all_good(self, script, size=2, **more):
        for rank, (status, output) in enumerate(self.world(script, size, **more)):
            self.assertEqual(status, 0, f"rank {rank}: {output}")
            self.assertIn("good", output)
