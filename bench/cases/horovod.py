"""Many small tensors per step: operations by name, as Horovod's programs ask for them, against Gloo.

    bench/compare horovod --ranks 2,4 --tensors 1000 --bytes 1024 --rounds 10 --steps 5

`named` asks for each tensor by itself, in an order shuffled on each rank; `grouped` for all in one call; Gloo is
torch.distributed.all_reduce(async_op=True) in one order. All in the same processes, in turns. Milliseconds per step;
what the CPU needs depends less on what else the machine does.
"""
import sys

from lib import groups, records, worker

ROUNDS = 10
PEERS = ["gloo"]
WAYS = ["named", "grouped"]


def options(parser):
    parser.add_argument("--ranks", type=records.list_of(int), default=[2, 4])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--bytes", type=int, default=1024, help="of each tensor [1024]")
    parser.add_argument("--steps", type=int, default=5, help="per round and side [5]")
    parser.add_argument("--python", default=sys.executable, help="the interpreter, with torch")


def team_of(options, side, build, ranks):
    def commands(folder):
        return [groups.cohort_run(build, "-np", str(ranks), "--run-dir", f"{folder}/job", "--", options.python,
                                  f"{groups.BENCH}/peers/named.py", folder, str(options.tensors), str(options.bytes))]
    return groups.Group(side, ranks, commands, groups.python_path(build))


def measure_ranks(options, ranks, recorder):
    teams = {}
    try:
        for side, build in options.builds.items():
            teams[side] = team_of(options, side, build, ranks)
        turns = [(side, way) for side in teams for way in WAYS] + [("cohort", peer) for peer in options.peers]
        for number in range(options.rounds):
            found = {turn: teams[turn[0]].ask(turn[1], options.steps) for turn in records.rotated(turns, number)}
            for way in WAYS:
                for unit, of in (("ms", lambda one: groups.slowest(one, "ms")), ("CPU ms", lambda one: worker.mean(one, "cpu_ms"))):
                    values = {side: of(found[side, way]) for side in teams}
                    values.update({peer: of(found["cohort", peer]) for peer in options.peers})
                    recorder.add(number, {"tensors": options.tensors, "bytes": options.bytes, "ranks": ranks, "way": way},
                                 unit, values)
        recorder.progress(f"{ranks} ranks, by name, in all: {teams['cohort'].ask('statistics')[0]['statistics']}")
    finally:
        for team in teams.values():
            team.stop()


def measure(options, recorder):
    for build in options.builds.values():
        groups.needed(build, "cohort")
    for ranks in options.ranks:
        measure_ranks(options, ranks, recorder)
