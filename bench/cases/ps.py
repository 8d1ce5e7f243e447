"""A parameter server: rows per second of a server's core, and the time of a call of 100 keys.

    bench/compare ps --ways shared,unix,tcp --batches 100,4096,100000 --workers 1,2 --rounds 5 --seconds 1
    bench/compare ps --dense 25000000 --workers 4 --servers 4 --rounds 3

Rows of 64 floats, 1,000,000 of them, keys at random, four calls under way. `pull` reads rows, `push` steps them by
row-wise Adagrad. A round starts each side's server and workers as processes and ends them.

`rpc` is torch's RPC with a table on the server (index_select, index_add), one thread there; its `shared` is what
TensorPipe chooses on one host, its `tcp` libuv. `redis` reads by MGET and writes rows by MSET, which is no step of an
optimizer; a client in C (hiredis). `dense`: all workers push a vector to all servers and pull it, until the last is done.
"""
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

from lib import groups, records

ROUNDS = 5
PEERS = ["rpc", "redis"]
LIMIT = 180


def options(parser):
    parser.add_argument("--ways", type=records.list_of(str, ["shared", "unix", "tcp"]), default=["shared", "unix", "tcp"])
    parser.add_argument("--batches", type=records.list_of(int), default=[4096], help="keys of a call [4096]")
    parser.add_argument("--workers", type=records.list_of(int), default=[1])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=1.0, help="per round, way and side [1]")
    parser.add_argument("--dense", type=int, default=0, metavar="FLOATS", help="instead: a dense vector")
    parser.add_argument("--servers", type=int, default=4, help="with --dense [4]")
    parser.add_argument("--python", default=sys.executable, help="the interpreter, with torch")


def figures_of(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=LIMIT)
    if done.returncode != 0 or not done.stdout.strip():
        raise groups.Failed(f"{command[0]} has ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def words_of(options, way, workers, batch):
    words = ["--where", way, "--workers", str(workers), "--seconds", str(options.seconds), "--json"]
    if options.dense:
        return [*words, "--dense", str(options.dense), "--servers", str(options.servers)]
    return [*words, "--rows", str(options.rows), "--batch", str(batch)]


class Redis:
    """A server that is there as long as this."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="cohort-redis-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.path = f"{self.folder.name}/socket"
        self.process = subprocess.Popen(
            [shutil.which("redis-server"), "--bind", "127.0.0.1", "--port", str(self.port), "--unixsocket", self.path, "--save",
             "", "--appendonly", "no", "--dir", self.folder.name], stdout=subprocess.DEVNULL)

    def __enter__(self):
        end = time.monotonic() + 20
        while not os.path.exists(self.path):
            if self.process.poll() is not None or time.monotonic() > end:
                self.__exit__()
                raise groups.Failed("redis-server does not start")
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def run_redis(options, way, batch):
    program = groups.program(options.build, "redis_peer")
    if way == "shared" or options.dense or not program or not shutil.which("redis-server"):
        return None
    with Redis() as server:
        at = server.path if way == "unix" else f"127.0.0.1:{server.port}"
        return figures_of([program, at, str(server.process.pid), str(options.rows), str(batch), str(options.seconds)])


def run_side(options, side, way, workers, batch):
    if side == "rpc":
        if way == "unix":
            return None
        return figures_of([options.python, f"{groups.BENCH}/peers/ps_torch.py", *words_of(options, way, workers, batch)])
    if side == "redis":
        return run_redis(options, way, batch) if workers == 1 else None
    return figures_of([groups.program(options.builds[side], "ps_bench"), *words_of(options, way, workers, batch)])


def measure(options, recorder):
    for build in options.builds.values():
        groups.needed(build, "ps_bench")
    for way in options.ways:
        for workers in options.workers:
            for batch in [0] if options.dense else options.batches:
                for number in range(options.rounds):
                    found = {}
                    for side in records.rotated([*options.builds, *options.peers], number):
                        figures = run_side(options, side, way, workers, batch)
                        if figures:
                            found[side] = figures
                    cell = {"way": way, "workers": workers}
                    if options.dense:
                        recorder.add(number, {**cell, "floats": options.dense, "servers": options.servers}, "ms",
                                     {side: figures["dense_ms"] for side, figures in found.items()})
                        continue
                    cell["keys"] = batch
                    for what in ("pull", "push"):
                        for name, unit, rate in (("", "M rows/s", True), ("_of_a_server_core", "M rows/s/server core", True),
                                                 ("_us", "us for 100 keys", False), ("_us_99", "us for 100 keys, 99%", False)):
                            recorder.add(number, {**cell, "what": what}, unit,
                                         {side: figures[what + name] for side, figures in found.items()}, rate=rate)
