"""`import cohort` in a new interpreter.

    bench/compare import --against OLD/build/release

`with torch`: torch is imported before, and not timed. The first round warms the caches and does not count.
"""
import sys

from lib import groups, records

ROUNDS = 30
PEERS = []
PROGRAM = "import time; {}begin = time.perf_counter(); import cohort; print((time.perf_counter() - begin) * 1e3)"


def options(parser):
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--with-torch", action="store_true", help="also where torch is there already")


def measure(options, recorder):
    for before in ["", "import torch; "] if options.with_torch else [""]:
        for number in range(-1, options.rounds):
            values = {side: float(groups.run([options.python, "-c", PROGRAM.format(before)],
                                             groups.python_path(options.builds[side])))
                      for side in records.rotated(options.builds, number)}
            if number >= 0:
                recorder.add(number, {"interpreter": "with torch" if before else "bare"}, "ms", values)
