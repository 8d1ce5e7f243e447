"""Prints what the two runs of ./demo came to, from the last lines of their run records.

usage: demo_report.py FOLDER FOLDER_OF_ONE_PROCESS
"""

import json
import pathlib
import sys


def events(folder):
    """The `start` and the `end` event of a run."""
    record = pathlib.Path(folder, "run.jsonl")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    named = {line["event"]: line for line in lines}
    if "end" not in named:
        sys.exit(f"{record}: the run did not come to its end")
    return named["start"], named["end"]


def main():
    start, end = events(sys.argv[1])
    _, alone = events(sys.argv[2])
    curves = str(pathlib.Path(sys.argv[1], "curves.svg"))
    speed, speed_alone = end["steady_samples_per_second"], alone["steady_samples_per_second"]
    rows = [
        ("accuracy", f"{100 * end['test_accuracy']:.2f} % on the test images"),
        ("throughput", f"{speed:,.0f} samples/s on {start['world_size']} processes, {speed_alone:,.0f} on one"),
        ("speed-up", f"{speed / speed_alone:.2f} over one process (medians of the epochs after the first)"),
        ("record", end["record"]),
        ("curves", curves),
        ("checkpoint", end["checkpoint"]),
        ("weights", end["weights"]),
    ]
    for name, text in rows:
        print(f"{name:<12} {text}")
    files = [curves, *(end[name] for name in ("record", "checkpoint", "weights"))]
    missing = [name for name in files if not pathlib.Path(name).exists()]
    if missing:
        sys.exit(f"missing: {', '.join(missing)}")


if __name__ == "__main__":
    main()
