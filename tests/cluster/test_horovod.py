"""Programs of Horovod's over two hosts of a box: by horovodrun, by horovod.run, and under the launchers that Horovod's own
documentation starts them with. The same weights, to the bit; a lost rank is named, and nothing is left."""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import unittest

from launch_case import PATIENCE, Launch, wait_until

PACKAGE = os.environ.get("COHORT_PYTHON_PACKAGE", "")
HOROVOD = pathlib.Path(PACKAGE).parent / "share" / "cohort" / "as-horovod"
RUN = pathlib.Path(PACKAGE).parent / "bin" / "horovodrun"

# The words are those of a program that has never heard of Cohort. With a rank as argument that one is killed halfway; with a
# number that is no rank's it goes on until it is ended.
PROGRAM = """
import hashlib, os, signal, socket, sys
import torch
import horovod.torch as hvd

def bits(tensors):
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest()[:16]

def train(lost=-1):
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())  # rank 0's weights are everybody's
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.utils.data.TensorDataset(torch.arange(1024.0).reshape(64, 16).sin())
    sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    for epoch in range(3 if lost < hvd.size() else 1000000):
        sampler.set_epoch(epoch)
        for (rows,) in torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True)).backward()
            optimizer.step()
        if epoch == 0 and hvd.rank() == 0:
            print("begun", flush=True)
        if hvd.rank() == lost:
            os.kill(os.getpid(), signal.SIGKILL)
    # Sums of whole numbers are the same in any order, so on one host, too. Of `every` a rank has as many rows as it has
    # ranks before it on its host, and one more.
    whole = hvd.allreduce(torch.arange(100.0) * (hvd.rank() + 1), op=hvd.Sum, name="whole")
    every = hvd.allgather(torch.full((hvd.local_rank() + 1, 2), hvd.rank()), name="every")
    mean = hvd.allreduce(torch.tensor(float(hvd.rank())))
    length = torch.cat([one.flatten() for one in model.parameters()]).norm().item()
    text = (f"rank {hvd.rank()}/{hvd.size()} local {hvd.local_rank()}/{hvd.local_size()} "
            f"cross {hvd.cross_rank()}/{hvd.cross_size()} on {socket.gethostname()} rows {every[:, 0].tolist()} mean {mean.item()} whole {bits([whole])} "
            f"length {length} weights {bits(model.parameters())}")
    hvd.shutdown()
    return text

if __name__ == "__main__":
    print(train(*map(int, sys.argv[1:])), flush=True)
"""

# horovod.run, for each line of arguments.
DRIVER = """
import horovod, train
if __name__ == "__main__":
    import sys
    for words in sys.argv[1:]:
        given = eval(words)
        try:
            print(*horovod.run(train.train, num_proc=4, **given), sep="\\n", flush=True)
        except Exception as error:
            print("raised:", type(error).__name__, error, flush=True)
"""

# As Horovod's documentation says it; where its package is not installed the ranks have to be told of ours.
WORDS = "-bind-to none -map-by slot -x NCCL_DEBUG=INFO -x LD_LIBRARY_PATH -x PATH -x PYTHONPATH -mca pml ob1 -mca btl ^openib"
MPIRUN = ["mpirun.openmpi", "-np", "4", "-H", "h1:2,h2:2", *WORDS.split()]
BATCH = f"#SBATCH -N2\n#SBATCH --ntasks-per-node 2\nmpirun.openmpi {WORDS} python train.py\n"
SRUN = ("srun", "-N2", "--ntasks-per-node=2")
INSTALLED = {"package": (PACKAGE, HOROVOD)}  # as `pip install extensions/horovod/package` does it

TWO_HOSTS = [("0/4", "0/2", "0/2", "h1"), ("1/4", "1/2", "0/2", "h1"), ("2/4", "0/2", "1/2", "h2"), ("3/4", "1/2", "1/2", "h2")]
ONE_HOST = [(f"{rank}/4", f"{rank}/4", "0/1", "h1") for rank in range(4)]

SSHD = """\
Port 2222
HostKey {box}/host_key_h2
AuthorizedKeysFile {folder}/authorized
PidFile none
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
UseDNS no
SetEnv HOME={box}/home_h2
"""


class Horovod(Launch):
    needs = ("COHORT_COMMAND", "COHORT_PYTHON_PACKAGE")
    wanted = ("hvd", "--slurm", "--hosts", "2")

    @classmethod
    def setUpClass(cls):
        if not list(pathlib.Path(PACKAGE, "cohort").glob("_core.*.so")):
            raise unittest.SkipTest("the Python package is not built")
        environment = dict(os.environ, PYTHONPATH=PACKAGE)
        cls.python = next((python for python in (shutil.which("python3"), "/usr/bin/python3") if subprocess.run(
            [python, "-c", "import torch, cohort.horovod.torch"], env=environment, capture_output=True, check=False).returncode == 0), None)
        if cls.python is None:
            raise unittest.SkipTest("no Python here has torch and can use the package")
        super().setUpClass()

    def setUp(self):
        super().setUp()
        folder = pathlib.Path(self.folder)
        (folder / "train.py").write_text(PROGRAM)
        (folder / "driver.py").write_text(DRIVER)
        (folder / "hosts").write_text("h1 slots=2\n# the other one\nh2 slots=2\n")
        # `python` and `horovodrun` as the articles say them.
        commands = folder / "bin"
        commands.mkdir()
        self.script(f'exec {self.python} -B "$@"\n', "bin/python")
        self.script(f'exec {self.python} -B {RUN} "$@"\n', "bin/horovodrun")
        self.environment = [f"PATH={commands}:{os.environ['PATH']}", "LD_LIBRARY_PATH=", "OMP_NUM_THREADS=1"]

    def on_h1(self, *words, package=(PACKAGE,), more=(), timeout=90):
        path = f"PYTHONPATH={':'.join(map(str, package))}"
        return self.box.run("h1", "env", *self.environment, path, *more, *words, cwd=self.folder, timeout=timeout)

    def lines(self, done, layout=None):
        """Output of the ranks about themselves, by rank; all have to have the same weights."""
        said = done.stdout + done.stderr
        # mpirun may join two lines.
        found = re.findall(r"rank (\S+) local (\S+) cross (\S+) on (\S+) "
                           r"rows (\[.*?\]) mean (\S+) whole (\S+) length (\S+) weights ([0-9a-f]{16})", done.stdout)
        self.assertEqual((done.returncode, len(found)), (0, 4), said)
        found.sort()
        self.assertEqual([line[:4] for line in found], layout or TWO_HOSTS, said)
        rows = [rank for rank, line in enumerate(found) for _ in range(int(line[1][0]) + 1)]
        self.assertEqual({line[4:] for line in found}, {(str(rows), "1.5", *found[0][6:])}, said)
        return found[0][6:]

    def in_a_batch_script(self):
        out = pathlib.Path(self.folder) / "out"
        done = self.on_h1("sbatch", "--wait", "-o", out, self.script(BATCH, "job.sh"), **INSTALLED)
        done.stdout, done.stderr = out.read_text(), done.stdout + done.stderr
        return done

    def test_every_way_gives_the_same_bits(self):
        horovodrun = ("horovodrun", "-np", "4")
        ways = {
            "horovodrun": lambda: self.on_h1(*horovodrun, "-H", "h1:2,h2:2", "python", "train.py"),
            "srun": lambda: self.on_h1(*SRUN, "python", "train.py", **INSTALLED),
            "mpirun": lambda: self.on_h1(*MPIRUN, "python", "train.py", **INSTALLED),
            "mpirun in a batch script": self.in_a_batch_script,
            "horovod.run": lambda: self.on_h1("python", "driver.py", "dict(hosts='localhost:2,h2:2')", **INSTALLED),
        }
        found = {}
        for way, run in ways.items():
            with self.subTest(way):
                found[way] = self.lines(run())
        self.assertEqual(len(set(found.values())), 1, found)
        # The same layout on one host: the same bits. Another one: what does not depend on the order of sums.
        done = self.on_h1(*horovodrun, "-H", "localhost:4", "python", "train.py", more=["COHORT_PRETEND_HOSTS=2"])
        on_one = [(rank, local, cross, "h1") for rank, local, cross, _ in TWO_HOSTS]
        self.assertEqual(self.lines(done, on_one), found["horovodrun"])
        whole, length, _ = self.lines(self.on_h1(*horovodrun, "-H", "localhost:4", "python", "train.py"), ONE_HOST)
        self.assertEqual(whole, found["horovodrun"][0])
        self.assertAlmostEqual(float(length), float(found["horovodrun"][1]), 4)

    @contextlib.contextmanager
    def other_sshd(self):
        """On h2, at another port, for another key than the one in ssh's configuration. Gives words for the environment."""
        keys = pathlib.Path(self.folder) / "my keys"
        keys.mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / "key"], check=True)
        sshd = pathlib.Path(self.folder) / "sshd_config"
        sshd.write_text(SSHD.format(box=self.box.folder, folder=self.folder))
        shutil.copy(keys / "key.pub", pathlib.Path(self.folder) / "authorized")
        ssh = pathlib.Path(self.folder) / "ssh_config"
        ssh.write_text(re.sub(r"(?m)^  IdentityFile .*\n", "", (self.box.folder / "ssh_config").read_text()))
        process = self.box.start("h2", "/usr/sbin/sshd", "-D", "-e", "-f", sshd)
        try:
            there = ("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/2222")
            wait_until(lambda: self.box.run("h2", *there).returncode == 0, "an sshd at port 2222")
            yield [f"COHORT_RUN_SSH=ssh -F {ssh}"], str(keys / "key")
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE)

    def test_a_hostfile_and_a_port_and_a_key_of_ssh(self):
        with self.other_sshd() as (more, key):
            command = ("horovodrun", "-np", "4", "-hostfile", "hosts", "--network-interfaces", "eth0")
            first = self.lines(self.on_h1(*command, "-p", "2222", "-i", key, "python", "train.py", more=more))
            # Each of the two is needed.
            for given, words in {
                ("-p", "2222"): r"ssh cannot log in without a password.*`ssh -F \S+ -p 2222 -o BatchMode=yes h2 true` has to work",
                ("-i", key): "ssh cannot log in without a password.*-i '.*my keys/key' -o BatchMode=yes h2 true` has to work",
                ("-p", "2223", "-i", key): "no sshd listens there .*port 2223: Connection refused",
            }.items():
                done = self.on_h1(*command, *given, "python", "train.py", more=more)
                self.assertEqual(done.returncode, 127, done.stderr)
                self.assertRegex(done.stderr, "no agent on h2 -- by ssh: " + words)
            given = f"dict(hostfile='hosts', ssh_port=2222, ssh_identity_file={key!r}, network_interfaces='eth0')"
            done = self.on_h1("python", "driver.py", given, more=more, **INSTALLED)
            self.assertEqual(self.lines(done), first)

    def test_a_host_that_does_not_come_in_time_is_named(self):
        self.shell_reads("h2", "sleep 8\n")
        done = self.on_h1("horovodrun", "-np", "2", "-H", "h1:1,h2:1", "--start-timeout", "2", "true")
        self.assertEqual(done.returncode, 127)
        self.assertRegex(done.stderr, "no agent on h2 -- by ssh: no sign of life")

    def test_a_network_that_does_not_lead_to_the_other_host_is_named(self):
        done = self.on_h1("horovodrun", "-np", "2", "-H", "h1:1,h2:1", "--network-interfaces", "lo", "true")
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, "COHORT_NETWORK=lo fits no address of this host, which has .*eth0")

    def test_a_lost_rank_is_named_and_nothing_is_left(self):
        done = self.on_h1("horovodrun", "-np", "4", "-H", "h1:2,h2:2", "python", "train.py", "3")
        self.assertEqual(done.returncode, 128 + 9, done.stderr)
        self.assertRegex(done.stderr, r"rank 3 failed: killed by SIGKILL \(host h2")
        done = self.on_h1("python", "driver.py", "dict(args=[3], hosts='h1:2,h2:2')", **INSTALLED)
        self.assertRegex(done.stdout, r"raised: RankFailed rank 3 of 4 \(host h2\) failed: .*SIGKILL")
        done = self.on_h1(*SRUN, "python", "train.py", "3", **INSTALLED)
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r"HorovodInternalError: .*lost rank 3 \(h2, pid \d+\)")
        done = self.on_h1(*MPIRUN, "python", "train.py", "3", **INSTALLED)
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r"process rank 3 with PID \d+ on node h2 exited on signal 9|lost rank 3 \(h2")

    def test_a_lost_host_is_named_and_nothing_is_left(self):
        job = self.box.start("h1", "env", *self.environment, f"PYTHONPATH={PACKAGE}", "horovodrun", "-np", "4", "-H", "h1:2,h2:2",
                             "python", "train.py", "4", cwd=self.folder)
        self.addCleanup(self.end, job)
        self.addCleanup(self.box.act, "heal", "h2")
        self.assertIn("begun", job.stdout.readline(), "" if job.poll() is None else job.stderr.read())
        self.box.act("cut", "h2")
        _, err = job.communicate(timeout=PATIENCE)
        self.assertEqual(job.returncode, 1, err)
        self.assertIn("the agent of h2 is lost", err)
        # The host that nobody reaches ends its part by itself.
        wait_until(lambda: not self.box.processes("h2", "agent|train"), "h2 cleans up")


if __name__ == "__main__":
    unittest.main()
