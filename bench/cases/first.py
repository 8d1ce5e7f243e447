"""From the start of torchrun on several hosts to the end of the first all_reduce: backend "cohort", against Gloo. Needs root.

    bench/compare first --hosts 2 --ranks 2

`torchrun --nnodes HOSTS --nproc-per-node RANKS` on each host of a cluster in a box, a program of ten lines. Seconds
until the last rank was there: torch imported, the group there, the first all_reduce done. After a round that warms the
caches.
"""
import os
import re
import subprocess
import sys
import tempfile
import time

from lib import boxes, groups, records

ROUNDS = 9
PEERS = ["gloo"]
MARKS = ["imported", "group", "reduced"]
PROGRAM = r"""
import os, sys, time
def mark(name): os.write(1, f"mark {name} {time.time()}\n".encode())  # whole, although ranks share it
import torch, torch.distributed as dist
if sys.argv[1] == "cohort": import cohort
mark("imported")
dist.init_process_group(sys.argv[1])
mark("group")
values = torch.ones(4)
dist.all_reduce(values)
assert values[0] == dist.get_world_size()
mark("reduced")
dist.destroy_process_group()
"""


def options(parser):
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host [2]")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one job [180]")


def start(box, options, program, side, port):
    """One job. Seconds from its start to each mark, of the rank that was there last."""
    backend = "gloo" if side == "gloo" else "cohort"
    environment = {**os.environ, **groups.python_path(options.builds.get(side, options.build))}
    begun, jobs = time.time(), []
    try:
        for number, host in enumerate(box.hosts):
            words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(box.hosts)), "--nproc-per-node",
                     str(options.ranks), "--node-rank", str(number), "--master-addr", box.hosts[0], "--master-port",
                     str(port), program, backend]
            jobs.append(subprocess.Popen(box.on(host, words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                         stderr=subprocess.STDOUT, text=True, env=environment))
        said = "".join(job.communicate(timeout=options.limit)[0] for job in jobs)
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
                job.communicate()
    times = {}
    for mark in MARKS:
        found = [float(at) for at in re.findall(rf"mark {mark} ([0-9.]+)", said)]
        if any(job.returncode for job in jobs) or len(found) != len(box.hosts) * options.ranks:
            raise groups.Failed(f"{side}: not all ranks have said '{mark}': {said}")
        times[mark] = max(found) - begun
    return times


def measure(options, recorder):
    boxes.check()
    sides = [*options.builds, *options.peers]
    # In a folder that hosts share: /tmp of a box is this machine's too, but /dev/shm is not.
    with boxes.Box(options.hosts, 0) as box, tempfile.TemporaryDirectory(prefix="cohort-first-") as folder:
        program = os.path.join(folder, "program.py")
        with open(program, "w", encoding="utf-8") as file:
            file.write(PROGRAM)
        for number in range(-1, options.rounds):
            taken = {side: start(box, options, program, side, 29500 + (number + 1) * len(sides) + place)
                     for place, side in enumerate(records.rotated(sides, number))}
            for mark in MARKS if number >= 0 else []:
                recorder.add(number, {"hosts": options.hosts, "ranks of each": options.ranks, "until": mark}, "s",
                             {side: times[mark] for side, times in taken.items()})
