"""The failure modes of docs/failures.md that one host can show: each is named in time, with who, where and what to do.

Prints a table: mode, seconds from the fault to the message, the message. The modes of several hosts (F18 to F20) are in
tests/cluster/test_failure_modes.py.
"""

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import unittest

from failure_modes import COHORT, HARM, LIMIT, PATIENCE, START, Modes, print_table, tell
from support import needs_torch


def setUpModule():
    if not COHORT:
        raise unittest.SkipTest("COHORT_COMMAND is not set")


def tearDownModule():
    print_table()


class Ranks(Modes):
    def test_f01_a_rank_dies(self):
        job = self.job(START + "if rank == 1:\n    harm()\n    os.kill(os.getpid(), signal.SIGKILL)\nworld.barrier()\n")
        self.named(1, "a rank dies", job, r"cohort: rank 1 failed: killed by SIGKILL \(host \S+, pid \d+\)")
        self.assertEqual(job.ends(), 128 + signal.SIGKILL)
        self.assertRegex(job.text, r"rank 0: (waiting )?in barrier\(\), operation \d")

    def test_f03_ranks_disagree(self):
        # Another length, type, reduction, root and order of operations; each is refused on both ranks.
        job = self.job(
            START
            + """
import array
def bring(*both):
    world.barrier()
    began = time.monotonic()
    try:
        both[rank]()
    except cohort.Mismatch as error:
        print(f"REFUSED {time.monotonic() - began:.6f} {error}", flush=True)
four = lambda kind="f", n=4: array.array(kind, [0] * n)
bring(lambda: world.all_reduce(four()), lambda: world.all_reduce(four(n=5)))
bring(lambda: world.all_reduce(four()), lambda: world.all_reduce(four("i")))
bring(lambda: world.all_reduce(four()), lambda: world.all_reduce(four(), op="max"))
bring(lambda: world.broadcast(four(), root=0), lambda: world.broadcast(four(), root=1))
bring(lambda: world.all_reduce(four()), lambda: world.barrier())
world.barrier()
"""
        )
        self.assertEqual(job.ends(), 0, job.text)
        refused = re.findall(r"REFUSED ([\d.]+) (.* refused -- rank \d \(\S+\).*brought.*brought.*)", job.text)
        self.assertEqual(len(refused), 10, job.text)
        slowest = max(float(seconds) for seconds, _ in refused)
        tell(3, "ranks disagree (length, type, op, root, order)", slowest, refused[0][1])
        self.assertLess(slowest, LIMIT)

    def test_f04_a_rank_is_late(self):
        job = self.job(
            START
            + """
if rank == 1:
    world.recv(bytearray(1), 0)  # until the other one has given up
else:
    harm()
    try:
        world.all_reduce(bytearray(8), timeout=1)
    except cohort.Timeout as error:
        print("TIMEOUT", error, flush=True)
    os._exit(0)
"""
        )
        self.named(4, "a rank does not come (timeout=1)", job, r"TIMEOUT .*rank 1 .*did not come to operation 2.*")

    def test_f04_a_rank_stops(self):
        job = self.job(
            START + "if rank == 1:\n    harm()\n    os.kill(os.getpid(), signal.SIGSTOP)\nworld.barrier()\n",
            "--stopped-timeout", "6",
        )  # fmt: skip
        at, _ = job.when(r"cohort: rank 1 \(\S+, pid \d+\) has been stopped for \d+ s .*kill -CONT")
        self.assertLess(at - job.harmed(), LIMIT)
        self.assertEqual(job.ends(), 124, job.text)

    # Metrics of all ranks, a save in the background, a comparison, preemption, a trace, somebody who watches.
    BESIDE = """
import contextlib
import cohort.track
def beside():
    cohort.track.log(1, x=1.0, reduce="mean")
    preemption = cohort.Preemption()
    preemption.requested(world)
    with contextlib.suppress(ImportError):
        import torch
        from cohort.checkpoint import CheckpointFolder
        from cohort.nn import DistributedDataParallel
        model = DistributedDataParallel(torch.nn.Linear(4, 1), compare_parameters_every=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        folder = CheckpointFolder("checkpoints", comm=world)
        folder.save_async(model, optimizer)
        return preemption, folder
    return (preemption,)
kept = beside()
world.barrier()
"""

    def watched(self, text, *options):
        job = self.start(COHORT, "run", "-np", 2, "--grace", "1", "--trace", *options, "--", sys.executable,
                         self.script(START + self.BESIDE + text))  # fmt: skip
        job.harmed()
        watch = self.start(COHORT, "watch", "--once")
        self.addCleanup(watch.ends)
        return job

    def test_f04_ranks_wait_for_each_other_whatever_goes_on_beside(self):
        job = self.watched("harm()\nworld.recv(bytearray(1), 1 - rank)\n", "--deadlock-timeout", "4")
        at, _ = job.when(r"nothing can go on: rank 0 .* waits in recv\(uint8\[1\]\) for rank 1; rank 1 .* for rank 0")
        self.assertLess(at - job.harmed(), LIMIT)
        self.assertEqual(job.ends(), 124, job.text)

    def test_f04_a_rank_is_elsewhere_whatever_goes_on_beside(self):
        job = self.watched(
            "harm()\nif rank == 1:\n    time.sleep(1000)\nkept[0].requested(world)\n", "--stall-timeout", "4"
        )  # fmt: skip
        at, _ = job.when(r"rank 1 .* did not call all_reduce\(int32\[1\], max\) of Preemption\.requested, operation \d+ within \d+ s; rank 0 w")
        self.assertLess(at - job.harmed(), LIMIT)
        self.assertEqual(job.ends(), 124, job.text)

    def test_f05_a_rank_is_slow(self):
        job = self.job(
            START
            + """
from cohort._core import count_step
harm()
for step in range(1000):
    until = time.monotonic() + (0.05 if rank == 1 else 0.01)
    while time.monotonic() < until:
        time.sleep(0.001)
    world.all_reduce(bytearray(8))
    count_step()
""",
            ranks=3,
        )
        self.named(5, "a rank is slow (5 times, 50 ms for a step)", job, r"cohort: rank 1 \(\S+, pid \d+\) .*slow.*")

    @needs_torch
    def test_f06_a_value_is_not_finite(self):
        job = self.job(
            START
            + """
import torch
from cohort.nn import DistributedDataParallel
net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
model = DistributedDataParallel(net, non_finite="raise", compare_parameters_every=1)
x = torch.ones(2, 4)
model(x).sum().backward()
net[0].weight.register_hook(lambda g: g * (float("nan") if rank == 1 else 1))
model.zero_grad()
world.barrier()
if rank == 1:
    harm()
try:
    model(x).sum().backward()
except cohort.NonFinite as error:
    print("NONFINITE", error, flush=True)
with torch.no_grad():
    if rank == 1:
        net[1].bias[0] += 1e-7
try:
    model(x)
except cohort.Mismatch as error:
    print("DIFFERENT", error, flush=True)
"""
        )
        self.named(
            6, "a gradient is not finite", job,
            r"NONFINITE .*step 1 .*rank 1 \(\S+\), parameter '0\.weight' of \[3, 4\], element 0 at \[0, 0\] -- it is nan",
        )  # fmt: skip
        self.assertEqual(job.ends(), 0, job.text)
        self.assertEqual(len(re.findall("NONFINITE", job.text)), 2)
        self.assertEqual(len(re.findall(r"DIFFERENT .*parameter '1\.bias' of \[2\], element 0 at \[0\]", job.text)), 2)

    def test_f09_the_launcher_is_killed(self):
        job = self.job(
            START
            + """
import subprocess
children = [subprocess.Popen(["sleep", "1000"], start_new_session=leaves) for leaves in (True, False)]
print("PIDS", os.getpid(), *(child.pid for child in children), flush=True)
time.sleep(1000)
"""
        )
        for _ in range(2):
            job.when("PIDS")
        limit = time.monotonic() + PATIENCE
        while len(found := re.findall(r"PIDS (.*)", job.text)) < 2 and time.monotonic() < limit:
            time.sleep(0.01)
        pids = [int(pid) for line in found for pid in line.split()]
        self.assertEqual(len(pids), 6, job.text)
        since = time.monotonic()
        job.process.kill()
        self.gone(pids)
        tell(9, "the launcher is killed: nothing is left", time.monotonic() - since, f"{len(pids)} processes are gone")

    def test_f10_a_process_that_cannot_be_killed(self):
        # Held at its exit by a debugger: SIGKILL does nothing to it, as in a call of the kernel that does not return.
        job = self.job(START + "print('PID', rank, os.getpid(), flush=True)\ntime.sleep(1000)\n", "--grace", "1")
        pid = int(job.when(r"PID 1 (\d+)")[1][1])
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        seize, detach, trace_exit = 0x4206, 17, 0x40
        if libc.ptrace(seize, pid, None, trace_exit) != 0:
            self.skipTest(f"ptrace: {os.strerror(ctypes.get_errno())}")
        try:
            since = time.monotonic()
            job.process.send_signal(signal.SIGTERM)
            self.named(10, "a process cannot be killed", job, rf"pid {pid} .*in state [tTDd]", since=since)
            self.assertNotEqual(job.ends(LIMIT), 0)
        finally:
            os.waitpid(pid, 0x40000000)  # __WALL: the stop, which detaching needs to have been seen
            libc.ptrace(detach, pid, None, None)

    def test_f12_a_fork(self):
        job = self.job(
            START
            + """
if rank == 0:
    harm()
    if os.fork() == 0:
        try:
            world.barrier()
        except cohort.InvalidArgument as error:
            print("FORKED", error, flush=True)
        os._exit(0)
    os.wait()
world.barrier()
"""
        )
        self.named(12, "a fork after the world is formed", job, r"FORKED .*forked child")
        self.assertEqual(job.ends(), 0, job.text)

    @needs_torch
    def test_f13_a_rank_runs_out_of_data(self):
        job = self.job(
            START
            + """
import torch
from cohort.nn import DistributedDataParallel
net = torch.nn.Linear(1, 1, bias=False)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
with torch.no_grad():
    net.weight.fill_(0)
with model.join():
    for batch in range(3 if rank == 0 else 1):
        optimizer.zero_grad()
        model(torch.full((2, 1), rank + 1.0)).mean().backward()
        optimizer.step()
    if rank == 1:
        harm()
# Averages of 1 and 2, then of 1 alone, twice.
print("JOINED", net.weight.item(), flush=True)
"""
        )
        self.named(13, "a rank runs out of data: the others end well", job, r"JOINED -3\.5$")
        self.assertEqual(job.ends(), 0, job.text)
        self.assertEqual(job.text.count("JOINED -3.5"), 2)

    def test_f14_the_order_of_every_epoch(self):
        job = self.alone(
            HARM
            + """
from cohort.data import DistributedSampler
sampler = DistributedSampler(1000)
first = list(sampler)
harm()
second = list(sampler)  # nobody has called set_epoch
print("ORDERS", first != second, sorted(first) == sorted(second), flush=True)
"""
        )
        self.named(14, "set_epoch is forgotten: the next epoch all the same", job, "ORDERS True True")

    def test_f24_an_operation_is_tried_again(self):
        # There is no parameter server. Only collectives change numbers: refused ones change nothing, and values
        # sent again are counted once.
        job = self.job(
            START
            + """
import array
total = array.array("d", [1.0] * 1000)
harm()
for attempt in range(3):
    try:
        world.all_reduce(total if attempt == 2 or rank == 0 else array.array("f", total))
        print("APPLIED", attempt, total[0], flush=True)
    except cohort.Mismatch as error:
        print("REFUSED", attempt, total[0], error, flush=True)
"""
        )
        self.named(24, "no parameter server: what is refused changes nothing", job, "REFUSED 0 1.0 .*rank 1 brought")
        self.assertEqual(job.ends(), 0, job.text)
        self.assertEqual(job.text.count("REFUSED 1 1.0"), 2)
        self.assertEqual(job.text.count("APPLIED 2 2.0"), 2)


class Starts(Modes):
    def test_f02_the_members_change(self):
        # No elastic worlds: all ranks begin anew, and nobody waits for an old member.
        job = self.job(
            START
            + """
import pathlib
mark = pathlib.Path("first")
if mark.exists():
    print("AGAIN", rank, size, flush=True)
    sys.exit(0)
world.barrier()
if rank == 1:
    mark.touch()
    harm()
    os.kill(os.getpid(), signal.SIGKILL)
world.barrier()
""",
            "--max-restarts", "1",
        )  # fmt: skip
        self.named(2, "members change: all ranks begin anew", job, "AGAIN [01] 2")
        self.assertEqual(job.ends(), 0, job.text)
        self.assertEqual(job.text.count("AGAIN"), 2)

    def test_f07_a_port_is_taken(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            secret = self.folder / "secret"
            subprocess.run([COHORT, "secret", secret], check=True, capture_output=True)
            options = f"rank=0, world_size=2, secret_file='{secret}'"
            job = self.alone(f"{HARM}\nimport cohort\nharm()\ncohort.init('tcp://127.0.0.1:{port}', {options})\n")
            self.named(7, "a port is taken", job, rf"127\.0\.0\.1:{port}: Address already in use .*held by pid {os.getpid()} ")
            self.assertEqual(job.ends(), 1)

    def test_f08_a_file_of_an_earlier_job(self):
        forms = HARM + f"import cohort\nharm()\ncohort.init('file://{self.folder}/meet', rank=RANK, world_size=2)\n"
        first = self.alone(forms.replace("RANK", "1"))
        first.harmed()
        limit = time.monotonic() + PATIENCE
        while not (self.folder / "meet").exists() and time.monotonic() < limit:
            time.sleep(0.01)
        self.assertTrue((self.folder / "meet").exists())
        pid = first.process.pid
        first.process.kill()
        first.ends()
        job = self.alone(forms.replace("RANK", "0"))
        self.named(8, "a file of an earlier job", job, rf"left by an earlier job.*pid {pid}.*rm ")
        self.assertEqual(job.ends(), 1)

    def test_f11_more_shared_memory_than_there_is(self):
        job = self.alone(HARM + "import cohort\ncohort.init(alone=True)\nharm()\ncohort.world().allocate(1 << 44)\n")
        self.named(11, "more shared memory than there is", job, r"Unavailable: allocate\(\d+\) failed -- rank 0 .*available")

    def test_f15_a_world_of_one(self):
        job = self.alone(
            HARM + "import cohort\nharm()\ncohort.init()\n", RANK="0", WORLD_SIZE="1", OMPI_COMM_WORLD_SIZE="4"
        )
        self.named(15, "a world of one, where four were meant", job, "this would be a world of one .*OMPI_COMM_WORLD_SIZE=4")

    def test_f16_another_program(self):
        forms = HARM + f"import cohort\nharm()\ncohort.init('file://{self.folder}/meet', rank=RANK, world_size=2)\n"
        jobs = [
            self.start(sys.executable, self.script(forms.replace("RANK", str(rank)) + "#" * rank, f"program{rank}.py"))
            for rank in (0, 1)
        ]
        began = [job.harmed() for job in jobs]
        for job in jobs:
            self.named(16, "another program", job, r"cannot form a world.*rank 0 \(.*rank 1 \(.*", since=max(began))

    @needs_torch
    def test_f17_killed_in_a_save(self):
        save = (
            HARM
            + """
import torch
from cohort.checkpoint import CheckpointFolder
net = torch.nn.Linear(1000, 1000)
folder = CheckpointFolder("saved", keep=2)
for step in range(1000):
    with torch.no_grad():
        net.weight.fill_(step)
    folder.save(net, step=step)
    print("SAVED", step, flush=True)
"""
        )
        job = self.alone(save)
        job.when("SAVED 2")
        job.process.kill()  # in the midst of one of the next
        job.ends()
        saved = max(int(step) for step in re.findall(r"SAVED (\d+)", job.text))
        load = self.alone(
            HARM
            + """
import torch
from cohort.checkpoint import CheckpointFolder
net = torch.nn.Linear(1000, 1000)
harm()
info = CheckpointFolder("saved").load_latest(net)
step = info.progress.step
print("LOADED", step, bool((net.weight == step).all()), flush=True)
"""
        )
        step, whole = self.named(17, "killed in a save: the newest whole one", load, r"LOADED (\d+) (\w+)").groups()
        self.assertGreaterEqual(int(step), saved)
        self.assertEqual(whole, "True")

    def test_f21_clocks_that_differ(self):
        if shutil.which("cc") is None:
            self.skipTest("no C compiler")
        source = self.script(
            """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static int real(clockid_t id, struct timespec *t) {
  static int (*next)(clockid_t, struct timespec *);
  if (!next) next = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  return next(id, t);
}
int clock_gettime(clockid_t id, struct timespec *t) {
  int result = real(id, t);
  if (id == CLOCK_REALTIME && t) t->tv_sec += 3600;
  return result;
}
time_t time(time_t *t) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (t) *t = now.tv_sec;
  return now.tv_sec;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  t->tv_sec = now.tv_sec;
  t->tv_usec = now.tv_nsec / 1000;
  return 0;
}
""",
            "ahead.c",
        )
        subprocess.run(["cc", "-shared", "-fPIC", "-o", self.folder / "ahead.so", source, "-ldl"], check=True)
        program = self.script(
            START
            + """
import array
clocks = array.array("d", [0.0, 0.0])
world.all_gather(array.array("d", [time.time()]), clocks)
print("APART", round((clocks[1] - clocks[0]) / 60), "min", flush=True)
if rank == 0:
    world.recv(bytearray(1), 1)
else:
    harm()
    try:
        world.recv(bytearray(1), 0, timeout=1)
    except cohort.Timeout as error:
        print("TIMEOUT", error, flush=True)
        os._exit(0)
"""
        )
        preload = f'export LD_PRELOAD="${{LD_PRELOAD:+$LD_PRELOAD }}{self.folder}/ahead.so"'  # behind a sanitizer's
        ahead = f"if [ $RANK = 1 ]; then {preload}; fi; exec {sys.executable} {program}"
        job = self.start(COHORT, "run", "-q", "--no-logs", "-np", 2, "--", "sh", "-c", ahead)
        job.when("APART 60 min")
        self.named(21, "clocks an hour apart: deadlines hold (timeout=1)", job, r"TIMEOUT .*rank 1 .*rank 0 ")
        seconds = job.when("TIMEOUT")[0] - job.harmed()
        self.assertGreater(seconds, 0.9)

    def test_f22_a_rank_comes_twice(self):
        forms = HARM + f"import cohort\nharm()\ncohort.init('file://{self.folder}/meet', rank=0, world_size=2)\n"
        first = self.alone(forms)
        first.harmed()
        limit = time.monotonic() + PATIENCE
        while not (self.folder / "meet").exists() and time.monotonic() < limit:
            time.sleep(0.01)
        second = self.alone(forms)
        # The one that came first may be either of them.
        text = r"rank 0 is taken: rank 0 \(host \S+, pid \d+\) has it, and this process .* claims it too"
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit and first.process.poll() is None and second.process.poll() is None:
            time.sleep(0.01)
        late = first if first.process.poll() is not None else second
        self.named(22, "a rank comes twice", late, text)

    def test_f22_a_process_of_an_earlier_attempt(self):
        job = self.job(
            START
            + """
import json, pathlib, subprocess
kept = pathlib.Path("environment.json")
if not kept.exists():
    world.barrier()
    if rank == 1:
        kept.write_text(json.dumps(dict(os.environ)))
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()
if rank == 0:
    harm()
    os.set_inheritable(int(os.environ["COHORT_SECRET_FD"]), True)  # as in a process that was started before `init`
    late = [sys.executable, "-c", "import cohort; cohort.init(init_timeout=3)"]
    ended = subprocess.run(late, env=json.loads(kept.read_text()), close_fds=False, capture_output=True, text=True)
    print("LATE", ended.returncode, " ".join(ended.stderr.split())[-400:], flush=True)
world.barrier()
print("WHOLE", flush=True)
""",
            "--max-restarts", "1",
        )  # fmt: skip
        at, found = job.when(r"LATE (\d+) .*cohort\.errors\.\w+: (.*)")
        seconds = at - job.harmed()
        tell(22.1, "one of an earlier attempt (init_timeout=3)", seconds, found[2])
        self.assertLess(seconds, LIMIT)
        self.assertEqual(found[1], "1")
        self.assertEqual(job.ends(), 0, job.text)
        self.assertEqual(job.text.count("WHOLE"), 2)

    def test_f23_too_few_open_files(self):
        since = time.monotonic()
        job = self.start("bash", "-c", f"ulimit -n 40; exec {COHORT} run -np 16 true")
        self.named(23, "too few open files", job, r"16 processes .* open files and the limit is 40", since=since)
        self.assertEqual(job.ends(), 127)


if __name__ == "__main__":
    unittest.main()
