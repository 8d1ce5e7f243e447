"""What tests of `cohort run` over hosts of a box share: the box, jobs that are ended, and a look at what they leave."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
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

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.before = {host: set(cls.box.processes(host)) for host in cls.box_hosts()}

    @staticmethod
    def box_hosts():
        return ("h1", "h2", "h3")

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="cohort-cluster-")
        self.addCleanup(shutil.rmtree, self.folder)
        self.addCleanup(self.nothing_is_left)

    def nothing_is_left(self):
        def left():
            return {pid: line for host in self.box_hosts() for pid, line in self.box.processes(host).items()
                    if pid not in self.before[host] and "slurmstepd" not in line}
        try:
            wait_until(lambda: not left(), "nothing is left", 15)
        except AssertionError:
            found = left()
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"left: {found}") from None

    def run_job(self, *words, host="h1", **options):
        return self.box.run(host, COHORT, "run", *words, cwd=self.folder, timeout=60, **options)

    def start_job(self, *words, host="h1"):
        job = self.box.start(host, COHORT, "run", *words, cwd=self.folder)
        self.addCleanup(self.end, job)
        return job

    @staticmethod
    def end(job):
        """Whatever became of it."""
        with contextlib.suppress(ProcessLookupError):
            job.kill()
        job.wait()
        for stream in (job.stdout, job.stderr):
            stream.close()

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
