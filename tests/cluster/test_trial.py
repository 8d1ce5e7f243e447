"""`cohort doctor --run` over hosts of a box: sound ones, and such in which one thing is broken, which the verdict names."""

import os
import pathlib
import shutil
import subprocess
import time
import unittest

from doctor_case import COHORT, PATIENCE, Cluster

#: Each comparison of a whole period of 4-byte elements fails on h2, as if its memory were broken.
WRONG = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>
int memcmp(const void* a, const void* b, size_t bytes) {
  static int (*real)(const void*, const void*, size_t);
  static __thread int wrong;
  char name[64] = "";
  if (!real) real = (int (*)(const void*, const void*, size_t))dlsym(RTLD_NEXT, "memcmp");
  if (bytes == 4 * 251 && gethostname(name, sizeof name) == 0 && strcmp(name, "h2") == 0) return wrong = 1;
  if (bytes == 4 && wrong) return 1;
  wrong = 0;
  return real(a, b, bytes);
}
"""


class Trial(Cluster):
    wanted = ("trial", "--slurm", "--hosts", "3")

    def run_test(self, *words, status, host="h1", **options):
        begun = time.monotonic()
        done = self.box.run(host, COHORT, "doctor", "--run", *words, cwd=self.folder, timeout=PATIENCE, **options)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        self.assertLess(time.monotonic() - begun, 60)
        verdict = done.stdout.splitlines()[-1]
        self.assertTrue(verdict.startswith("passed" if status == 0 else "FAILED"), verdict)
        return done.stdout, verdict

    def test_hosts_that_are_sound(self):
        said, verdict = self.run_test("-H", "h1,h2:2", status=0)
        for check in ("start", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "sendrecv", "training"):
            self.assertRegex(said, rf"(?m)^(ok|warning) +{check} ")
        self.assertIn("3 ranks on 2 hosts", said)
        self.assertRegex(verdict, r"^passed in \d+ s: jobs work on these 2 hosts")

    def test_the_nodes_of_an_allocation(self):
        done = self.box.run("h1", "salloc", "-Q", "-N", "2", COHORT, "doctor", "--run", cwd=self.folder, timeout=PATIENCE)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("2 ranks on 2 hosts", done.stdout)

    def test_a_host_that_is_down(self):
        self.box.act("cut", "h3")
        self.addCleanup(self.box.act, "heal", "h3")
        said, verdict = self.run_test("-H", "h1,h2,h3", status=1)
        self.assertIn("h3", verdict)
        self.assertNotRegex(verdict, "h1|h2")
        self.assertIn("what to do: ", said)

    def test_another_version(self):
        old = pathlib.Path(self.folder) / "cohort"
        old.write_text("#!/bin/sh\nprintf 'cohort-agent-is-here\\t1\\t0.0.1\\tGNU 9\\th2\\t/old/cohort\\n'; cat\n")
        old.chmod(0o755)
        _, verdict = self.run_test("-H", "h1,h2", "--remote-cohort", str(old), status=1)
        self.assertRegex(verdict, r"h2 \(version: .*0\.0\.1")

    def test_a_firewall(self):
        # h2 lets nothing in from h3 but ssh; the rule has to come before the one that finds local addresses.
        blocked, mended = [], []
        for ip, address in (("ip", "10.77.0.3"), ("ip -6", "fd77::3")):
            blocked += [f"{ip} rule add pref 20 lookup local", f"{ip} rule del pref 0",
                        f"{ip} rule add pref 10 from {address} ipproto tcp dport 1024-65534 blackhole"]
            mended += [f"{ip} rule add pref 0 lookup local", f"{ip} rule del pref 20", f"{ip} rule del pref 10"]
        self.broken("h2", "; ".join(blocked), "; ".join(mended))
        said, verdict = self.run_test("-H", "h1,h2,h3", status=1)
        self.assertRegex(verdict, r"h3 to h2 \((reached|one direction): ")
        self.assertIn("drops", said)

    def test_a_slow_link(self):
        self.box.act("shape", "h2", "80mbit")
        self.addCleanup(self.box.act, "shape", "h2", "none")
        said, verdict = self.run_test("-H", "h1,h2", status=0)
        self.assertRegex(verdict, "warnings: .*h1 to h2: speed")
        self.assertRegex(said, r"warning +all_reduce .* 8 B to (1|8) MiB")

    @unittest.skipIf(shutil.which("cc") is None, "no C compiler")
    def test_wrong_bits(self):
        source, library = (pathlib.Path(self.folder) / f"wrong.{end}" for end in ("c", "so"))
        source.write_text(WRONG)
        subprocess.run(["cc", "-shared", "-fPIC", "-fno-builtin", "-o", library, source, "-ldl"], check=True, timeout=60)
        said, verdict = self.run_test("-H", "h1,h2", status=1, env=dict(os.environ, LD_PRELOAD=str(library)))
        self.assertIn("all_reduce", verdict)
        self.assertIn("wrong on h2 (rank 1)", verdict)
        self.assertNotIn("wrong on h1", verdict)
        self.assertIn("what to do: leave h2 out", said)


if __name__ == "__main__":
    unittest.main()
