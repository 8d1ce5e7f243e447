"""cohort.elastic: trainings go on where others would begin again, with the same bits and every sample once."""

import collections
import contextlib
import io
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

import cohort
from cohort import elastic
from cohort._launch import command as _command
from cohort.data import DistributedSampler, permutation
from support import SECONDS, needs_torch, torch

# Trains a model whose loss a plain loop over all samples has, too. PLAN says which worker is killed at which step, and
# where: {"1": [20, "backward"]}.
TRAINING = """
import hashlib, json, os, signal, sys, time
import torch
import cohort
from cohort.data import DistributedSampler

torch.set_num_threads(1)
WORKER = os.environ["COHORT_WORKER"]
at, where = json.loads(os.environ.get("PLAN", "{}")).get(WORKER, (0, ""))
size, batch, epochs = json.loads(os.environ["SIZES"])
noise = os.environ.get("NOISE")  # dropout and statistics of batches
scale = "BATCH" in os.environ

generator = torch.Generator().manual_seed(1)
x = torch.randn(size, 8, generator=generator)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
torch.manual_seed(5)
layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
if noise:
    layers[1:1] = [torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2)]
net = torch.nn.Sequential(*layers)
torch.manual_seed(100 + int(WORKER))
if int(WORKER) > 0:
    with torch.no_grad():
        net[0].weight.zero_()  # the first rank's counts
optimizer = torch.optim.Adam(net.parameters(), 0.01)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
sampler = DistributedSampler(data, 1, 0, batch_size=batch, seed=3)
options = json.loads(os.environ.get("LOADER", "{}"))
loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=cohort.data.EmptyBatches(data), **options)

def here(place):
    if place == where and state.steps == at:
        os.kill(os.getpid(), signal.SIGKILL)

def digest(tensors):
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest()[:12]

def buffers():
    return digest([*net.buffers(), torch.ones(1)])

state = cohort.elastic.State()
state.add("model", net).add("optimizer", optimizer, net, scale_lr="linear" if scale else None)
state.add("schedule", schedule).add("sampler", sampler, batch=os.environ.get("BATCH", "keep"))
state.losses = []
state.on_step(lambda: here("step"))
net[0].weight.register_hook(lambda gradient: here("backward"))

def tell(*words):
    print(*words, flush=True)

@cohort.elastic.run(save=lambda state, world: tell("save", state.steps, world.rank, world.size))
def train(state, world):
    tell("world", world.epoch, state.steps, world.rank, world.size, world.first_size, digest(net.parameters()), buffers())
    assert cohort.size() == world.size
    model = cohort.nn.DistributedDataParallel(net, sampler=sampler)
    while sampler.epoch < epochs:
        for inputs, targets in loader:
            optimizer.zero_grad()
            tell("begin", state.steps, digest([torch.get_rng_state()]))
            here("forward")
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            here("reduced")
            optimizer.step()
            here("between")
            count = len(inputs)
            lost = float(loss.detach()) * count if count else 0.0
            try:
                state.step()
            finally:  # it has ended, also where the world changes with it
                tell("step", world.epoch, state.steps, world.rank, world.size, count, lost, digest(net.parameters()), buffers())
            if world.epoch is not None and not os.path.exists(os.path.join(os.environ["FOLDER"], "fast")):
                time.sleep(float(os.environ.get("PACE", "0.005")))
        schedule.step()
        state.losses = [*state.losses, sampler.epoch]
        sampler.next_epoch()
    assert state.losses == list(range(epochs)), state.losses
    rate = 0.01 * 0.9**epochs * (world.size / world.first_size if scale else 1)
    assert abs(optimizer.param_groups[0]["lr"] - rate) < 1e-9, optimizer.param_groups
    assert schedule.base_lrs == [group["initial_lr"] for group in optimizer.param_groups], schedule.base_lrs
    tell("over", world.rank, world.size)

train(state)
"""

# The same without torch.
NUMPY = """
import json, os, signal, sys
import numpy as np
import cohort
from cohort.data import DistributedSampler

WORKER = os.environ["COHORT_WORKER"]
at, where = json.loads(os.environ.get("PLAN", "{}")).get(WORKER, (0, ""))
size, batch, epochs = json.loads(os.environ["SIZES"])
x = np.random.default_rng(1).normal(size=(size, 4))
weights = {"w": np.full(4, float(WORKER)), "steps": np.zeros(1, np.int64)}
sampler = DistributedSampler(size, 1, 0, batch_size=batch, seed=3)
state = cohort.elastic.State().add("weights", weights).add("sampler", sampler)

@cohort.elastic.run
def train(state, world):
    print("world", world.epoch, state.steps, world.rank, world.size, weights["w"].sum(), np.random.random(), flush=True)
    while sampler.epoch < epochs:
        for batch in sampler:
            gradient = x[batch].sum(0)
            if state.steps == at and where == "reduced":
                os.kill(os.getpid(), signal.SIGKILL)
            world.comm.all_reduce(gradient)
            weights["w"] -= 0.01 * gradient
            weights["steps"] += 1
            if state.steps == at and where == "between":
                os.kill(os.getpid(), signal.SIGKILL)
            state.step()
        sampler.next_epoch()

train(state)
assert "torch" not in sys.modules
print("over", state.steps, int(weights["steps"][0]), *map(repr, weights["w"]), flush=True)
"""

# Each rank steps parameters of its own. JOIN: this worker says what it begins with.
LOCAL = """
import hashlib, json, os, signal, sys, time
import torch
import cohort
from cohort.data import DistributedSampler

torch.set_num_threads(1)
WORKER = os.environ["COHORT_WORKER"]
at, where = json.loads(os.environ.get("PLAN", "{}")).get(WORKER, (0, ""))
size, batch, epochs = json.loads(os.environ["SIZES"])
x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))
torch.manual_seed(5 + int(WORKER))
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
net[2].bias.requires_grad_(False)
optimizer = torch.optim.Adam(net.parameters(), 0.01)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
diloco = cohort.optim.DiLoCo(net, optimizer, sync_every=20, fragments=2, fragment_sync_delay=1, fragment_update_alpha=0.5)
sampler = DistributedSampler(size, 1, 0, batch_size=batch)
state = cohort.elastic.State().add("diloco", diloco).add("sampler", sampler).add("schedule", schedule)
taken = 0

def digest(tensors):
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest()[:12]

def here(place):
    if place == where and state.steps + 1 == at:
        os.kill(os.getpid(), signal.SIGKILL)

@cohort.elastic.run
def train(state, world):
    global taken
    print("world", state.steps, world.rank, world.size, diloco.steps_left, taken, digest(net.parameters()),
          digest([one.outer for one in diloco._fragments]), optimizer.param_groups[0]["lr"], flush=True)
    while sampler.epoch < epochs:
        for indices in sampler:
            here("forward")
            optimizer.zero_grad()
            inputs = x[indices]
            if len(inputs) > 1:
                net(inputs).sub(inputs.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            taken += 1
            diloco.step(len(inputs))
            here("between")
            try:
                state.step()
            finally:
                print("step", world.epoch, state.steps, world.rank, world.size, len(inputs), digest(net.parameters()), flush=True)
            if not os.path.exists(os.path.join(os.environ["FOLDER"], "fast")):
                time.sleep(float(os.environ.get("PACE", "0")))
        schedule.step()
        sampler.next_epoch()
    diloco.synchronize()

train(state)
print("over", state.steps, taken, digest(net.state_dict().values()), flush=True)
"""

# Other packages reduce: Horovod's API, initialised before `train` or in it, and torch's DistributedDataParallel.
OTHERS = """
import hashlib, os, signal, sys
import torch
import cohort
from cohort.data import DistributedSampler

torch.set_num_threads(1)
how = os.environ["HOW"]
size, batch, epochs = 1003, 8, 2
x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
sampler = DistributedSampler(size, 1, 0, batch_size=batch)
if how.startswith("hvd"):
    import cohort.horovod.torch as hvd
if how == "hvd before":
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
state = cohort.elastic.State().add("model", net).add("optimizer", optimizer).add("sampler", sampler)

@cohort.elastic.run
def train(state, world):
    model, stepper = net, optimizer
    if how == "hvd":
        hvd.init()
        stepper = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    elif how == "torch":
        torch.distributed.init_process_group("cohort")
        model = torch.nn.parallel.DistributedDataParallel(net)
    print("world", state.steps, world.rank, world.size, flush=True)
    while sampler.epoch < epochs:
        for indices in sampler:
            stepper.zero_grad()
            inputs = x[indices or [0]]
            loss = model(inputs).sub(inputs.sum(1, keepdim=True)).square().mean()
            if state.steps == 30 and os.environ["COHORT_WORKER"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            stepper.step()
            state.step()
        sampler.next_epoch()

train(state)
print("over", state.steps, hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest(), flush=True)
"""

VIRTUAL = """
import hashlib, json, os, signal
import torch
import cohort
from cohort.data import DistributedSampler

at, part = json.loads(os.environ.get("PLAN", "{}")).get(os.environ["COHORT_WORKER"], (-1, 0))
size, batch, epochs = json.loads(os.environ["SIZES"])
x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))
net = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Unflatten(1, (4, 3)), torch.nn.BatchNorm1d(4), torch.nn.Flatten(),
                          torch.nn.Dropout(0.2), torch.nn.Linear(12, 1))
optimizer = torch.optim.AdamW(net.parameters(), 0.01)
sampler = DistributedSampler(size, 1, 0, batch_size=batch, virtual_ranks=5)
state = cohort.elastic.State().add("model", net).add("optimizer", optimizer).add("sampler", sampler)

@cohort.elastic.run
def train(state, world):
    model = cohort.nn.DistributedDataParallel(net, sampler=sampler, virtual_ranks=5)
    print("world", state.steps, world.rank, world.size, flush=True)
    while sampler.epoch < epochs:
        for number, indices in enumerate(sampler):
            if (state.steps, number % 2) == (at, part):
                os.kill(os.getpid(), signal.SIGKILL)
            if indices:
                inputs = x[indices]
                model(inputs).sub(inputs.sum(1, keepdim=True)).square().mean().backward()
            else:
                model.step_without_samples()
            complete = model.step_complete()
            if complete:
                optimizer.step()
                optimizer.zero_grad()
            sampler.step()
            if complete:
                state.step()
        sampler.next_epoch()

torch.manual_seed(7)
for parameter in net.parameters():
    torch.nn.init.uniform_(parameter, -0.5, 0.5)
train(state)
print("over", state.steps, hashlib.sha256(b"".join(one.numpy().tobytes() for one in net.state_dict().values())).hexdigest(), flush=True)
"""


def put(file, text):
    """Replaces the file at once, since it may be read at any time."""
    new = file.with_name("new")
    new.write_text(text)
    os.replace(new, file)


class Job:
    """`cohort run` of a program, whose workers' lines it has from their logs."""

    def __init__(self, *options, program=TRAINING, sizes=(1003, 8, 2), plan=None, **environment):
        self.folder = tempfile.TemporaryDirectory(prefix="cohort-elastic-")
        self.path = pathlib.Path(self.folder.name)
        self.sizes = sizes
        (self.path / "train.py").write_text(program)
        self.err = open(self.path / "err", "w+")
        environment = {key: value if isinstance(value, str) else json.dumps(value) for key, value in environment.items()}
        self.command = subprocess.Popen(
            [_command.find(), "run", "--run-dir", "r", *options, sys.executable, "train.py"], cwd=self.path,
            env=dict(os.environ, FOLDER=str(self.path), SIZES=json.dumps(sizes), PLAN=json.dumps(plan or {}),
                     OMP_NUM_THREADS="1", **environment),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.err)  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.command.poll() is None:
            self.command.terminate()
            try:
                self.command.wait(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                self.command.kill()
                self.command.wait(timeout=SECONDS)
        self.err.close()
        self.folder.cleanup()

    def said(self):
        return (self.path / "err").read_text()

    def log(self, worker, kind="out"):
        path = self.path / "r" / "logs" / f"rank-{worker}.{kind}"
        return path.read_text() if path.exists() else ""

    def lines(self, word):
        """Returns, by worker, the words of its lines that begin so."""
        return {
            worker: [line.split()[1:] for line in self.log(worker).split("\n")[:-1] if line.startswith(word + " ")]
            for worker in range(16)
        }

    def wait_for_world(self, size):
        limit = time.monotonic() + 2 * SECONDS
        while not any(int(step[3]) == size for steps in self.lines("step").values() for step in steps):
            if time.monotonic() > limit or self.command.poll() is not None:
                raise AssertionError(f"no world of {size} has trained:\n{self.said()}")
            time.sleep(0.02)

    def end(self, status=0):
        ended = self.command.wait(timeout=4 * SECONDS)
        if ended != status:
            raise AssertionError(f"ended with {ended}:\n{self.said()}")
        return self

    def check(self, case):
        """Parameters are the same on all ranks, no step is left out, and the ledger has each sample of each epoch once."""
        size, _, epochs = self.sizes
        digests, samples = {}, collections.defaultdict(int)
        for worker, steps in self.lines("step").items():
            for before, (epoch, step, _rank, _size, count, _loss, digest, *_) in zip([None, *steps], steps):
                case.assertEqual(digests.setdefault(step, digest), digest, (worker, step))
                case.assertTrue(before is None or int(step) == int(before[1]) + 1, (worker, before, step))
                samples[int(step)] += int(count)
            for world in self.lines("world")[worker]:
                case.assertIn(world[5], [digests.get(world[1]), *([world[5]] if world[1] == "0" else [])], (worker, world))
        found = elastic.audit(self.path / "r", {"sampler": size})
        case.assertTrue(found, found.problems)
        case.assertEqual(found.epochs, {("sampler", epoch): size for epoch in range(epochs)})
        return samples

    def losses(self):
        """Returns the loss of each step, over all ranks that have ended it."""
        losses = collections.defaultdict(float)
        for steps in self.lines("step").values():
            for step in steps:
                losses[int(step[1])] += float(step[5])
        return losses


def uninterrupted(size, global_batch, epochs):
    """Returns the losses of TRAINING's model, on one rank: by step."""
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True).sin()
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for epoch in range(epochs):
        order = torch.tensor(permutation(size, 3, epoch).tolist())
        for indices in order.split(global_batch):
            optimizer.zero_grad()
            loss = (net(x[indices]) - y[indices]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()) * len(indices))
        schedule.step()
    return losses


@needs_torch
class Killed(unittest.TestCase):
    def check_losses(self, job, workers):
        right = uninterrupted(job.sizes[0], job.sizes[1] * workers, job.sizes[2])
        losses = job.losses()
        self.assertEqual(sorted(losses), list(range(1, len(right) + 1)))
        for step, loss in enumerate(right, 1):
            # A rank that was killed after others had ended the step has not said what it lost.
            if step not in job.incomplete:
                self.assertLess(abs(losses[step] - loss), 1e-3 * max(1.0, abs(loss)), step)

    def train(self, workers, plan, **options):
        with Job("-np", str(workers), "--min-np", "1", plan=plan, **options) as job:
            job.end()
            samples = job.check(self)
            steps = max(samples)
            full = job.sizes[1] * workers
            per_epoch = math.ceil(job.sizes[0] / full)
            self.assertEqual(steps, per_epoch * job.sizes[2])
            whole = {s: min(full, job.sizes[0] - full * ((s - 1) % per_epoch)) for s in samples}
            job.incomplete = {step for step in samples if samples[step] != whole[step]}
            self.assertLessEqual(job.incomplete, {at + 1 for at, _ in plan.values()})
            if "NOISE" not in options:
                self.check_losses(job, workers)
            self.assertIn(f"sampler 'sampler': {full} samples a step, whatever the number of ranks", job.log(0, "err"))
            return {word: job.lines(word) for word in ("world", "begin", "step")}

    def test_in_backward(self):
        lines = self.train(2, {"1": (20, "backward")}, sizes=(1003, 8, 1))
        self.assertEqual([world[:5] for world in lines["world"][0]], [["0", "0", "0", "2", "2"], ["1", "20", "0", "1", "2"]])


@needs_torch
class KilledEverywhere(Killed):
    def test_in_backward(self):
        self.train(4, {"1": (20, "backward"), "0": (45, "between"), "3": (70, "step")}, sizes=(10007, 32, 2), PACE="0")

    def test_as_speeds_are_exchanged(self):
        self.train(3, {"1": (9, "between"), "0": (20, "forward")}, COHORT_SHARES="measured")

    def test_while_others_reduce_or_have_not_begun(self):
        self.train(3, {"2": (0, "forward"), "0": (41, "reduced")})

    def test_steps_and_rates_that_go_with_the_ranks(self):
        with Job("-np", "3", "--min-np", "1", plan={"1": (20, "backward")}, BATCH="scale") as job:
            job.end()
            samples = job.check(self)
            self.assertEqual({step: count for step, count in samples.items() if count not in (16, 24)}, {53: 11, 116: 11})
            self.assertEqual(samples[20], 24)
            self.assertIn("8 samples a step on each rank", job.log(0, "err"))
            self.assertIn("rates times ranks / 3", job.log(0, "err"))

    def test_with_loaders_that_read_ahead(self):
        for options in ({"num_workers": 2}, {"num_workers": 4, "persistent_workers": True}):
            with self.subTest(options):
                self.train(3, {"1": (20, "backward"), "0": (42, "between")}, sizes=(1003, 8, 3), LOADER=options)  # 0: all others

    def test_generators_and_statistics_are_those_of_the_last_step(self):
        lines = self.train(3, {"1": (20, "backward"), "2": (50, "backward")}, NOISE="1")
        begins = collections.defaultdict(set)
        for step, state in lines["begin"][0]:
            begins[step].add(state)
        redone = [step for step in ("20", "50") if sum(begin[0] == step for begin in lines["begin"][0]) > 1]
        self.assertEqual(redone, ["20", "50"])
        # (A DataLoader without workers draws a number as it begins: that of the step before has been drawn in both.)
        statistics = {step[1]: step[7] for step in lines["step"][0]}
        for world in lines["world"][0][1:]:
            self.assertEqual(world[6], statistics[world[1]])


@needs_torch
class Local(unittest.TestCase):
    """LocalSGD and DiLoCo: a remaining rank has taken each step once, with the parameters that it had."""

    def train(self, workers, plan, left):
        with Job("-np", str(workers), "--min-np", "1", program=LOCAL, sizes=(1003, 8, 2), plan=plan) as job:
            job.end()
            overs = [over for overs in job.lines("over").values() for over in overs]
            self.assertEqual(len(overs), left, job.said())
            steps = 2 * math.ceil(1003 / (8 * workers))
            self.assertEqual({tuple(over[:2]) for over in overs}, {(str(steps), str(steps))})
            self.assertEqual(len({over[2] for over in overs}), 1)
            self.assertTrue(elastic.audit(job.path / "r", {"sampler": 1003}))
            worlds, taken = job.lines("world"), job.lines("step")
            for worker, lines in worlds.items():
                for world in lines[1:]:
                    before = [step[5] for step in taken[worker] if step[1] == world[0]]
                    self.assertEqual(world[4], world[0])
                    self.assertIn(world[5], before, "goes on with its own parameters")

    def test_killed_in_a_round(self):
        self.train(2, {"1": (15, "forward")}, 1)

    def test_killed_at_synchronisations(self):
        self.train(3, {"1": (30, "between"), "0": (69, "forward")}, 1)

    def test_who_comes_has_what_all_had_last(self):
        with tempfile.TemporaryDirectory() as folder:
            hosts = pathlib.Path(folder) / "hosts"
            put(hosts, "a:2\n")
            options = ("--min-np", "1", "--starter", "local", "--host-discovery-script", f"cat {hosts}")
            with Job(*options, program=LOCAL, sizes=(10007, 8, 1), PACE="0.2") as job:
                job.wait_for_world(2)
                put(hosts, "a:2\nb:1\n")
                job.wait_for_world(3)
                (job.path / "fast").touch()
                job.end()
                first, second, joined = (job.lines("world")[worker] for worker in range(3))
                changed = first[-1]
                self.assertEqual(joined[0][:4:2], [changed[0], "3"], job.said())
                for other in (second[-1], joined[0]):
                    self.assertEqual([other[3], *other[6:]], [changed[3], *changed[6:]])
                self.assertEqual(second[-1][4], changed[0])
                self.assertIn(f"{changed[3]} steps before the next synchronisation", job.log(2, "err"))
                self.assertEqual(len({over[0][2] for over in job.lines("over").values() if over}), 1)
                self.assertTrue(elastic.audit(job.path / "r", {"sampler": 10007}))


@needs_torch
class Virtual(unittest.TestCase):
    """Virtual ranks: ranks that are lost, within a step too, leave the same weights, to the bit."""

    def train(self, workers, plan):
        with Job("-np", str(workers), "--min-np", "1", program=VIRTUAL, sizes=(253, 3, 1), plan=plan) as job:
            job.end()
            overs = [tuple(over) for overs in job.lines("over").values() for over in overs]
            self.assertEqual(len(overs), workers - len(plan), job.said())
            self.assertTrue(elastic.audit(job.path / "r", {"sampler": 253}))
            sizes = {world[2] for worlds in job.lines("world").values() for world in worlds}
            self.assertEqual(sizes, {str(size) for size in range(workers - len(plan), workers + 1)})
            return set(overs)

    def test_with_any_ranks(self):
        alone = self.train(1, {})
        self.assertEqual(alone, self.train(3, {"1": (5, 0), "0": (12, 1)}))
        self.assertEqual(len(alone), 1)


@needs_torch
class Hosts(unittest.TestCase):
    def test_ranks_come_and_go(self):
        with tempfile.TemporaryDirectory() as folder:
            hosts = pathlib.Path(folder) / "hosts"
            put(hosts, "a:4\n")
            options = ("--min-np", "1", "--starter", "local", "--host-discovery-script", f"cat {hosts}")
            with Job(*options, plan={"1": (10, "backward")}, sizes=(10007, 32, 3), PACE="0.2") as job:
                job.wait_for_world(4)
                job.wait_for_world(3)
                put(hosts, "a:4\nb:2\n")
                job.wait_for_world(5)
                put(hosts, "b:1\n")  # a's leave, and one of b's
                job.wait_for_world(1)
                (job.path / "fast").touch()
                job.end()
                samples = job.check(self)
                right = uninterrupted(10007, 128, 3)
                losses = job.losses()
                self.assertEqual(len(losses), len(right))
                whole = [step for step in samples if samples[step] == min(128, 10007 - 128 * ((step - 1) % 79))]
                self.assertGreaterEqual(len(whole), len(right) - 2)
                for step in whole:
                    self.assertLess(abs(losses[step] - right[step - 1]), 1e-3 * max(1.0, right[step - 1]), step)

    def test_told_to_end_all_save_at_the_same_step(self):
        with Job("-np", "2", "--min-np", "1", sizes=(100000, 8, 1)) as job:
            job.wait_for_world(2)
            job.command.send_signal(signal.SIGTERM)
            job.end(75)
            saves = [save for saves in job.lines("save").values() for save in saves]
            self.assertEqual(len(saves), 2, job.said())
            self.assertEqual(len({save[0] for save in saves}), 1, saves)
            self.assertTrue(elastic.audit(job.path / "r"))


@needs_torch
class Others(unittest.TestCase):
    def test_they_use_the_world(self):
        for how in ("hvd", "hvd before", "torch"):
            with self.subTest(how), Job("-np", "3", "--min-np", "1", program=OTHERS, HOW=how) as job:
                job.end()
                worlds = [world for world in job.lines("world")[0] if world[2] == "2"]
                self.assertEqual(worlds, [["30", "0", "2"]], job.said())
                overs = [over for overs in job.lines("over").values() for over in overs]
                self.assertEqual([over[0] for over in overs], ["84", "84"])
                self.assertEqual(overs[0], overs[1])
                self.assertTrue(elastic.audit(job.path / "r", {"sampler": 1003}))


class WithoutTorch(unittest.TestCase):
    def test_arrays(self):
        for plan in ({"1": (20, "reduced")}, {"0": (20, "between")}):
            with Job("-np", "3", "--min-np", "1", program=NUMPY, sizes=(1003, 8, 2), plan=plan) as job:
                job.end()
                overs = [over for overs in job.lines("over").values() for over in overs]
                self.assertEqual(len(overs), 2, job.said())
                self.assertEqual(overs[0], overs[1])
                self.assertEqual(overs[0][:2], ["84", "84"])
                found = elastic.audit(job.path / "r", {"sampler": 1003})
                self.assertTrue(found, found.problems)


class States(unittest.TestCase):
    """One process, no world or one of one."""

    def test_a_save_that_cannot_be_called_is_refused_at_once(self):
        for wrong in (lambda state: None, lambda state, world, folder: None, "save"):
            with self.assertRaisesRegex(cohort.InvalidArgument, "elastic.run: save=.* is called as save.state, world. -- "):
                elastic.run(lambda state, world: None, save=wrong)
        elastic.run(lambda state, world: None, save=print)

    def test_attributes(self):
        state = elastic.State()
        state.epoch, state.names = 3, ["a"]
        self.assertEqual((state.epoch, state.names), (3, ["a"]))
        kept = state._get_attributes()
        self.assertIsNot(kept, b"")
        state.names.append("b")
        state.epoch = 4
        self.assertNotEqual(state._get_attributes(), kept)
        state._set_attributes(kept)
        self.assertEqual((state.epoch, state.names), (3, ["a"]))
        del state.epoch
        for wrong in ("epoch", "nothing"):
            with self.assertRaises(AttributeError):
                getattr(state, wrong)
        for wrong in ("steps", "add", "_core"):
            with self.assertRaises(AttributeError):
                setattr(state, wrong, 1)

    def test_generators_go_back(self):
        from cohort.elastic import _random

        draws = [random.random, lambda: random.gauss(0, 1)]
        try:
            import numpy.random

            draws += [numpy.random.random, numpy.random.standard_normal]
        except ImportError:
            pass
        if torch is not None:
            draws.append(lambda: torch.rand(1).item())
        get, set_states = _random.access(_random.GlobalGenerators())
        for draw in draws:
            for before in range(4):
                kept = get()
                self.assertEqual(_random._python_global.getstate(), random.getstate())
                first = [draw() for _ in range(before)]
                if before == 3:
                    get()
                set_states(kept)
                self.assertEqual([draw() for _ in range(before)], first)
        self.assertIsNotNone(_random._python_global._watch)
        state, own = elastic.State(), random.Random(3)
        state.add("own", own)

    def test_what_cannot_be_kept_is_refused(self):
        state = elastic.State().add("sampler", DistributedSampler(10, 1, 0, batch_size=2))
        for name, thing, options, why in (
            ("sampler", DistributedSampler(10, batch_size=2), {}, "already"),
            ("all", DistributedSampler(10), {}, "no batch_size"),
            ("other", DistributedSampler(10, batch_size=2), {"batch": "more"}, "'keep' or 'scale'"),
            ("number", 3, {}, "state.number = ..."),
        ):
            with self.assertRaisesRegex(cohort.InvalidArgument, why):
                state.add(name, thing, **options)

    @needs_torch
    def test_what_of_torch_cannot_be_kept_is_refused(self):
        state, net = elastic.State(), torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for name, things, options, why in (
            ("loader", [torch.utils.data.DataLoader([1])], {}, "sampler's.*IterableDataset"),
            ("wrapped", [torch.nn.DataParallel(net)], {}, "wrap that in `train`"),
            ("optimizer", [optimizer, torch.nn.Linear(2, 2)], {}, "not the model's"),
            ("optimizer", [optimizer], {"scale_lr": "log"}, "scale_lr is 'log'"),
        ):
            with self.assertRaisesRegex(cohort.InvalidArgument, why):
                state.add(name, *things, **options)
        with self.assertRaisesRegex(cohort.InvalidArgument, "state.add"):
            state.model = net

    @needs_torch
    def test_two_optimizers_of_one_batch_use_it_once(self):
        for workers in (0, 2):
            for takes_sampler in (False, True):
                net, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
                sampler = DistributedSampler(22, 1, 0, batch_size=4)
                loader = torch.utils.data.DataLoader(torch.ones(22, 2), batch_sampler=sampler, num_workers=workers)
                state = elastic.State().add("net", net).add("other", other).add("sampler", sampler)
                at = []

                def train(state, _world):
                    how = {"sampler": sampler} if takes_sampler else {}
                    models = [cohort.nn.DistributedDataParallel(one, **how) for one in (net, other)]
                    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (net, other)]
                    while sampler.epoch < 2:
                        for batch in loader:
                            at.append(sampler.cursor)
                            for model, optimizer in zip(models, optimizers):
                                model(batch).mean().backward()
                                optimizer.step()
                                state.step()
                        self.assertEqual(sampler.steps_left(), 0)
                        sampler.next_epoch()

                self.run_alone(state, train)
                self.assertEqual((at, state.steps), ([0, 4, 8, 12, 16, 20] * 2, 24), (workers, takes_sampler))

    @needs_torch
    def test_a_schedule_after_the_step_is_warned_of(self):
        if not hasattr(torch.optim.Optimizer, "register_step_pre_hook"):
            self.skipTest("this torch has no hooks of optimizers")
        for late, each_step in ((True, True), (False, True), (True, False)):
            net = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            state = elastic.State().add("net", net).add("rate", schedule)

            def train(state, _world):
                for step in range(8):
                    optimizer.step()
                    if not late:
                        schedule.step()
                    state.step()
                    if late and (each_step or step % 2 == 1):  # else after an epoch
                        schedule.step()

            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                elastic.run(train)(state)
            cohort.shutdown()
            warned = said.getvalue().count("the schedule 'rate' goes on after each state.step()")
            self.assertEqual(warned, 1 if late and each_step else 0, said.getvalue())

    def run_alone(self, state, train, **options):
        program = elastic.run(train, **options)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                return program(state)
        finally:
            cohort.shutdown()

    def test_a_job_that_is_not_elastic_has_one_world(self):
        state = elastic.State()
        state.count = 0
        worlds = []
        with tempfile.TemporaryDirectory() as folder:
            sampler = DistributedSampler(10, 1, 0, batch_size=2)
            state.add("sampler", sampler)
            state.on_change(worlds.append)

            def train(state, world, more):
                for _ in sampler:
                    state.count += 1
                    state.step()
                return world.size + more

            ledger = os.path.join(folder, "samples-0.jsonl")
            state.set_steps(7)
            with contextlib.redirect_stderr(io.StringIO()) as said:
                try:
                    self.assertEqual(elastic.run(ledger=ledger)(train)(state, 5), 6)
                finally:
                    cohort.shutdown()
            self.assertEqual((state.steps, state.count, sampler.cursor, len(worlds)), (12, 5, 10, 1))
            policy = "cohort: elastic: sampler 'sampler': 2 samples a step, whatever the number of ranks\n"
            self.assertEqual(said.getvalue(), policy)
            self.assertEqual(elastic.audit(folder, {"sampler": 10}).epochs, {("sampler", 0): 10})
        for error in (cohort.PeerLost("rank 3 is gone"), ValueError("mine")):

            def fail(state, world):
                raise error

            with self.assertRaises(type(error)) as raised:
                self.run_alone(elastic.State(), fail)
            self.assertIs(raised.exception, error)

    def test_a_sampler_is_stepped_once(self):
        sampler, other = DistributedSampler(12, 1, 0, batch_size=2), DistributedSampler(12, 1, 0, batch_size=2)
        state = elastic.State().add("sampler", sampler).add("other", other)

        def train(state, world):
            for _ in range(3):
                cursor = sampler.cursor
                sampler.next_batch()
                sampler.next_batch()
                state.step()  # steps over the first
                self.assertEqual(sampler.cursor, cursor + 2)
                sampler.step()  # by hand
                state.step()
                self.assertEqual(sampler.cursor, cursor + 4)

        self.run_alone(state, train)
        self.assertEqual(other.cursor, 0)

    def test_losses_are_found_in_what_became_of_them(self):
        lost = cohort.PeerLost("rank 1 is gone")
        for error, found in (
            (lost, lost),
            (elastic.MembershipChanged("now"), None),
            (ValueError("mine"), False),
            (RuntimeError("Got the following error when running the callback: PeerLost: all_reduce failed"), "all_reduce failed"),
        ):
            got = elastic._run._loss_in(error)
            if found is False:
                self.assertIsNone(got)
            elif isinstance(found, str):
                self.assertEqual((type(got), str(got)), (cohort.PeerLost, found))
            else:
                self.assertIs(got, found or error)
        try:
            try:
                raise lost
            except cohort.PeerLost as error:
                raise RuntimeError("framework") from error
        except RuntimeError as error:
            self.assertIs(elastic._run._loss_in(error), lost)

    @needs_torch
    def test_rates_are_exactly_back_at_the_first_size(self):
        net = torch.nn.Linear(2, 2)
        for kind, factor in (("linear", 3 / 7), ("sqrt", (3 / 7) ** 0.5)):
            optimizer = torch.optim.SGD([{"params": [net.weight], "lr": 0.1}, {"params": [net.bias], "lr": 0.03}])
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.7**epoch)
            state = elastic.State().add("optimizer", optimizer, scale_lr=kind).add("schedule", schedule)
            from cohort.elastic import _torch

            rates = _torch._Rates(optimizer, _torch._SCALES[kind], lambda: _torch._schedules_of(state, optimizer))
            rates.scale(3, 7)
            for group, rate in zip(optimizer.param_groups, (0.1, 0.03)):
                self.assertAlmostEqual(group["lr"], rate * factor, places=12)
            self.assertEqual(schedule.base_lrs, [group["initial_lr"] for group in optimizer.param_groups])
            rates.scale(5, 7)
            rates.scale(7, 7)
            self.assertEqual([group["lr"] for group in optimizer.param_groups], [0.1, 0.03])
            self.assertEqual((schedule.base_lrs, schedule.get_last_lr()), ([0.1, 0.03], [0.1, 0.03]))
            rates.scale(3, 7)
            optimizer.step()
            schedule.step()
            self.assertAlmostEqual(optimizer.param_groups[0]["lr"], 0.1 * factor * 0.7, places=12)
            rates.scale(7, 7)
            self.assertAlmostEqual(optimizer.param_groups[0]["lr"], 0.07, places=15)
            self.assertEqual(schedule.base_lrs, [0.1, 0.03])

    @needs_torch
    def test_what_others_have_is_taken_over(self):
        def make(kind, steps):
            torch.manual_seed(steps)
            net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Conv1d(1, 2, 3))
            optimizer = kind(net.parameters(), 0.1)
            for _ in range(steps):
                optimizer.zero_grad()
                sum(p.square().sum() for p in net.parameters()).backward()
                optimizer.step()
            return net, optimizer

        class Recorder:
            """In the place of the core's State."""

            def __init__(self):
                self.parts, self.values = {}, {}

            def add_part(self, name, *functions):
                self.parts[name] = functions

            def add_value(self, name, get, put, per_rank):
                self.values[name] = get, put

            def on_change(self, callback):
                pass

        for kind in (torch.optim.SGD, torch.optim.Adam, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9), torch.optim.Adagrad):
            states = []
            for steps in (3, 0, 1):
                net, optimizer = make(kind, steps)
                core = Recorder()
                state = elastic.State()
                state.__dict__["_core"] = core
                state.add("model", net).add("optimizer", optimizer, net)
                states.append((net, optimizer, core))
            net, optimizer, core = states[0]
            for other, others, others_core in states[1:]:
                for name, (contents, _, _) in core.parts.items():
                    layout, items = contents()
                    versions = others_core.parts[name][2]()
                    others_core.parts[name][1](layout, [(key, memoryview(bytearray(bytes(data.numpy())))) for key, data in items])
                    if items:
                        self.assertNotEqual(others_core.parts[name][2](), versions, name)
                for name, (get, _) in core.values.items():
                    got = get()
                    others_core.values[name][1](bytes(got))
                for mine, his in zip(net.state_dict().values(), other.state_dict().values()):
                    self.assertTrue(torch.equal(mine, his))
                for a, b in ((net, optimizer), (other, others)):
                    b.zero_grad()
                    sum(p.square().sum() for p in a.parameters()).backward()
                    b.step()
                for mine, his in zip(net.parameters(), other.parameters()):
                    self.assertTrue(torch.equal(mine, his))
            with self.assertRaisesRegex(cohort.InvalidArgument, "is another one on another rank"):
                core.parts["model"][1](b"weight float32 [3]", [])


class Audits(unittest.TestCase):
    def audit(self, text, sizes=None, more=""):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "samples-0.jsonl").write_text(textwrap.dedent(text))
            if more:
                (pathlib.Path(folder) / "samples-3.jsonl").write_text(textwrap.dedent(more))
            return elastic.audit(folder, sizes)

    @staticmethod
    def line(begin, end, first, last, epoch=0, world=0):
        line = {"world": world, "sampler": "s", "epoch": epoch, "samples": [begin, end], "steps": [first, last]}
        return json.dumps(line) + "\n"

    @staticmethod
    def head(world, step, epoch, cursor, **more):
        return json.dumps({"world": world, "size": 2, "step": step, "samplers": {"s": [epoch, cursor]}, **more}) + "\n"

    def test_what_is_right(self):
        text = self.head(0, 0, 0, 0) + self.line(0, 10, 1, 5) + self.line(10, 20, 6, 10)
        found = self.audit(text + self.line(0, 4, 11, 12, 1) + '{"world":0,"sam', {"s": 20}, more=self.line(8, 20, 5, 10))
        self.assertTrue(found, found.problems)
        self.assertEqual(found.epochs, {("s", 0): 20, ("s", 1): 4})

    def test_what_the_next_world_does_again_counts_once(self):
        text = self.head(0, 0, 0, 0) + self.line(0, 10, 1, 5) + self.line(0, 2, 6, 6, 1)
        for cursor in (6, 10):
            more = self.head(1, 5, 0, cursor) + self.line(cursor, 10, 4, 5, 0, 1) * (cursor < 10) + self.line(0, 7, 6, 8, 1, 1)
            found = self.audit(text, {"s": 10}, more)
            self.assertTrue(found, found.problems)
            self.assertEqual(found.epochs, {("s", 0): 10, ("s", 1): 7})

    def test_what_is_missing_or_repeated(self):
        one = self.line(0, 10, 1, 5)
        for text, sizes, why in (
            (one + self.line(12, 20, 6, 10), None, "samples-0.jsonl:2: .*samples 10 to 11 are in no line before"),
            (self.line(2, 10, 1, 5), None, "samples-0.jsonl:1: .*samples 0 to 1 are in no line before"),
            (one + self.line(8, 20, 6, 10), None, "samples-0.jsonl:2: .*samples 8 to 9 are used once more, after .*jsonl:1"),
            (one + self.line(2, 4, 6, 7), None, "samples-0.jsonl:2: .*samples 2 to 3 are used once more, after .*jsonl:1"),
            (one + self.line(9, 12, 5, 5, 0, 1), None, "samples 9 to 9 are used once more"),
            (one + self.line(0, 10, 6, 9, 1), {"s": 12}, "epoch 0: 10 of 12 samples are used"),
            (self.line(0, 13, 1, 5), {"s": 12}, "epoch 0: 13 of 12 samples are used"),
            (self.line(0, 9, 1, 5) + self.line(0, 9, 6, 9, 2), None, "nothing of epoch 1 is used, and epoch 2 is"),
        ):
            found = self.audit(text, sizes)
            self.assertFalse(found)
            self.assertEqual(len(found.problems), 1, found.problems)
            self.assertRegex(found.problems[0], why)

    def test_a_world_that_begins_anew(self):
        text = self.head(0, 0, 0, 0) + self.line(0, 128, 1, 64)
        for world, restart, right in ((1, 0, False), (1, 1, True)):
            anew = self.head(world, 0, 0, 0, **({"restart": restart} if restart else {}))
            found = self.audit(text, {"s": 200}, anew + self.line(0, 200, 1, 100, 0, 1) + self.line(0, 2, 101, 101, 1, 1))
            self.assertEqual(bool(found), right)
            self.assertEqual(found.epochs, {("s", 0): 200, ("s", 1): 2})
            if not right:
                why = "samples-3.jsonl:1: world 1 begins after step 0, and world 0 had ended step 64: 64 steps are trained anew"
                self.assertRegex(found.problems.pop(), why)
                self.assertEqual(found.problems, [])

    def test_a_training_that_goes_on_in_another_run(self):
        with tempfile.TemporaryDirectory() as folder:
            days = [pathlib.Path(folder, name) for name in ("day1", "day2", "day3")]
            for day, text in zip(
                days,
                (
                    self.head(0, 0, 0, 0) + self.line(0, 10, 1, 5) + self.line(0, 6, 6, 8, 1),
                    # It goes on from the checkpoint of step 7.
                    self.head(0, 7, 1, 4) + self.line(4, 8, 8, 9, 1) + self.head(1, 8, 1, 6) + self.line(6, 10, 9, 10, 1, 1),
                    self.head(0, 11, 2, 2) + self.line(2, 10, 12, 15, 2),
                ),
            ):
                day.mkdir()
                (day / "samples-0.jsonl").write_text(text)
            found = elastic.audit(days[:2], {"s": 10})
            self.assertTrue(found, found.problems)
            self.assertEqual((found.epochs, found.begins), ({("s", 0): 10, ("s", 1): 10}, {"s": (0, 0)}))
            found = elastic.audit(str(days[1]), {"s": 10})
            self.assertTrue(found, found.problems)
            self.assertEqual((found.epochs, found.begins), ({("s", 1): 6}, {"s": (1, 4)}))
            found = elastic.audit(days, {"s": 10})
            self.assertEqual(len(found.problems), 1)
            self.assertRegex(found.problems[0], "day3.samples-0.jsonl:2: .*epoch 2: samples 0 to 1 are in no line before")
            with self.assertRaisesRegex(cohort.InvalidArgument, "no folder"):
                elastic.audit([])

    def test_what_is_no_ledger(self):
        with self.assertRaisesRegex(cohort.InvalidArgument, "no ledger"), tempfile.TemporaryDirectory() as folder:
            elastic.audit(folder)
        for text in ("[]\n", "{\n", '{"sampler": "s"}\n'):
            with self.assertRaisesRegex(cohort.Corrupt, r"samples-0.jsonl:1"):
                self.audit(text)


if __name__ == "__main__":
    unittest.main()
