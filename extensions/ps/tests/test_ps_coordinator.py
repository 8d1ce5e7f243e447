"""Functions that a coordinator schedules on workers, some of which are killed in their midst."""

import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from support import numpy

from cohort import ps
from cohort.errors import InvalidArgument

NAMES = (f"@cohort-coordinator-{os.getpid()}-{number}" for number in itertools.count())

HEAD = """
import os, signal, subprocess, sys, time
import numpy
import cohort
from cohort import ps

def counts(client):
    return client.table("counts", 1, optimizer=ps.Sgd(lr=1.0), consistency=ps.Bounded(ps.UNBOUNDED))

if cohort.role() == "server":
    ps.serve()
    sys.exit()
"""

# As a supervisor of workers does: what was killed is started again.
WORKERS = HEAD + """
if cohort.role_number() > 0:
    if "worker" not in sys.argv:
        while (status := subprocess.call([sys.executable, __file__, "worker"], close_fds=False)) == -signal.SIGKILL:
            print("started again", flush=True)
        sys.exit(status)
    ps.serve_functions()
    sys.exit()
"""

ALL = WORKERS + """
def square(x, plus=0):
    return x * x + plus

def rows():
    number = 0
    while True:
        yield cohort.role_number(), number
        number += 1

def take(batches):
    return next(batches)

class TwoWords(Exception):  # pickles, and does not unpickle
    def __init__(self, one, other):
        super().__init__(one)

def unreadable(raises):
    counts(ps.current_client()).push([2], numpy.full((1, 1), -1, numpy.float32))
    if raises:
        raise TwoWords("of the function", 7)
    return TwoWords("returned", 7)

def fail():
    counts(ps.current_client()).push([1], numpy.full((1, 1), -1, numpy.float32))
    raise KeyError("of the function")

with ps.ClusterCoordinator() as coordinator:
    values = [coordinator.schedule(square, args=(x,), kwargs={"plus": 1}) for x in range(20)]
    assert coordinator.fetch({"all": values})["all"] == [x * x + 1 for x in range(20)]
    coordinator.join()
    assert coordinator.done()
    batches = coordinator.create_per_worker_dataset(rows)
    own = iter(batches)
    taken = coordinator.fetch([coordinator.schedule(take, args=(own,)) for _ in range(20)])
    for worker in {worker for worker, _ in taken}:
        numbers = [number for one, number in taken if one == worker]
        assert sorted(numbers) == list(range(len(numbers))), taken
    failed = coordinator.schedule(fail)
    behind = [coordinator.schedule(time.sleep, args=(0.01,)) for _ in range(200)]
    try:
        coordinator.join()
        raise SystemExit("no error")
    except KeyError as error:
        assert "of the function" in str(error)
    assert coordinator.done()
    try:
        failed.fetch()
    except KeyError:
        print("failed as it should")
    assert coordinator.schedule(square, args=(3,)).fetch() == 9
    returned, after = coordinator.schedule(unreadable, args=(False,)), coordinator.schedule(square, args=(4,))
    coordinator.join()
    assert after.fetch() == 16
    try:
        returned.fetch()
        raise SystemExit("no error")
    except cohort.Error as error:
        assert "function unreadable counts, but what it returned cannot be unpickled here" in str(error), error
    raised = coordinator.schedule(unreadable, args=(True,))
    try:
        coordinator.join()
        raise SystemExit("no error")
    except cohort.Error as error:
        assert "of the function" in str(error)
    assert coordinator.schedule(lambda: float(counts(ps.current_client()).pull([2])[0, 0])).fetch() == 1
    assert coordinator.schedule(lambda: float(counts(ps.current_client()).pull([1])[0, 0])).fetch() == 0, "what it pushed counts"
print("done")
"""

# Each function adds 1; now and then its worker is killed before or after that counts, or before it has told so.
ONCE = WORKERS + """
import random

def add(number, strike):
    client = ps.current_client()
    counts(client).push([0], numpy.full((1, 1), -1, numpy.float32))
    fresh = not os.path.exists(f"struck-{number}")
    if strike and fresh:
        open(f"struck-{number}", "w").close()
    if strike == "before" and fresh:
        os.kill(os.getpid(), signal.SIGKILL)
    if strike == "after" and fresh:  # its clock ends, and then nothing more is heard of it
        clock = client.clock
        def ending():
            clock()
            os.kill(os.getpid(), signal.SIGKILL)
        client.clock = ending
    return number

with ps.ClusterCoordinator(patience=2.0) as coordinator:
    strikes = {3: "before", 10: "after", 17: "before", 24: "after"}
    values = [coordinator.schedule(add, args=(number, strikes.get(number))) for number in range(30)]
    coordinator.join()
    lost = 0
    for number, value in enumerate(values):
        try:
            assert value.fetch() == number
        except cohort.Error as error:
            assert strikes[number] == "after" and "was lost before it told" in str(error), error
            lost += 1
    total = coordinator.schedule(lambda: float(counts(ps.current_client()).pull([0])[0, 0])).fetch()
    print("total", total, "lost", lost)
"""


@unittest.skipIf(numpy is None, "no NumPy")
class Scheduled(unittest.TestCase):
    def output(self, text, ranks=3):
        command = [os.environ["COHORT_COMMAND"], "run", "-q", "--prefix", "none", "--timeout", "200", "-np", str(ranks)]
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "program.py")
            program.write_text(text)
            done = subprocess.run(
                [*command, "--servers", "2", sys.executable, program], cwd=folder, capture_output=True, text=True, timeout=230
            )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_what_tensorflows_does(self):
        self.assertEqual(self.output(ALL).splitlines(), ["failed as it should", "done"])

    def test_functions_of_killed_workers_count_once(self):
        text = self.output(ONCE)
        self.assertIn("total 30.0 lost 2", text)
        self.assertEqual(text.count("started again"), 4)

    def test_only_worker_0_is_one(self):
        with self.assertRaisesRegex(InvalidArgument, "there are no workers beside"):
            ps.ClusterCoordinator()
        with self.assertRaisesRegex(InvalidArgument, "worker 0 is the coordinator"):
            ps.serve_functions()
        with self.assertRaisesRegex(InvalidArgument, "no function that a ClusterCoordinator"):
            ps.current_client()


if __name__ == "__main__":
    unittest.main()
