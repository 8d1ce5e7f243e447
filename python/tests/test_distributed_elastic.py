"""torch.distributed over "cohort" in elastic jobs: process groups that are formed again when workers are killed, and come."""

import os
import pathlib
import tempfile
import unittest

from support import needs_torch
from test_run_elastic import Job

# Trains by torch's DistributedDataParallel until there is a file "stop", and tells of each step what Job.check reads.
# CASES: what else it does in each world, before.
TRAINING = """
import datetime, hashlib, os, signal, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import cohort
from cohort import _core, distributed

WORKER = int(os.environ["COHORT_WORKER"])
stop = os.path.join(os.environ["FOLDER"], "stop")
torch.manual_seed(WORKER)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
step = worlds = 0

def total(value, group=None):
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()

def check_world():
    rank, size = dist.get_rank(), dist.get_world_size()
    assert os.environ["RANK"] == str(rank) and os.environ["WORLD_SIZE"] == str(size), os.environ
    assert total(rank + 1) == size * (size + 1) / 2
    seen = [None] * size
    dist.all_gather_object(seen, (rank, WORKER, _core.formed_epoch("torch's members")))
    assert [one[0] for one in seen] == list(range(size)) and len({one[2] for one in seen}) == 1, seen
    if size > 1:
        came = torch.zeros(1)
        requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1) * rank, (rank + 1) % size),
                                           dist.P2POp(dist.irecv, came, (rank - 1) % size)])
        for request in requests:
            request.wait()
        assert came.item() == (rank - 1) % size
    return seen

def check_groups():
    # Groups of one rank, of all, and of some twice.
    rank, size = dist.get_rank(), dist.get_world_size()
    for ranks in (range(1), range(size), range(size // 2, size), range(size // 2, size)):
        group = dist.new_group(list(ranks))
        if rank in ranks:
            assert total(rank, group) == sum(ranks)

CASES

def train():
    global step
    state = [model.state_dict(), optimizer.state_dict(), step]
    dist.broadcast_object_list(state, src=0)
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    step = state[2]
    replica = DistributedDataParallel(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    while not distributed.members_changed():
        optimizer.zero_grad()
        replica(torch.ones(2, 16) * (rank + 1)).square().sum().backward()
        optimizer.step()
        step += 1
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:12]
        epoch = _core.formed_epoch("torch's members")
        print("step", time.monotonic_ns(), epoch, step, rank, size, digest, flush=True)
        if total(os.path.exists(stop)):
            return True
        time.sleep(0.01)
    return False

while True:
    try:
        dist.init_process_group("cohort")
        worlds += 1
        check_world()
        others()
        if train():
            break
    except RuntimeError as error:
        print("over", distributed.is_over(), type(error).__name__, str(error)[:150], flush=True)
        if not distributed.is_over():
            raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
"""

FORMED_AGAIN = """
def again(**how):
    global worlds
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("cohort", **how)
    worlds += 1
    check_world()

def must_end(error, call):
    try:
        call()
    except error as found:
        assert distributed.is_over()
        return str(found)
    raise AssertionError("the group goes on")

def others():
    if worlds == 1:
        again()                                                       # the same members, from a group in good order
        def aborted():
            dist.barrier()
            if dist.get_rank() == 1:
                distributed.abort("by the program")
            dist.barrier()
        assert "by the program" in must_end(cohort.Aborted, aborted)
        again(timeout=datetime.timedelta(seconds=1))
        if dist.get_rank() == 2:
            time.sleep(1.5)
        must_end((cohort.Timeout, cohort.Aborted), dist.barrier)
        again(rank=int(os.environ["RANK"]))                           # true statements are allowed
    elif dist.get_world_size() == 3 and WORKER == 3:
        os.kill(os.getpid(), signal.SIGKILL)                          # while the others make groups
    check_groups()
"""


@needs_torch
class Faults(unittest.TestCase):
    def test_groups_are_formed_again_after_aborts_deadlines_and_kills(self):
        with Job("-np", "4", "--min-np", "1", script=TRAINING.replace("CASES", FORMED_AGAIN)) as job:
            for worker in range(4):
                job.wait_for_step(worker, 0, worker, 4)
            job.kill(1)
            for rank, worker in enumerate((0, 2)):
                job.wait_for_step(worker, 2, rank, 2)
            self.assertEqual(job.stop(), 0, job.said())
            job.check(self, 0, 1, 2, 3)


@needs_torch
class Hosts(unittest.TestCase):
    def test_members_come_and_go_and_are_killed(self):
        with tempfile.TemporaryDirectory() as folder:
            hosts = pathlib.Path(folder) / "hosts"

            def listed(text):
                (pathlib.Path(folder) / "new").write_text(text)
                os.replace(pathlib.Path(folder) / "new", hosts)

            def world_of(epoch, *workers):
                for rank, worker in enumerate(workers):
                    job.wait_for_step(worker, epoch, rank, len(workers))

            listed("a\n")
            options = ("--min-np", "1", "--starter", "local", "--host-discovery-script", f"cat {hosts}")
            script = TRAINING.replace("CASES", "others = check_groups")
            with Job(*options, "--blacklist-cooldown-range", "1", "2", script=script) as job:
                world_of(0, 0)
                listed("a\nb:2\n")
                world_of(1, 0, 1, 2)
                listed("b:2\n")
                world_of(2, 1, 2)
                job.wait_for("removed it", lambda: (job.path / "r/logs/rank-0.err").read_text())
                job.kill(1)
                world_of(3, 2)
                listed("b:2\nc:2\n")
                for worker in (2, 3, 4):  # and b's free place may have been filled by now
                    job.wait_for(r"^step \d+ [4-9] \d+ \d [34] ", lambda: job.log(worker))
                job.kill(4)
                job.wait_for(r"^step \d+ [5-9] \d+ \d [2-4] ", lambda: job.log(3))
                job.kill(2)
                # Free places are filled again.
                job.wait_for(r"^step \d+ [6-9] \d+ \d 4 ", lambda: job.log(3))
                self.assertEqual(job.stop(), 0, job.said())
                job.check(self, *(worker for worker in range(12) if job.log(worker)))


if __name__ == "__main__":
    unittest.main()
