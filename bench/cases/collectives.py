"""Collectives on this host: against Open MPI, MPICH, Gloo (C++) and Gloo of torch.

    bench/compare collectives --ranks 2,4 --sizes 8,64K,16M --peers openmpi
    bench/compare collectives --against OLD/build/release --ranks 2,4 --sizes 4,256,4K,64K,1M,4M,16M,64M --memory heap
    bench/compare collectives --goals                  the table of goals for all_reduce, at 2, 4 and 8 ranks

Every library is started once per number of ranks and sleeps while it is not asked. A round measures each of them for a
moment through the same loop (bench/peers/peer_loop.h), and the distance of the cores before and after: on virtual
machines it moves every figure by 3 to 5 times, so rounds are distinguished by it. Microseconds, the slowest rank of
each call. Results are compared in full, once.
"""
import random
import statistics
import sys
import time

from lib import groups, records
from lib.records import K, M

ROUNDS = 20
PEERS = ["openmpi", "mpich", "gloo", "torch"]
COLLECTIVES = ["all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all",
               "send_recv", "barrier"]
NEAR_NS = 200  # between the 95 ns of cores that share a cache and the 400 to 500 ns of others

# Rows of the goals: title, sizes, our memory, factor over Open MPI at 2, 4, 8 ranks, factor over both Gloos.
GOALS = [
    ("up to 256 B", [8, 64, 256], "heap", (1.2, 1.7, 2.5), 100),
    ("1 to 64 KiB", [K, 4 * K, 16 * K, 64 * K], "heap", (1.5, 2.5, 3.5), 50),
    ("256 KiB, other memory", [256 * K], "heap", (1.6, 3.5, 3.5), 15),
    ("1 to 4 MiB, other memory", [M, 4 * M], "heap", (1.05, 2.3, 2.4), 9),
    ("16 to 64 MiB, other memory", [16 * M, 64 * M], "heap", (2, 2.7, 2.2), 4.5),
    ("256 KiB to 64 MiB, arena", [256 * K, M, 4 * M, 16 * M, 64 * M], "arena", (6, 6, 5), 9),
]


def options(parser):
    parser.add_argument("--collectives", type=records.list_of(str, COLLECTIVES + ["all"]), default=["all_reduce"])
    parser.add_argument("--sizes", type=records.list_of(records.size_of))
    parser.add_argument("--ranks", type=records.list_of(int))
    parser.add_argument("--memory", type=records.list_of(str, ["heap", "arena"]), default=["heap", "arena"],
                        help="ours; the peers' is the heap")
    parser.add_argument("--states", type=records.list_of(str, ["hot", "touched", "cold"]), default=["hot"])
    parser.add_argument("--types", type=records.list_of(str, ["float32", "float16", "bfloat16"]), default=["float32"])
    parser.add_argument("--slice", type=float, default=0.03, help="seconds that one library gets in a round [0.03]")
    parser.add_argument("--seconds", type=float, default=600,
                        help="for each number of ranks; no round begins after it [600]")
    parser.add_argument("--goals", action="store_true", help="all_reduce against the goals of Cohort's design")


def cells_of(options):
    cells = []
    for collective in COLLECTIVES if "all" in options.collectives else options.collectives:
        for dtype in options.types:
            for state in options.states if collective != "barrier" else ["hot"]:
                for size in options.sizes if collective != "barrier" else [0]:
                    cells.append({"collective": collective, "type": dtype, "bytes": size, "state": state})
    return cells


class Libraries:
    """Groups of one number of ranks, by side. `small`, `most`: how many calls a slice holds at most. One that fails is
    left out from then on."""

    def __init__(self, recorder, slice_seconds, least, most):
        self.recorder, self.slice, self.least, self.most = recorder, slice_seconds, least, most
        self.groups, self.calls, self.cpu_us = {}, {}, {}

    def start(self, side, ranks, commands):
        try:
            self.groups[side] = groups.Group(side, ranks, commands)
        except groups.Failed as failure:
            self.lose(side, failure)

    def lose(self, side, failure):
        self.recorder.fail(str(failure))
        if side in self.groups:
            self.groups.pop(side).stop()

    def ask(self, side, cell, calls, memory, check=0):
        if side not in self.groups:
            return None
        try:
            return self.groups[side].ask("run", cell["collective"], cell["bytes"], calls, cell["state"], memory, cell["type"],
                                         check)
        except groups.Failed as failure:
            return self.lose(side, failure)

    def calibrate(self, cell, memories):
        """Checks the results, and finds how many calls fill a slice."""
        for side in list(self.groups):
            for memory in memories if side in ("cohort", "against") else ["heap"]:
                rounds = side.endswith(("/int8", "/int4"))
                first = self.ask(side, cell, 3, memory, check=0 if rounds else 1)
                if not first:
                    continue
                wrong = sum(answer["wrong"] for answer in first)
                if wrong:
                    self.recorder.fail(f"{side} delivered {wrong} wrong elements: {cell}, {memory}")
                calls = int(self.slice * 1e6 / max(groups.slowest(first), 0.05))
                self.calls[str(cell), side, memory] = max(self.least, min(self.most(cell), calls))

    def round_of(self, cell, number):
        """Microseconds by side and memory; `cpu_us` then holds those of the processor, of all ranks together."""
        turns = [key[1:] for key in self.calls if key[0] == str(cell)]
        found, self.cpu_us = {}, {}
        for side, memory in records.rotated(turns, number):
            answers = self.ask(side, cell, self.calls[str(cell), side, memory], memory)
            if answers:
                found[side, memory] = round(groups.slowest(answers), 4)
                self.cpu_us[side, memory] = sum(answer.get("cpu_us", 0) for answer in answers)
        return found

    def stop(self):
        for group in self.groups.values():
            group.stop()


def distance_of(trips):
    near = [trip < NEAR_NS for trip in trips]
    return "moved" if near[0] != near[1] else "near" if near[0] else "far"


def measure_ranks(options, ranks, distance, recorder):
    libraries = Libraries(recorder, options.slice, 3,
                          lambda cell: 20000 if cell["state"] == "hot" and cell["bytes"] < 4096 else 500)
    try:
        for side in [*options.builds, *options.peers]:
            name, build = ("cohort", options.builds[side]) if side in options.builds else (side, options.build)
            if groups.peer_commands(name, build, ranks, "") is None or (side == "torch" and not groups.has_torch(sys.executable)):
                recorder.progress(f"{records.TITLES[side]} is not there and left out: bench/README.md says what it needs")
                continue
            libraries.start(side, ranks,
                            lambda folder, name=name, build=build: groups.peer_commands(name, build, ranks, folder))
        if "cohort" not in libraries.groups:
            return
        print(f"{ranks} ranks: " + ", ".join(group.version for group in libraries.groups.values()), flush=True)
        cells = cells_of(options)
        for cell in cells:
            libraries.calibrate(cell, options.memory)
        deadline = time.monotonic() + options.seconds
        for number in range(options.rounds):
            if time.monotonic() > deadline:
                recorder.progress(f"{options.seconds:g} s are over after {number} of {options.rounds} rounds on {ranks} ranks")
                break
            for cell in random.sample(cells, len(cells)):
                before = distance.measure()
                found = libraries.round_of(cell, number)
                cores = distance_of([before, distance.measure()])
                for memory in options.memory:
                    values = {side: found.get((side, memory if side in options.builds else "heap"))
                              for side in libraries.groups}
                    recorder.add(number, {**cell, "ranks": ranks, "memory": memory, "cores": cores}, "us", values)
    finally:
        libraries.stop()


def measure(options, recorder):
    options.ranks = options.ranks or ([2, 4, 8] if options.goals else [2])
    options.sizes = options.sizes or (sorted({size for row in GOALS for size in row[1]}) if options.goals
                                      else [8, K, 64 * K, M, 16 * M])
    groups.needed(options.build, "cohort_peer", "core_distance")
    if options.against:
        groups.needed(options.against, "cohort_peer")
    distance = groups.CoreDistance(options.build)
    try:
        for ranks in options.ranks:
            measure_ranks(options, ranks, distance, recorder)
    finally:
        distance.stop()


def show(found, options):
    order = {name: at for at, name in enumerate(COLLECTIVES)}
    found = sorted(found, key=lambda e: (e["cell"]["ranks"], order[e["cell"]["collective"]], e["cell"]["type"],
                                         e["cell"]["state"], e["cell"]["memory"], e["cell"]["bytes"], e["cell"]["cores"]))
    records.print_table(found)
    if options.goals:
        show_goals(found)


def show_goals(found):
    """all_reduce of float32 against the goals. A row's figure is its worst size's median."""
    def ratios(peer, places):
        return records.ratios([entry for entry in records.settled(found)
                               if all(entry["cell"][name] == value for name, value in places.items())], peer)

    settled = records.settled(found)
    peers = [peer for peer in PEERS if any(peer in entry["values"] for entry in settled)]
    for state, cores in sorted({(entry["cell"]["state"], entry["cell"]["cores"]) for entry in settled}):
        print(f"\nfp32 sum in place, {state} buffers, cores {cores}: times faster, the worst size's median\n"
              "|  | against | ranks | goal | reached | of all rounds and sizes | worst size |  |\n|---|---|---|---|---|---|---|---|")
        for title, sizes, memory, open_mpi, gloo in GOALS:
            for peer in peers:
                for ranks, goal in zip((2, 4, 8), open_mpi if peer == "openmpi" else (gloo,) * 3):
                    by_size = {size: ratios(peer, {"collective": "all_reduce", "type": "float32", "ranks": ranks, "bytes": size,
                                                   "memory": memory, "state": state, "cores": cores}) for size in sizes}
                    by_size = {size: values for size, values in by_size.items() if values}
                    if not by_size:
                        continue
                    worst = min(by_size, key=lambda size: statistics.median(by_size[size]))
                    reached = statistics.median(by_size[worst])
                    every = [value for values in by_size.values() for value in values]
                    verdict = "reached" if reached >= goal else "missed"
                    if len(by_size) < len(sizes):
                        verdict += f" ({len(sizes) - len(by_size)} sizes not measured)"
                    wanted, verdict = ("-", "") if peer == "mpich" else (f"{goal:g}", verdict)
                    print(f"| {title} | {records.TITLES[peer]} | {ranks} | {wanted} | {reached:.2f} | "
                          f"{min(every):.2f}-{max(every):.2f} | {records.size_text(worst)} | {verdict} |")
