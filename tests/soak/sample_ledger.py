#!/usr/bin/env python3
"""Audits that every sample is used exactly once per epoch, across kills, preemption and changes of the world's size.

A small training (tests/soak/ledger_peer.cpp) runs on 1 to 8 ranks, each attempt on another number and with another batch size, some
over two hosts that this machine pretends to be. Each rank writes a line per optimizer step: epoch, range of the cursor, its samples.
Attempts are ended after a step that is drawn: a rank, an agent or the launcher gets SIGKILL, or somebody SIGUSR1. The next one goes on
from the newest checkpoint; what counts of an attempt's lines are those up to the step at which the next one went on.

  partition   in each epoch, the samples of all lines that count are the data set: each once
  together    of each step that counts there is a line of every rank, and the ranges of the steps follow each other
  parameters  the same is in the parameters, from which each step took 1 for every sample in it
  durable     an attempt goes on from the newest step that was committed, and from the very last one where all ranks were preempted
  ends        every attempt ends before its deadline, and leaves no process
"""

import collections
import contextlib
import json
import math
import pathlib
import random
import signal
import sys
import tempfile

sys.dont_write_bytecode = True
import attempts  # noqa: E402
from soak import job, series  # noqa: E402

#: after_steps: of the attempt, as rank 0's ledger tells
End = collections.namedtuple("End", "how after_steps")


def read_lines(path):
    lines = []
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # else it is torn
                lines.append(json.loads(line))
    return lines


class Plan:
    """Plan of run `number` of a seed."""

    def __init__(self, seed, number):
        draw = self.draw = random.Random(f"{seed}/{number}")
        self.epochs = draw.randint(1, 3)
        self.size = draw.choice((61, 97, 128, 151))
        self.ends = [End(draw.choice(("rank", "rank", "agent", "launcher", "preempt", "preempt")), draw.randint(0, 14))
                     for _ in range(draw.randint(1, 4))]

    def __str__(self):
        return f"{self.size} samples, {self.epochs} epochs: {', '.join(f'{how} after {steps}' for how, steps in self.ends)}"

    def layout(self):
        """(words of `cohort run`, ranks)"""
        ranks = self.draw.randint(1, 8)
        if ranks > 1 and self.draw.random() < 0.25:
            first = self.draw.randint(1, ranks - 1)
            return ["-q", "--starter", "local", "-H", f"a:{first},b:{ranks - first}"], ranks
        return ["-q", "-np", str(ranks)], ranks


class Ledger:
    """Lines that the attempts of one run have written."""

    def __init__(self, folder):
        self.folder = folder
        self.ranks = []  # by attempt

    def lines(self, attempt, rank):
        return read_lines(self.folder / "ledger" / f"{attempt}.{rank}")

    def attempt(self, attempt):
        """({"from": step, ...} or None if it never trained, {step: [line of each rank]})."""
        first, steps = None, collections.defaultdict(list)
        for rank in range(self.ranks[attempt]):
            head, *rest = self.lines(attempt, rank) or [None]
            first = first or head
            for line in rest:
                steps[line["step"]].append(line)
        return first, steps

    def audit(self, size, epochs):
        """Returns how many steps count, and how many were done in vain. Raises AssertionError."""
        trained = [(number, *self.attempt(number)) for number in range(len(self.ranks))]
        trained = [(number, first["from"], steps) for number, first, steps in trained if first is not None]
        used = [collections.Counter() for _ in range(epochs)]
        position = (0, 0)  # epoch, cursor
        counted = vain = 0
        for index, (number, begin, steps) in enumerate(trained):
            end = trained[index + 1][1] if index + 1 < len(trained) else max(steps, default=begin)
            assert end <= max(steps, default=begin), f"together: went on from step {end}, of which attempt {number} has no line"
            for step in range(begin + 1, end + 1):
                lines = steps[step]
                assert len(lines) == self.ranks[number], f"together: step {step} of attempt {number} has {len(lines)} lines"
                places = {(line["epoch"], line["begin"], line["end"]) for line in lines}
                assert len(places) == 1, f"together: step {step} of attempt {number} is at {places}"
                epoch, first, last = places.pop()
                if position[1] == size:
                    position = (position[0] + 1, 0)
                assert (epoch, first) == position, f"together: step {step} begins at {(epoch, first)} instead of {position}"
                samples = [sample for line in lines for sample in line["samples"]]
                assert len(samples) == last - first, f"together: step {step} has {len(samples)} samples in {first}..{last}"
                used[epoch].update(samples)
                position = (epoch, last)
                counted += 1
            vain += sum(step > end for step in steps)
        assert position == (epochs - 1, size), f"partition: the training ends at {position}"
        for epoch, samples in enumerate(used):
            wrong = {sample: samples[sample] for sample in {*samples, *range(size)} if samples[sample] != (sample < size)}
            assert not wrong, f"partition: in epoch {epoch}, uses of samples that are not 1: {wrong}"
        return counted, vain


class Ledgers:
    def __init__(self, options):
        self.options, self.place = options, job.Here()
        self.cohort, self.peer = (series.program(options.build, name) for name in ("cohort", "ledger_peer"))

    def strike(self, attempt, end, path, draw):
        """False if the attempt was over before."""
        attempt.until(lambda: len(read_lines(path)) > end.after_steps, math.inf)
        if not attempt.running():
            return False
        if end.how == "preempt":
            return attempt.strike(draw.choice(("rank", "agent", "launcher")), draw, signal.SIGUSR1)
        return attempt.strike(end.how, draw)

    def one(self, plan, folder):
        draw, ends = plan.draw, list(plan.ends)
        (folder / "ledger").mkdir()
        ledger = Ledger(folder)
        counts = {"attempts": 0, "kills": 0, "preemptions": 0, "steps": 0, "steps_done_again": 0, "worlds": 0}
        status = None
        sizes = []
        while status != 0:
            end = ends.pop(0) if ends else None
            words, ranks = plan.layout()
            name = len(ledger.ranks)
            program = [self.peer, folder, name, f"size={plan.size}", f"epochs={plan.epochs}", f"batch={draw.randint(1, 5)}",
                       f"save-every={draw.choice((1, 2, 3, 5, 9))}", "pace-ms=3"]
            ledger.ranks.append(ranks)
            committed = attempts.checkpoint_steps(folder / "checkpoints")[-1:]
            with attempts.Attempt(self.place, self.cohort, words, program, folder, name) as attempt:
                struck = end is not None and self.strike(attempt, end, folder / "ledger" / f"{name}.0", draw)
                status = attempt.ended(self.options.deadline)
            counts["attempts"] += 1
            sizes.append(ranks)
            assert status == 0 or struck, f"ends: with status {status}, though nobody struck: {attempt.output()}"
            first, steps = ledger.attempt(name)
            if first:
                assert [first["from"]] == (committed or [0]), f"durable: {committed} was committed, it went on from {first['from']}"
            if struck and end.how == "preempt":
                assert status in (0, 75), f"ends: with status {status} when it was preempted: {attempt.output()}"
                newest = attempts.checkpoint_steps(folder / "checkpoints")[-1:]
                last = max(steps, default=first["from"])
                assert newest == [last], f"durable: preempted at step {last}, and {newest} is saved"
                counts["preemptions"] += status == 75
            else:
                counts["kills"] += struck
        counts["steps"], counts["steps_done_again"] = ledger.audit(plan.size, plan.epochs)
        counts["worlds"] = len(set(sizes))
        # An attempt that was struck after its last step has written its line too.
        uses = read_lines(folder / "used.json")
        assert uses and all(used == [plan.epochs] * plan.size for used in uses), f"parameters: uses in {plan.epochs} epochs: {uses}"
        return counts


def made_up(folder, size, epochs, draw):
    """The ledger of a training that did everything right: kills and other worlds at random."""
    (folder / "ledger").mkdir()
    ledger = Ledger(folder)
    saved = (0, 0, 0)  # step, epoch, cursor
    while saved[1:] != (epochs, 0):
        ranks, batch = draw.randint(1, 5), draw.randint(1, 4)
        lives, kept = draw.randint(1, 30), saved
        lines = [[{"from": saved[0], "ranks": ranks}] for _ in range(ranks)]
        step, epoch, cursor = saved
        for _ in range(lives):
            if epoch == epochs:
                break
            end = min(size, cursor + ranks * batch)
            for rank in range(ranks):
                samples = [(sample * 7 + epoch) % size for sample in range(cursor, end)][rank::ranks]
                lines[rank].append({"step": step + 1, "epoch": epoch, "begin": cursor, "end": end, "samples": samples})
            step, epoch, cursor = (step + 1, epoch, end) if end < size else (step + 1, epoch + 1, 0)
            if draw.random() < 0.5 or epoch == epochs:
                kept = (step, epoch, cursor)
        saved = kept
        for rank in range(ranks):
            path = folder / "ledger" / f"{len(ledger.ranks)}.{rank}"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines[rank]) + "{torn")
        ledger.ranks.append(ranks)
    return ledger


def harm(ledger, how, draw):
    """Makes one thing wrong in a line that counts: of the last attempt, all of whose steps do."""
    last = len(ledger.ranks) - 1
    rank = 0  # the only one that has samples in every step
    path = ledger.folder / "ledger" / f"{last}.{rank}"
    lines = read_lines(path)
    line = draw.choice(lines[1:])
    if how == "a line is missing":
        lines.remove(line)
    elif how == "a sample is missing":
        line["samples"].pop()
    elif how == "a sample is another":
        line["samples"][0] += 1
    elif how == "a range is another":
        line["end"] += 1
    elif how == "it went on too late":
        lines[0]["from"] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if how == "it went on too late":
        for other in range(ledger.ranks[last]):
            path = ledger.folder / "ledger" / f"{last}.{other}"
            path.write_text(path.read_text().replace('"from": ', '"from": 1', 1))


def self_test():
    """A correct ledger passes, and each kind of error is found."""
    missed = 0
    wrongs = ("a line is missing", "a sample is missing", "a sample is another", "a range is another", "it went on too late")
    for number in range(60):
        for wrong in (None, *wrongs):
            draw = random.Random(f"{number}/{wrong}")
            with tempfile.TemporaryDirectory() as folder:
                ledger = made_up(pathlib.Path(folder), 29, 2, draw)
                if wrong and not any(ledger.attempt(len(ledger.ranks) - 1)[1].values()):
                    continue
                if wrong:
                    harm(ledger, wrong, draw)
                try:
                    ledger.audit(29, 2)
                    found = False
                except AssertionError as problem:
                    found = problem
                if bool(found) != bool(wrong):
                    missed += 1
                    print(f"self-test {number}: {wrong or 'nothing is wrong'}: {found or 'not found'}")
    print(f"self-test: {missed} ledgers misjudged")
    return 1 if missed else 0


def main():
    parser = series.parser("sample-ledger", __doc__, count=20, deadline=120)
    parser.add_argument("--self-test", action="store_true", help="whether the audit finds what is wrong in ledgers made up")
    options = parser.parse_args()
    if options.self_test:
        return self_test()
    runs = series.Series(options, "sample-ledger", first=1, every=20, plan=lambda number: Plan(options.seed, number),
                         one=Ledgers(options).one)
    runs.run()
    return runs.report()


if __name__ == "__main__":
    sys.exit(main())
