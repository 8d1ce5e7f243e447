"""The cost of checkpoints in a training of 25 million parameters: in the background, and blocking, against none.

    bench/compare saves --ranks 2 --every 100 --optimizer adam --place rank0

Blocks of --every steps, each begun with no save, a save in the background, or a blocking one; a round is one of each.
`without`: the block with no save. Also how long the call held the program up, and how long until it was saved.
"""
import os
import sys
import tempfile

from lib import groups, records, worker

ROUNDS = 5
PEERS = []
WAYS = ["background", "blocking"]


def options(parser):
    parser.add_argument("--ranks", type=records.list_of(int), default=[2])
    parser.add_argument("--every", type=int, default=100, help="steps of a block [100]")
    parser.add_argument("--batch", type=int, default=32, help="samples of each rank's step [32]")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="adam",
                        help="adam has twice the parameters as state [adam]")
    parser.add_argument("--place", choices=("rank0", "shared", "local"), default="rank0")
    parser.add_argument("--folder", help="for the checkpoints [a new one in TMPDIR]")
    parser.add_argument("--python", default=sys.executable, help="the interpreter, with torch")


def team_of(options, side, ranks, own):
    def commands(folder):
        return [groups.cohort_run(options.builds[side], "-np", str(ranks), "--run-dir", f"{folder}/job", "--", options.python,
                                  f"{groups.BENCH}/peers/saves.py", folder, str(options.batch), options.optimizer,
                                  options.place, os.path.join(own, side))]
    return groups.Group(side, ranks, commands, groups.python_path(options.builds[side]))


def measure_ranks(options, ranks, own, recorder):
    teams = {}
    try:
        for side, build in options.builds.items():
            groups.needed(build, "cohort")
            teams[side] = team_of(options, side, ranks, own)
        turns = [(side, way) for side in teams for way in ["none", *WAYS]]
        for number in range(-1, options.rounds):  # first touches of memory are not what is measured
            found = {turn: teams[turn[0]].ask(turn[1], options.every) for turn in records.rotated(turns, number)}
            for way in WAYS if number >= 0 else []:
                cell = {"optimizer": options.optimizer, "place": options.place, "steps": options.every, "ranks": ranks, "way": way}
                for unit, key in (("ms", "ms"), ("CPU ms", "cpu_ms"), ("ms of the call", "held_ms"), ("ms until saved", "saved_ms")):
                    def of(answers, key=key):
                        return worker.mean(answers, key) if key == "cpu_ms" else groups.slowest(answers, key)
                    values = {side: of(found[side, way]) for side in teams}
                    if key in ("ms", "cpu_ms"):
                        values["without"] = of(found["cohort", "none"])
                    recorder.add(number, cell, unit, values)
            recorder.progress(f"round {number + 1} of {options.rounds}")
    finally:
        for team in teams.values():
            team.stop()


def measure(options, recorder):
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="cohort-saves-", dir=options.folder) as own:
            measure_ranks(options, ranks, own, recorder)
