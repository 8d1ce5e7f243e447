"""Faults in an elastic job of `cohort run`, case by case: how a process fails, when, and which one. Each case ends in
its goal state or in one named error, is never silent for 30 s, and leaves nothing behind."""

import os
import pathlib
import signal
import tempfile
import threading
import time
import unittest

from support import SECONDS
from test_run_elastic import Job

SILENCE = 30.0

# Trains by Cohort's Horovod API, and fails as FAULTS says: (worker, moment, what) of each. Moments: "init", "start", "forward",
# "collective", "step", "commit", "form again 1" (the first time, 2: ...), "formed 1".
PROGRAM = """
import os, signal, sys, threading, time
import cohort
from cohort import _core
from cohort.horovod import basics, elastic
from cohort.horovod.objects import allgather_object, broadcast_object

WORKER = int(os.environ["COHORT_WORKER"])
FAULTS = [fault[1:] for fault in eval(os.environ.get("FAULTS", "[]")) if fault[0] == WORKER]
stop = os.path.join(os.environ["FOLDER"], "stop")

def ancestor(generations):
    pid = os.getpid()
    for _ in range(generations):
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return pid

def act(what):
    print("fault", what, flush=True)
    if what == "exit":
        os._exit(1)
    elif what == "abort":
        os.abort()
    elif what == "memory":
        raise MemoryError("no memory")
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what in ("agent", "guard", "supervisor"):
        os.kill(ancestor(("agent", "guard", "supervisor").index(what) + 1), signal.SIGKILL)
    else:
        os.kill(os.getpid(), signal.SIGKILL)

def moment(now):
    for fault in [one for one in FAULTS if one[0] == now]:
        FAULTS.remove(fault)
        act(fault[1])

class State(elastic.ObjectState):
    def save(self):
        if self.step == 5:
            moment("commit")
        super().save()

formed = 0
form_again = basics.form_again

def counted():
    global formed
    formed += 1
    moment(f"form again {formed}")
    form_again()
    moment(f"formed {formed}")

basics.form_again = counted
moment("init")
basics.init()
state = State(step=0, sum=0)
moment("start")

@elastic.run
def train(state):
    while not broadcast_object(os.path.exists(stop), 0, "stop"):
        if state.step == 4:
            moment("forward")
            if any(fault[0] == "collective" for fault in FAULTS):
                threading.Timer(0.1, moment, ["collective"]).start()
            else:
                time.sleep(0.3)
        seen = allgather_object(state.sum, "sums")
        assert seen == seen[:1] * basics.size(), seen
        state.step += 1
        state.sum = hash((state.sum, state.step)) & 0xffffffff
        print("step", time.monotonic_ns(), _core.formed_epoch(), state.step, basics.rank(), basics.size(), f"{state.sum:x}",
              flush=True)
        if state.step == 5:
            moment("step")
        time.sleep(0.01)
        state.commit()

train(state)
print("over", flush=True)
"""


class Watched(Job):
    """Also knows how long nobody has said anything, and what is left in the end."""

    def __init__(self, *options, faults=(), **environment):
        self.before = set(os.listdir("/dev/shm"))
        self.gap, self.over = 0.0, threading.Event()
        super().__init__(*options, script=PROGRAM, FAULTS=repr(list(faults)), **environment)
        self.watcher = threading.Thread(target=self.watch)
        self.watcher.start()

    def watch(self):
        last, size = time.monotonic(), 0
        while not self.over.wait(0.05) and self.command.poll() is None:
            files = [self.path / "err", *(self.path / "r/logs").glob("rank-*")]
            now = sum(file.stat().st_size for file in files)
            if now != size:
                last, size = time.monotonic(), now
            self.gap = max(self.gap, time.monotonic() - last)

    def __exit__(self, *how):
        self.over.set()
        self.watcher.join()
        super().__exit__(*how)

    def processes(self):
        found = {}
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if f"FOLDER={self.path}\0".encode() in (process / "environ").read_bytes():
                    found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                pass  # it has ended
        return found

    def left_behind(self):
        return [*self.processes().values(), *(name for name in set(os.listdir("/dev/shm")) - self.before if "cohort" in name)]

    def wait_for_world(self, size, epoch=0):
        """A step of all that are there, in a world of so many, in this epoch or a later one; the workers by rank."""
        known = {}

        def trains():
            for path in (self.path / "r/logs").glob("rank-*.out"):
                steps = [line.split() for line in path.read_text().split("\n")[:-1] if line.startswith("step ")]
                if steps and int(steps[-1][5]) == size and int(steps[-1][2]) >= epoch:
                    known[int(steps[-1][4])] = int(path.name[5:-4])
            return "now" if len(known) == size else ""

        self.wait_for("now", trains)
        return [known[rank] for rank in range(size)]


class Case(unittest.TestCase):
    def settle(self, job, status, said="."):
        """The job ends with this status, having said so, and leaves nothing."""
        got = job.stop()
        limit = time.monotonic() + 10
        while job.left_behind() and time.monotonic() < limit:
            time.sleep(0.02)
        if status is not None:
            self.assertEqual(got, status, job.said())
        self.assertRegex(job.said(), said)
        self.assertEqual(job.left_behind(), [], job.said())
        self.assertLess(job.gap, SILENCE)
        job.check(self, *range(16))


HOSTS = ("-H", "a:2,b:2", "--starter", "local", "--min-np", "1")


class OneFault(Case):
    """{how} x {when} x {who}; the others train on."""

    def goes_on(self, how, when, who, left=3):
        with self.subTest(how=how, when=when, who=who), Watched(*HOSTS, faults=[(who, when, how)]) as job:
            job.wait_for_world(left, epoch=1)
            self.settle(job, 0)

    def test_killed(self):
        for when in ("init", "start", "forward", "collective", "step", "commit"):
            for who in (0, 3):
                self.goes_on("kill", when, who)

    def test_ended(self):
        for how in ("exit", "abort", "memory"):
            for when, who in zip(("init", "start", "forward", "collective", "step", "commit"), (0, 3) * 3):
                if (how, when) != ("memory", "collective"):  # an exception of another thread ends no process
                    self.goes_on(how, when, who)

    def test_stopped(self):
        for when, who in (("forward", 0), ("collective", 3)):
            how = {"faults": [(who, when, "stop")], "COHORT_TIMEOUT": "5"}
            with self.subTest(when=when, who=who), Watched(*HOSTS, "--stopped-timeout", "6", **how) as job:
                job.wait_for_world(3, epoch=1)
                self.settle(job, 0, rf"worker {who} .*was stopped for \d+ s and is killed; epoch 1 goes on with 3 of 4 workers")

    def test_the_agent_of_a_host(self):
        for how in ("agent", "guard"):
            for when in ("start", "collective", "commit"):
                self.goes_on(how, when, 3, left=2)

    def test_the_supervisor(self):
        for when in ("init", "forward", "collective"):
            with self.subTest(when=when), Watched(*HOSTS, faults=[(3, when, "supervisor")]) as job:
                job.command.wait(timeout=SECONDS)
                self.settle(job, -signal.SIGKILL)


class SeveralFaults(Case):
    def test_while_the_others_form_the_next_world(self):
        for how in ("kill", "exit", "abort"):
            for who in (0, 3):
                faults = [(1, "collective", "kill"), (who, "form again 1", how)]
                with self.subTest(how=how, who=who), Watched(*HOSTS, faults=faults) as job:
                    job.wait_for_world(2, epoch=1)
                    self.settle(job, 0)

    def test_all_but_one(self):
        faults = [(0, "collective", "kill"), (1, "form again 1", "kill"), (3, "formed 1", "kill")]
        with Watched(*HOSTS, faults=faults) as job:
            self.assertEqual(job.wait_for_world(1), [2])
            self.settle(job, 0)

    def test_all(self):
        with Watched(*HOSTS, faults=[(worker, "step", "kill") for worker in range(4)]) as job:
            job.command.wait(timeout=SECONDS)
            self.settle(job, 128 + signal.SIGKILL, r"the job cannot go on: no worker is left\n.*rank \d failed: killed by SIGKILL")

    def test_two_at_nearly_the_same_time(self):
        for apart in (0.0, 0.001, 0.02, 0.1, 1.0):
            with self.subTest(apart=apart), Watched(*HOSTS) as job:
                job.wait_for_world(4)
                job.kill(1)
                time.sleep(apart)
                job.kill(2)
                self.assertEqual(job.wait_for_world(2), [0, 3])
                self.settle(job, 0)


class Hosts(Case):
    """Hosts are what a file says, all of them this one. If its first line begins with "!", the rest of that is done instead."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="cohort-hosts-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.script = f'read first < {self.folder}/hosts; case "$first" in "!"*) eval "${{first#?}}";; *) cat {self.folder}/hosts;; esac'

    def listed(self, text):
        (self.folder / "new").write_text(text)
        os.replace(self.folder / "new", self.folder / "hosts")

    def job(self, text, *options, least=1):
        self.listed(text)
        return Watched("--starter", "local", "--host-discovery-script", self.script, "--min-np", str(least), *options)

    def test_added_and_removed(self):
        with self.job("a:2\n") as job:
            self.assertEqual(job.wait_for_world(2), [0, 1])
            self.listed("a:2\nb\n")
            self.assertEqual(job.wait_for_world(3), [0, 1, 2])
            self.listed("b\nc:2\n")
            self.assertEqual(sorted(job.wait_for_world(3, epoch=2)), [2, 3, 4])
            self.settle(job, 0)

    def test_a_fault_as_hosts_change(self):
        for apart in (0.0, 0.5, 1.0):
            with self.subTest(apart=apart), self.job("a:2\nb\n") as job:
                job.wait_for_world(3)
                self.listed("a:2\nb\nc:2\n")
                time.sleep(apart)
                job.kill(0)
                self.assertEqual(job.wait_for_world(4), [1, 2, 3, 4])
                self.settle(job, 0)

    def test_one_rank_fails_and_no_host_comes(self):
        with self.job("a:1\nb:1\n") as job:
            job.wait_for_world(2)
            job.kill(1)
            self.assertEqual(job.wait_for_world(1), [0])
            self.settle(job, 0, "b")

    def test_all_hosts_are_blacklisted(self):
        with self.job("a:1\nb:1\n", "--elastic-timeout", "2") as job:
            job.wait_for_world(2)
            job.kill(1)
            job.wait_for_world(1)
            job.kill(0)
            job.command.wait(timeout=SECONDS)
            self.settle(job, 128 + signal.SIGKILL, "the job cannot go on: .*\n.*failed: killed by SIGKILL")

    def test_the_reset_limit(self):
        with self.job("a:1\nb:1\nc:1\n", "--reset-limit", "1") as job:
            job.wait_for_world(3)
            job.kill(1)
            job.wait_for_world(2)
            job.kill(0)
            job.command.wait(timeout=SECONDS)
            self.settle(job, 128 + signal.SIGKILL, r"the job cannot go on: its members have changed 1 time \(--reset-limit\)")

    def test_too_few_until_hosts_come(self):
        with self.job("a:1\nb:1\n", least=2) as job:
            job.wait_for_world(2)
            job.kill(0)
            job.wait_for(r"waits|wait", job.said)
            self.listed("b:1\nc:1\n")
            self.assertEqual(job.wait_for_world(2, epoch=1), [1, 2])
            self.settle(job, 0)

    def test_too_few_and_no_host_comes(self):
        with self.job("a:1\nb:1\n", "--elastic-timeout", "2", least=2) as job:
            job.wait_for_world(2)
            job.kill(0)
            job.command.wait(timeout=SECONDS)
            self.settle(job, 75, "asks for the job to be started again")

    def test_a_host_that_is_said_twice_has_the_places_of_both_lines(self):
        with self.job("a:1\nb:1\n") as job:
            job.wait_for_world(2)
            self.listed("!echo a:1; echo a:1; echo b:1\n")
            self.assertEqual(job.wait_for_world(3), [0, 2, 1])
            self.settle(job, 0)

    def test_a_host_that_flaps(self):
        with self.job("a:1\nb:1\n", "--blacklist-cooldown-range", "1", "4") as job:
            job.wait_for_world(2)
            for flap in range(3):
                workers = job.wait_for_world(2, epoch=2 * flap)
                job.kill(workers[1])
                job.wait_for_world(1, epoch=2 * flap + 1)
            job.wait_for_world(2, epoch=6)
            self.settle(job, 0)

    def test_a_script_that_does_not_say_which_hosts_there_are(self):
        for script in ("sleep 40", "exit 1", "echo 'a:b:c d'"):
            with self.subTest(script=script), self.job("a:1\nb:1\n") as job:
                job.wait_for_world(2)
                self.listed(f"!{script}\n")
                time.sleep(2.5)  # it is run each second
                self.assertEqual(job.wait_for_world(2), [0, 1])
                job.kill(1)
                self.assertEqual(job.wait_for_world(1), [0])
                self.listed("a:1\nc:1\n")
                if script != "sleep 40":  # that is given 30 s
                    self.assertEqual(job.wait_for_world(2, epoch=2), [0, 2])
                self.settle(job, 0)

    def test_a_script_that_says_that_there_are_none(self):
        with self.job("a:1\nb:1\n") as job:
            job.wait_for_world(2)
            self.listed("!true\n")
            self.assertEqual(job.wait_for_world(1), [0], "the oldest")
            self.listed("a:1\nb:1\nc:1\n")
            self.assertEqual(job.wait_for_world(3, epoch=2)[0], 0)
            self.settle(job, 0)


del Case

if __name__ == "__main__":
    unittest.main()
