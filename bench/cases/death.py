"""The time until a dead rank is reported: from its SIGKILL until `cohort run` has written its post-mortem.

    bench/compare death --rounds 200 --processes 4 --mebibytes 64

`--mebibytes`: memory that the rank has touched before, which the kernel has to free first. Interpreters of Python are
the ranks, so that they are as big as a small worker is.
"""
import datetime
import json
import os
import subprocess
import sys
import tempfile

from lib import groups, records

ROUNDS = 200
PEERS = []
WORKER = """
import os, signal, sys, time
memory = bytearray(int(sys.argv[1]) << 20)
for i in range(0, len(memory), 4096): memory[i] = 1
if os.environ["RANK"] == "1":
    time.sleep(0.2)
    sys.stdout.write("dies %.6f\\n" % time.time())
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def options(parser):
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--mebibytes", type=int, default=0)


def one_job(build, options):
    with tempfile.TemporaryDirectory() as folder:
        command = [groups.program(build, "cohort"), "run", "-np", str(options.processes), "--json", "--run-dir",
                   f"{folder}/job", "--grace", "1", "--no-python", sys.executable, "-c", WORKER, str(options.mebibytes)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=120, env=dict(os.environ))
    events = [json.loads(line) for line in done.stdout.splitlines()]
    died = [float(e["line"].split()[1]) for e in events if e["event"] == "output" and e["line"].startswith("dies")]
    told = [datetime.datetime.fromisoformat(e["time"].replace("Z", "+00:00")).timestamp() for e in events
            if e["event"] == "failure" and e["rank"] == 1 and e["signal"] == "SIGKILL"]
    if len(died) != 1 or len(told) != 1:
        raise groups.Failed(f"a job without its post-mortem:\n{done.stdout.decode()}")
    return 1000 * (told[0] - died[0])


def measure(options, recorder):
    for build in options.builds.values():
        groups.needed(build, "cohort")
    for number in range(options.rounds):
        values = {side: one_job(options.builds[side], options) for side in records.rotated(options.builds, number)}
        recorder.add(number, {"ranks": options.processes, "MiB of each": options.mebibytes}, "ms", values)
