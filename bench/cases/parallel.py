"""Steps of torch's model parallelism over the backend "cohort", against the same over Gloo.

    bench/compare parallel --ranks 2,4 --ways fsdp,tp,1f1b
    bench/compare parallel --rates 0,1000               half of the ranks on each of two hosts of a box; needs root

    fsdp   FSDP2 of 33 million parameters, batch 8, its buffers in memory of the group; "heap": in torch's own
    tp     4 blocks of ColwiseParallel and RowwiseParallel, 128 rows of 512
    1f1b   a pipeline of a block a rank, 16 micro-batches of 32 rows of 512

Each backend has its processes, which sleep while the others' are measured; every round takes steps of each. Times are
of the slowest rank; "CPU ms" of all threads, the mean of the ranks. One thread for each rank. Fails if they have not
trained alike. Needs a torch with Gloo and these (2.13 has them all).
"""
import sys

from lib import boxes, groups, records, worker

ROUNDS = 9
PEERS = ["gloo"]
WARMUP = 2
WAYS = {"fsdp": 1, "tp": 4, "1f1b": 1}  # how many steps are timed at once


def options(parser):
    parser.add_argument("--ranks", type=records.list_of(int), default=[2, 4])
    parser.add_argument("--rates", type=records.list_of(int), help="between two hosts, in Mbit/s, 0: free [one host]")
    parser.add_argument("--ways", type=records.list_of(str, list(WAYS)), default=list(WAYS))
    parser.add_argument("--python", default=sys.executable, help="the interpreter whose torch is measured")


def group_of(options, side, build, ranks, box):
    places = ["-np", str(ranks)] if box is None else ["-H", ",".join(f"{host}:{ranks // 2}" for host in box.hosts)]
    backend = side if side == "gloo" else "cohort"

    def commands(folder):
        command = groups.cohort_run(build, *places, "--run-dir", f"{folder}/job", "--", options.python,
                                    f"{groups.BENCH}/peers/parallel.py", folder, backend)
        return [command if box is None else box.on("h1", command)]
    environment = {**groups.python_path(build), "GLIBC_TUNABLES": groups.KEEP_MEMORY}
    return groups.Group(side, ranks, commands, {**environment, **({"GLOO_SOCKET_IFNAME": "eth0"} if box else {})})


def measure_way(options, way, teams, cell, recorder):
    recorder.progress(f"{way}, {cell}")
    turns = [(side, side, way) for side in teams]
    for team in teams.values():
        team.ask("model", way)
    if way == "fsdp":
        teams["cohort"].ask("model", "fsdp_heap")
        turns.append(("heap", "cohort", "fsdp_heap"))
    for number in range(-WARMUP, options.rounds):
        found = {}
        for name, side, step in records.rotated(turns, number):
            answers = teams[side].ask("step", step, WAYS[way])
            found[name] = groups.slowest(answers, "ms"), worker.mean(answers, "cpu_ms")
        for unit, at in (("ms", 0), ("CPU ms", 1)):
            if number >= 0:
                recorder.add(number, {"way": way, **cell}, unit, {name: one[at] for name, one in found.items()})
    sums = {name: [answer["sum"] for answer in teams[side].ask("sum", step)] for name, side, step in turns}
    for name, values in sums.items():
        if any(abs(value - other) > 1e-5 * other for value, other in zip(values, sums["cohort"])):
            recorder.fail(f"{way} after training: {name} {values}, cohort {sums['cohort']}")


def measure_ranks(options, ranks, box, recorder):
    teams = {}
    try:
        for side, build in {**options.builds, **{peer: options.build for peer in options.peers}}.items():
            teams[side] = group_of(options, side, build, ranks, box)
        links = "one host" if box is None else f"2 hosts, {box.rate or 'free'}"
        for way in options.ways:
            measure_way(options, way, teams, {"ranks": ranks, "links": links}, recorder)
    finally:
        for team in teams.values():
            team.stop()


def measure(options, recorder):
    for build in options.builds.values():
        groups.needed(build, "cohort")
    if not groups.has_torch(options.python):
        sys.exit(f"bench/compare parallel: {options.python} has no torch.distributed -- give --python one that has")
    if options.rates is not None:
        boxes.check()
    for rate in [None] if options.rates is None else options.rates:
        for ranks in options.ranks:
            if rate is None:
                measure_ranks(options, ranks, None, recorder)
            else:
                with boxes.Box(2, rate) as box:
                    measure_ranks(options, ranks, box, recorder)
