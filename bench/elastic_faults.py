"""Workers of an elastic job are killed one after another: how long until those that are left have done their next step, and
where that time goes. A newcomer takes the place of each. The script plays the job's supervisor itself, which hears of a
death as soon as the kernel has freed the process.

    PYTHONPATH=build/release/python:python/tests ELASTIC_STORE=build/release/bin/elastic_store \\
        python bench/elastic_faults.py [--ranks 4] [--faults 30]
"""

import argparse
import random
import re
import time

from support_elastic import TRAINING, ElasticJob

# When each phase is over, in the words of the log.
MARKS = """
import cohort
from cohort.hvd import basics, elastic

def marked(name, function):
    def call(*args, **kwargs):
        begun = time.monotonic_ns()
        try:
            return function(*args, **kwargs)
        finally:
            print("mark", name, begun, time.monotonic_ns(), flush=True)
    return call

basics.form_again = marked("form_again", basics.form_again)
cohort.init = marked("join", cohort.init)
basics.shutdown = marked("leave", basics.shutdown)
# What torch imports when it is first used.
warm = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
warm.param_groups[0]["params"][0].sum().backward()
warm.step()
hvd.elastic.TorchState.sync = marked("sync", hvd.elastic.TorchState.sync)
"""


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def tell(what, values):
    print(f"{what:34} p50 {percentile(values, 0.5):8.1f} ms   p95 {percentile(values, 0.95):8.1f} ms   max {max(values):8.1f} ms")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    choose = random.Random(arguments.seed)
    script = TRAINING.replace("hvd.init()\n", MARKS + "\nprint('joining', flush=True)\nhvd.init()\n", 1)
    phases = {name: [] for name in ("to next step of all", "process freed", "error raised, world left", "join", "sync",
                                    "growing: longest gap of a step")}  # fmt: skip
    members = list(range(arguments.ranks))
    with ElasticJob(script, workers=arguments.ranks + arguments.faults + 1) as job:
        job.begin(*members)
        job.start(*members)
        for rank, worker in enumerate(members):
            job.wait_for_step(worker, 0, rank, len(members))
        for fault in range(arguments.faults):
            lost = choose.choice(members)
            members.remove(lost)
            killed = job.kill(lost)
            job.workers[lost].wait()
            phases["process freed"].append((time.monotonic_ns() - killed) / 1e6)
            job.begin(*members)
            epoch = job.epoch
            steps = [job.wait_for_step(worker, epoch, rank, len(members)) for rank, worker in enumerate(members)]
            phases["to next step of all"].append((max(steps) - killed) / 1e6)
            for worker in members:
                marks = {}
                for name, begun, ended in re.findall(r"^mark (\w+) (\d+) (\d+)$", job.log(worker), re.MULTILINE):
                    if killed < int(begun) < max(steps):
                        marks.setdefault(name, (int(begun), int(ended)))
                if "join" in marks:
                    phases["error raised, world left"].append((marks["join"][0] - killed) / 1e6)
                    phases["join"].append((marks["join"][1] - marks["join"][0]) / 1e6)
                if "sync" in marks:
                    phases["sync"].append((marks["sync"][1] - marks["sync"][0]) / 1e6)
            newcomer = arguments.ranks + fault
            members.append(newcomer)
            job.start(newcomer)  # the others are told once it has come as far as `init`
            job.wait_for(newcomer, "^joining")
            job.begin(*members)
            for rank, worker in enumerate(members):
                job.wait_for_step(worker, job.epoch, rank, len(members))
            oldest = [step[0] for step in job.steps(members[0]) if step[1] in (epoch, job.epoch)]
            phases["growing: longest gap of a step"].append(max(b - a for a, b in zip(oldest, oldest[1:])) / 1e6)
        job.stop()
    for what, values in phases.items():
        if values:
            tell(f"{arguments.ranks} ranks: {what}", values)


if __name__ == "__main__":
    main()
