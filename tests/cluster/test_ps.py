"""Parameter servers on hosts of a box: they listen where the others reach them, without being told, and a host is lost."""

import ast
import re
import unittest

from launch_case import Launch
from python_case import COHORT, PACKAGE, PythonCase


class TestParameterServers(PythonCase):
    by_user = False
    hosts = 3
    files = {
        "tables.py": """
import numpy
import cohort
from cohort import ps

with ps.connect() as client:
    users = client.table("users", 4, optimizer=ps.Sgd(lr=1.0))
    keys = list(range(100))
    users.push(keys, numpy.ones((100, 4), numpy.float32))
    client.clock()
    print(cohort.server_addresses(), float(users.pull(keys).sum()), flush=True)
""",
        "counts.py": """
import pathlib, time
import numpy
from cohort import ps

with ps.connect() as client:
    counts = client.table("counts", 1, optimizer=ps.Sgd(lr=1.0), consistency=ps.Async())
    keys, ones = numpy.arange(60), -numpy.ones((60, 1), numpy.float32)
    pushed, longest, ends = 0, 0.0, None
    while ends is None or time.monotonic() < ends:
        begin = time.monotonic()
        counts.push(keys, ones)
        pushed += 1
        longest = max(longest, time.monotonic() - begin)
        if pushed == 20:
            print("ready", flush=True)
        if ends is None and pathlib.Path("cut").exists():
            ends = time.monotonic() + 9
    print(set(counts.pull(keys).ravel().tolist()) == {float(pushed)}, longest, flush=True)
""",
    }

    def addresses(self, device):
        told = [self.box.run(host, "ip", "-4", "-o", "addr", "show", "dev", device).stdout for host in ("h1", "h2")]
        return [re.search(r"inet ([\d.]+)", text)[1] for text in told]

    def tables(self, *words):
        out = self.as_user(COHORT, "run", "-q", "--prefix", "none", "-H", "h1:1,h2:1", *words,
                           "--server-program", f"{self.python} -m cohort.ps", "--", self.python, "tables.py")  # fmt: skip
        lines = out.splitlines()
        self.assertEqual(len(lines), 2, out)
        self.assertEqual(lines[0], lines[1])
        addresses, total = lines[0].rsplit(" ", 1)
        # The average of two workers' gradients, as Sync takes it.
        self.assertEqual(float(total), -800.0)
        return [address.rsplit(":", 1)[0] for address in ast.literal_eval(addresses)]

    def test_each_is_at_its_hosts_address(self):
        self.assertEqual(self.tables("--servers", "2"), self.addresses("eth0"))

    def test_a_host_that_is_cut_off_is_gone_on_without(self):
        job = self.box.start("h1", "env", f"PYTHONPATH={PACKAGE}", COHORT, "run", "-q", "--prefix", "none", "-H", "h1:1",
                             "--server-hosts", "h2,h3", "--lost-servers", "1", "--server-program",
                             f"{self.python} -m cohort.ps", "--", self.python, "counts.py", cwd=self.folder)  # fmt: skip
        self.addCleanup(Launch.end, job)
        self.assertEqual(job.stdout.readline(), "ready\n")
        self.addCleanup(self.box.run, "h3", "ip", "link", "set", "dev", "eth0", "up")
        self.box.run("h3", "ip", "link", "set", "dev", "eth0", "down")
        (self.folder / "cut").touch()
        out, err = job.communicate(timeout=60)
        self.box.run("h3", "ip", "link", "set", "dev", "eth0", "up")  # where nothing may be left by then but sshd
        self.assertEqual(job.returncode, 0, err)
        self.assertRegex(err, "server 1 on h3 is lost with its host")
        exact, longest = out.split()
        self.assertEqual(exact, "True")
        print(f"rows of a host that was cut off: away for {float(longest):.2f} s")
        self.assertLess(float(longest), 6)  # 3.1 s and the time to connect, on a busy machine

    def test_the_networks_that_are_named(self):
        self.assertEqual(self.tables("--servers", "2", "--network", "eth0"), self.addresses("eth0"))
        self.assertEqual(set(self.tables("--servers", "2", "--network", "fd77::/64")), {"[fd77::1]", "[fd77::2]"})


if __name__ == "__main__":
    unittest.main()
