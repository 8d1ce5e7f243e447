"""Workers or hosts of an elastic job of `cohort run` are lost one after another, and others come: how long until those that
are left have done their next step, and where that time goes; or what share of the time has gone into steps.

    PYTHONPATH=build/release/python:python/tests python bench/elastic_faults.py [--ranks 4] [--faults 200] [--torch]
    ... --hosts 8                one rank on each host of a box (tools/cluster-box; needs root)
    ... --hosts 4 --lost host    the cables of hosts are taken out
    ... --every 15 --minutes 5   a worker is killed so often: the share of the time that went into steps

Without --hosts this machine plays twice as many hosts as ranks, so that another worker starts as soon as the launcher
has looked for hosts (each second). --torch: workers that train by cohort.horovod.torch, and need seconds to import torch; else
their steps are collectives of Cohort's Horovod API alone.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import random
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "cluster"))

from support_elastic import TRAINING
from test_run_elastic import Job

PATIENCE = 60.0

PLAIN = """
import os, time
import cohort
from cohort import _core
from cohort.horovod import basics, elastic
from cohort.horovod.objects import allgather_object, broadcast_object

stop = os.path.join(os.environ["FOLDER"], "stop")
hvd.init()
state = elastic.ObjectState(step=0)

@elastic.run
def train(state):
    while not broadcast_object(os.path.exists(stop), 0, "stop"):
        assert sum(allgather_object(1, "total")) == basics.size()
        state.step += 1
        print("step", time.monotonic_ns(), _core.formed_epoch(), state.step, basics.rank(), basics.size(), "-", flush=True)
        time.sleep(float(os.environ.get("PACE", "0.01")))
        state.commit()

train(state)
"""

# Prints the times at which each phase begins and ends.
MARKS = """
import cohort
from cohort.horovod import basics, elastic

def marked(name, function):
    def call(*args, **kwargs):
        begun = time.monotonic_ns()
        try:
            return function(*args, **kwargs)
        finally:
            print("mark", name, begun, time.monotonic_ns(), flush=True)
    return call

basics.form_again = marked("form_again", basics.form_again)
cohort.init = marked("init", cohort.init)
elastic.State.on_reset = marked("reset", elastic.State.on_reset)
basics.init()
"""
# Imports early what torch imports at first use: after `init` the others would wait for it.
WARM = """
warm = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
warm.param_groups[0]["params"][0].sum().backward()
warm.step()
"""


class Worker:
    """A worker's output so far."""

    def __init__(self, path):
        self.path, self.read, self.pid = path, 0, None
        self.steps, self.marks = [], []

    def look(self):
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self.read)
            new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            self.read += len(new)
            for what, *words in map(str.split, new.decode().splitlines()):
                if what == "pid":
                    self.pid = int(words[0])
                elif what == "step":
                    self.steps.append(tuple(map(int, words[:5])))  # time, epoch, step, rank, size
                elif what == "mark":
                    self.marks.append((words[0], int(words[1]), int(words[2])))
        return self


class Faults:
    def __init__(self, job, ranks, choose):
        self.job, self.ranks, self.choose = job, ranks, choose
        self.workers = {}
        self.phases = {}

    def members(self):
        """(epoch, workers by rank, when it began) of each epoch; times as time.monotonic_ns()."""
        try:
            found = json.loads((self.job.path / "r/job.json").read_text())["members"]
        except (OSError, ValueError, KeyError):
            return []
        to_monotonic = time.monotonic() - time.time()
        return [(one["epoch"], one["workers"],
                 (datetime.datetime.fromisoformat(one["time"].replace("Z", "+00:00")).timestamp() + to_monotonic) * 1e9)
                for one in found]  # fmt: skip

    def worker(self, number):
        if number not in self.workers:
            self.workers[number] = Worker(self.job.path / "r/logs" / f"rank-{number}.out")
        return self.workers[number].look()

    def wait_until(self, what, condition):
        limit = time.monotonic() + PATIENCE
        while not (found := condition()):
            if time.monotonic() > limit or self.job.command.poll() is not None:
                raise AssertionError(f"{what}: not after {PATIENCE:g} s\n{self.job.said()[-3000:]}")
            time.sleep(0.004)
        return found

    def all_train(self):
        """The latest epoch, if all of its members have done a step in it and there are as many as wanted."""
        known = self.members()
        if not known or len(known[-1][1]) != self.ranks:
            return None
        trains = all(steps and steps[-1][1] == known[-1][0] for steps in (self.worker(w).steps for w in known[-1][1]))
        return known[-1] if trains else None

    def note(self, phase, nanoseconds):
        self.phases.setdefault(phase, []).append(nanoseconds / 1e6)

    def fault(self, lose):
        """`lose(workers)` loses some of them, and returns which, and how to bring it back."""
        epoch, workers, _ = self.wait_until("all train", self.all_train)
        time.sleep(self.choose.random() * 0.1)  # anywhere in a step
        before = time.monotonic_ns()
        lost, heal = lose(workers)
        left = [w for w in workers if w not in lost]

        def first_steps():
            found = [next((s for s in self.worker(w).steps[-500:] if s[1] > epoch), None) for w in left]
            return found if all(found) else None

        steps = self.wait_until(f"{left} train without {lost}", first_steps)
        known = self.wait_until("the record", lambda: [one for one in self.members() if one[0] > epoch])
        heal()
        self.note("next step of all", max(s[0] for s in steps) - before)
        self.note("detect: death to the decision", known[0][2] - before)
        if all(s[1] == known[0][0] for s in steps):
            marks = [{n: (b, e) for n, b, e in reversed(self.worker(w).marks[-12:]) if b > before} for w in left]
            formed = [m["init"][1] for m in marks if "init" in m]
            if formed:
                self.note("  error raised", max(m["form_again"][0] for m in marks if "form_again" in m) - before)
                self.note("re-form: decision to the world", max(formed) - known[0][2])
                self.note("state and next step", max(s[0] for s in steps) - max(formed))


    def note_growth(self):
        """Between two steps, of those that were there."""
        for worker in self.workers.values():
            for before, after in zip(worker.look().steps, worker.steps[1:]):
                if after[1] > before[1] and after[4] > before[4] and after[3] == 0:
                    self.note("a newcomer: between two steps", after[0] - before[0])


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def tell(what, values):
    print(f"{what:32} p50 {percentile(values, 0.5):8.1f} ms   p95 {percentile(values, 0.95):8.1f} ms   "
          f"max {max(values):8.1f} ms   of {len(values)}")  # fmt: skip


def share_of_steps(faults, begun, ended):
    """The usual step in ms; of the time, what did not go into changes of members (from the last step of an epoch to the first
    new one in another, less a step); the same with missing workers counted; and the changes, in ms."""
    steps = {}
    for worker in faults.workers.values():
        for when, epoch, step, _, size in worker.look().steps:
            if begun <= when <= ended and when < steps.get(step, (ended,))[0]:
                steps[step] = (when, epoch, size)
    done = sorted(steps.values())
    pairs = list(zip(done, done[1:]))
    usual = percentile([b[0] - a[0] for a, b in pairs], 0.5)
    changes = [max(0, b[0] - a[0] - usual) for a, b in pairs if a[1] != b[1]]
    within = [(b[0] - a[0]) * b[2] / faults.ranks for a, b in pairs if a[1] == b[1]]
    whole = done[-1][0] - done[0][0]
    return usual / 1e6, 1 - sum(changes) / whole, sum(within) / whole, [change / 1e6 for change in changes]


class InBox(Job):
    """The command runs on the box's first host."""

    def __init__(self, box, *options, script):
        self.box = box
        super().__init__(*options, script=script)

    def words(self, *command):
        return self.box.words("h1", "env", f"FOLDER={self.path}", f"PACE={os.environ.get('PACE', '0.01')}", *command)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="of the job (with --hosts: one on each)")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--hosts", type=int, default=0)
    parser.add_argument("--lost", choices=("process", "host"), default="process")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--every", type=float, default=0.0, help="seconds")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    choose = random.Random(arguments.seed)
    ranks = arguments.hosts or arguments.ranks
    script = TRAINING if arguments.torch else PLAIN
    script = script.replace("hvd.init()\n", (WARM if arguments.torch else "") + MARKS, 1)
    with contextlib.ExitStack() as stack:
        hosts = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / "hosts"
        names = [f"h{n + 1}" for n in range(arguments.hosts or 2 * ranks)]
        hosts.write_text("".join(f"{name}:1\n" for name in names))
        options = ["-np", str(ranks), "--min-np", "1", "--max-np", str(ranks), "--host-discovery-script", f"cat {hosts}",
                   "--blacklist-cooldown-range", "1", "1"]  # fmt: skip
        if arguments.hosts:
            import boxes

            box = boxes.Box("elastic", "--hosts", str(arguments.hosts))
            stack.callback(box.down)
            job = stack.enter_context(InBox(box, *options, script=script))
        else:
            job = stack.enter_context(Job(*options, "--starter", "local", script=script))
        faults = Faults(job, ranks, choose)

        def kill(workers):
            lost = choose.choice(workers)
            os.kill(faults.worker(lost).pid, 9)
            return [lost], lambda: None

        def cut(workers):
            host = choose.choice(names[1:])
            on_host = {pid for pid in box.processes(host)}
            lost = [w for w in workers if faults.worker(w).pid in on_host]
            box.act("cut", host)

            def heal():
                time.sleep(5.0)  # until what was left there has noticed, too
                box.act("heal", host)

            return lost, heal

        print("load", " ".join(pathlib.Path("/proc/loadavg").read_text().split()[:3]), flush=True)
        if arguments.every:
            faults.wait_until("all train", faults.all_train)
            begun = time.monotonic_ns()
            for number in range(1, int(60 * arguments.minutes / arguments.every) + 1):
                time.sleep(max(0.0, begun / 1e9 + number * arguments.every - time.monotonic()))
                kill(faults.members()[-1][1])
            time.sleep(arguments.every)
            step, all_steps, by_workers, changes = share_of_steps(faults, begun, time.monotonic_ns())
            print(f"a fault per {arguments.every:g} s, a step of {step:.0f} ms: {100 * all_steps:.1f} % of the time went into "
                  f"steps; {100 * by_workers:.1f} % with missing workers counted")  # fmt: skip
            tell("a change, between two steps", changes)
        for _ in range(0 if arguments.every else arguments.faults):
            faults.fault(kill if arguments.lost == "process" else cut)
        job.stop()
        faults.note_growth()
    for what, values in faults.phases.items():
        tell(what, values)


if __name__ == "__main__":
    main()
