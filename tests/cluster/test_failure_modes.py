"""The failure modes of docs/failures.md that need several hosts: each is named in time, or does no harm.

Prints the rows F18 to F20 of the table that python/tests/test_failure_modes.py prints for one host.
"""

import os
import re
import tempfile
import time
import unittest

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")
PEER = os.environ.get("COHORT_HOSTS_PEER", "")
LIMIT = 30.0  # seconds: nothing may take longer to be named


def tell(number, name, seconds, text):
    print(f"F{number:<3} {name:<46} {seconds:8.3f} s  {' '.join(text.split())[:150]}", flush=True)


class Modes(boxes.InBox):
    needs = ("COHORT_COMMAND", "COHORT_HOSTS_PEER")
    wanted = ("modes", "--hosts", "2")

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="cohort-modes-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def job(self, *words):
        """A job over both hosts; its end, and the seconds that it took."""
        since = time.monotonic()
        done = self.box.run("h1", COHORT, "run", "-q", "--no-logs", *words, "-H", "h1:1,h2:1", PEER, cwd=self.folder, timeout=60)
        return done, time.monotonic() - since

    def broken(self, host, how, mend):
        self.addCleanup(self.box.run, host, "sh", "-c", mend)
        done = self.box.run(host, "sh", "-c", how)
        self.assertEqual(done.returncode, 0, done.stderr)

    def block(self, host, source, family):
        """The host drops what comes from this address, but for answers of its sshd."""
        ip = f"ip -{family}"
        # The rules have to come before the one that finds local addresses.
        self.broken(host, f"{ip} rule add pref 20 lookup local; {ip} rule del pref 0; "
                          f"{ip} rule add pref 9 from {source} ipproto tcp sport 22 lookup local; "
                          f"{ip} rule add pref 10 from {source} ipproto tcp dport 1024-65534 blackhole",
                    f"{ip} rule add pref 0 lookup local; {ip} rule del pref 20; {ip} rule del pref 10; {ip} rule del pref 9")

    def test_f18_a_network_that_leads_nowhere(self):
        # docker0 has one address on all hosts, and what listens there is somebody else.
        addresses = {host: self.box.run(host, "ip", "-4", "-o", "addr", "show", "docker0").stdout for host in ("h1", "h2")}
        self.assertEqual(len({re.search(r"inet (\S+)", text)[1] for text in addresses.values()}), 1, addresses)
        done, seconds = self.job()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(re.findall(r"rank \d of 2, local 0 of 1, host \d of 2", done.stdout)), 2, done.stdout)
        tell(18, "a network that leads nowhere: the other is found", seconds, done.stdout)
        self.assertLess(seconds, LIMIT)

    def test_f19_one_family_of_addresses_is_dead(self):
        for family, source in ((4, "10.77.0.2"), (6, "fd77::2")):
            with self.subTest(family=family):
                self.block("h1", source, family)
                done, seconds = self.job()
                self.doCleanups()
                self.setUp()
                self.assertEqual(done.returncode, 0, done.stderr)
                tell(19, f"IPv{family} is dropped: the other is found", seconds, done.stdout)
                self.assertLess(seconds, LIMIT)

    def test_f20_a_firewall(self):
        self.block("h1", "10.77.0.2", 4)
        self.block("h1", "fd77::2", 6)
        done, seconds = self.job("--start-timeout", "5")
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r"h2")
        self.assertRegex(done.stderr, r"no agent on h2 -- .*(connect|reach|answer)")
        tell(20, "a firewall drops (--start-timeout 5)", seconds, done.stderr)
        self.assertLess(seconds, LIMIT)


if __name__ == "__main__":
    unittest.main()
