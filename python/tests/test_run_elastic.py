"""Elastic jobs of `cohort run`: workers that train by hvd.elastic.run are killed, and hosts come and go."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from cohort._launch import command as _command
from support import SECONDS, needs_torch
from support_elastic import TRAINING


class Job:
    """`cohort run` of the training, whose workers' lines it has from their logs."""

    def __init__(self, *options, script=TRAINING, **environment):
        self.folder = tempfile.TemporaryDirectory(prefix="cohort-elastic-")
        self.path = pathlib.Path(self.folder.name)
        (self.path / "train.py").write_text("import os\nprint('pid', os.getpid(), flush=True)\n" + script)
        self.err = open(self.path / "err", "w+")
        self.command = subprocess.Popen(
            self.words(_command.find(), "run", "--as-horovod", "--run-dir", "r", *options, sys.executable, "train.py"), cwd=self.path,
            env=dict(os.environ, FOLDER=str(self.path), **environment), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=self.err)  # fmt: skip

    def words(self, *command):
        return command

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.command.poll() is None:
            self.command.terminate()
        self.command.wait(timeout=SECONDS)
        self.err.close()
        self.folder.cleanup()

    def said(self):
        return (self.path / "err").read_text()

    def log(self, worker):
        path = self.path / "r" / "logs" / f"rank-{worker}.out"
        return path.read_text() if path.exists() else ""

    def wait_for(self, pattern, text):
        limit = time.monotonic() + 2 * SECONDS
        while not (found := re.search(pattern, text(), re.MULTILINE)):
            if time.monotonic() > limit or self.command.poll() is not None:
                logs = "\n".join(self.log(worker)[-500:] for worker in range(8))
                raise AssertionError(f"{pattern!r} was never said:\n{self.said()}\n{logs}")
            time.sleep(0.01)
        return found

    def wait_for_step(self, worker, epoch, rank, size):
        self.wait_for(rf"^step \d+ {epoch} \d+ {rank} {size} ", lambda: self.log(worker))

    def kill(self, worker):
        os.kill(int(self.wait_for(r"^pid (\d+)", lambda: self.log(worker))[1]), signal.SIGKILL)

    def stop(self):
        (self.path / "stop").touch()
        return self.command.wait(timeout=2 * SECONDS)

    def check(self, case, *workers):
        """All trained alike, and no step is skipped; one may be done again."""
        digests = {}
        for worker in workers:
            steps = re.findall(r"^step \d+ (\d+) (\d+) \d+ \d+ (\w+)$", self.log(worker), re.MULTILINE)
            for before, (epoch, step, digest) in zip([None, *steps], steps):
                case.assertEqual(digests.setdefault((epoch, step), digest), digest, (worker, epoch, step))
                if before:
                    case.assertIn(int(step) - int(before[1]), (0, 1), worker)


@needs_torch
class Elastic(unittest.TestCase):
    def test_a_rank_that_ends_before_anybody_trained_is_a_failure(self):
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        program = "import os, cohort; os.environ['RANK'] == '0' or cohort.init()"
        command = [_command.find(), "run", "-np", "2", "--min-np", "1", "--run-dir", folder, sys.executable, "-c", program]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        self.assertNotEqual(ended.returncode, 0, ended.stderr)
        self.assertIn("rank 0 had ended with 0 before it formed the world that rank 1 waits for", ended.stderr)

    def test_others_train_on_when_workers_are_killed(self):
        with Job("-np", "4", "--min-np", "2") as job:
            for worker in range(4):
                job.wait_for_step(worker, 0, worker, 4)
            job.kill(1)
            for rank, worker in enumerate((0, 2, 3)):
                job.wait_for_step(worker, 1, rank, 3)
            job.wait_for(r"epoch 1 is formed: its 3 members are in a world of it after \d+ ms", job.said)
            job.kill(0)
            for rank, worker in enumerate((2, 3)):
                job.wait_for_step(worker, 2, rank, 2)
            self.assertEqual(job.stop(), 0, job.said())
            self.assertIn("was killed by SIGKILL; epoch 1 goes on with 3 of 4 workers (ranks 0-2 are workers 0,2-3)", job.said())
            job.check(self, 0, 1, 2, 3)

    def test_nothing_is_redone_when_a_host_is_drained(self):
        with Job("-H", "a,b:2", "--starter", "local", "--min-np", "1") as job:
            for worker in range(3):
                job.wait_for_step(worker, 0, worker, 3)
            subprocess.run([_command.find(), "ctl", job.path / "r", "drain", "b"], check=True, stdout=subprocess.DEVNULL)
            job.wait_for_step(0, 1, 0, 1)
            self.assertEqual(job.stop(), 0, job.said())
            steps = [int(step) for step in re.findall(r"^step \d+ \d+ (\d+) ", job.log(0), re.MULTILINE)]
            self.assertEqual(steps, list(range(steps[0], steps[0] + len(steps))))
            job.check(self, 0, 1, 2)

    def test_a_process_keeps_its_local_rank_and_a_new_one_takes_the_free_one(self):
        # 2 of 3 keeps 2 while it is one of two; rank 2 is 1 of 3.
        script = TRAINING.replace("hvd.init()", "import cohort\nhvd.init()").replace(
            "state.step += 1", "state.step += 1; assert hvd.local_rank() == cohort.local_rank() == int(os.environ['LOCAL_RANK'])")  # fmt: skip
        with Job("--min-np", "1", "-np", "3", "--starter", "local", "--host-discovery-script", "echo a:3",
                 "--blacklist-cooldown-range", "1", "2", script=script) as job:  # fmt: skip
            for worker in range(3):
                job.wait_for_step(worker, 0, worker, 3)
            job.kill(1)
            for epoch, workers in ((1, (0, 2)), (2, (0, 2, 3))):
                for rank, worker in enumerate(workers):
                    job.wait_for_step(worker, epoch, rank, len(workers))
            self.assertEqual(job.stop(), 0, job.said())
            job.check(self, 0, 1, 2, 3)

    def test_hosts_come_and_go_while_it_trains(self):
        with tempfile.TemporaryDirectory() as folder:
            hosts = pathlib.Path(folder) / "hosts"

            def listed(text):
                (pathlib.Path(folder) / "new").write_text(text)
                os.replace(pathlib.Path(folder) / "new", hosts)

            listed("a:2\n")
            with Job("--min-np", "1", "--starter", "local", "--host-discovery-script", f"cat {hosts}") as job:
                for worker in range(2):
                    job.wait_for_step(worker, 0, worker, 2)
                listed("a:2\nb\n")
                for worker in range(3):
                    job.wait_for_step(worker, 1, worker, 3)
                listed("b\n")
                job.wait_for_step(2, 2, 0, 1)
                self.assertEqual(job.stop(), 0, job.said())
                self.assertIn("workers 0-1 leave: host a is listed no more; epoch 2 goes on with 1 of 3 workers", job.said())
                job.check(self, 0, 1, 2)


if __name__ == "__main__":
    unittest.main()
