"""Hosts that have no IPv4: jobs are started, meet and exchange what they have, as anywhere."""

import os
import pathlib
import re
import shutil
import tempfile
import unittest

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")
PEER = os.environ.get("COHORT_HOSTS_PEER", "")
LINE = re.compile(r"rank (\d) of 4, local \d of 2, host \d of 2: ([0-9a-f]{16})")


class OnlyIPv6(boxes.InBox):
    needs = ("COHORT_HOSTS_PEER",)
    wanted = ("six", "--slurm", "--hosts", "3", "--ipv6-only")

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="cohort-six-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def digest(self, *command):
        done = self.box.run("h1", *command, cwd=self.folder, timeout=100)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        found = LINE.findall(done.stdout)
        self.assertEqual(sorted(rank for rank, _ in found), list("0123"), done.stdout + done.stderr)
        self.assertEqual(len({digest for _, digest in found}), 1, done.stdout)
        return found[0][1]

    def test_the_hosts_have_no_ipv4(self):
        self.assertNotIn("inet ", self.box.run("h2", "ip", "-4", "addr", "show", "up", "scope", "global").stdout)

    # Not MPICH's own launcher: it asks its interface for an IPv4 address.
    def test_the_same_bits_however_it_is_started(self):
        first = self.digest(COHORT, "run", "-q", "-H", "h1:2,h2:2", PEER)
        ways = {
            "from a third host": [COHORT, "run", "-q", "-H", "h2:2,h3:2", PEER],
            "by address": [COHORT, "run", "-q", "-H", "[fd77::1]:2,[fd77::2]:2", PEER],
            "cohort run by srun": ["salloc", "-Q", "-N", "2", COHORT, "run", "-q", "--per-node", "2", PEER],
            "srun, through MUNGE": ["srun", "-N", "2", "--ntasks-per-node=2", "-n", "4", "--overcommit", PEER],
            "srun, PMI-2": ["srun", "--mpi=pmi2", "-N", "2", "--ntasks-per-node=2", "-n", "4", "--overcommit", PEER],
        }
        for way, words in ways.items():
            with self.subTest(way):
                self.assertEqual(self.digest(*words), first)

    def test_torchs_address_is_one_of_ipv6(self):
        done = self.box.run("h1", COHORT, "run", "-q", "--prefix", "none", "-H", "h1,h2", "sh", "-c", "echo $MASTER_ADDR", cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(set(done.stdout.split()), {"fd77::1"}, done.stdout)


if __name__ == "__main__":
    unittest.main()
