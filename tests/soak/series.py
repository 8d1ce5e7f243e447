"""A series of runs. Run N of a seed is always the same one; what is done is kept in a file, so that an interrupted series
goes on where it was; each run with a problem says how it is done again alone."""

import argparse
import collections
import concurrent.futures
import contextlib
import itertools
import json
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
import traceback

from . import ROOT

median = statistics.median_high


def parser(program, text, **defaults):
    """The options that all harnesses have, and those of `defaults` (count, jobs, deadline) at these."""
    made = argparse.ArgumentParser(prog=f"tools/{program}", description=text,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release", help="the build folder [build/release]")
    for name, kind, what in (("count", int, "runs"), ("jobs", int, "runs at once"), ("deadline", float, "seconds for one to end")):
        if name in defaults:
            made.add_argument(f"--{name}", type=kind, default=defaults[name], help=f"{what} [{defaults[name]}]")
    made.add_argument("--seed", default="1", help="run N of a seed is always the same one [1]")
    made.add_argument("--only", type=int, action="append", default=[], help="this run alone; repeatable")
    made.add_argument("--state", type=pathlib.Path, help="file that keeps what is done: the same command goes on where it was")
    made.add_argument("--keep", type=pathlib.Path, help="folder that keeps those of runs with problems")
    return made


def program(build, name):
    """A program of the build folder."""
    path = build.resolve() / "bin" / name
    if not path.exists():
        raise SystemExit(f"{path} is not there -- build it: cmake --build {build} --target {name}; or name another folder by --build")
    return path


class Series:
    """`plan(number)` says what a run is; `one(plan, folder)` does it and returns figures, and "problems" that it found. It
    may raise instead. `group` runs, one after the other, share a folder."""

    def __init__(self, options, title, *, plan, one, first=0, group=1, every=100, again=()):
        self.options, self.title, self.plan, self.one = options, title, plan, one
        self.first, self.group, self.every, self.again = first, group, every, again
        self.results = {}
        self.lock, self.stopping = threading.Lock(), threading.Event()
        self.began = time.monotonic()
        if options.state and options.state.exists():
            for line in options.state.read_text().splitlines():
                with contextlib.suppress(ValueError):  # torn by the end of that series
                    result = json.loads(line)
                    if result["key"] == self.key(result["number"]):
                        self.results[result["number"]] = result

    def key(self, number):
        """The words that do it again."""
        chosen = [(name, getattr(self.options, name)) for name in self.again]
        words = [f"--{name} {each}" for name, value in chosen for each in (value if isinstance(value, list) else [value])]
        return " ".join([f"tools/{self.title}", *words, f"--seed {self.options.seed} --only {number}"])

    def numbers(self):
        all_of_them = range(self.first, self.first + self.options.count)
        return self.options.only or [number for number in all_of_them if number not in self.results]

    def run(self):
        jobs = getattr(self.options, "jobs", 1)
        groups = [list(each) for _, each in itertools.groupby(self.numbers(), lambda number: number // self.group)]
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            try:
                list((pool.map if jobs > 1 else map)(self.run_group, groups))
            except BaseException as reason:
                self.stopping.set()
                if not isinstance(reason, KeyboardInterrupt):
                    raise
                print("interrupted: what is under way ends first", flush=True)

    def run_group(self, numbers):
        folder = None
        try:
            for number in numbers:
                if self.stopping.is_set():
                    return
                folder = folder or pathlib.Path(tempfile.mkdtemp(prefix=f"{self.title}-{number}-",
                                                                 dir=getattr(self.options, "folder", None)))
                if self.run_one(number, folder)["problems"]:
                    if self.options.keep:
                        self.options.keep.mkdir(parents=True, exist_ok=True)
                        subprocess.run(["cp", "-a", folder, self.options.keep], check=True)
                    shutil.rmtree(folder, ignore_errors=True)
                    folder = None
        finally:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)

    def run_one(self, number, folder):
        result = {"key": self.key(number), "number": number, "plan": "", "problems": []}
        since = time.monotonic()
        try:
            plan = self.plan(number)
            result["plan"] = str(plan)
            result.update(self.one(plan, folder))
        except AssertionError as problem:
            result["problems"].append(str(problem))
        except Exception:  # of the harness, or of its host: this run's, and the series goes on
            result["problems"].append(f"harness: {traceback.format_exc()}")
        result.setdefault("seconds", round(time.monotonic() - since, 2))
        with self.lock:
            self.add(result)
        return result

    def add(self, result):
        self.results[result["number"]] = result
        if self.options.state:
            with open(self.options.state, "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        if result["problems"] or self.options.only or self.every == 1:
            self.tell(result)
        if self.every > 1 and len(self.results) % self.every == 0:
            print(self.summary(), flush=True)

    def tell(self, result):
        figures = [f"{name} {round(value, 2) if isinstance(value, float) else value}" for name, value in result.items()
                   if name not in ("key", "number", "plan", "problems", "said")]
        print(f"{self.title} {result['number']}: {result['plan']}: {', '.join(figures)}")
        for problem in result["problems"]:
            print(f"  NOT AS IT SHOULD BE: {problem}")
        for line in result.get("said", "").splitlines():
            print(f"  | {line}")
        if result["problems"]:
            print(f"  again: {result['key']} --build {self.options.build}")
        print(end="", flush=True)

    def bad(self):
        return sorted(number for number, result in self.results.items() if result["problems"])

    def summary(self):
        totals = collections.Counter()
        for result in self.results.values():
            totals.update({name: value for name, value in result.items()
                           if isinstance(value, int) and name not in ("number", "status")})
        figures = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in totals.items())
        return (f"{self.title}: {len(self.results)} runs{f' ({figures})' if figures else ''}, {time.monotonic() - self.began:.0f} s, "
                f"{len(self.bad())} not as they should be{': ' if self.bad() else ''}{self.bad() or ''}")

    def table(self, by, *columns):
        """Table of the runs by the value of a field; columns: (heading, field, function over its values)."""
        rows = collections.defaultdict(list)
        for result in self.results.values():
            rows[result.get(by, "-")].append(result)
        print(f"{by:14} {'runs':>6} {'bad':>4}", *(f"{heading:>14}" for heading, _, _ in columns))
        for name, found in sorted(rows.items()):
            cells = []
            for _, field, function in columns:
                values = [result[field] for result in found if result.get(field) is not None]
                cells.append(f"{round(function(values), 2) if values else '-':>14}")
            print(f"{name:14} {len(found):6} {sum(bool(result['problems']) for result in found):4}", *cells)

    def report(self):
        """Exit status of the command."""
        print(self.summary(), flush=True)
        return 1 if self.bad() or self.stopping.is_set() else 0
