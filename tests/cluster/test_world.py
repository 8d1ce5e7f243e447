"""Ranks on several hosts of a box are one world, however they were started: the same bits, and a named end."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import tempfile
import time
import unittest

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")
PEER = os.environ.get("COHORT_HOSTS_PEER", "")
HEALTH_PEER = os.environ.get("COHORT_HEALTH_PEER", "")
OURS = r"^[^ ]*(cohort|hosts_peer) "
LINE = re.compile(r"rank (\d) of (\d), local (\d) of (\d), host (\d) of (\d): ([0-9a-f]{16})")


class World(boxes.InBox):
    needs = ("COHORT_HOSTS_PEER",)
    wanted = ("world", "--slurm", "--hosts", "3")

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="cohort-world-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def on(self, host, *command, timeout=100):
        return self.box.run(host, *command, cwd=self.folder, timeout=timeout)

    def ranks(self, done):
        self.assertEqual(done.returncode, 0, done.stderr)
        found = sorted(LINE.findall(done.stdout))
        self.assertTrue(found, done.stdout + done.stderr)
        self.assertEqual(len(found), int(found[0][1]), done.stdout)
        self.assertEqual(len({line[-1] for line in found}), 1, f"ranks differ: {done.stdout}")
        return found

    def test_the_same_bits_however_it_is_started(self):
        first = self.ranks(self.on("h1", COHORT, "run", "-q", "-H", "h1:2,h2:2", PEER))
        self.assertEqual([line[2:6] for line in first], [("0", "2", "0", "2"), ("1", "2", "0", "2"), ("0", "2", "1", "2"), ("1", "2", "1", "2")])
        ways = {
            "srun": ["srun", "--nodelist=h1,h2", "-N", "2", "--ntasks-per-node=2", "-n", "4", PEER],
            "srun, PMI-2": ["srun", "--mpi=pmi2", "--nodelist=h1,h2", "-N", "2", "--ntasks-per-node=2", "-n", "4", PEER],
            "cohort run by srun": ["salloc", "-N", "2", "--nodelist=h1,h2", COHORT, "run", "-q", "--per-node", "2", PEER],
            "cohort run by mpirun": [COHORT, "run", "-q", "-H", "h1:2,h2:2", "--starter", "mpirun", PEER],
            "Open MPI": ["mpirun.openmpi", "--allow-run-as-root", "--bind-to", "none", "-np", "4", "-H", "h1:2,h2:2", PEER],
            "MPICH": ["mpiexec.mpich", "-np", "4", "-hosts", "h1:2,h2:2", PEER],
        }
        for way, words in ways.items():
            with self.subTest(way):
                self.assertEqual(self.ranks(self.on("h1", *words)), first)
        with self.subTest("again"):
            self.assertEqual(self.ranks(self.on("h2", COHORT, "run", "-q", "-H", "h1:2,h2:2", PEER)), first)

    def test_hosts_need_not_be_alike(self):
        found = self.ranks(self.on("h1", COHORT, "run", "-q", "-H", "h1:1,h2:3,h3:2", PEER))
        self.assertEqual([line[3] for line in found], ["1", "3", "3", "3", "2", "2"])

    def job(self):
        return self.run_for_a_while(self.box.start("h1", COHORT, "run", "-q", "-H", "h1:2,h2:2", PEER, "100", cwd=self.folder))

    def run_for_a_while(self, job):
        self.addCleanup(job.stdout.close)
        self.addCleanup(job.stderr.close)
        self.addCleanup(job.wait)
        self.addCleanup(job.kill)
        limit = time.monotonic() + 30
        while len(self.peers()) < 4 and time.monotonic() < limit:
            time.sleep(0.05)
        time.sleep(1)
        return job

    def peers(self):
        return {pid: host for host in ("h1", "h2") for pid in self.box.processes(host, rf"^{re.escape(PEER)} 100")}

    def test_a_killed_rank_is_named_with_its_host(self):
        job = self.job()
        victim = next(pid for pid, host in self.peers().items() if host == "h2")
        os.kill(victim, signal.SIGKILL)
        _, text = job.communicate(timeout=60)
        self.assertEqual(job.returncode, 128 + signal.SIGKILL, text)
        self.assertRegex(text, r"rank [23] failed: killed by SIGKILL \(host h2, pid \d+\)")
        self.assertEqual(self.peers(), {})

    def test_ranks_on_the_other_host_name_the_lost_one_themselves(self):
        job = self.box.start("h1", "srun", "--kill-on-bad-exit=0", "--nodelist=h1,h2", "-N", "2", "--ntasks-per-node=2", "-n",
                             "4", PEER, "100", cwd=self.folder)
        self.run_for_a_while(job)
        victim = next(pid for pid, host in self.peers().items() if host == "h2")
        os.kill(victim, signal.SIGKILL)
        _, text = job.communicate(timeout=60)
        self.assertNotEqual(job.returncode, 0, text)
        self.assertRegex(text, r"failed -- rank 0 \(h1\).* lost rank [23] \(h2, pid \d+\)")
        self.assertEqual(self.peers(), {})

    def test_ranks_that_wait_for_each_other_across_hosts_are_named(self):
        done = self.on("h1", COHORT, "run", "-q", "--deadlock-timeout", "3", "-H", "h1:1,h2:2", HEALTH_PEER, "crossed")
        self.assertEqual(done.returncode, 124, done.stderr)
        self.assertRegex(done.stderr, r"nothing can go on: rank 0 \(h1, pid \d+\) waits in all_reduce\(float32\[10\], sum\), "
                                      r"operation 3 for ranks 1-2;.* rank 2 \(h2, pid \d+\) waits in .*, operation 1 for rank 0 ")

    def test_a_rank_of_another_host_that_does_not_come_is_named(self):
        done = self.on("h1", COHORT, "run", "-q", "--stall-timeout", "4", "-H", "h1:1,h2:2", HEALTH_PEER, "away", "2")
        self.assertEqual(done.returncode, 124, done.stderr)
        self.assertRegex(done.stderr, r"rank 2 \(h2, pid \d+\) did not call all_reduce\(float32\[10\], sum\), operation 2 within \d+ s; "
                                      r"ranks 0-1 were waiting")

    def test_a_host_whose_processes_are_all_stopped_is_named_and_cleans_up_later(self):
        job = self.box.start("h1", COHORT, "run", "-q", "--stopped-timeout", "7", "-H", "h1:2,h2:2", PEER, "100", cwd=self.folder)
        self.run_for_a_while(job)
        stopped = [pid for pid in self.box.processes("h2", OURS)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            _, text = job.communicate(timeout=60)
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        self.assertEqual(job.returncode, 124, text)
        self.assertRegex(text, r"nothing has come from the agent of h2 \(ranks 2-3\) for \d+ s")
        limit = time.monotonic() + 30
        while self.box.processes("h2", OURS) and time.monotonic() < limit:
            time.sleep(0.1)
        self.assertEqual(self.box.processes("h2", OURS), {}, "something is left")

    def test_a_host_whose_cable_is_cut_is_named(self):
        job = self.job()
        since = time.monotonic()
        self.box.act("cut", "h2")
        self.addCleanup(self.box.act, "heal", "h2")
        _, text = job.communicate(timeout=60)
        took = time.monotonic() - since
        self.assertNotEqual(job.returncode, 0, text)
        self.assertIn("h2", text)
        self.assertLess(took, 20, text)
        limit = time.monotonic() + 30
        while self.peers() and time.monotonic() < limit:
            time.sleep(0.1)
        self.assertEqual(self.peers(), {}, "ranks are left")


if __name__ == "__main__":
    unittest.main()
