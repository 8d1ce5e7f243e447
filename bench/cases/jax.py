"""Gradients of a compiled program of JAX: all of a step reduced in it, by name.

    bench/compare jax --ranks 2 --shapes 1x4,60x4K,1x4M,1x16M,1x64M --rounds 10 --steps 5 --python .venv/bin/python

`cohort` reduces by XLA's foreign functions, `callback` by the way back into Python that is taken where those are not
known, `gloo` is JAX's own: psum over processes. The program makes the gradients (times two) and reduces them; `nothing`
only makes them. All in the same processes, in turns. Milliseconds per step, from the call to the results.
"""
import sys

from lib import groups, records

ROUNDS = 10
PEERS = ["callback", "gloo", "nothing"]


def options(parser):
    parser.add_argument("--ranks", type=records.list_of(int), default=[2])
    parser.add_argument("--shapes", type=records.list_of(str), default=["1x4", "60x4K", "1x4M", "1x16M", "1x64M"],
                        help="how many arrays of how many bytes [1x4,60x4K,1x4M,1x16M,1x64M]")
    parser.add_argument("--steps", type=int, default=5, help="per round and side [5]")
    parser.add_argument("--python", default=sys.executable, help="the interpreter, with jax")


def measure_ranks(options, ranks, recorder):
    def commands_of(build):
        return lambda folder: [groups.cohort_run(build, "-np", str(ranks), "--run-dir", f"{folder}/job", "--", options.python,
                                                 f"{groups.BENCH}/peers/jax_steps.py", folder)]
    teams = {}
    try:
        for side, build in options.builds.items():
            teams[side] = groups.Group(side, ranks, commands_of(build), groups.python_path(build))
        turns = [(side, "cohort") for side in teams] + [("cohort", peer) for peer in options.peers]
        for shape in options.shapes:
            for number in range(options.rounds):
                found = {way if side == "cohort" else side: teams[side].ask(way, shape, options.steps)
                         for side, way in records.rotated(turns, number)}
                recorder.add(number, {"arrays": shape, "ranks": ranks}, "ms",
                             {name: groups.slowest(answers, "ms") for name, answers in found.items()})
    finally:
        for team in teams.values():
            team.stop()


def measure(options, recorder):
    for build in options.builds.values():
        groups.needed(build, "cohort")
    for ranks in options.ranks:
        measure_ranks(options, ranks, recorder)
