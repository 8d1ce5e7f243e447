"""The digits in Python on two hosts of a box, under every launcher, by a user without any rights there: the same weights, to
the bit, and nothing left on any host."""

import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import unittest

from launch_case import wait_until
from python_case import COHORT, EXAMPLES, PACKAGE, PythonCase

# digits_ddp.py's steps with cohort.nn, few of them, and what came out. With a number of steps, a checkpoint after each; the
# other words are its place and host=folder for each host.
PROGRAM = """
import hashlib, os, sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.nn.functional as F
import cohort
from cohort.checkpoint import CheckpointFolder
from cohort.data import DistributedSampler
from cohort.nn import DistributedDataParallel
from digits import Net, load

torch.set_num_threads(1)
cohort.init(timeout=60)
world = cohort.world()
torch.manual_seed(world.rank())  # rank 0's weights are everybody's
train, _ = load()
net = Net()
model = DistributedDataParallel(net, world)
optimizer = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
sampler = DistributedSampler(train.labels, world.size(), world.rank(), shuffle=True, seed=1)
order = torch.tensor(list(sampler))
first, last, checkpoints = 0, 6, None
if len(sys.argv) > 2:
    last = int(sys.argv[2])
    folders = dict(word.split("=") for word in sys.argv[4:])
    checkpoints = CheckpointFolder(os.path.join(folders[world.host()], "checkpoints"), place=sys.argv[3])
    info = checkpoints.load_latest(net, optimizer)
    first = info.progress.step if info else 0
    print(f"rank {world.rank()} on {world.host()} begins at step {first}, with the part of {int(checkpoints.rank_state()['rank'])}"
          if info else f"rank {world.rank()} begins", flush=True)
for step in range(first, last):
    batch = order[step * 16 : step * 16 + 16]
    optimizer.zero_grad()
    F.nll_loss(model(train.images[batch]), train.labels[batch]).backward()
    optimizer.step()
    if checkpoints:
        checkpoints.save(net, optimizer, step=step + 1, state={"rank": torch.tensor(world.rank())})
bits = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
print(f"rank {world.rank()} of {world.size()} on {world.cross_size()} hosts: {hashlib.sha256(bits).hexdigest()}", flush=True)
cohort.shutdown()
"""

FUNCTION = """
import array, os, sys
import cohort

def total(value):
    cohort.init()
    values = array.array("d", [value * (cohort.rank() + 1)])
    cohort.world().all_reduce(values)
    return values[0], cohort.world().host(), cohort.world().cross_size()

def fail(rank):
    if int(os.environ["RANK"]) == rank:
        raise LookupError(f"rank {rank} knows why")
    import time
    time.sleep(300)

if __name__ == "__main__":
    import functions  # so that it need not be sent by value
    print(cohort.run(functions.total, args=(2.0,), hosts="h1:2,h2:2", prefix="none"))
    print(cohort.Distributor(4, use_gpu=False, hosts="h1:2,h2:2").run(functions.total, 3.0))
    try:
        cohort.run(functions.fail, args=(3,), hosts="h1:2,h2:2", quiet=True)
    except LookupError as error:
        print("raised:", error, "on", error.__cause__.host, error.__cause__.rank)
"""


class PythonTraining(PythonCase):
    files = {"train.py": PROGRAM, "functions.py": FUNCTION}

    def by_hand(self, program):
        """`cohort run` on h1 starts its own agent, and waits for one that is started by hand on the other host."""
        self.as_user(COHORT, "secret", "job.secret")
        agents = [self.box.start("h2", "env", f"PYTHONPATH={PACKAGE}", COHORT, "agent", "--join", "h1:4711", "--secret-file",
                                 "job.secret", "--name", "h2", as_user=True, cwd=self.folder)]
        try:
            return self.as_user(COHORT, "run", "-q", "--starter", "hand", "--secret-file", "job.secret", "--listen", "4711", "-np", "4",
                                "-H", "h1:2,h2:2", *program)
        finally:
            for agent in agents:
                try:
                    agent.communicate(timeout=20)
                except BaseException:
                    agent.kill()
                    agent.communicate()

    def test_digits_by_every_launcher_give_the_same_bits(self):
        program = [self.python, str(self.folder / "train.py"), str(EXAMPLES / "common")]
        cohort = [COHORT, "run", "-q", "--no-logs", "--no-python"]
        ways = {
            "ssh": lambda: self.as_user(*cohort, "-np", "4", "-H", "h1:2,h2:2", *program),
            "slurm, a launcher for each host": lambda: self.as_user("salloc", "-Q", "-N2", "--ntasks-per-node=2", *cohort, *program),
            "slurm, a task for each rank": lambda: self.as_user("srun", "-N2", "--ntasks-per-node=2", *program),
            "open-mpi": lambda: self.as_user("mpirun.openmpi", "-x", "PYTHONPATH", "--bind-to", "none", "-np", "4",
                                             "-H", "h1:2,h2:2", *program),
            "mpich": lambda: self.as_user("mpiexec.mpich", "-np", "4", "-hosts", "h1:2,h2:2", *program),
            "by hand": lambda: self.by_hand([*program]),
        }
        bits = {}
        for way, train in ways.items():
            said = train()
            found = re.findall(r"rank (\d) of 4 on 2 hosts: ([0-9a-f]{64})", said)
            self.assertEqual(sorted(rank for rank, _ in found), list("0123"), f"{way}: {said}")
            self.assertEqual(len({digest for _, digest in found}), 1, f"{way}: ranks differ: {said}")
            bits[way] = found[0][1]
        self.assertEqual(len(set(bits.values())), 1, bits)
        self.assertNotEqual(bits["ssh"], hashlib.sha256(b"").hexdigest())

    def test_digits_in_the_shape_of_chainermn(self):
        """As good on two hosts as alone, and the same whoever has started it."""
        program = [self.python, EXAMPLES / "03-horovod" / "digits_chainermn.py", "--epochs", "2", "--same-batches"]
        threads = ["env", "OMP_NUM_THREADS=1"]

        def last(said, ranks, hosts):
            self.assertIn(f"{ranks} processes on {hosts} hosts", said)
            return re.findall(r"epoch 2: loss ([\d.]+), accuracy ([\d.]+)", said)[-1]

        alone = last(self.as_user(*threads, *program), 1, 1)
        by_ssh = last(self.as_user(*threads, COHORT, "run", "-q", "--no-logs", "--no-python", "--prefix", "none", "--env",
                                   "OMP_NUM_THREADS=1", "-np", "4", "-H", "h1:2,h2:2", *program), 4, 2)
        by_mpi = last(self.as_user(*threads, "mpirun.openmpi", "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS", "--bind-to", "none", "-np", "4",
                                   "-H", "h1:2,h2:2", *program), 4, 2)
        self.assertGreater(float(alone[1]), 0.85)
        self.assertAlmostEqual(float(by_ssh[1]), float(alone[1]), delta=0.006)
        self.assertEqual(by_mpi, by_ssh)

    def train(self, *words):
        return self.as_user(COHORT, "run", "-q", "--no-logs", "--no-python", "-np", "4", "-H", "h1:2,h2:2", self.python,
                            self.folder / "train.py", EXAMPLES / "common", *words)

    def bits(self, said):
        found = set(re.findall(r"on 2 hosts: ([0-9a-f]{64})", said))
        self.assertEqual(len(found), 1, said)
        return found

    def assert_all_begin_at(self, step, said):
        begun = re.findall(r"rank (\d) on h\d begins at step (\d), with the part of (\d)", said)
        self.assertEqual(sorted(begun), [(rank, str(step), rank) for rank in "0123"], said)

    def test_goes_on_after_either_host_has_lost_its_disk(self):
        whole = self.bits(self.train())
        disks = [self.folder / "disk-h1", self.folder / "disk-h2"]
        place = ["local", f"h1={disks[0]}", f"h2={disks[1]}"]
        said = self.train("2", *place)
        self.assertEqual(len(re.findall(r"rank \d begins$", said, re.M)), 4, said)
        for lost, first in (0, 2), (1, 4):
            self.assertEqual([path.name for path in disks if path.exists()], ["disk-h1", "disk-h2"])
            shutil.rmtree(disks[lost])
            said = self.train(str(first + 2), *place)
            self.assert_all_begin_at(first, said)
        self.assertEqual(self.bits(said), whole)

    def need_sshfs(self):
        if not shutil.which("sshfs") or not os.path.exists("/dev/fuse"):
            self.skipTest("needs sshfs and /dev/fuse -- apt-get install sshfs")

    @contextlib.contextmanager
    def served(self, server, client):
        """A folder of the server's, and where the client has it through sshfs."""
        folder, mounted = (pathlib.Path(tempfile.mkdtemp(prefix=host, dir=self.folder)) for host in (server, client))
        for path in folder, mounted:
            path.chmod(0o777)
        ssh = " ".join(self.box.words(client, self.box.folder / "ssh", as_user=True))
        subprocess.run(["sshfs", "-o", "allow_other", "-o", f"ssh_command={ssh}", "-o", "sftp_server=/usr/lib/openssh/sftp-server",
                        f"{server}:{folder}", mounted], check=True, timeout=30)
        try:
            yield folder, mounted
        finally:
            subprocess.run(["umount", mounted], check=True)

    def test_goes_on_from_a_folder_that_one_host_serves_to_the_other(self):
        """Through sshfs, which like NFS keeps what it knows of names and files for a while."""
        self.need_sshfs()
        whole = self.bits(self.train())
        for server, client in ("h1", "h2"), ("h2", "h1"):  # rank 0, which names and removes checkpoints, is on h1
            with self.subTest(server=server), self.served(server, client) as (folder, mounted):
                place = ["shared", f"{server}={folder}", f"{client}={mounted}"]
                self.train("2", *place)
                for first in 2, 4:
                    said = self.train(str(first + 2), *place)
                    self.assert_all_begin_at(first, said)
                self.assertEqual(self.bits(said), whole)
                # Three are kept, and none that is not whole.
                self.assertEqual(sorted(path.name for path in (folder / "checkpoints").iterdir()),
                                 [f"checkpoint-{step:06}-step-{step}" for step in (4, 5, 6)])

    def test_a_file_whose_locks_end_at_each_host_is_no_meeting_place(self):
        self.need_sshfs()

        def rank(number, folder):
            return ["env", f"PYTHONPATH={PACKAGE}", "WORLD_SIZE=2", f"RANK={number}", f"COHORT_INIT=file://{folder}/meet", self.python,
                    "-c", "import cohort; cohort.init(timeout=60)"]

        def refused(number, folder):
            done = self.box.run("h2", *rank(number, folder), as_user=True, timeout=60)
            self.assertNotEqual(done.returncode, 0)
            return done.stderr

        with self.served("h1", "h2") as (folder, mounted):
            said = refused(0, mounted)
            self.assertIn("this file system takes two names of one file for two files -- choose another one", said)
            # A file that was open when it was removed goes when sshfs hears that it is closed, for which nobody waits.
            wait_until(lambda: not list(folder.iterdir()), "an empty folder", 10)
        with self.served("h1", "h2") as (folder, mounted):
            with self.box.start("h1", *rank(0, folder), as_user=True) as first:
                try:
                    limit = time.monotonic() + 30
                    while not (folder / "meet").exists():
                        self.assertLess(time.monotonic(), limit)
                        self.assertIsNone(first.poll())
                        time.sleep(0.05)
                    said = refused(1, mounted)
                finally:
                    first.terminate()
            self.assertRegex(said, "made by .* on host h1 .* on host h2 .*this file system keeps locks to each host: take another one")

    def test_functions_on_two_hosts(self):
        said = self.as_user(self.python, "functions.py")
        self.assertIn("[(20.0, 'h1', 2), (20.0, 'h1', 2), (20.0, 'h2', 2), (20.0, 'h2', 2)]", said)
        self.assertIn("(30.0, 'h1', 2)", said)
        self.assertIn("raised: rank 3 knows why on h2 3", said)


if __name__ == "__main__":
    unittest.main()
