"""torch's model parallelism over "cohort" gives what it gives over "gloo": the programs of parallel_programs.py."""

import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback
import unittest

from support import needs_torch, torch
from support_distributed import free_port

SECONDS = 240

if torch is not None:
    import parallel_programs  # here, so that what is forked has it


def ranks_of(backend, size, folder):
    """Forks them: importing all of this takes longer than most programs. Returns what failed."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    children = {}
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with open(pathlib.Path(folder, f"{backend}-{rank}.log"), "w") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
                parallel_programs.run(backend, folder)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children[child] = rank
    until = time.monotonic() + SECONDS
    failed = []
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            rank = children.pop(child)
            if status != 0:
                failed.append(f"{backend}, rank {rank}: " + pathlib.Path(folder, f"{backend}-{rank}.log").read_text()[-3000:])
        elif time.monotonic() > until:
            for late in children:
                os.kill(late, signal.SIGKILL)
            until += SECONDS
        else:
            time.sleep(0.01)
    return failed


@needs_torch
class Case(unittest.TestCase):
    maxDiff = None

    def both_agree(self, size):
        with tempfile.TemporaryDirectory(prefix="cohort-parallel-") as folder:
            for backend in "cohort", "gloo":
                self.assertEqual(ranks_of(backend, size, folder), [])
            differing, skipped, compared = parallel_programs.compare(folder, size)
        self.assertEqual(differing, [])
        if int(torch.__version__.split(".")[0]) >= 2:
            self.assertEqual([why for why in skipped.values() if "ranks or more" not in why], [])
        for name, why in skipped.items():
            print(f"{name}: {why}", file=sys.stderr)
        self.assertGreater(compared, 0)


class Two(Case):
    def test_all(self):
        self.both_agree(2)


class Four(Case):
    def test_all(self):
        self.both_agree(4)


if __name__ == "__main__":
    unittest.main()
