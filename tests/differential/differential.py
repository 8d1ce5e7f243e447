#!/usr/bin/env python3
"""Runs generated training programs over Cohort and in plain torch, and says where they differ: see README.md."""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Optional

import compare
import coverage
import cpp
import grammar
import lossy
import reference
import shrink
import source
import torch
from jobs import Jobs


class Suite:
    def __init__(self, plant: str = "", runner: str = "") -> None:
        self.jobs = cpp.Jobs(runner) if runner else Jobs(plant)
        self.runner = runner
        self.programs = self.not_torchs = 0
        self.kinds: collections.Counter[str] = collections.Counter()
        self.refusals: dict[str, list[int]] = {}
        self.differences: list[tuple[dict[str, Any], compare.Verdict]] = []
        self.used = coverage.Used()
        self.once: list[str] = []
        self.ready: Any = None

    def judge(self, program: dict[str, Any], following: Optional[dict[str, Any]] = None) -> Optional[compare.Verdict]:
        """None: plain torch does not take the program. The reference of `following` is computed while the ranks work."""
        ready, self.ready = self.ready, None
        rounds = grammar.is_lossy(program)
        plain = ready[1] if ready is not None and ready[0] is program else None if rounds else self.plain(program)
        if plain is None and not rounds:
            self.prepare(following)
            return None
        job = self.jobs.of(program)
        job.start(program)
        self.prepare(following)
        replies = job.finish()
        try:
            if rounds:
                plain = self.forced(program, replies)
        except lossy.OutOfBounds as error:
            return compare.Verdict("different", str(error))
        except Exception:
            return None
        finally:
            self.jobs.after(program, replies)
        verdict = compare.verdict(program, plain or [], replies)
        return self.elsewhere(program, verdict, replies) if "virtual" in program and verdict.kind in ("same", "refused") else verdict

    def elsewhere(self, program: dict[str, Any], verdict: compare.Verdict, replies: list[Any]) -> compare.Verdict:
        """Virtual ranks: other numbers of ranks give the same bits."""
        for other in grammar.elsewhere(program):
            job = self.jobs.of(other)
            job.start(other)
            there = job.finish()
            self.jobs.after(other, there)
            found = compare.other_bits(replies, there, source.phases_of(other))
            if found:
                return compare.Verdict("different", f"on {other['ranks']} ranks of one host in place of {program['ranks']}: {found}")
        return verdict

    def prepare(self, program: Optional[dict[str, Any]]) -> None:
        if program is not None and not grammar.is_lossy(program):
            self.ready = program, self.plain(program)

    @staticmethod
    def plain(program: dict[str, Any]) -> Any:
        try:
            return reference.run(program)
        except Exception:
            return None

    @staticmethod
    def forced(program: dict[str, Any], replies: list[Any]) -> Any:
        if any(reply is None for reply in replies):
            return []
        recorded = [reference.Records(False) for _ in replies]
        for records, reply in zip(recorded, replies):
            records.gradients = reply["gradients"]
        return reference.run(program, recorded)

    def fails_afresh(self, program: dict[str, Any]) -> bool:
        self.jobs.restart((max(source.phases_of(program)), program["hosts"]))
        verdict = self.judge(program)
        return verdict is not None and verdict.kind == "different"

    def fails(self, program: dict[str, Any]) -> bool:
        verdict = self.judge(program)
        return verdict is not None and verdict.kind == "different"

    def run(self, program: dict[str, Any], following: Optional[dict[str, Any]] = None) -> str:
        verdict = self.judge(program, following)
        self.programs += 1
        if verdict is None:
            self.not_torchs += 1
            return "torch refuses it"
        if not self.runner:
            self.used.add(source.text_of(program, reference=False), program["method"])
        if verdict.kind == "different":
            if not self.fails_afresh(program):
                self.once.append(f"seed {program['seed']}: {verdict.text}")
                verdict.kind = "only once"
            else:
                self.differences.append((program, verdict))
        if verdict.kind.startswith("refused"):
            self.refusals.setdefault(f"{program['method']}: {'LATE ' if verdict.kind != 'refused' else ''}{verdict.text}", []).append(program["seed"])
        self.kinds[verdict.kind] += 1
        return f"{verdict.kind} {verdict.text}"

    def report(self, seconds: float) -> None:
        print(f"\n{self.programs} programs in {seconds:.0f} s ({self.programs / max(seconds, 0.1):.1f} a second): "
              f"{dict(self.kinds)}, {self.not_torchs} that plain torch refuses; {self.jobs.restarts} jobs were restarted")  # fmt: skip
        if self.once:
            print("differed once, and not in a fresh job:", *self.once[:20], sep="\n  ")
        print("refusals:")
        for text, seeds in sorted(self.refusals.items(), key=lambda pair: -len(pair[1])):
            print(f"  {len(seeds):5} {text} (seed {seeds[0]})")
        if not self.runner:
            self.used.report()


def show(suite: Suite, program: dict[str, Any], verdict: compare.Verdict, seconds: float) -> None:
    smaller = shrink.shrink(program, suite.fails, seconds) if seconds else program
    final = suite.judge(smaller) or verdict
    print(f"\nDIFFERENCE, seed {program['seed']}, {smaller['method']} on {smaller['ranks']} ranks"
          f"{' of hosts ' + smaller['hosts'] if smaller['hosts'] else ''}: {final.text or verdict.text}")  # fmt: skip
    print(json.dumps(smaller))
    print(source.text_of(smaller, reference=False), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30, help="how long; default 30")
    parser.add_argument("--count", type=int, default=1 << 40, help="programs at most")
    parser.add_argument("--fixed", type=int, default=0, help="begin with so many seeds from 0")
    parser.add_argument("--seed", type=int, help="the first of the others; default: by the clock")
    parser.add_argument("--method", default="", choices=["", *grammar.METHODS], help="of programs; default: all")
    parser.add_argument("--virtual", action="store_true", help="those of ddp with virtual ranks alone")
    parser.add_argument("--worlds", type=int, nargs="*", default=[], help="numbers in grammar.WORLDS; default: all")
    parser.add_argument("--shrink", type=float, default=60, help="seconds for a difference")
    parser.add_argument("--plant", default="", help="faults to plant (planted.py)")
    parser.add_argument("--runner", default="", help="the program of runner.cpp: over C++'s wrappers in place of Python's")
    parser.add_argument("--program", help="a file with one program as JSON: runs it alone")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if not hasattr(torch.amp, "GradScaler"):
        print(f"torch {torch.__version__} is too old: 2.3 is needed")
        return 77
    torch.set_num_threads(1)
    suite = Suite(options.plant, os.path.abspath(options.runner) if options.runner else "")
    draw = cpp.program if options.runner else grammar.program
    begin = time.monotonic()
    if options.program:
        with open(options.program) as file:
            program = json.load(file)
        print(source.text_of(program, reference=False), suite.run(program))
        suite.jobs.close()
        return 1 if suite.differences else 0
    fresh = options.seed if options.seed is not None else int(time.time()) % 10_000_000 * 100
    seeds = [f"0 to {options.fixed - 1}"] * bool(options.fixed) + [f"from {fresh} on"] * (options.count > options.fixed)
    print("seeds", ", and ".join(seeds), flush=True)
    shown = 0

    def drawn() -> Iterator[dict[str, Any]]:
        for number in itertools.count():
            seed = number if number < options.fixed else fresh + number - options.fixed
            made = draw(seed, "ddp" if options.virtual else options.method, options.worlds[number % len(options.worlds)] if options.worlds else -1)
            if "virtual" in made or not options.virtual:
                yield made

    programs = drawn()
    try:
        program = next(programs)
        for _ in range(options.count):
            if time.monotonic() - begin > options.seconds:
                break
            following = next(programs)
            said = suite.run(program, following)
            if options.verbose:
                print(program["seed"], said, flush=True)
            program = following
            if len(suite.differences) > shown:
                shown = len(suite.differences)
                show(suite, *suite.differences[-1], options.shrink)
    except KeyboardInterrupt:
        pass
    finally:
        suite.jobs.close()
    suite.report(time.monotonic() - begin)
    print(f"{len(suite.differences)} differences", *(f"seed {program['seed']}: {verdict.text}" for program, verdict in suite.differences),
          sep="\n  ")  # fmt: skip
    return 1 if suite.differences else 0


if __name__ == "__main__":
    sys.exit(main())
