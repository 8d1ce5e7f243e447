"""How process groups of the backend "cohort" begin and end: launchers, addresses, deaths. Starts its processes itself."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
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
print("good", dist.get_rank(), flush=True)
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


class Launchers(Case):
    ENV = SMALLEST + 'dist.init_process_group("cohort", timeout=PATIENCE)\n' + GOOD

    def test_cohort_run(self):
        self.two_are_good(os.environ.get("COHORT_COMMAND", "cohort"), "run", "-q", "-np", "2", "--timeout", "100", "--", sys.executable, self.script(self.ENV))

    def test_torchrun(self):
        # 1.13's own launcher is broken under Python 3.11 unless output is redirected.
        more = [] if TORCH_2 else ["-r", "1", "-t", "1"]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
        self.two_are_good(*launcher, *more, self.script(self.ENV.replace('print("good"', 'print("\\ngood"')))

    def test_torchrun_and_init_again(self):
        # The agent's store outlives the groups.
        again = """
for _ in range(3):
    dist.init_process_group("cohort", timeout=PATIENCE)
    check()
    group = dist.new_group([0, 1])
    dist.barrier(group)
    dist.destroy_process_group()
dist.init_process_group("cohort", timeout=PATIENCE)
"""
        if not TORCH_2:
            self.skipTest("1.13's own groups cannot be formed again in the agent's store")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        self.two_are_good(*launcher, self.script(SMALLEST + again + GOOD))

    def test_the_old_launcher_with_local_rank(self):
        script = (
            SMALLEST
            + """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int, required=True)
local_rank = parser.parse_args().local_rank
dist.init_process_group("cohort", timeout=PATIENCE)
assert local_rank == dist.get_rank()
"""
            + GOOD.replace('print("good"', 'print("\\ngood"')
        )
        more = [] if TORCH_2 else ["-r", "1", "-t", "1"]
        launcher = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node", "2", "--master_port", str(free_port())]
        self.two_are_good(*launcher, *more, self.script(script))

    def test_spawn(self):
        script = (
            SMALLEST
            + f"""
import torch.multiprocessing as mp

def main(rank, address):
    dist.init_process_group("cohort", init_method=address, rank=rank, world_size=2, timeout=PATIENCE)
    check()
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank) and os.environ["WORLD_SIZE"] == "2"
    dist.destroy_process_group()
    assert "RANK" not in os.environ
    print("\\ngood", rank, flush=True)

if __name__ == "__main__":
    mp.spawn(main, ("tcp://127.0.0.1:{free_port()}",), nprocs=2)
"""
        )
        self.two_are_good(sys.executable, self.script(script))


class Addresses(Case):
    def test_tcp(self):
        script = f"""
dist.init_process_group("cohort", init_method="tcp://127.0.0.1:{free_port()}", rank=rank, world_size=2, timeout=PATIENCE)
"""
        self.all_good(script + GOOD)

    def test_file_and_the_stale_one(self):
        path = self.folder / "meeting"
        start = f"""
dist.init_process_group("cohort", init_method="file://{path}", rank=rank, world_size=2, timeout=PATIENCE)
check()
"""
        # Ends without destroying its group, in the middle of things: the file stays.
        for status, output in self.world(start + 'print("good", flush=True)\nos._exit(0)\n'):
            self.assertEqual(status, 0, output)
            self.assertIn("good", output)
        self.assertTrue(path.exists())
        began = time.monotonic()
        for status, output in self.world(start):
            self.assertNotEqual(status, 0, output)
            self.assertRegex(output, "is taken.*fresh file|Aborted")
        self.assertLess(time.monotonic() - began, 3 * SECONDS)

    def test_destroy_and_init_again(self):
        # The file goes with its group, which takes the slowest rank's leave.
        script = f"""
for i in range(3):
    dist.init_process_group("cohort", init_method="file://{self.folder}/meeting%d" % i, rank=rank, world_size=2, timeout=PATIENCE)
    check()
    dist.destroy_process_group()
    assert not dist.is_initialized()
dist.init_process_group("cohort", init_method="file://{self.folder}/last", rank=rank, world_size=2, timeout=PATIENCE)
"""
        self.all_good(script + GOOD)

    def test_the_backend_is_known_whenever_torch_comes(self):
        for first, second in (("torch.distributed", "cohort"), ("cohort", "torch.distributed")):
            done = subprocess.run(
                [sys.executable, "-c", f"import {first}, {second}, sys; import torch.distributed as dist; "
                 "print(dist.Backend('cohort'), [f for f in sys.meta_path if 'cohort' in repr(f)])"],
                capture_output=True, text=True, timeout=2 * SECONDS, env=environment(),
            )
            self.assertEqual(done.stdout.split("\n")[0], "cohort []", done.stderr)

    @unittest.skipUnless(TORCH_2, "torch 1.13 has one backend in a group")
    def test_beside_another_backend(self):
        for backends in ("cpu:cohort,cuda:gloo", "cuda:gloo,cpu:cohort"):
            script = f"""
dist.init_process_group("{backends}", init_method="file://{self.folder}/{backends[:4]}", rank=rank, world_size=2, timeout=PATIENCE)
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor.tolist() == [2] * 3
world = dist.group.WORLD
assert world._get_backend(torch.device("cpu")) is world, world
assert "Gloo" in type(world._get_backend(torch.device("cuda"))).__name__, world._get_backend(torch.device("cuda"))
assert {{device.type for device in world._device_types}} == {{"cpu", "cuda"}}
group = dist.new_group([0, 1])
found = [None, None]
dist.all_gather_object(found, rank, group=group)
assert found == [0, 1]
dist.destroy_process_group()
print("good")
"""
            self.all_good(script)


class Endings(Case):
    START = """
address = "file://" + os.environ["FOLDER"] + "/torch"
dist.init_process_group("cohort", init_method=address, rank=rank, world_size=int(sys.argv[2]), timeout=PATIENCE)
"""

    def test_a_missing_rank_is_named(self):
        script = self.START.replace("PATIENCE", "datetime.timedelta(seconds=4)")
        world = World(SMALLEST + "rank = int(sys.argv[1])\nif rank == 1: sys.exit()\n" + script, 3, arguments=True)
        first, _, third = world.ends(4 * SECONDS)
        self.assertRegex(first[1], r"1 of 3 ranks did not come within 4 s: 1")
        self.assertRegex(third[1], r"1 of 3 ranks did not come|rank 0 did not say")

    def test_a_rank_that_is_taken(self):
        script = "rank = 0\n" + self.START
        outputs = [output for _, output in self.world(script.replace("PATIENCE", "datetime.timedelta(seconds=10)"))]
        self.assertTrue(any("rank 0 is taken" in output for output in outputs), outputs)

    def test_monitored_barrier(self):
        self.all_good(
            self.START
            + """
cohort.monitored_barrier()
if rank == 0:
    try:
        cohort.monitored_barrier(timeout=1.0, wait_all_ranks=True)
        sys.exit("nobody has come")
    except cohort.Timeout as error:
        assert "rank 1" in str(error) and "rank 2" in str(error), error
else:
    import time
    time.sleep(3)
    try:
        dist.barrier()
        sys.exit("it is over")
    except cohort.Error:
        pass
print("good")
""",
            3,
        )

    def test_abort(self):
        self.all_good(
            self.START
            + """
import cohort.distributed
if rank == 0:
    cohort.distributed.abort("enough of this")
else:
    work = dist.all_reduce(torch.ones(500_000), async_op=True)
    try:
        work.wait()
        sys.exit("aborted")
    except cohort.Aborted as error:
        assert "enough of this" in str(error), error
dist.destroy_process_group()
dist.init_process_group("cohort", init_method=address + "2", rank=rank, world_size=2, timeout=PATIENCE)
check()
dist.destroy_process_group()
print("good")
"""
        )

    def test_a_dead_rank(self):
        script = self.START + """
import signal
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Linear(700, 700))
model(torch.ones(2, 700)).sum().backward()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    for _ in range(3):
        model(torch.ones(2, 700)).sum().backward()
    sys.exit("rank 1 is gone")
except RuntimeError as error:
    assert "rank 1" in str(error), error
print("good", flush=True)
"""
        began = time.monotonic()
        (status, output), (killed, _) = self.world(script)
        self.assertEqual((status, killed), (0, -signal.SIGKILL), output)
        self.assertIn("good", output)
        self.assertLess(time.monotonic() - began, 3 * SECONDS)

    def test_an_exception_ends_the_others(self):
        (first, _), (second, told) = self.world(
            self.START + """
if rank == 0:
    raise LookupError("no such thing")
try:
    dist.barrier()
except cohort.Error as error:
    print("told:", error)
"""
        )
        self.assertNotEqual(first, 0)
        self.assertRegex(told, "told:.*LookupError: no such thing")

    def test_an_end_without_destroy(self):
        # With futures whose operations nobody brings to an end.
        self.all_good(
            self.START
            + """
future = dist.all_reduce(torch.ones(300_000), async_op=True).get_future()
group = dist.new_group([0, 1])
other = dist.irecv(torch.empty(3), 1 - rank, tag=5).get_future() if rank == 0 else None
future.wait()
print("good", flush=True)
"""
        )


if __name__ == "__main__":
    unittest.main()
