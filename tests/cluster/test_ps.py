"""Parameter servers on two hosts of a box: they listen where the others reach them, without being told."""

import ast
import re
import unittest

from python_case import COHORT, PythonCase


class TestParameterServers(PythonCase):
    by_user = False
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
"""
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

    def test_the_networks_that_are_named(self):
        self.assertEqual(self.tables("--servers", "2", "--network", "eth0"), self.addresses("eth0"))
        self.assertEqual(set(self.tables("--servers", "2", "--network", "fd77::/64")), {"[fd77::1]", "[fd77::2]"})


if __name__ == "__main__":
    unittest.main()
