"""Base of tests of `cohort run` over hosts of a box: the box, jobs that are ended, and checks of their remains."""

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
import time

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")
PATIENCE = 30


def wait_until(condition, what, seconds=PATIENCE):
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"{what}: not after {seconds} s")


class Launch(boxes.InBox):
    """One box for all; every test leaves its hosts as they were."""

    needs = ("COHORT_COMMAND",)
    wanted = ("launch", "--slurm", "--hosts", "3")

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="cohort-cluster-")
        self.addCleanup(shutil.rmtree, self.folder)
        self.addCleanup(self.nothing_is_left)

    def nothing_is_left(self):
        self.box.expect_nothing_new(15)

    def run_job(self, *words, host="h1", **options):
        return self.box.run(host, COHORT, "run", *words, cwd=self.folder, timeout=60, **options)

    def start_job(self, *words, host="h1"):
        job = self.box.start(host, COHORT, "run", *words, cwd=self.folder)
        self.addCleanup(self.end, job)
        return job

    @staticmethod
    def end(job):
        """Ends the job in any case."""
        with contextlib.suppress(ProcessLookupError):
            job.kill()
        job.wait()
        for stream in (job.stdout, job.stderr):
            stream.close()

    def one(self, host, pattern):
        found = [pid for pid in self.box.processes(host, pattern) if pid not in self.box.before]
        self.assertTrue(found, f"{pattern} on {host}")
        return found

    def guard_and_agent(self, host, pattern="agent --invited"):
        found = self.one(host, pattern)
        pairs = [(boxes.parent_of(pid), pid) for pid in found if boxes.parent_of(pid) in found]
        self.assertEqual(len(pairs), 1, found)
        return pairs[0]

    def shell_reads(self, host, text):
        file = self.box.folder / f"home_{host}" / ".bashrc"
        file.write_text(text)
        self.addCleanup(file.unlink)

    def script(self, text, name="script"):
        path = pathlib.Path(self.folder) / name
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)
        return str(path)

    def record(self):
        return json.loads((pathlib.Path(self.folder) / "runs/latest/job.json").read_text())
