#!/usr/bin/env python3
"""Trainings with 8 virtual ranks that all have to end with the same weights, buffers and loss, to the bit.

Three models (an MLP over digits, convolutions with BatchNorm and dropout, a small GPT), in C++ and Python, with AdamW, a schedule,
clipping and accumulation, for 200 steps: on 1, 2, 3, 4, 5 and 8 ranks of one host (shared memory), on 2 x 2, 3 x 1 and 5 + 3 ranks
of several (TCP: hosts that this machine pretends to be, and with root those of tools/cluster-box), and in C++ with the portable
kernels instead of the processor's best ones, and with others on each rank.
"""

import argparse
import collections
import pathlib
import re
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
import attempts  # noqa: E402
from soak import job, series  # noqa: E402

LAYOUTS = ("1", "2", "3", "4", "5", "8", "2,2", "1,1,1", "5,3")
KERNELS = (("3", "scalar"), ("3", "mixed"), ("2,2", "mixed"), ("8", "mixed"))
BOX = ("2,2", "1,1,1")
DIGEST = re.compile(r"digest (\w+), loss (\S+)")


def train(options, place, program, layout, environment, box=False):
    """Returns the endings of all ranks, whose number is the sum of the layout."""
    ranks = [int(each) for each in layout.split(",")]
    where = ["-H", ",".join(f"h{host}:{slots}" for host, slots in enumerate(ranks, 1))] if box else ["-np", str(sum(ranks))]
    pretended = {"COHORT_PRETEND_HOSTS": layout} if len(ranks) > 1 and not box else {}
    with tempfile.TemporaryDirectory() as folder, attempts.Attempt(
            place, series.program(options.build, "cohort"), ["-q", "--stopped-timeout", "60", *where], program, folder, 0,
            environment={**environment, **pretended}) as attempt:
        status = attempt.ended(options.deadline)
        endings = DIGEST.findall(attempt.said())
        if status != 0 or len(endings) != sum(ranks):
            return {f"status {status}: {attempt.complaints()[-500:]}"}
        return set(endings)


def main():
    parser = argparse.ArgumentParser(prog="tools/soak/same-bits", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=series.ROOT / "build/release", help="the build folder [build/release]")
    parser.add_argument("--steps", type=int, default=200, help="of each training [200]")
    parser.add_argument("--models", default="digits,conv,gpt", help="some of digits,conv,gpt [all]")
    parser.add_argument("--languages", default="c++,python", help="some of c++,python [all]")
    parser.add_argument("--python", default=sys.executable, help="a Python that has torch [this one]")
    parser.add_argument("--deadline", type=float, default=300, help="seconds for one to end [300]")
    options = parser.parse_args()
    python = {"PYTHONPATH": str(options.build / "python")}
    peers = {"c++": [series.program(options.build, "same_bits_peer")],
             "python": [options.python, pathlib.Path(__file__).with_name("same_bits_peer.py")]}
    here, box = job.Here(), None
    try:
        box = attempts.InBox(3)
    except unittest.SkipTest as why:
        print(f"not on several hosts: {why}")
    bad = 0
    try:
        for language in options.languages.split(","):
            environment = python if language == "python" else {}
            for model in options.models.split(","):
                program, found, since = [*peers[language], model, options.steps], collections.defaultdict(list), time.monotonic()
                for layout in LAYOUTS:
                    for ending in train(options, here, program, layout, environment):
                        found[ending].append(layout)
                for layout, kernels in KERNELS if language == "c++" else ():
                    for ending in train(options, here, program, layout, {"KERNELS": kernels}):
                        found[ending].append(f"{layout} {kernels}")
                for layout in BOX if box else ():
                    for ending in train(options, box, program, layout, environment, box=True):
                        found[ending].append(f"{layout} box")
                same = len(found) == 1 and "status" not in str(next(iter(found)))
                bad += not same
                print(f"{language} {model}: {'same bits' if same else 'NOT AS IT SHOULD BE'}, {time.monotonic() - since:.0f} s")
                for ending, layouts in found.items():
                    print(f"  {' '.join(ending) if isinstance(ending, tuple) else ending}: {'; '.join(layouts)}", flush=True)
    finally:
        if box:
            box.close()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
