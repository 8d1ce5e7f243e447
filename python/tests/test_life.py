"""Beginnings and ends of worlds: init and shutdown, exit, interrupts, forks, deaths. Starts its processes itself."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from support import SECONDS, needs_torch, run_world, torch

IMPORTS = """
import os, signal, sys, threading, time
import cohort

def interrupt_a_wait():
    # As Ctrl-C does, once the main thread has been seen at one place three times in a row: it waits there.
    seen = []
    def look(number, frame):
        seen.append((id(frame), frame.f_lasti))
        if len(seen) > 3 and len(set(seen[-3:])) == 1:
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.07, 0.07)
"""
START = (
    IMPORTS
    + """
world = cohort.init(os.environ["TEST_INIT"])
rank = cohort.rank()
"""
)


class Life(unittest.TestCase):
    def all_good(self, script, size=2, **environment):
        ended = run_world(START + script, size, **environment)
        every = "".join(f"rank {rank} ended with {status}: {output}\n" for rank, (status, output) in enumerate(ended))
        for status, output in ended:
            self.assertEqual(status, 0, every)
            self.assertIn("good", output)

    def test_init_and_shutdown_again_and_again(self):
        self.all_good(
            """
assert cohort.is_initialized()
assert cohort.init() is world is cohort.world()  # nothing to do
old, took = world, []
for i in range(20):
    cohort.shutdown()
    cohort.shutdown()
    assert not cohort.is_initialized()
    try:
        cohort.rank()
        sys.exit("there is no world")
    except ValueError as error:
        assert "cohort.init()" in str(error)
    began = time.perf_counter()
    cohort.init(os.environ["TEST_INIT"])
    took.append(time.perf_counter() - began)
    data = bytearray([1])
    cohort.world().all_reduce(data)
    assert data[0] == 2
try:
    cohort.init(alone=True)
    sys.exit("arguments without effect")
except cohort.InvalidArgument as error:
    assert "already" in str(error), error
assert (old.rank(), old.size(), old.has_left) == (rank, 2, True)
try:
    old.barrier()
    sys.exit("the old world is over")
except cohort.InvalidArgument as error:
    assert "has left" in str(error), error
print(f"good: init took {sorted(took)[10] * 1e3:.1f} ms")
"""
        )

    def test_an_interrupt_ends_a_wait_and_not_the_operation(self):
        # Rank 0 comes once rank 1 has been interrupted; the operation that was waited for is carried out nevertheless.
        self.all_good(
            """
data, token = bytearray([1]) * 500_000, bytearray(1)
if rank == 1:
    for wait in ("at once", "later"):
        interrupt_a_wait()
        try:
            if wait == "at once":
                world.all_reduce(data)
            else:
                work = world.all_reduce(data, async_op=True)
                work.wait()
            sys.exit("nobody has come")
        except KeyboardInterrupt:
            pass
    assert not work.done()
    world.send(token, 0)
    assert work.wait()
    assert data[7] == 4, data[7]
else:
    world.recv(token, 1)
    world.all_reduce(data)
    world.all_reduce(data)
world.barrier()
print("good")
"""
        )

    def test_an_interrupt_in_split_aborts(self):
        self.all_good(
            """
if rank == 1:
    interrupt_a_wait()
    try:
        world.split()
        sys.exit("nobody has come")
    except KeyboardInterrupt:
        pass
else:
    try:
        world.recv(bytearray(1), 1)
        sys.exit("nobody has sent")
    except cohort.Aborted as error:
        assert "interrupted in split" in str(error), error
print("good")
"""
        )

    def test_an_interrupt_in_init(self):
        began = time.monotonic()
        script = """
interrupt_a_wait()
try:
    cohort.init("file://" + os.environ["FOLDER"] + "/other", rank=0, world_size=2)
except KeyboardInterrupt:
    print("good")
"""
        ((status, output),) = run_world(IMPORTS + script, 1)
        self.assertEqual(status, 0, output)
        self.assertIn("good", output)
        self.assertLess(time.monotonic() - began, SECONDS)

    def test_threads(self):
        self.all_good(
            """
mine = [world.split() for _ in range(4)]
results = [bytearray([1]) for _ in mine]

def work(own, data):
    for _ in range(3):
        own.all_reduce(data, op="max")
    own.all_reduce(data)

threads = [threading.Thread(target=work, args=pair) for pair in zip(mine, results)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert [data[0] for data in results] == [2] * 4
print("good")
"""
        )

    def test_threads_on_one_communicator(self):
        # Threads come in any order: all of them bring the same.
        self.all_good(
            """
def work():
    for _ in range(200):
        data = bytearray([1])
        world.all_reduce(data)
        assert data[0] == 2
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("good")
"""
        )

    def test_abort(self):
        self.all_good(
            """
if rank == 0:
    world.abort("enough")
try:
    world.barrier()
    sys.exit("aborted")
except cohort.Aborted as error:
    assert "enough" in str(error), error
cohort.shutdown()
cohort.init(os.environ["TEST_INIT"])
cohort.world().barrier()
print("good")
"""
        )

    def test_an_exception_is_told_to_the_others(self):
        script = """
if rank == 0:
    if "pending" in os.environ:
        work = world.recv(bytearray(8), 1, async_op=True)
    raise LookupError("no such thing")
try:
    world.barrier()
except cohort.Error as error:
    print("good:", error)
"""
        for environment in ({}, {"pending": "1"}):
            with self.subTest(**environment):
                (first, output), (second, told) = run_world(START + script, 2, **environment)
                self.assertEqual((first, second), (1, 0), output + told)
                self.assertIn("no such thing", output)
                self.assertIn("LookupError: no such thing", told)

    def test_an_end_with_works_that_nobody_waited_for(self):
        self.all_good(
            """
data = bytearray([1]) * 3_000_000
for _ in range(3):
    world.all_reduce(data, async_op=True)
print("good")
"""
        )

    def test_a_dead_rank_whose_forked_child_lives(self):
        # The child has the dead rank's descriptors: there is no end-of-file.
        script = """
if rank == 1:
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os.write(told, b"x")
        signal.pause()
    open(os.path.join(os.environ["FOLDER"], "child"), "w").write(str(child))
    os.read(ready, 1)
    world.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
world.barrier()
began = time.monotonic()
try:
    world.all_reduce(bytearray(1))
except cohort.PeerLost as error:
    assert error.peer == 1, error.peer
    assert isinstance(error, ConnectionError)
    assert time.monotonic() - began < 10
    print("good")
child = int(open(os.path.join(os.environ["FOLDER"], "child")).read())
os.kill(child, 0)  # it does live
os.kill(child, signal.SIGKILL)
"""
        (status, output), (killed, _) = run_world(START + script, 2)
        self.assertEqual((status, killed), (0, -signal.SIGKILL), output)
        self.assertIn("good", output)

    def test_a_forked_child(self):
        self.all_good(
            """
memory = world.allocate(100)
work = world.recv(bytearray(8), 1 - rank, async_op=True)
for way in ("os._exit", "exit"):
    child = os.fork()
    if child == 0:
        assert cohort.is_initialized() and cohort.rank() == rank and cohort.size() == 2
        for call in (world.barrier, lambda: world.all_reduce(bytearray(1)), work.wait, world.split,
                     lambda: world.abort("from the child"), lambda: world.allocate(1)):
            try:
                call()
                os._exit(3)
            except cohort.InvalidArgument as error:
                assert "forked child" in str(error), error
        if way == "exit":
            sys.exit(0)
        del work, memory
        cohort.shutdown()
        assert not cohort.is_initialized()
        cohort.init(alone=True)
        cohort.world().barrier()
        cohort.shutdown()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, (way, status)
world.barrier()  # operations received by the time of the fork may be waited for
world.send(bytes(8), 1 - rank)
assert work.wait()
world.barrier()
print("good")
"""
        )

    def test_a_worker_of_multiprocessing_that_runs_the_script_again(self):
        script = (
            "import multiprocessing, os, sys\nimport cohort\ncohort.init(alone=True)\n"
            "worker = multiprocessing.get_context(sys.argv[1]).Process(target=os.getpid)\nworker.start()\nworker.join(60)\n"
        )
        guarded = script.replace("worker =", "if __name__ != '__main__': sys.exit()\nworker =")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "script.py")
            for text, method, refused in ((script, "spawn", True), (script, "forkserver", True), (script, "fork", False),
                                          (guarded.replace("cohort.init(", "__name__ == '__main__' and cohort.init("), "spawn",
                                           False)):
                path.write_text(text)
                ran = subprocess.run([sys.executable, str(path), method], capture_output=True, text=True, timeout=SECONDS)
                self.assertEqual("this process is no rank: multiprocessing has started it" in ran.stderr, refused, ran.stderr)
                self.assertEqual("if __name__ ==" in ran.stderr, refused, ran.stderr)

    def test_a_timeout(self):
        self.all_good(
            """
if rank == 0:
    try:
        world.all_reduce(bytearray(8), timeout=0.3)
        sys.exit("nobody has come")
    except cohort.Timeout as error:
        assert isinstance(error, TimeoutError)
        assert error.operation.startswith("all_reduce") and "rank 1" in str(error), error
else:
    try:
        world.recv(bytearray(1), 0)
        sys.exit("nobody has sent")
    except cohort.Error:
        pass
print("good")
"""
        )


WHO = """
import os, sys
TORCH = None
import cohort
try:
    cohort.init(os.environ["TEST_INIT"], init_timeout=20)
except cohort.Mismatch as error:
    sys.exit(f"refused: {error}")
cohort.world().barrier()
"""


class Identity(unittest.TestCase):
    """Ranks that would train different things are refused."""

    def pair(self, scripts, pythons=(sys.executable, sys.executable), **environment):
        with tempfile.TemporaryDirectory(prefix="cohort-python-") as folder:
            ranks = []
            for rank, (script, python) in enumerate(zip(scripts, pythons)):
                path = pathlib.Path(folder, str(rank), "train.py")
                path.parent.mkdir()
                path.write_text(script)
                env = dict(os.environ, TEST_INIT=f"file://{folder}/meeting?rank={rank}&world_size=2", **environment)
                ranks.append(
                    subprocess.Popen([python, str(path)], env=env, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
                )
            try:
                texts = [rank.communicate(timeout=60)[1] for rank in ranks]
                return [(rank.returncode, text) for rank, text in zip(ranks, texts)]
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()

    def test_the_same_script_at_another_place(self):
        for status, text in self.pair([WHO, WHO]):
            self.assertEqual(status, 0, text)

    def test_another_script(self):
        for status, text in self.pair([WHO, WHO + "# edited\n"]):
            self.assertEqual(status, 1, text)
            self.assertRegex(text, r"rank 0 .* is the program 'train.py \(\d+ bytes, crc [0-9a-f]{8}\)', rank 1 .* is 'train.py")
        for status, text in self.pair([WHO, WHO + "# edited\n"], COHORT_PROGRAM="train"):
            self.assertEqual(status, 0, text)

    @needs_torch
    def test_another_torch(self):
        other = "/usr/bin/python3"
        version = subprocess.run(
            [other, "-c", "import sys, torch; print(sys.version_info[:2], torch.__version__)"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        mine = f"{sys.version_info[:2]} {torch.__version__}"
        if not version or version == mine or version.split(")")[0] != mine.split(")")[0]:
            self.skipTest(f"there is no second torch for this version of Python (here {mine}, in {other} {version or 'none'})")
        script = WHO.replace("TORCH = None", "import torch")
        for status, text in self.pair([script, script], (sys.executable, other)):
            self.assertEqual(status, 1, text)
            self.assertRegex(text, rf"rank 0 .* runs with torch {re.escape(torch.__version__)}, rank 1 .* with torch ")
        for status, text in self.pair([WHO, WHO], (sys.executable, other)):
            self.assertEqual(status, 0, text)


class Import(unittest.TestCase):
    def test_is_quick_and_imports_neither_torch_nor_numpy(self):
        # Processor time, and the best of some: other work on the machine is not the package's.
        script = (
            "import sys, time; began = time.process_time(); import cohort; took = time.process_time() - began; "
            "assert not {'torch', 'numpy'} & set(sys.modules), sys.modules; print(took)"
        )
        run = [sys.executable, "-c", script]
        took = min(float(subprocess.run(run, check=True, capture_output=True).stdout) for _ in range(8))
        print(f"import cohort: {took * 1e3:.1f} ms")
        # Sanitizers slow it down.
        self.assertLess(took, 0.05 if "LD_PRELOAD" not in os.environ else 5)

    def test_without_a_world(self):
        import cohort

        self.assertFalse(cohort.is_initialized())
        cohort.shutdown()
        for call in (cohort.rank, cohort.size, cohort.local_rank, cohort.local_size, cohort.cross_rank, cohort.cross_size):
            with self.assertRaises(ValueError):
                call()


if __name__ == "__main__":
    unittest.main()
