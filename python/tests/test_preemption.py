"""Preemption over the ranks of `cohort run -np N`, and what becomes of Python's own handlers."""

import array
import os
import signal
import subprocess
import sys
import unittest

from support import SECONDS

import cohort


def setUpModule():
    cohort.init(timeout=SECONDS)


def tearDownModule():
    cohort.shutdown()


class Requested(unittest.TestCase):
    def calls_until_yes(self, preemption, hit):
        """Number of calls that said no, where rank 1 gets the signal after its call number `hit`."""
        cohort.world().barrier()
        calls = 0
        while not preemption.requested():
            calls += 1
            self.assertLess(calls, 10000)
            if calls == hit and cohort.rank() == 1 % cohort.size():
                os.kill(os.getpid(), signal.SIGUSR1)
        return calls

    def of_all(self, number):
        together = array.array("q", bytes(8 * cohort.size()))
        cohort.world().all_gather(array.array("q", [number]), together)
        return list(together)

    def test_all_ranks_get_the_same_answer_at_the_same_call(self):
        for _ in range(3):
            preemption = cohort.Preemption()
            self.assertEqual((preemption.signal, preemption.received()), (0, 0))
            calls = self.calls_until_yes(preemption, 10)
            self.assertEqual(set(self.of_all(calls)), {calls})
            self.assertIn(calls, (10, 11))
            self.assertEqual(preemption.signal, signal.SIGUSR1)
            self.assertTrue(preemption.requested(cohort.world()), "it stays yes, and asks nobody")
            self.assertEqual(preemption.received(), signal.SIGUSR1 if cohort.rank() == 1 % cohort.size() else 0)

    def test_every_few_calls_only(self):
        preemption = cohort.Preemption([signal.SIGUSR1], every=4)
        calls = self.calls_until_yes(preemption, 9)
        self.assertEqual(set(self.of_all(calls)), {calls})
        self.assertEqual(calls, 11)

    def test_arguments_without_meaning(self):
        for arguments, options in (([()], {}), ([[signal.SIGKILL]], {}), ([], {"every": 0})):
            with self.assertRaisesRegex(cohort.InvalidArgument, "Preemption"):
                cohort.Preemption(*arguments, **options)


PROGRAM = """
import os, signal, sys
import cohort
heard = []
signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
preemption = cohort.Preemption()
assert not preemption.requested()
os.kill(os.getpid(), signal.SIGUSR1)
assert preemption.requested() and preemption.received() == signal.SIGUSR1
assert heard == [signal.SIGUSR1], heard
del preemption
os.kill(os.getpid(), signal.SIGUSR1)
assert len(heard) == 2, heard
preemption = cohort.Preemption()
assert not preemption.requested(), "what came before it was made is not its"
os.kill(os.getpid(), signal.SIGTERM)
ends = preemption.requested()
del preemption
os.kill(os.getpid(), signal.SIGTERM)  # once more, on its way out
sys.exit(cohort.REQUEUE_STATUS if ends else 1)
"""


class Alone(unittest.TestCase):
    def test_a_program_without_a_world_and_with_a_handler_of_its_own(self):
        if cohort.rank() != 0:
            return
        left_out = ("COHORT_", "RANK", "WORLD_SIZE", "MASTER_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual(done.returncode, 75, done.stderr)


if __name__ == "__main__":
    unittest.main()
