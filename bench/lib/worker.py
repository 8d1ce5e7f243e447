"""A rank of a groups.Group that is written in Python: it answers the driver's lines until the driver goes."""
import ctypes
import json
import os
import signal
import statistics
import time

SECONDS_PER_COMMAND = 120


def die_with_parent():
    """torchrun puts its workers into sessions of their own, where they outlive it if it is killed."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise SystemExit("its launcher is gone")


def serve(folder, rank, name, answer):
    """`answer(words)` gives a dict to send back; "ok" false: not supported."""
    with open(f"{folder}/in.{rank}", encoding="ascii") as lines, open(f"{folder}/out.{rank}", "w", encoding="ascii") as out:
        print(json.dumps({"ok": True, "name": name}), file=out, flush=True)
        for line in lines:
            words = line.split()
            if words == ["quit"]:
                return
            signal.alarm(SECONDS_PER_COMMAND)
            print(json.dumps({"ok": True, **answer(words)}), file=out, flush=True)
            signal.alarm(0)


def timed(barrier, function, repeat=1):
    """Milliseconds, and those of the processor (all threads of this process), each in a list, for groups.slowest."""
    barrier()
    used, begin = time.process_time(), time.perf_counter()
    for _ in range(repeat):
        function()
    return {"ms": [(time.perf_counter() - begin) * 1e3 / repeat], "cpu_ms": [(time.process_time() - used) * 1e3 / repeat]}


def mean(answers, key):
    return statistics.mean(answer[key][0] for answer in answers)
