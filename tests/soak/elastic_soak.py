#!/usr/bin/env python3
"""One elastic training over the hosts of a box whose members change every few seconds, for as long as is asked for.

The training is tests/e2e/elastic_training_peer.cpp, two workers on the first host and one on each other. Every few seconds a worker
but the first gets SIGKILL, SIGSTOP or SIGTERM, or the agent of a host but the first, or such a host is drained or removed; a host
without a worker is added again. In the end the job is told to end, and saves.

  ends     with 75, after a save of the furthest step
  audit    each epoch that has ended has used each sample once, and no world begins before a step that another had ended
  growth   launcher, agent and worker of the first host have no more memory (5 %, at least 2 MiB), descriptors and threads (10 %, at
           least 4) in the last quarter than in the second; /dev/shm has no more files
  nothing  is left: no process

Needs root (tools/cluster-box).
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import statistics
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
import attempts  # noqa: E402
from soak import processes, series  # noqa: E402

SAMPLES, BATCH, EPOCHS, PACE_MS = 1003, 4, 100000, 25
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
STARTED = 60.0  # seconds for all hosts to have a worker at the start

Figures = collections.namedtuple("Figures", "kib descriptors threads")


def figures_of(pid):
    """Memory of its own, open descriptors and threads; None if the process has gone."""
    status = dict(re.findall(r"^(\w+):\s+(\d+)", processes.read(pid, "status").decode(), re.MULTILINE))
    with contextlib.suppress(OSError, KeyError):
        return Figures(int(status["RssAnon"]), len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]))
    return None


class Soak(attempts.Attempt):
    def __init__(self, options, place, folder):
        self.options, self.draw, self.folder = options, random.Random(options.seed), folder
        self.cohort = series.program(options.build, "cohort")
        self.peer = series.program(options.build, "elastic_training_peer")
        self.others = place.box.hosts[1:]
        hosts = ",".join(f"{host}:{1 if host in self.others else 2}" for host in place.box.hosts)
        super().__init__(place, self.cohort, ["-q", "-H", hosts, "--min-np", "1", "--max-np", str(options.hosts + 1), "--stopped-timeout",
                                              "2", "--preempt-grace", "6", "--blacklist-cooldown-range", "1", "2"],
                         [self.peer, SAMPLES, BATCH, EPOCHS, PACE_MS], folder, 0, environment={})
        self.run = folder / "job-0"
        self.done, self.seen = collections.Counter(), collections.defaultdict(list)

    def find(self):
        """The processes of each host: {host: {"launcher", "agent", "rank": pid}}; the oldest worker of a host is its "rank", and the
        youngest of several its "newest"."""
        found = collections.defaultdict(dict)
        for pid, (host, line) in self.place.box.new_processes("^sshd|cluster-box").items():
            for kind in ("rank", "agent", "launcher"):
                if not re.search(self.patterns[kind], line):
                    continue
                if kind == "rank" and kind in found[host]:
                    pair = sorted((pid, found[host]["rank"]), key=lambda one: (-processes.age_of(one), one))
                    found[host]["rank"], found[host]["newest"] = pair
                else:
                    # The agent is the child of the guard around it, whose command line is the same.
                    found[host][kind] = max(pid, found[host].get(kind, 0)) if kind == "agent" else pid
        return found

    def change(self):
        """Makes one change of the members, by chance."""
        found, host = self.find(), self.draw.choice(self.others)
        idle = [one for one in self.others if "rank" not in found[one]]
        how = self.draw.choice(("kill", "kill", "stop", "term"))
        if "newest" in found["h1"] and self.draw.random() < 0.25:
            what = self.strike_at("h1", "newest", how, found)
        elif len(idle) > 1 or host in idle:
            what = self.order("add", f"{self.draw.choice(idle)}:1")
        elif self.draw.random() < 0.3:
            what = self.order(self.draw.choice(("drain", "remove")), host)
        else:
            what = self.strike_at(host, self.draw.choice(("rank", "rank", "agent")), how, found)
        self.done[what] += 1

    def order(self, what, host):
        refused = self.place.box.run("h1", self.cohort, "ctl", self.run, what, host).returncode
        return f"{what} (refused)" if refused else what

    @staticmethod
    def strike_at(host, kind, how, found):
        there = kind in found[host] and processes.send([found[host][kind]], SIGNALS[how])
        return f"{how} {kind}" if there else f"{how} {kind} (gone)"

    def measure(self):
        first = self.find()["h1"]
        for kind in ("launcher", "agent", "rank"):
            if kind in first and (figures := figures_of(first[kind])):
                self.seen[kind].append(figures)
        self.seen["/dev/shm"].append(len(os.listdir("/dev/shm")))

    def last(self):
        return ", ".join(f"{kind} {seen[-1].kib / 1024:.1f} MiB {seen[-1].descriptors} files {seen[-1].threads} threads"
                         for kind, seen in self.seen.items() if kind != "/dev/shm")

    def growth(self):
        """Yields each figure that has grown from the second to the last quarter."""
        for kind, seen in self.seen.items():
            second, last = seen[len(seen) // 4:len(seen) // 2], seen[-(len(seen) // 4):]
            if kind == "/dev/shm":
                if statistics.median(last) > statistics.median(second):
                    yield f"/dev/shm: {second} files, then {last}"
                continue
            for field in Figures._fields:
                before, after = (statistics.median(getattr(one, field) for one in part) for part in (second, last))
                if after > before + (max(2048, before * 0.05) if field == "kib" else max(4, before * 0.1)):
                    yield f"{kind}: {before:g} {field}, then {after:g}"


def soak(options, place, folder):
    with Soak(options, place, folder) as training:
        ready = training.until(lambda: all("rank" in training.find()[host] for host in place.box.hosts), time.monotonic() + STARTED, 0.2)
        assert ready, f"ends: it does not begin: {training.output()}"
        end = time.monotonic() + options.seconds
        while training.running() and (now := time.monotonic()) < end:
            training.change()
            training.measure()
            count = sum(training.done.values())
            if count % 30 == 0:
                print(f"{count} changes, {training.complaints().count('goes on with')} worlds: {training.last()}", flush=True)
            time.sleep(max(0.0, now + options.every - time.monotonic()))
        assert training.running(), f"ends: with {training.wait(0)}, before it was told to: {training.output()[-6000:]}"
        processes.send([training.find()["h1"]["launcher"]], signal.SIGTERM)
        status = training.ended(60)
        worlds = training.complaints().count("goes on with")
        logs = [path.read_text(errors="replace") for path in (training.run / "logs").glob("rank-*.out")]
        saved = [int(step) for log in logs for step in re.findall(r"saved after step (\d+)", log)]
        print(f"{dict(training.done)}, {worlds} worlds, {max(saved, default=0)} steps: {training.last()}")
        assert status == 75 and saved, f"ends: with {status}, saved {saved}: {training.output()[-6000:]}"
        sys.path.insert(0, str(options.build / "python"))
        from cohort.elastic import audit

        found = audit(training.run, {"sampler": SAMPLES})
        assert found, f"audit: {found.problems}"
        ended = sorted(found.epochs)[:-1]  # the last is under way
        assert ended and all(found.epochs[epoch] == SAMPLES for epoch in ended), f"audit: {found.epochs}"
        begun = [json.loads(line) for path in training.run.glob("samples-*.jsonl") for line in path.read_text().splitlines()
                 if '"size"' in line and line.endswith("}")]
        furthest = max(begin["step"] for begin in begun)
        assert max(saved) >= furthest, f"ends: saved {saved}, and a world had begun at step {furthest}"
        grown = [*training.growth()]
        assert not grown, f"growth: {'; '.join(grown)}"


def main():
    parser = argparse.ArgumentParser(prog="tools/soak/elastic-soak", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=series.ROOT / "build/release", help="the build folder [build/release]")
    parser.add_argument("--seconds", type=float, default=1800, help="how long the members change [1800]")
    parser.add_argument("--every", type=float, default=10, help="seconds from a change to the next [10]")
    parser.add_argument("--hosts", type=int, default=4, help="hosts of the box [4]")
    parser.add_argument("--seed", default="1", help="for the changes [1]")
    options = parser.parse_args()
    if options.seconds < 8 * options.every:
        parser.error("--seconds of at least 8 times --every are wanted, so that there are quarters to compare")
    try:
        place = attempts.InBox(options.hosts)
    except unittest.SkipTest as reason:
        print(f"skipped: {reason}")
        return 77
    with contextlib.closing(place), tempfile.TemporaryDirectory(prefix="elastic-soak-") as folder:
        try:
            soak(options, place, pathlib.Path(folder))
        except AssertionError as problem:
            print(f"NOT AS IT SHOULD BE: {problem}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
