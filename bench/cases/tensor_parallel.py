"""A step of 12 transformer blocks cut over the ranks: Cohort's layers in C++, the same over torch's Gloo.

    bench/compare tensor_parallel --ranks 2,4

Width 256, 8 heads, 4 sequences of 64: four all_reduces of 256 KiB a block and step. "communication ms" is the time that a
rank spends in them, waiting for the others included, the mean of the ranks; "ms" is the step, forward and backward. Both
sides start anew in each round, under `cohort run`, with one thread for each rank; Gloo's is a program in Python.
"""
import json
import statistics
import sys
import tempfile

from lib import groups, records

ROUNDS = 5
PEERS = ["gloo"]


def options(parser):
    parser.add_argument("--ranks", type=records.list_of(int), default=[2])
    parser.add_argument("--steps", type=int, default=20, help="in each round [20]")
    parser.add_argument("--python", default=sys.executable, help="the interpreter whose Gloo is measured")


def one(build, ranks, words):
    with tempfile.TemporaryDirectory(prefix="cohort-tp-") as folder:
        groups.run(groups.cohort_run(build, "-np", str(ranks), "--run-dir", f"{folder}/job", "--", *words, f"{folder}/out"))
        with open(f"{folder}/out", encoding="ascii") as file:
            found = json.load(file)
    return {key: statistics.median(found[key]) for key in ("ms", "communication_ms")}


def measure(options, recorder):
    for build in options.builds.values():
        groups.needed(build, "cohort", "tp_step")
    steps = str(options.steps)
    sides = {side: lambda ranks, build=build: one(build, ranks, [groups.program(build, "tp_step"), steps])
             for side, build in options.builds.items()}
    if "gloo" in options.peers:
        if not groups.has_torch(options.python):
            sys.exit(f"bench/compare tensor_parallel: {options.python} has no torch -- give --python one that has")
        sides["gloo"] = lambda ranks: one(options.build, ranks, [options.python, f"{groups.BENCH}/peers/tp_gloo.py", steps])
    for number in range(options.rounds):
        for ranks in options.ranks:
            found = {side: sides[side](ranks) for side in records.rotated(sides, number)}
            for key, unit in (("communication_ms", "communication ms"), ("ms", "ms")):
                recorder.add(number, {"ranks": ranks}, unit, {side: values[key] for side, values in found.items()})
            recorder.progress(f"round {number + 1}, {ranks} ranks: {found}")
