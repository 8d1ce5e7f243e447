"""Base of tests of `cohort doctor` over hosts of a box: the box, which stays as it was, and ways to break it."""

import json
import os
import pathlib
import shutil
import tempfile

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")
# Limit for a command; the doctor's own is below 30 s, and the machine may be busy.
PATIENCE = 90


class Cluster(boxes.InBox):
    """One box for all; every test leaves its hosts as they were."""

    needs = ("COHORT_COMMAND",)
    wanted = ("doctor", "--hosts", "3")

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="cohort-doctor-")
        self.addCleanup(shutil.rmtree, self.folder)
        self.addCleanup(self.nothing_is_left)

    def nothing_is_left(self):
        self.box.expect_nothing_new(20, "^$")
        self.assertEqual([name for name in os.listdir(self.folder) if name.startswith(".cohort")], [], "left in the folder")

    def run_doctor(self, *words, host="h1", **options):
        options.setdefault("cwd", self.folder)
        return self.box.run(host, COHORT, "doctor", *words, timeout=PATIENCE, **options)

    def report(self, *words, status=None, **options):
        """The report as JSON."""
        done = self.run_doctor("--json", *words, **options)
        self.assertIn(done.returncode, (0, 1) if status is None else (status,), done.stderr + done.stdout)
        report = json.loads(done.stdout)
        self.assertEqual(done.returncode, 0 if report["ok"] else 1)
        return report

    def finding(self, report, row, level, host=None):
        """The one finding of the row that is not in order (or is)."""
        found = [check for check in report["checks"] if check["row"] == row and check["level"] == level and
                 (host is None or host in check["hosts"])]
        self.assertTrue(found, f"no {level} '{row}': " + json.dumps(
            [check for check in report["checks"] if check["level"] != "ok" or check["row"] == row], indent=1))
        return found[0]

    def failures(self, report):
        return {check["row"] for check in report["checks"] if check["level"] == "failed"}

    def on(self, host, command):
        done = self.box.run(host, "sh", "-ec", command)
        self.assertEqual(done.returncode, 0, f"{command}: {done.stderr}")
        return done.stdout

    def broken(self, host, command, mend):
        # Also where only a part of it was done.
        self.addCleanup(self.box.run, host, "sh", "-c", mend)
        self.on(host, command)

    def shell_reads(self, host, text):
        file = self.box.folder / f"home_{host}" / ".bashrc"
        file.write_text(text)
        self.addCleanup(file.unlink)

    def config(self, old, new):
        """An ssh command whose configuration differs in this."""
        text = (self.box.folder / "ssh_config").read_text()
        self.assertIn(old, text)
        file = pathlib.Path(self.folder) / "config"
        file.write_text(text.replace(old, new))
        return f"ssh -F {file}"
