#!/usr/bin/env python3
"""Kills a training again and again, resumes it, and compares its result with that of a training that nobody killed.

The training is examples/01-digits on a small part of its data, with a checkpoint after every second step; the number of images is
no multiple of anything. A rank, an agent (or its guard) or the launcher gets SIGKILL, one to four times per run, at a moment drawn
from the whole duration, or as soon as a save has begun; then the same command is given again, until the training is complete.

  same     parameters, optimizer and random states at the end are, to the bit, those of the training that was left alone
  durable  what had been committed when the kill came is there after it: no step is gone back behind
  ends     every attempt ends before its deadline, and leaves no process

--hosts 2: over two hosts of a box (tools/cluster-box; root), two ranks on each.
"""

import collections
import contextlib
import json
import math
import os
import pathlib
import random
import struct
import sys
import tempfile
import time

sys.dont_write_bytecode = True
import attempts  # noqa: E402
from soak import ROOT, job, series  # noqa: E402

TRAIN, TEST = 118, 22
PROGRAM_OPTIONS = ["--epochs", "3", "--batch-size", "24", "--save-every", "2", "--threads", "1", "--resume"]

#: moment: in durations of the training that nobody kills; in_save: then as soon as the next save has begun
Kill = collections.namedtuple("Kill", "victim in_save moment")


def small_data(folder):
    """The first of the shipped digits, in the same format."""
    folder.mkdir()
    for part, count in (("train", TRAIN), ("t10k", TEST)):
        for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
            data = (ROOT / "data" / "digits" / f"{part}-{kind}-ubyte").read_bytes()
            each = (len(data) - header) // struct.unpack(">I", data[4:8])[0]
            (folder / f"{part}-{kind}-ubyte").write_bytes(
                data[:4] + struct.pack(">I", count) + data[8:header] + data[header : header + count * each])
    return folder


def results(out):
    """{name: bytes} of what a training ends with: the weights, and the tensors of its last checkpoint."""
    last = sorted(path for path in (out / "checkpoints").iterdir() if path.name.startswith("checkpoint-"))[-1]
    found = {path.name: path.read_bytes() for path in last.rglob("*.safetensors")}
    found["weights"] = (out / "weights.safetensors").read_bytes()
    return found


def resumes(record):
    """The steps at which the attempts so far went on from a checkpoint."""
    steps = []
    if record.exists():
        for line in record.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # torn by a kill
                event = json.loads(line)
                if event.get("event") == "resume":
                    steps.append(event["step"])
    return steps


def saving(checkpoints):
    """A save is under way there: something lies beside the checkpoints that are complete."""
    with contextlib.suppress(OSError):
        return any(not name.startswith("checkpoint-") for name in os.listdir(checkpoints))
    return False


class Plan:
    """Plan of run `number` of a seed."""

    def __init__(self, seed, number):
        draw = self.draw = random.Random(f"{seed}/{number}")
        self.kills = [Kill(draw.choice(("rank", "rank", "agent", "launcher")), draw.random() < 0.35, draw.uniform(0.05, 1.0))
                      for _ in range(draw.randint(1, 4))]

    def __str__(self):
        return ", ".join(f"{kill.victim} {'in the save after' if kill.in_save else 'at'} {kill.moment:.2f}" for kill in self.kills)


class Trainings:
    def __init__(self, options, place):
        self.options, self.place = options, place
        self.cohort, self.digits = (series.program(options.build, name) for name in ("cohort", "digits"))
        self.layout = ["-q", "-H", "h1:2,h2:2"] if options.hosts == 2 else ["-q", "-np", "2"]
        self.folder = tempfile.TemporaryDirectory(prefix="kill-training-")
        self.data = small_data(pathlib.Path(self.folder.name) / "data")
        since = time.monotonic()
        out = pathlib.Path(self.folder.name) / "out"
        with self.start(out, self.folder.name, 0) as attempt:
            status = attempt.wait(time.monotonic() + options.deadline)
        if status != 0:
            raise SystemExit(f"the training that nobody kills ends with status {status}: {attempt.output()}")
        self.normal = time.monotonic() - since
        self.wanted = results(out)

    def start(self, out, folder, number):
        program = [self.digits, "--data", self.data, "--out", out, *PROGRAM_OPTIONS]
        return attempts.Attempt(self.place, self.cohort, self.layout, program, folder, number)

    def strike(self, attempt, kill, checkpoints, draw):
        """Kills somebody at the moment that the plan says; false if the attempt was over before."""
        moment = time.monotonic() + kill.moment * self.normal
        attempt.until(lambda: time.monotonic() >= moment, math.inf)
        if kill.in_save:
            attempt.until(lambda: saving(checkpoints), math.inf, every=0.0005)
        return attempt.running() and attempt.strike(kill.victim, draw)

    def one(self, plan, folder):
        kills = list(plan.kills)
        out, checkpoints = folder / "out", folder / "out" / "checkpoints"
        counts = {"attempts": 0, "kills": 0, "kills_during_a_save": 0, "resumes": 0}
        status = None
        while status != 0:
            kill = kills.pop(0) if kills else None
            since = time.monotonic()
            committed = attempts.checkpoint_steps(checkpoints)
            known = len(resumes(out / "run.jsonl"))
            counts["attempts"] += 1
            with self.start(out, folder, counts["attempts"]) as attempt:
                struck = kill is not None and self.strike(attempt, kill, checkpoints, plan.draw)
                status = attempt.ended(self.options.deadline)
            if counts["attempts"] == 1 and not struck:  # else moments drawn from a slower one's duration come too late
                self.normal = min(self.normal, time.monotonic() - since)
            assert status == 0 or struck, f"ends: with status {status}, though nobody was killed: {attempt.output()}"
            counts["kills"] += struck
            counts["kills_during_a_save"] += struck and saving(checkpoints)
            gone_on = resumes(out / "run.jsonl")[known:]
            counts["resumes"] += len(gone_on)
            wanted = committed[-1:]
            assert gone_on in ([], wanted), f"durable: step {wanted} was committed, and it went on from step {gone_on}"
        found = results(out)
        different = [name for name in self.wanted.keys() | found.keys() if self.wanted.get(name) != found.get(name)]
        assert not different, f"same: {', '.join(sorted(different))} differ from the training that nobody killed"
        return counts


def main():
    parser = series.parser("kill-training", __doc__, count=20, deadline=120)
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1, help="1: this one, two ranks; 2: in a box, two on each [1]")
    options = parser.parse_args()
    runs = series.Series(options, "kill-training", first=1, every=20, again=["hosts"], plan=lambda number: Plan(options.seed, number),
                         one=lambda plan, folder: trainings.one(plan, folder))
    if runs.numbers():
        place = attempts.InBox(2) if options.hosts == 2 else job.Here()
        with contextlib.closing(place):
            trainings = Trainings(options, place)
            runs.run()
    return runs.report()


if __name__ == "__main__":
    sys.exit(main())
