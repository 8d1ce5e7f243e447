"""Training the digits: the C++ example under `cohort run` and started by hand, against torch's DDP on Gloo.

    bench/compare ddp --rounds 5 --epochs 4 --batch-size 64
    bench/compare ddp --against OLD/build/release --processes 2,4
    bench/compare ddp --processes 2 --peers hand --rounds 20        what being watched by `cohort run` costs

`hand`: the same processes with no launcher, no agent, no status pages, no logs. Every round starts each anew, one thread
per process. Samples per second of the median epoch without the first.
"""
import json
import os
import socket
import subprocess
import sys
import tempfile

from lib import groups, records

ROUNDS = 5
PEERS = ["gloo", "hand"]


def options(parser):
    parser.add_argument("--processes", type=records.list_of(int), default=[1, 2])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step over all processes [64]")


def digits(build, folder, arguments):
    return [groups.program(build, "digits"), "--out", f"{folder}/out", "--threads", "1", "--shift", "0", *arguments]


def speed_of(folder):
    with open(f"{folder}/out/run.jsonl", encoding="utf-8") as file:
        return json.loads(file.read().splitlines()[-1])["steady_samples_per_second"]


def watched(build, processes, arguments):
    with tempfile.TemporaryDirectory() as folder:
        groups.run(groups.cohort_run(build, "-np", str(processes), "--run-dir", f"{folder}/job", "--",
                                     *digits(build, folder, arguments)))
        return speed_of(folder)


def by_hand(build, processes, arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        try:
            for rank in map(str, range(processes)):
                who = {"RANK": rank, "WORLD_SIZE": str(processes), "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": str(processes),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
                ranks.append(subprocess.Popen(digits(build, folder, arguments), stdout=subprocess.DEVNULL,
                                              stderr=subprocess.PIPE, env={**os.environ, **who}))
            for process in ranks:
                _, words = process.communicate(timeout=600)
                if process.returncode != 0:
                    raise groups.Failed(f"by hand: a process failed with {process.returncode}:\n{words.decode()}")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return speed_of(folder)


def under_gloo(processes, arguments):
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    said = groups.run(start + [f"{groups.BENCH}/peers/ddp_digits.py", "--threads", "1", *arguments])
    return json.loads(said.strip().splitlines()[-1])["samples_per_second"]


def measure(options, recorder):
    for build in options.builds.values():
        groups.needed(build, "cohort", "digits")
    arguments = ["--epochs", str(options.epochs), "--batch-size", str(options.batch_size)]
    ways = {side: lambda count, build=build: watched(build, count, arguments) for side, build in options.builds.items()}
    if "gloo" in options.peers:
        ways["gloo"] = lambda count: under_gloo(count, arguments)
    if "hand" in options.peers:
        ways["hand"] = lambda count: by_hand(options.build, count, arguments)
    for number in range(options.rounds):
        for count in options.processes:
            values = {side: ways[side](count) for side in records.rotated(ways, number)}
            recorder.add(number, {"processes": count, "batch": options.batch_size}, "samples/s", values, rate=True)
            recorder.progress(f"round {number + 1}, {count} processes: {values}")
