"""`cohort bench training` over the hosts of a box."""

import json
import os
import pathlib
import tempfile
import unittest

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")


class Bench(boxes.InBox):
    wanted = ("bench", "--hosts", "2")

    def test_the_command_may_be_elsewhere_on_other_hosts(self):
        # /dev/shm is each host's own, so this path leads nowhere on h2.
        own = "/dev/shm/here/cohort"
        done = self.box.run("h1", "sh", "-c", f"mkdir /dev/shm/here && cp {COHORT} {COHORT}-bench /dev/shm/here")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.addCleanup(self.box.run, "h1", "rm", "-r", "/dev/shm/here")
        with tempfile.TemporaryDirectory(prefix="cohort-bench-test-") as folder:
            rows = pathlib.Path(folder, "rows.json")
            done = self.box.run("h1", own, "bench", "training", "-H", "h1:1,h2:1", "--processes", "2", "--hosts", "2",
                                "--layers", "64,32,4", "--seconds", "0.1", "--repetitions", "1", "--remote-cohort", COHORT,
                                "--json", rows, cwd=folder, timeout=60)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            first, last = (json.loads(line) for line in rows.read_text().splitlines())
            self.assertEqual((first["hosts"], first["processes"], last["event"]), (2, 2, "verdict"))
            self.assertGreater(first["wire_bytes"], 4 * 2212)


if __name__ == "__main__":
    unittest.main()
