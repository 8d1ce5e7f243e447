"""An elastic job without its launcher: the test is the supervisor, which starts and kills workers and says who takes part."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from support import SECONDS

# Trains until there is a file "stop", a commit each step, and prints for each: time, epoch, step, rank, size, and a
# digest of the weights.
TRAINING = """
import hashlib, os, sys, time
import torch
import cohort.horovod.torch as hvd
from cohort import _core

stop = os.path.join(os.environ["FOLDER"], "stop")
hvd.init()
print("started", flush=True)
torch.manual_seed(hvd.rank() + 10 * int(os.environ["COHORT_WORKER"]))
model = torch.nn.Linear(16, 4)
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.01), model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
state.register_reset_callbacks([lambda: print("reset", hvd.rank(), hvd.size(), flush=True)])

@hvd.elastic.run
def train(state):
    while not hvd.broadcast_object(os.path.exists(stop), 0, "stop"):
        optimizer.zero_grad()
        model(torch.ones(2, 16) * (hvd.rank() + 1)).square().sum().backward()
        optimizer.step()
        state.step += 1
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="total").item()
        assert total == hvd.size(), (total, hvd.size())
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:12]
        print("step", time.monotonic_ns(), _core.formed_epoch(), state.step, hvd.rank(), hvd.size(), digest, flush=True)
        time.sleep(float(os.environ.get("PACE", "0.01")))
        state.commit()

train(state)
print("over", hvd.rank(), hvd.size(), flush=True)
"""


class ElasticJob:
    """The job's store, secret and status pages are another process's. As a context: nothing of it is left at the end."""

    def __init__(self, script=TRAINING, workers=16, **environment):
        self.shared_before = set(os.listdir("/dev/shm"))
        self.folder = tempfile.TemporaryDirectory(prefix="cohort-elastic-")
        self.path = pathlib.Path(self.folder.name)
        (self.path / "script.py").write_text(script)
        self.keeper = subprocess.Popen([os.environ["ELASTIC_STORE"], str(workers)], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, text=True)  # fmt: skip
        port, *descriptors = self.keeper.stdout.readline().split()
        self.secret, *self.pages = [os.open(f"/proc/{self.keeper.pid}/fd/{fd}", os.O_RDONLY if i == 0 else os.O_RDWR)
                                    for i, fd in enumerate(descriptors)]  # fmt: skip
        self.environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("COHORT_", "RANK", "WORLD_", "LOCAL_", "MASTER_"))
        }
        self.environment.update(COHORT_TIMEOUT=str(int(SECONDS)), FOLDER=str(self.path),
                                COHORT_STORE=f"127.0.0.1:{port}", COHORT_SECRET_FD=str(self.secret), **environment)  # fmt: skip
        self.workers = {}
        self.epoch = -1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in [*self.workers.values(), self.keeper]:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.keeper.stdin.close()
        self.keeper.stdout.close()
        for descriptor in (self.secret, *self.pages):
            os.close(descriptor)
        self.folder.cleanup()

    def say(self, line):
        """Returns what is answered before "done"."""
        self.keeper.stdin.write(line + "\n")
        self.keeper.stdin.flush()
        *answer, done = self.keeper.stdout.readline().split()
        assert done == "done", (answer, done)
        return answer

    def page(self, worker):
        """The epoch of the world that it has formed last, -1 for none, and whether it says that it has the state."""
        formed, has_state = self.say(f"page {worker}")
        return int(formed), has_state == "1"

    def begin(self, *workers, cause="", hosts=None, tell=True):
        """The next epoch, of these workers."""
        self.epoch += 1
        members = ",".join(f"{worker}:{(hosts or {}).get(worker, 0)}" for worker in workers)
        self.say(f"begin {self.epoch} {members} {cause}")
        if tell:
            self.say(f"tell {self.epoch}")

    def start(self, *workers, **environment):
        for worker in workers:
            page = self.pages[worker]
            with open(self.path / f"{worker}.log", "w") as log:
                self.workers[worker] = subprocess.Popen(
                    [sys.executable, str(self.path / "script.py")],
                    # The rank and size at a process's start count for nothing, as RANK does for those who stay.
                    env=dict(self.environment, COHORT_WORKER=str(worker), COHORT_STATUS_FD=str(page), RANK="0", WORLD_SIZE="1",
                             **environment),
                    pass_fds=(self.secret, page), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)  # fmt: skip

    def kill(self, worker):
        """Returns when: time.monotonic_ns()."""
        at = time.monotonic_ns()
        self.workers[worker].send_signal(signal.SIGKILL)
        return at

    def log(self, worker):
        return (self.path / f"{worker}.log").read_text()

    def wait_for(self, worker, pattern, seconds=2 * SECONDS):
        """The first line that the pattern matches, as a match."""
        limit = time.monotonic() + seconds
        while True:
            found = re.search(pattern, self.log(worker), re.MULTILINE)
            if found:
                return found
            ended = self.workers[worker].poll()
            if time.monotonic() > limit or (ended is not None and not re.search(pattern, self.log(worker), re.MULTILINE)):
                raise AssertionError(f"worker {worker} (ended: {ended}) never said {pattern!r}:\n{self.log(worker)[-4000:]}")
            time.sleep(0.002)

    def wait_for_step(self, worker, epoch, rank, size):
        """The first step in such a world: its time."""
        return int(self.wait_for(worker, rf"^step (\d+) {epoch} \d+ {rank} {size} ")[1])

    def steps(self, worker):
        """(time, epoch, step, rank, size, digest) of each."""
        found = re.findall(r"^step (\d+) (\d+) (\d+) (\d+) (\d+) (\w+)$", self.log(worker), re.MULTILINE)
        return [(*map(int, each[:5]), each[5]) for each in found]

    def left_behind(self):
        """Processes of the job, but for the keeper, and what is in /dev/shm."""
        found = [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - self.shared_before if "cohort" in name]
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if f"FOLDER={self.path}\0".encode() in (process / "environ").read_bytes():
                    found.append(process.name)
            except OSError:
                pass  # it has ended
        return found

    def stop(self):
        """The training ends; (exit status, output) of those that still ran, by worker."""
        (self.path / "stop").touch()
        running = [worker for worker, process in self.workers.items() if process.poll() is None]
        return {worker: (self.workers[worker].wait(timeout=2 * SECONDS), self.log(worker)) for worker in running}
