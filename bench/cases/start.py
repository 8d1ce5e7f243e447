"""Starting and ending a job of N processes that do nothing: cohort run, mpirun, torchrun.

    bench/compare start -np 4 --rounds 20
    bench/compare start -np 4 --against OLD/build/release

After a round that warms the caches. A launcher that is not installed is left out; torchrun, which takes seconds, takes
part in --torchrun-rounds of the rounds.
"""
import os
import shutil
import sys
import tempfile
import time

from lib import groups, records

ROUNDS = 20
PEERS = ["mpirun", "torchrun"]


def options(parser):
    parser.add_argument("-np", type=records.list_of(int), default=[4])
    parser.add_argument("--torchrun-rounds", type=int, default=3)


def measure(options, recorder):
    for build in options.builds.values():
        groups.needed(build, "cohort")
    with tempfile.TemporaryDirectory() as folder:
        for count in options.np:
            ways = {side: groups.cohort_run(build, "-np", str(count), "true") for side, build in options.builds.items()}
            if "mpirun" in options.peers and shutil.which("mpirun"):
                root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
                ways["mpirun"] = ["mpirun", *root, "--oversubscribe", "-np", str(count), "true"]
            if "torchrun" in options.peers and groups.has_torch(sys.executable):
                ways["torchrun"] = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node",
                                    str(count), "true"]
            for number in range(-1, options.rounds):
                values = {}
                for side in records.rotated(ways, number):
                    if side == "torchrun" and number >= options.torchrun_rounds:
                        continue
                    begin = time.perf_counter()
                    groups.run(ways[side], cwd=folder)
                    values[side] = (time.perf_counter() - begin) * 1000
                if number >= 0:
                    recorder.add(number, {"ranks": count}, "ms", values)
