"""`cohort run` started on each host of one job: as the task of a Slurm step on each node, and by hand as torchrun is."""

import contextlib
import os
import pathlib
import re
import signal
import unittest

from launch_case import COHORT, PATIENCE, Launch, wait_until

WORKER = os.environ.get("COHORT_INIT_WORKER", "")
PACKAGE = os.environ.get("COHORT_PYTHON_PACKAGE", "")
#: A program written for torchrun: the numbers by its variables, and a sum over all.
SUM = """
import array, os, cohort
cohort.init()
world = cohort.world()
numbers = array.array("d", [world.rank() + 1.0])
world.all_reduce(numbers)
print(os.environ["RANK"], os.environ["LOCAL_RANK"], world.local_rank(), world.cross_rank(), numbers[0], flush=True)
"""
#: A rank that waits, and a process that it has started in a session of its own.
STAYS = "echo up; (setsid sleep 1000 &); sleep 1000"
SAYS = "echo $RANK $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $WORLD_SIZE $(hostname)"
#: A task on each of two nodes.
ONE_EACH = ("-N2", "--ntasks-per-node=1", "-wh1,h2")
FOUR = ["0 0/2 0/2 4 h1", "1 1/2 0/2 4 h1", "2 0/2 1/2 4 h2", "3 1/2 1/2 4 h2"]


class Nodes(Launch):
    needs = ("COHORT_COMMAND", "COHORT_INIT_WORKER")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.secret = str(cls.box.folder / "secret-of-nodes")
        if cls.box.run("h1", COHORT, "secret", cls.secret).returncode != 0:
            raise AssertionError("no secret")

    def srun(self, *words, srun=(), np="2"):
        job = self.box.start("h1", "srun", *ONE_EACH, *srun, COHORT, "run", "-np", np, *words,
                             cwd=self.folder)
        self.addCleanup(self.end, job)
        return job

    def by_hand(self, host, rank, *words, nodes=2, np="2", secret=None):
        job = self.start_job("--nnodes", str(nodes), "--node-rank", str(rank), "--master-addr", "h1", "--master-port", "4712",
                             "--secret-file", secret or self.secret, "-np", np, *words, host=host)
        return job

    def ended(self, job, status, *texts):
        out, err = job.communicate(timeout=PATIENCE)
        self.assertEqual(job.returncode, status, out + err)
        for text in texts:
            self.assertIn(text, err)
        return out, err

    def come_up(self, job, ranks):
        for _ in range(ranks):
            line = job.stdout.readline()
            self.assertIn("up", line, line or job.stderr.read())

    def expect_four(self, job):
        out, err = self.ended(job, 0, "4 processes on 2 hosts (h1: ranks 0-1, h2: ranks 2-3), -np 2 of a launcher on each")
        self.assertEqual(sorted(line.split("| ")[1] for line in out.splitlines()), FOUR, err)

    def expect_world(self, job):
        out, err = self.ended(job, 0)
        formed = re.findall(r"formed rank=(\d) size=4 local=(\d)/2 cross=(\d)/2 ", out)
        self.assertEqual(sorted(formed), [("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1")], out + err)
        self.assertNotIn("cohort warning", err)

    def launcher_of(self, host):
        """Processes of node 1: the command, which is the guard, and its agent."""
        return self.guard_and_agent(host, r"^\S*cohort run ")


class InAStep(Nodes):
    def test_one_job_with_the_right_numbers(self):
        self.expect_four(self.srun("sh", "-c", SAYS))

    def test_one_world_through_munge_pmi_and_pmix(self):
        for mpi in ("none", "pmi2", "pmix"):
            if mpi == "pmix" and not pathlib.Path("/usr/lib/x86_64-linux-gnu/slurm-wlm/mpi_pmix.so").exists():
                continue
            with self.subTest(mpi):
                self.expect_world(self.srun(WORKER, srun=(f"--mpi={mpi}",)))

    def test_python(self):
        if not list(pathlib.Path(PACKAGE, "cohort").glob("_core.*.so")):
            self.skipTest("the Python package is not built")
        program = pathlib.Path(self.folder, "sum.py")
        program.write_text(SUM)
        out, err = self.ended(self.srun("--env", f"PYTHONPATH={PACKAGE}", program), 0)
        self.assertEqual(sorted(line.split("| ")[1] for line in out.splitlines()),
                         ["0 0 0 0 10.0", "1 1 1 0 10.0", "2 0 0 1 10.0", "3 1 1 1 10.0"], err)

    def test_torchruns_words_find_the_secret_by_the_step(self):
        self.expect_four(self.box.start(
            "h1", "srun", *ONE_EACH, "sh", "-c",
            f"exec {COHORT} run --nnodes=$SLURM_NNODES --node_rank=$SLURM_PROCID --master_addr=h1 --master_port=4713 "
            f"--nproc_per_node=2 sh -c '{SAYS}'", cwd=self.folder))

    def test_exported_places_of_torch_do_not_split_it(self):
        self.expect_four(self.box.start(
            "h1", "srun", *ONE_EACH, "sh", "-c",
            "export MASTER_ADDR=h1 MASTER_PORT=29500 WORLD_SIZE=$SLURM_NTASKS RANK=$SLURM_PROCID; "
            f"exec {COHORT} run -np 2 sh -c '{SAYS}'", cwd=self.folder))

    def test_several_launchers_on_a_node_are_refused(self):
        done = self.box.run("h1", "srun", "-N2", "-n4", "-wh1,h2", "--overcommit", COHORT, "run", "-np", "2", "true", cwd=self.folder)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("`cohort run` was started 4 times, and each would be a job of its own", done.stderr)
        self.assertIn("`srun --ntasks-per-node=1 cohort run -np N PROGRAM`", done.stderr)
        done = self.box.run("h1", "srun", *ONE_EACH, "env", "COHORT_ALONE=1", COHORT, "run", "-q", "-np", "1", "sh", "-c",
                            "echo $RANK of $WORLD_SIZE", cwd=self.folder)
        self.assertEqual((done.returncode, done.stdout.count("0 of 1")), (0, 2), done.stdout + done.stderr)

    def test_a_failing_rank_gives_the_status_everywhere(self):
        job = self.srun("sh", "-c", f"[ $RANK != 3 ] || {{ echo why >&2; exit 9; }}; {STAYS}")
        _, err = self.ended(job, 9, "rank 3 failed: exit code 9 (host h2", "why")
        self.assertRegex(err, r"task.* 0.*: Exited with exit code 9")
        self.assertRegex(err, r"task.* 1.*: Exited with exit code 9|tasks 0-1: Exited with exit code 9")

    def test_a_killed_rank_is_named_with_its_host(self):
        job = self.srun("sh", "-c", STAYS)
        self.come_up(job, 4)
        os.kill(self.record()["pids"][2], signal.SIGKILL)
        self.ended(job, 137, "rank 2 failed: killed by SIGKILL (host h2")

    def test_the_launcher_of_the_other_node_is_killed(self):
        for which, said in ((0, "h2"), (1, "the agent of h2")):
            with self.subTest("agent" if which else "command"):
                # In files of the tasks' own: srun, once a task is killed, at times shows nothing more of the others.
                job = self.srun("sh", "-c", STAYS, srun=("--error=said.%t",))
                self.come_up(job, 4)
                os.kill(self.launcher_of("h2")[which], signal.SIGKILL)
                job.communicate(timeout=PATIENCE)
                err = pathlib.Path(self.folder, "said.0").read_text()
                self.assertIn(said, err)
                self.assertIn("ending the job", err)
                self.assertNotEqual(job.returncode, 0)
                self.nothing_is_left()

    def test_the_supervisor_is_killed(self):
        job = self.srun("sh", "-c", STAYS)
        self.come_up(job, 4)
        os.kill(self.one("h1", r"^\S*cohort run ")[0], signal.SIGKILL)
        self.assertIn("node 0 at task 0 of the step is lost; ending what runs here", job.communicate(timeout=PATIENCE)[1])
        self.assertNotEqual(job.returncode, 0)

    def test_ctrl_c_reaches_the_ranks_of_both(self):
        job = self.srun("sh", "-c", "trap 'kill $!; echo asked; exit 0' INT; echo up; sleep 1000 & wait")
        self.come_up(job, 4)
        # As Slurm does: the signal is every task's. The first may have ended the job before the second comes.
        tasks = [self.one("h1", r"^\S*cohort run ")[0], self.launcher_of("h2")[0]]
        for pid in tasks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        out, err = job.communicate(timeout=PATIENCE)
        self.assertEqual((job.returncode, out.count("asked")), (130, 4), out + err)

    def test_a_cut_link_ends_both_sides(self):
        job = self.srun("sh", "-c", STAYS)
        self.come_up(job, 4)
        self.box.act("cut", "h2")
        try:
            wait_until(lambda: not [pid for host in ("h1", "h2") for pid in self.box.processes(host, "^sleep 1000")],
                       "no rank is left")
        finally:
            self.box.act("heal", "h2")
        _, err = job.communicate(timeout=PATIENCE)
        self.assertIn("the agent of h2 is lost", err)


class ByHand(Nodes):
    def test_at_torchruns_rendezvous_nobody_needs_a_number(self):
        words = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "77", "--rdzv-endpoint", "h1:4713", "--secret-file",
                 self.secret, "--nproc-per-node", "2", "sh", "-c", SAYS)
        other = self.start_job(*words, host="h2")  # the place says who is 0, not the order
        self.expect_four(self.start_job(*words, host="h1"))
        self.ended(other, 0, "node 1 of 2: ranks 2-3 here")

    def test_a_node_that_lacks_the_program_ends_the_job_of_all(self):
        first = self.by_hand("h1", 0, "--start-timeout", "600", "sh", "-c", STAYS)
        self.ended(self.by_hand("h2", 1, "/no/such"), 127, "cannot start /no/such: No such file")
        self.ended(first, 127, "h2: cannot start /no/such: No such file")

    def test_one_world_whoever_comes_first(self):
        early = self.by_hand("h2", 1, WORKER)
        first = self.by_hand("h1", 0, WORKER)
        self.expect_world(first)
        out, err = self.ended(early, 0, "node 1 of 2: ranks 2-3 here; output and logs are at node 0 (h1:4712)")
        self.assertEqual(out, "", err)

    def test_each_launchers_own_words_count_on_its_node(self):
        first = self.by_hand("h1", 0, "sh", "-c", SAYS + " first", np="1")
        said = first.stderr.readline()
        self.assertIn("waiting at ", said)
        self.assertIn("for node 1; on each: cohort run --nnodes 2 --node-rank R --master-addr h1 --master-port 4712 --secret-file FILE", said)
        other = self.by_hand("h2", 1, "--env", "WHO=second", "sh", "-c", SAYS + " $WHO", np="3")
        out, err = self.ended(first, 0, "4 processes on 2 hosts (h1: rank 0, h2: ranks 1-3), a launcher on each with its own -np")
        self.assertEqual(sorted(line.split("| ")[1] for line in out.splitlines()),
                         ["0 0/1 0/2 4 h1 first", "1 0/3 1/2 4 h2 second", "2 1/3 1/2 4 h2 second", "3 2/3 1/2 4 h2 second"], err)
        self.ended(other, 0)

    def test_restarts_take_all_nodes_along(self):
        jobs = [self.by_hand(host, rank, "--max-restarts", "1", "sh", "-c",
                             "echo $RANK try $COHORT_RESTART; [ $COHORT_RESTART = 0 ] || exit 0; [ $RANK = 1 ] || { touch up; sleep 1000; }; "
                             "until [ -e up ]; do sleep 0.01; done; exit 5", np="1")
                for rank, host in enumerate(("h1", "h2"))]
        out, err = self.ended(jobs[0], 0, "starting all 2 ranks again")
        self.assertEqual(sorted(line.split("| ")[1] for line in out.splitlines()),
                         ["0 try 0", "0 try 1", "1 try 0", "1 try 1"], err)
        self.ended(jobs[1], 0)

    def test_ctrl_c_at_either_ends_both_in_order(self):
        for which in (0, 1):
            with self.subTest(which):
                jobs = [self.by_hand(host, rank, "sh", "-c", "trap 'kill $!; echo asked; exit 0' INT; echo up; sleep 1000 & wait")
                        for rank, host in enumerate(("h1", "h2"))]
                self.come_up(jobs[0], 4)
                jobs[which].send_signal(signal.SIGINT)
                out, err = jobs[0].communicate(timeout=PATIENCE)
                self.assertEqual((jobs[0].returncode, out.count("asked")), (130, 4), out + err)
                self.ended(jobs[1], 130)
                self.nothing_is_left()

    def test_who_does_not_fit_is_told_and_does_no_harm(self):
        first = self.by_hand("h1", 0, "hostname", np="1")
        self.assertIn("waiting at ", first.stderr.readline())
        other = str(pathlib.Path(self.folder) / "other")
        self.assertEqual(self.box.run("h1", COHORT, "secret", other).returncode, 0)
        for words, text in (({"rank": 1, "nodes": 3}, "was started with --nnodes 3, and node rank 0 with 2"),
                            ({"rank": 1, "secret": other, "words": ("--start-timeout", "2")}, "authentication failed")):
            stranger = self.by_hand("h3", words["rank"], *words.get("words", ()), "hostname", np="1",
                                    nodes=words.get("nodes", 2), secret=words.get("secret"))
            _, said = stranger.communicate(timeout=PATIENCE)
            self.assertNotEqual(stranger.returncode, 0)
            self.assertIn(text, said)
        second = self.by_hand("h2", 1, "hostname", np="1")
        out, err = self.ended(first, 0)
        self.assertEqual(sorted(out.splitlines()), ["h1:0 | h1", "h2:1 | h2"], err)
        self.ended(second, 0)

    def test_a_node_that_does_not_come_is_named(self):
        job = self.by_hand("h1", 0, "--start-timeout", "2", "hostname")
        self.ended(job, 127, "nobody has come as node 1")
        job = self.by_hand("h2", 1, "--start-timeout", "2", "hostname")
        self.ended(job, 127, "node 1 does not reach node 0", "h1:4712")

    def test_the_host_of_the_supervisor_is_gone(self):
        jobs = [self.by_hand(host, rank, "sh", "-c", STAYS) for rank, host in enumerate(("h1", "h2"))]
        self.come_up(jobs[0], 4)
        self.box.act("cut", "h1")
        try:
            self.ended(jobs[1], 1, "node 0 at h1:4712 is lost")
        finally:
            self.box.act("heal", "h1")
        jobs[0].communicate(timeout=PATIENCE)


del Launch, Nodes

if __name__ == "__main__":
    unittest.main()
