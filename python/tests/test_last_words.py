"""Reports of a dying rank to its agent, and the stacks of one that is asked. The test is the agent: it makes the
page."""

import fcntl
import os
import signal
import struct
import subprocess
import sys
import time
import unittest

from support import needs_torch

BYTES = 128 << 10
STACKS = 48 << 10


class Page:
    """As src/telemetry/status_page.h has it."""

    def __init__(self):
        self.fd = os.memfd_create("cohort-status", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, BYTES)
        os.pwrite(self.fd, b"CHSTAT08", 0)
        fcntl.fcntl(self.fd, 1033, 2)  # F_ADD_SEALS, F_SEAL_SHRINK

    def close(self):
        os.close(self.fd)

    @property
    def fields(self):
        return struct.unpack("=QiIiIqqIIq", os.pread(self.fd, 56, 0))

    @property
    def tells_stacks(self):
        return self.fields[2] == 1

    @property
    def step(self):
        return self.fields[5]

    @property
    def words(self):
        ready, length = self.fields[7:9]
        return os.pread(self.fd, length, 56).decode() if ready else ""

    @property
    def stacks(self):
        return os.pread(self.fd, BYTES - STACKS, STACKS).rstrip(b"\0").decode()


class LastWords(unittest.TestCase):
    def setUp(self):
        self.page = Page()
        self.addCleanup(self.page.close)

    def start(self, script, *options):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("COHORT_", "RANK", "WORLD_", "LOCAL_", "MASTER_"))}
        process = subprocess.Popen(
            [sys.executable, *options, "-c", script],
            env=dict(env, COHORT_STATUS_FD=str(self.page.fd), COHORT_TIMEOUT="30"),
            pass_fds=[self.page.fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(self.end, process)
        return process

    def end(self, process):
        process.kill()
        process.communicate()

    def run_to_end(self, script, *options):
        process = self.start(script, *options)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def test_an_exception_is_told_with_its_traceback(self):
        began = time.monotonic_ns()
        status, _, err = self.run_to_end(
            """
import cohort

def load(sample):
    raise ValueError(f"no sample {sample}")

load(7)
"""
        )
        self.assertEqual(status, 1)
        self.assertLess(began, self.page.fields[9])
        self.assertLess(self.page.fields[9], time.monotonic_ns())
        self.assertIn("ValueError: no sample 7", err)
        self.assertTrue(self.page.words.startswith("Traceback (most recent call last):\n"), self.page.words)
        self.assertIn("in load\n", self.page.words)
        self.assertTrue(self.page.words.endswith("ValueError: no sample 7\n"), self.page.words)

    def test_the_hook_of_the_program_is_called_too(self):
        hook = "sys.excepthook = lambda kind, error, trace: print('mine:', error, flush=True)\n"
        before = f"import sys\n{hook}import cohort\ncohort.init()\nraise KeyError('left')"
        after = f"import sys\nimport cohort\n{hook}cohort.init()\nraise KeyError('left')"
        for script in (before, after):
            self.setUp()
            status, out, _ = self.run_to_end(script)
            self.assertEqual((status, out), (1, "mine: 'left'\n"))
            self.assertTrue(self.page.words.endswith("KeyError: 'left'\n"), self.page.words)

    def test_long_tracebacks_lose_their_beginning(self):
        status, _, _ = self.run_to_end("import cohort\nraise ValueError('\u00fc' * 20000 + 'the end')")
        self.assertEqual(status, 1)
        self.assertTrue(self.page.words.endswith("the end\n"))
        self.assertGreater(len(self.page.words.encode()), 12000)
        self.assertLessEqual(len(self.page.words.encode()), 12288)

    def test_what_is_no_failure_is_not_told(self):
        for script, status in (
            ("import sys, cohort\nsys.exit(3)", 3),
            ("import cohort\nraise KeyboardInterrupt", -signal.SIGINT),
            ("import cohort\ntry:\n  1 / 0\nexcept ZeroDivisionError:\n  pass", 0),
            ("import cohort, threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()", 0),
            (
                "import cohort, unittest\n"
                "class T(unittest.TestCase):\n  def test(self):\n    raise ValueError\n"
                "unittest.main()",
                1,
            ),
        ):
            self.assertEqual(self.run_to_end(script)[0], status, script)
            self.assertEqual(self.page.words, "", script)

    def test_without_an_agent_nothing_is_changed(self):
        script = """
import faulthandler, signal, sys
import cohort
cohort.init()
assert sys.excepthook is sys.__excepthook__
assert not faulthandler.is_enabled()
assert not faulthandler.unregister(signal.SIGQUIT)
"""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("COHORT_", "RANK", "WORLD_", "LOCAL_", "MASTER_"))}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)

    @unittest.skipIf("asan" in os.environ.get("LD_PRELOAD", ""), "the sanitizer's handlers are kept")
    def test_a_crash_tells_where_in_python_it_was(self):
        crash = """
import ctypes, os, resource, signal
import cohort
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
cohort.init()

def read_nothing():
    {0}

read_nothing()
"""
        for deed, number in (("ctypes.string_at(0)", signal.SIGSEGV), ("os.abort()", signal.SIGABRT)):
            self.setUp()
            status, _, err = self.run_to_end(crash.format(deed))
            self.assertEqual(status, -number)
            self.assertTrue(self.page.words.startswith(f"fatal signal {number.name}\n"), self.page.words)
            self.assertIn("Fatal Python error", self.page.words)
            self.assertIn("in read_nothing\n", self.page.words)
            self.assertIn("the native stack:\n", self.page.words)
            self.assertNotIn("read_nothing", err)
        # A program that has asked for it on stderr keeps it there.
        self.setUp()
        status, _, err = self.run_to_end(crash.format("ctypes.string_at(0)"), "-X", "faulthandler")
        self.assertEqual(status, -signal.SIGSEGV)
        self.assertIn("in read_nothing", err)

    @unittest.skipIf("asan" in os.environ.get("LD_PRELOAD", ""), "the sanitizer's handlers are kept")
    def test_the_crash_of_a_fork_is_not_its_parent_s(self):
        status, _, _ = self.run_to_end(
            """
import ctypes, os, resource
import cohort
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
cohort.init()

def of_the_fork():
    ctypes.string_at(0)

def of_the_rank():
    ctypes.string_at(0)

child = os.fork()
if child == 0:
    of_the_fork()
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 11
of_the_rank()
"""
        )
        self.assertEqual(status, -signal.SIGSEGV)
        self.assertIn("in of_the_rank", self.page.words)
        self.assertNotIn("in of_the_fork", self.page.words)

    def wait_until(self, condition):
        end = time.monotonic() + 30
        while not condition():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.01)

    def test_stacks_are_written_when_asked(self):
        process = self.start(
            """
import sys, threading
import cohort
cohort.init()
event = threading.Event()

def prefetch():
    event.wait()

def epoch():
    sys.stdin.readline()

threading.Thread(target=prefetch, daemon=True).start()
epoch()
sys.exit(7)
"""
        )
        self.wait_until(lambda: self.page.tells_stacks)

        def asked():
            os.lseek(self.page.fd, STACKS, os.SEEK_SET)
            process.send_signal(signal.SIGQUIT)
            time.sleep(0.05)
            return "in prefetch" in self.page.stacks and "in epoch" in self.page.stacks

        self.wait_until(asked)
        self.assertIn("most recent call first", self.page.stacks)
        self.assertEqual(self.page.words, "")
        process.stdin.write("\n")
        process.stdin.flush()
        self.assertEqual(process.wait(30), 7)

    def test_a_handler_of_the_program_for_sigquit_stays(self):
        status, out, err = self.run_to_end(
            """
import os, signal
signal.signal(signal.SIGQUIT, lambda *_: print("mine", flush=True))
import cohort
cohort.init()
os.kill(os.getpid(), signal.SIGQUIT)
"""
        )
        self.assertEqual((status, out), (0, "mine\n"), err)
        self.assertFalse(self.page.tells_stacks)

    def test_a_fork_is_no_rank(self):
        status, out, err = self.run_to_end(
            """
import os, signal
import cohort
cohort.init()
child = os.fork()
if child == 0:
    raise ValueError("of the fork")
os.waitpid(child, 0)
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGQUIT)
    os._exit(0)
print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""
        )
        self.assertEqual((status, out), (0, "3\n"), err)
        self.assertEqual((self.page.words, self.page.stacks), ("", ""))

    @needs_torch
    def test_steps_of_a_wrapped_model_are_counted(self):
        status, _, err = self.run_to_end(
            """
import torch
import cohort
from cohort.nn import DistributedDataParallel
cohort.init()
model = DistributedDataParallel(torch.nn.Linear(2, 1))
for step in range(5):
    model(torch.ones(3, 2)).sum().backward()
with model.no_sync():
    model(torch.ones(3, 2)).sum().backward()
"""
        )
        self.assertEqual(status, 0, err)
        self.assertEqual(self.page.step, 5)

    @needs_torch
    def test_steps_of_an_optimizer_are_counted(self):
        status, _, err = self.run_to_end(
            """
import torch
import cohort.horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
"""
        )
        self.assertEqual(status, 0, err)
        self.assertEqual(self.page.step, 4)


if __name__ == "__main__":
    unittest.main()
