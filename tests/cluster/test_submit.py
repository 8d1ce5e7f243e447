"""`cohort submit` with a real Slurm: jobs over its nodes, their output and their ends."""

import json
import pathlib
import re
import time
import unittest

from launch_case import COHORT, Launch, wait_until

PATIENCE = 90


class Submit(Launch):
    wanted = ("submit", "--slurm", "--hosts", "2")

    def nothing_is_left(self):
        self.box.run("h1", "scancel", "--full", "-u", "root")
        self.box.expect_nothing_new(20)

    def submit(self, *words, status=0):
        done = self.box.run("h1", COHORT, "submit", *words, cwd=self.folder, timeout=PATIENCE)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr + self.box.slurm_errors())
        return done

    def start(self, *words):
        """A follower, once its job runs: (process, job, what it has said, line by line)."""
        follower = self.box.start("h1", COHORT, "submit", *words, cwd=self.folder)
        self.addCleanup(self.end, follower)
        said = []
        while not any("RUNNING" in line for line in said):
            said.append(follower.stderr.readline())
            self.assertTrue(said[-1], "".join(said) + self.box.slurm_errors())
        job = re.search(r"cohort: job (\d+);", "".join(said)).group(1)
        wait_until((pathlib.Path(self.folder) / "began").exists, "the program begins")
        return follower, job

    def test_a_job_over_all_nodes(self):
        done = self.submit("--nodes", "2", "--ntasks-per-node", "2", "--time", "5", "--env", "GREETING=good day", "sh", "-c",
                           "echo $GREETING, rank $RANK of $WORLD_SIZE on $(hostname); exit 0")
        for rank in range(4):
            self.assertIn(f"good day, rank {rank} of 4 on h{rank // 2 + 1}", done.stdout)
        self.assertIn("#SBATCH --ntasks-per-node=2\n", done.stderr)
        self.assertIn("COMPLETED", done.stderr)
        run = pathlib.Path(self.folder) / "runs/latest"
        self.assertEqual(self.record()["world_size"], 4)
        self.assertIn("--nodes=2", (run / "submit.sh").read_text())
        job = json.loads((run / "submit.json").read_text())["job"]
        self.assertIn("rank 3 of 4", self.submit("--follow", job).stdout)

    def test_its_status_is_the_jobs(self):
        self.submit("-np", "1", "--", "sh", "-c", "exit 7", status=7)

    def test_slurms_own_words(self):
        said = self.submit("-p", "nowhere", "true", status=1).stderr
        self.assertIn("invalid partition specified: nowhere", said)
        self.assertIn("`sinfo -s`", said)
        self.assertIn("Invalid", self.submit("--nodes", "2", "--sbatch=--mem=never", "true", status=1).stderr)

    def test_why_it_waits(self):
        follower = self.box.start("h1", COHORT, "submit", "--nodes", "64", "true", cwd=self.folder)
        self.addCleanup(self.end, follower)
        said = ""
        while not re.search(r"PENDING \(Partition\w+\)", said):
            line = follower.stderr.readline()
            self.assertTrue(line, said)
            said += line

    def test_a_job_that_is_cancelled(self):
        follower, job = self.start("sh", "-c", "touch began; exec sleep 1000")
        self.assertEqual(self.box.run("h1", "scancel", job).returncode, 0)
        _, said = follower.communicate(timeout=PATIENCE)
        self.assertEqual(follower.returncode, 143, said)
        self.assertIn("CANCELLED", said)

    def test_it_is_asked_to_save_and_queued_again(self):
        follower, job = self.start("sh", "-c", "[ ! -e began ] || { echo and went on; exit 0; }; trap 'echo saved; exit 75' USR1; touch began; "
                                   "while :; do sleep 0.1; done")
        # As at the end of its time: the batch script alone gets it.
        self.assertEqual(self.box.run("h1", "scancel", "--batch", "-s", "USR1", job).returncode, 0)

        def queued_again():
            state = self.box.run("h1", "scontrol", "-o", "show", "job", job).stdout
            return "JobState=PENDING" in state and "Restarts=1" in state

        wait_until(queued_again, "it is queued again", 60)
        time.sleep(3)  # Slurm's daemons refuse credentials that are not younger than the end before, by whole seconds
        self.box.run("h1", "scontrol", "update", f"JobId={job}", "StartTime=now")
        out, said = follower.communicate(timeout=PATIENCE)
        self.assertEqual(follower.returncode, 0, out + said + self.box.slurm_errors())
        self.assertRegex(out, r"(?s)saved.*and went on")


if __name__ == "__main__":
    unittest.main()
