"""torch.distributed's programs over "cohort" on two hosts of a box, under every launcher and by hand."""

import os
import re
import signal
import unittest

from python_case import COHORT, EXAMPLES, PACKAGE, PythonCase

# A program of torch's over hosts. Words: the init_method, and for tcp:// and file:// this process's rank and world
# size.
PROGRAM = """
import datetime, hashlib, os, sys
sys.path.insert(0, os.environ["EXAMPLES"])
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
import cohort
from digits import Net, load

torch.set_num_threads(1)
method, place = sys.argv[1], [int(word) for word in sys.argv[2:]]
given = dict(zip(("rank", "world_size"), place))
dist.init_process_group("cohort", init_method=method, timeout=datetime.timedelta(seconds=60), **given)
rank, size = dist.get_rank(), dist.get_world_size()

generator = torch.Generator().manual_seed(rank)
values = torch.randn(50021, generator=generator)
summed = values.clone()
dist.all_reduce(summed)
mine = dist.distributed_c10d._get_default_group().communicator

# Groups within a host, across hosts, of one rank for each host.
for ranks in ([0, 1], [2, 3]), ([0, 2], [1, 3]), ([0, 1, 3], [2]):
    groups = [dist.new_group(some) for some in ranks]
    for some, group in zip(ranks, groups):
        if rank in some:
            tensor = torch.tensor([2.0 ** rank])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(2.0 ** one for one in some), (some, tensor)
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank, "host": mine.host()})
assert [one["rank"] for one in objects] == list(range(size))
assert len({one["host"] for one in objects}) == 2, objects
cohort.monitored_barrier(timeout=30)

# One rank of each host does not come: those that have are told both.
group = dist.new_group()
if "IN_FULL" in os.environ and rank in (0, 2):
    try:
        cohort.monitored_barrier(group, timeout=5)
        sys.exit("ranks 1 and 3 have not come")
    except cohort.Timeout as error:
        assert str(error).startswith("monitored_barrier: ranks 1, 3 did not come within 5 s"), error
cohort.monitored_barrier(timeout=30)

def train(model, optimizer=None):
    torch.manual_seed(1)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    train_set, _ = load()
    for step in range(4):
        first = (step * size + rank) * 8
        optimizer.zero_grad()
        F.nll_loss(model(train_set.images[first:first + 8]), train_set.labels[first:first + 8]).backward()
        optimizer.step()

torch.manual_seed(rank)  # rank 0's weights are everybody's
net = Net()
train(torch.nn.parallel.DistributedDataParallel(net))
weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])

# Adam's state shared out over the hosts, and whole on each rank: the same weights.
nets = []
for share in (True, False):
    torch.manual_seed(0)
    nets.append(torch.nn.parallel.DistributedDataParallel(Net()))
    parameters = nets[-1].parameters()
    train(nets[-1], ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01) if share
          else torch.optim.Adam(parameters, lr=0.01))
for one, other in zip(nets[0].parameters(), nets[1].parameters()):
    assert torch.equal(one, other), "ZeroRedundancyOptimizer gives other weights"

if hasattr(torch.distributed, "device_mesh") and "IN_FULL" in os.environ:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    # Sharded within a host and replicated across hosts, and sharded over all.
    for shape, names in ((2, 2), ("hosts", "ranks")), ((4,), ("ranks",)):
        torch.manual_seed(0)
        sharded, plain = Net(), Net()
        dist.broadcast(torch.zeros(1), 0)
        plain.load_state_dict(sharded.state_dict())
        fully_shard(sharded, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        train(sharded)
        train(torch.nn.parallel.DistributedDataParallel(plain))
        for one, other in zip(sharded.parameters(), plain.parameters()):
            torch.testing.assert_close(one.full_tensor(), other.detach(), rtol=1e-4, atol=1e-5)
    print(f"rank {rank}: sharded", flush=True)

def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]

cross = mine.cross_size()
dist.destroy_process_group()
if "AND_COHORT" in os.environ:  # the same ranks at the same places, as a world of its own
    cohort.init(timeout=60)
    again = values.clone()
    cohort.world().all_reduce(again)
    assert torch.equal(again, summed), "other bits than cohort.init()'s"
    cohort.shutdown()
print(f"rank {rank} of {size} on {cross} hosts: {digest(summed)} {digest(weights)}", flush=True)
"""

ENDLESS = """
import datetime, os
import torch
import torch.distributed as dist
import cohort

dist.init_process_group("cohort", timeout=datetime.timedelta(seconds=60))
begun = False
while True:
    dist.all_reduce(torch.ones(4))
    if not begun:
        print(os.getpid(), flush=True)
    begun = True
"""

# In an elastic job, until a file says stop: a group of each world's, and of its first and last rank.
ELASTIC = """
import os, time
import torch
import torch.distributed as dist
import cohort.distributed

while True:
    try:
        dist.init_process_group("cohort")
        rank, size = dist.get_rank(), dist.get_world_size()
        ends = dist.new_group(sorted({0, size - 1}))
        said = False
        while True:
            total = torch.tensor([1.0, float(os.path.exists("stop"))])
            dist.all_reduce(total)
            if rank in (0, size - 1):
                dist.all_reduce(total, group=ends)
            if not said:
                print("trains", os.getpid(), rank, size, flush=True)
            said = True
            if total[1] > 0:
                break
            time.sleep(0.01)
        break
    except RuntimeError:
        if not cohort.distributed.is_over():
            raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
"""

# How scripts give torch's four variables from a launcher's.
BY_SLURM = """#!/bin/sh
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID MASTER_ADDR=h1 MASTER_PORT=29411
exec "$@"
"""
BY_OPEN_MPI = """#!/bin/sh
export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE MASTER_ADDR=h1 MASTER_PORT=29412
exec "$@"
"""


class Programs(PythonCase):
    files = {"group.py": PROGRAM, "endless.py": ENDLESS, "elastic.py": ELASTIC, "by_slurm.sh": BY_SLURM, "by_open_mpi.sh": BY_OPEN_MPI}
    environment = [f"PYTHONPATH={PACKAGE}", f"EXAMPLES={EXAMPLES / 'common'}", "PYTHONDONTWRITEBYTECODE=1"]

    def program(self, *words):
        return [self.python, str(self.folder / "group.py"), *words]

    def on_each_host(self, words_of, environment=()):
        """Starts on each host what `words_of` says for it, waits for all, and returns what they have said."""
        ended = self.box.run_all([(host, ["env", *self.environment, *environment, *words]) for host in ("h1", "h2")
                                  for words in words_of(host)], as_user=self.by_user, cwd=self.folder)
        said = "\n".join(output for _, output in ended)
        self.assertEqual([status for status, _ in ended], [0] * len(ended), said)
        return said

    def from_h1(self, *words, environment=()):
        done = self.box.run("h1", "env", *self.environment, *environment, *words, as_user=self.by_user, timeout=120, cwd=self.folder)
        self.assertEqual(done.returncode, 0, f"{words}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def digests(self, said):
        found = re.findall(r"rank (\d) of 4 on 2 hosts: (\w{16} \w{16})", said)
        self.assertEqual(sorted(rank for rank, _ in found), list("0123"), said)
        self.assertEqual(len({digest for _, digest in found}), 1, said)
        return found[0][1]

    @property
    def redirected(self):
        """1.13's own launcher is broken under Python 3.11 unless output is redirected."""
        return ["-r", "1", "-t", "1"] if "dist-packages" in self.torch else []

    def torchrun(self, *words):
        return lambda host: [[self.python, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "2", *self.redirected, *words,
                              *(["--node_rank", str(int(host == "h2"))] if "--master_addr" in words else []), *self.program("env://")[1:]]]

    def every_launcher_gives_the_same_bits(self):
        for path in self.folder.glob("*.sh"):
            path.chmod(0o755)
        both = ["AND_COHORT=1", "IN_FULL=1"]
        env = self.program("env://")

        def by_hand(method):
            return lambda host: [self.program(method, str(2 * int(host == "h2") + local), "4") for local in range(2)]

        def by_variables(host):
            return [["env", f"RANK={2 * int(host == 'h2') + local}", "WORLD_SIZE=4", "MASTER_ADDR=h1", "MASTER_PORT=29417", *env]
                    for local in range(2)]

        ways = {
            "cohort run": lambda: self.from_h1(COHORT, "run", "-q", "--no-logs", "--no-python", "-np", "4", "-H", "h1:2,h2:2", *env,
                                               environment=both),
            "srun, with torch's variables": lambda: self.from_h1(
                "srun", "-N2", "--ntasks-per-node=2", str(self.folder / "by_slurm.sh"), *env, environment=both[:1]),
            "mpirun, with torch's variables": lambda: self.from_h1(
                "mpirun.openmpi", *(w for name in ("PYTHONPATH", "EXAMPLES", "AND_COHORT") for w in ("-x", name)), "--bind-to", "none",
                "-np", "4", "-H", "h1:2,h2:2", str(self.folder / "by_open_mpi.sh"), *env, environment=both[:1]),
            "torchrun": lambda: self.on_each_host(
                self.torchrun("--rdzv_backend", "c10d", "--rdzv_endpoint", "h1:29413"), both[:1]),
            "torch.distributed.launch": lambda: self.on_each_host(
                self.torchrun("--master_addr", "h1", "--master_port", "29414"), both[:1]),
            "tcp://": lambda: self.on_each_host(by_hand("tcp://h1:29415")),
            "file://": lambda: self.on_each_host(by_hand(f"file://{self.folder}/meeting")),
            "env://": lambda: self.on_each_host(by_variables),
        }
        bits = {}
        for way, start in ways.items():
            with self.subTest(way):
                said = start()
                bits[way] = self.digests(said)
                through_torch = "the secret of this world of 4 ranks goes through torch's store"
                if way in ("cohort run", "srun, with torch's variables", "mpirun, with torch's variables"):
                    self.assertNotIn(through_torch, said)
                else:
                    self.assertEqual(said.count(through_torch), 1 + way.startswith("torch"), said)
        self.assertEqual(len(set(bits.values())), 1, bits)


class OfAUser(Programs):
    def endless(self, port):
        """Four ranks by hand that are within a loop: their processes, and the pid of each."""
        ranks = []
        for rank, host in enumerate(("h1", "h1", "h2", "h2")):
            variables = [f"RANK={rank}", "WORLD_SIZE=4", "MASTER_ADDR=h1", f"MASTER_PORT={port}", "OMP_NUM_THREADS=1"]
            ranks.append(self.box.start(host, "env", *self.environment, *variables, self.python, self.folder / "endless.py",
                                        as_user=self.by_user, cwd=self.folder))
            self.addCleanup(ranks[-1].communicate)
            self.addCleanup(ranks[-1].kill)
        return ranks, [int(rank.stdout.readline()) for rank in ranks]

    def ended(self, rank):
        _, said = rank.communicate(timeout=60)
        self.assertNotEqual(rank.returncode, 0, said)
        return said

    def test_a_lost_rank_is_named(self):
        ranks, pids = self.endless(29421)
        os.kill(pids[3], signal.SIGKILL)
        for rank in ranks[:3]:
            self.assertRegex(self.ended(rank), rf"cohort.errors.(PeerLost|Aborted): .*rank 3 \(h2, pid {pids[3]}\)")

    def test_a_cable_that_is_cut_is_named_on_both_sides(self):
        ranks, _ = self.endless(29422)
        self.addCleanup(self.box.act, "heal", "h2")
        self.box.act("cut", "h2")
        for rank in ranks:
            self.assertRegex(self.ended(rank), r"cohort.errors.(PeerLost|Aborted): .*has not answered for 3 s")

    def test_groups_follow_the_members_of_an_elastic_job(self):
        job = self.box.start("h1", "env", *self.environment, COHORT, "run", "--no-logs", "--min-np", "1", "-H", "h1:2,h2:2",
                             self.python, "elastic.py", as_user=self.by_user, cwd=self.folder)
        self.addCleanup(job.communicate)
        self.addCleanup(job.kill)

        def all_train(size):
            """The pid of each rank, once all train in a world of so many."""
            pids = {}
            while len(pids) < size:
                line = job.stdout.readline()
                self.assertNotEqual(line, "", line or job.communicate()[1])
                found = re.search(rf"trains (\d+) (\d+) {size}$", line.strip())
                if found:
                    pids[int(found[2])] = int(found[1])
            return pids

        os.kill(all_train(4)[0], signal.SIGKILL)  # whose host goes on with the next rank 0
        all_train(3)
        self.box.act("cut", "h2")
        try:
            all_train(1)
        finally:
            self.box.act("heal", "h2")
        (self.folder / "stop").touch()
        self.assertEqual(job.wait(timeout=60), 0)

    def test_every_launcher_gives_the_same_bits(self):
        self.every_launcher_gives_the_same_bits()


class OfThisPython(Programs):
    by_user = False
    environment = Programs.environment + ["OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]

    def test_every_launcher_gives_the_same_bits(self):
        self.every_launcher_gives_the_same_bits()


if __name__ == "__main__":
    unittest.main()
