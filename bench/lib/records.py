"""Shared by all cases of bench/compare: rounds in rotating order, records, and the table that is printed of them.

A record is one cell (what was measured: a dict) in one round, with a figure of each side. The first side, "cohort", is
what the others are compared with. `ahead` is the other side's time over ours in the same round, or ours over theirs for
a rate: above 1 means that we are faster.
"""
import argparse
import json
import math
import os
import platform
import statistics
import sys
import time

from lib import groups

K, M = 1 << 10, 1 << 20
TITLES = {"cohort": "Cohort", "against": "against", "openmpi": "Open MPI", "mpich": "MPICH",
          "openmpi5": "Open MPI 5", "mpich5": "MPICH 5", "gloo": "Gloo",
          "torch": "Gloo of torch", "rpc": "RPC of torch", "view": "Gloo, bucket view", "plain": "no communication", "bound": "bound of the link"}


def size_of(text):
    factor = {"K": K, "M": M, "G": 1 << 30}.get(text[-1:].upper(), 1)
    try:
        size = int(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no size: a number, with K, M or G if you like")
    return size


def size_text(size):
    for unit, name in ((M, "M"), (K, "K")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def list_of(kind, known=None):
    def parse(text):
        try:
            values = [kind(word) for word in text.split(",") if word]
        except ValueError:
            values = []
        unknown = [value for value in values if known and value not in known]
        if unknown or not values:
            raise argparse.ArgumentTypeError(f"'{unknown[0] if unknown else text}': choose from {', '.join(known or ['numbers'])}")
        return list(dict.fromkeys(values))
    return parse


def rotated(names, number):
    """The order of a round."""
    names = list(names)
    shift = number % len(names) if names else 0
    return names[shift:] + names[:shift]


class Recorder:
    """Keeps what is measured, and writes it to a file as it comes; `resume`: after what the file has already."""

    def __init__(self, path=None, resume=False):
        self.records, self.failed = [], False
        resume = bool(path) and resume and os.path.exists(path)
        if resume:
            with open(path, "r+b") as file:
                file.truncate(file.read().rfind(b"\n") + 1)  # a line that was not written to its end
            self.records = read(path)
        self.file = open(path, "a" if resume else "w", encoding="utf-8") if path else None

    def write(self, entry):
        if self.file:
            self.file.write(json.dumps(entry) + "\n")
            self.file.flush()

    def add(self, number, cell, unit, values, rate=False):
        values = {side: value for side, value in values.items() if value is not None}
        entry = {"round": number, "cell": cell, "unit": unit, "rate": rate, "values": values}
        self.records.append(entry)
        self.write(entry)

    def progress(self, text):
        print(text, file=sys.stderr, flush=True)

    def fail(self, text):
        """Reports a problem; the measuring goes on, and the command fails at its end."""
        self.failed = True
        print(f"bench/compare: {text}", file=sys.stderr, flush=True)

    def header(self, options):
        busy = groups.busy_cores()
        facts = {"event": "header", "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "host": platform.node(),
                 "kernel": platform.release(), "cores": groups.usable_cores(), "load": os.getloadavg()[0],
                 "busy_cores": round(busy, 2), "options": {name: str(value) for name, value in vars(options).items()}}
        self.write(facts)
        print(f"{facts['cores']} cores, load {facts['load']:.1f}; up to {options.rounds} rounds", flush=True)
        if busy > 0.1:
            print(f"WARNING: the machine is not idle: {busy:.1f} cores are busy before anything has started",
                  file=sys.stderr)


def read(path):
    with open(path, encoding="utf-8") as file:
        return [entry for entry in map(json.loads, file) if "event" not in entry]


def ahead(entry, side):
    ours, theirs = entry["values"]["cohort"], entry["values"][side]
    return ours / theirs if entry["rate"] else theirs / ours


def ratios(entries, side):
    return [ahead(entry, side) for entry in entries
            if side in entry["values"] and entry["values"].get("cohort", 0) > 0 and entry["values"][side] > 0]


def settled(records):
    """Drops the rounds in which the distance of the cores changed."""
    return [entry for entry in records if entry["cell"].get("cores") != "moved"]


def by_cell(records):
    cells = {}
    for entry in settled(records):
        cells.setdefault((json.dumps(entry["cell"]), entry["unit"]), []).append(entry)
    return cells


def spread(values):
    """Median, quartiles, least and most."""
    return f"{quartiles(values)[:-1]}, all {min(values):.2f}-{max(values):.2f})"


def quartiles(values):
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def number_text(value):
    return f"{value:.0f}" if abs(value) >= 10000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def cell_text(name, value):
    return size_text(value) if name == "bytes" else str(value)


def others_of(entries):
    return list(dict.fromkeys(side for entry in entries for side in entry["values"] if side != "cohort"))


def open_table(records, *titles):
    """Prints what is equal in all rows, and the head of a table. Gives the names that differ: its first columns."""
    names = list(dict.fromkeys(name for entry in records for name in entry["cell"]))
    common = [name for name in names if len({str(entry["cell"].get(name)) for entry in records}) == 1]
    if common:
        print(", ".join(f"{name} {cell_text(name, records[0]['cell'][name])}" for name in common))
    names = [name for name in names if name not in common]
    print("| " + " | ".join([*names, *titles]) + " |\n|" + "---|" * (len(names) + len(titles)))
    return names


def place_of(cell, names):
    return [cell_text(name, cell[name]) if name in cell else "" for name in names]


def worst_first(records):
    """For each cell its measurements, the side that is fastest next to ours, and its `ahead` in each round; the cells in
    which we are furthest behind first, those without another side last."""
    rows = []
    for entries in by_cell(records).values():
        found = {side: values for side in others_of(entries) if (values := ratios(entries, side))}
        best = min(found, key=lambda side: statistics.median(found[side]), default=None)
        rows.append((entries, best, found.get(best, [])))
    return sorted(rows, key=lambda row: statistics.median(row[2]) if row[2] else math.inf)


def print_worst_first(records):
    """A row for each cell: the best of the other sides, its time over ours within a round, and the medians of both."""
    names = open_table(records, "best peer over ours (quartiles)", "best peer", "its time", "ours", "unit", "rounds")
    rows = worst_first(records)
    for entries, best, within in rows:
        theirs = statistics.median(entry["values"][best] for entry in entries if best in entry["values"]) if best else None
        ours = statistics.median(entry["values"]["cohort"] for entry in entries)
        print("| " + " | ".join([*place_of(entries[0]["cell"], names), quartiles(within) if best else "",
                                 TITLES.get(best, best) if best else "none", number_text(theirs) if best else "",
                                 number_text(ours), entries[0]["unit"], str(len(entries))]) + " |")
    behind = sum(statistics.median(within) < 1 for _, _, within in rows if within)
    print(f"{len(rows)} cells; in {behind} a peer is faster")
    print_moved(records)


def print_moved(records):
    moved = len(records) - len(settled(records))
    if moved:
        print(f"{moved} measurements in which the cores' distance changed are left out")


def print_table(records):
    """A row for each cell: what ours took, and the median of each other side with `ahead`: median (quartiles, all)."""
    sides = others_of(records)
    names = open_table(records, "unit", "rounds", TITLES["cohort"], *(f"{TITLES.get(side, side)}: time, ahead" for side in sides))
    for (_, unit), entries in by_cell(records).items():
        row = place_of(entries[0]["cell"], names)
        for side in ["cohort", *sides]:
            found = [entry["values"][side] for entry in entries if side in entry["values"]]
            text = number_text(statistics.median(found)) if found else ""
            if side == "cohort":
                row += [unit, str(len(found)), f"{text} ({number_text(min(found))}-{number_text(max(found))})" if found else ""]
            else:
                within = ratios(entries, side)
                row.append(text + (f", {spread(within)}" if within else ""))
        print("| " + " | ".join(row) + " |")
    print_moved(records)
