"""What the rounds of a comparison say: medians and ratios with their spread, and the table of goals."""
import statistics

NEAR_NS = 200  # between the 95 ns of cores that share a cache and the 400 to 500 ns of others

NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "gloo": "Gloo C++", "torch": "Gloo torch"}

STATES = ["hot", "touched", "cold"]

# Rows of the goals: title, sizes, our memory, factor over Open MPI at 2, 4, 8 ranks, factor over both Gloos.
K, M = 1024, 1 << 20
GOALS = [
    ("up to 256 B", [8, 64, 256], "heap", (1.2, 1.7, 2.5), 100),
    ("1 to 64 KiB", [K, 4 * K, 16 * K, 64 * K], "heap", (1.5, 2.5, 3.5), 50),
    ("256 KiB, other memory", [256 * K], "heap", (1.6, 3.5, 3.5), 15),
    ("1 to 4 MiB, other memory", [M, 4 * M], "heap", (1.05, 2.3, 2.4), 9),
    ("16 to 64 MiB, other memory", [16 * M, 64 * M], "heap", (2, 2.7, 2.2), 4.5),
    ("256 KiB to 64 MiB, arena", [256 * K, M, 4 * M, 16 * M, 64 * M], "arena", (6, 6, 5), 9),
]
GOAL_SIZES = sorted({size for _, sizes, _, _, _ in GOALS for size in sizes})


def distance_of(trips):
    """near, far or changed, from the round trips before and after."""
    near = [trip < NEAR_NS for trip in trips]
    return "changed" if near[0] != near[1] else "near" if near[0] else "far"


def size_text(size):
    for unit, name in ((M, "M"), (K, "K")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def ratios(rounds, peer, memory):
    return [entry["us"][peer] / entry["us"][f"cohort/{memory}"] for entry in rounds
            if peer in entry["us"] and f"cohort/{memory}" in entry["us"]]


def spread(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def grouped(rounds):
    """Rounds by (cell, distance); those in which the cores moved are left out."""
    groups, moved = {}, 0
    for entry in rounds:
        distance = distance_of(entry["trips"])
        moved += distance == "changed"
        if distance != "changed":
            key = (entry["collective"], entry["dtype"], entry["ranks"], entry["bytes"], entry["state"], distance)
            groups.setdefault(key, []).append(entry)
    first_seen = list(dict.fromkeys(key[0] for key in groups))
    order = sorted(groups, key=lambda key: (key[2], first_seen.index(key[0]), key[1], STATES.index(key[4]), key[3], key[5]))
    return {key: groups[key] for key in order}, moved


def print_rows(rounds, peers):
    groups, moved = grouped(rounds)
    print(f"\n{'collective':<14} {'type':<9} {'ranks':>5} {'size':>6} {'state':<8}{'cores':<6}{'rounds':>6} {'memory':<6} "
          f"{'cohort us':>10}  " + "  ".join(f"{NAMES[peer] + ' us':>14} {'ratio (min to max)':>24}" for peer in peers))
    for (collective, dtype, ranks, size, state, distance), entries in groups.items():
        for memory in ("heap", "arena"):
            own = [entry["us"][f"cohort/{memory}"] for entry in entries if f"cohort/{memory}" in entry["us"]]
            if not own:
                continue
            line = (f"{collective:<14} {dtype:<9} {ranks:>5} {size_text(size):>6} {state:<8}{distance:<6}{len(own):>6} "
                    f"{memory:<6} {statistics.median(own):>10.2f}  ")
            cells = []
            for peer in peers:
                found = [entry["us"][peer] for entry in entries if peer in entry["us"]]
                cells.append(f"{statistics.median(found):>14.2f} {spread(ratios(entries, peer, memory)):>24}"
                             if found else f"{'-':>14} {'':>24}")
            print(line + "  ".join(cells))
    if moved:
        print(f"{moved} measurements in which the cores' distance changed are left out")


def print_table(rounds, peers):
    """all_reduce of float32 against the goals. A row's figure is its worst size's median ratio."""
    groups, moved = grouped(rounds)
    places = sorted({(state, distance) for (_, _, _, _, state, distance) in groups})
    for state, distance in places:
        print(f"\nfp32 sum in place, {state} buffers, cores {distance}: times faster, median of rounds of the worst size "
              "(least to most of all rounds and sizes)")
        print(f"| {'':<26} | against | ranks | goal | reached | spread | worst size | rounds |  |")
        print("|---|---|---|---|---|---|---|---|---|")
        for title, sizes, memory, open_mpi, gloo in GOALS:
            for peer in peers:
                for ranks, goal in zip((2, 4, 8), open_mpi if peer == "openmpi" else (gloo,) * 3):
                    found = {}
                    for size in sizes:
                        entries = groups.get(("all_reduce", "float32", ranks, size, state, distance), [])
                        values = ratios(entries, peer, memory)
                        if values:
                            found[size] = values
                    if not found:
                        continue
                    worst = min(found, key=lambda size: statistics.median(found[size]))
                    reached = statistics.median(found[worst])
                    every = [value for values in found.values() for value in values]
                    wanted = f"{goal:g}" if peer != "mpich" else "-"
                    verdict = "" if peer == "mpich" else "reached" if reached >= goal else "missed"
                    if len(found) < len(sizes):
                        verdict += f" ({len(sizes) - len(found)} sizes not measured)"
                    print(f"| {title:<26} | {NAMES[peer]} | {ranks} | {wanted} | {reached:.2f} | "
                          f"{min(every):.2f} to {max(every):.2f} | {size_text(worst)} | "
                          f"{min(len(v) for v in found.values())} | {verdict} |")
    if moved:
        print(f"\n{moved} measurements in which the cores' distance changed are left out")
