"""Servers beside the ranks of `cohort run`, over hosts of a box: where they run, how they end, and that nothing is left."""

import os
import pathlib
import signal
import unittest

from launch_case import COHORT, PATIENCE, Launch


class TestRoles(Launch):
    SERVES = ("if [ $COHORT_ROLE = server ]; then trap 'echo bye; exit 0' TERM; touch ready.$COHORT_ROLE_NUMBER; "
              "while :; do sleep 0.05; done; fi; ")
    WAITS = ("for n in $(seq 0 $((COHORT_SERVERS - 1))); do while [ ! -e ready.$n ]; do sleep 0.05; done; done; "
             "echo $(hostname) worker $RANK/$WORLD_SIZE")
    LASTS = "(setsid sleep 1001 &); echo up; exec sleep 1000"

    def start_up(self, *words):
        job = self.start_job("--grace", "1", "-H", "h1:1,h2:1", "--servers", "2", *words, "sh", "-c", self.LASTS)
        for _ in range(4):
            self.assertIn("up", job.stdout.readline())
        return job

    def ended(self, job, status, *texts):
        _, err = job.communicate(timeout=PATIENCE)
        self.assertEqual(job.returncode, status, err)
        for text in texts:
            self.assertIn(text, err)

    def test_servers_are_spread_and_end_with_the_ranks(self):
        done = self.run_job("-H", "h1:2,h2:1", "--servers", "2", "sh", "-c", self.SERVES + self.WAITS)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = sorted(line.split(" | ") for line in done.stdout.splitlines())
        self.assertEqual([[name.strip(), text] for name, text in lines],
                         [["h1:0", "h1 worker 0/3"], ["h1:1", "h1 worker 1/3"], ["h1:server 0", "bye"],
                          ["h2:2", "h2 worker 2/3"], ["h2:server 1", "bye"]])
        self.assertIn("3 processes and 2 servers on 2 hosts (h1: ranks 0-1, server 0, h2: rank 2, server 1)", done.stderr)
        logs = pathlib.Path(self.folder) / "runs/latest/logs"
        self.assertEqual((logs / "server-1.out").read_text(), "bye\n")
        self.assertEqual(len(self.record()["server_pids"]), 2)

    def test_ranks_of_another_host_have_their_servers_while_they_save(self):
        job = self.start_job("-H", "h1:1,h2:1", "--servers", "1", "--grace", "20", "sh", "-c",
                             "if [ $COHORT_ROLE = server ]; then trap 'ls saved.*; exit 0' TERM\n"
                             "elif [ $RANK = 1 ]; then trap 'sleep 1; touch saved.1; exit 0' TERM\n"
                             "else trap 'touch saved.0; exit 0' TERM; fi\necho up; while :; do sleep 0.05; done")
        for _ in range(3):
            self.assertIn("up", job.stdout.readline())
        job.terminate()
        out, err = job.communicate(timeout=PATIENCE)
        self.assertEqual(job.returncode, 143, err)
        self.assertEqual([line.split(" | ")[1] for line in out.splitlines()], ["saved.0", "saved.1"], err)

    def test_a_killed_server_is_named_with_its_host(self):
        job = self.start_up()
        os.kill(self.record()["server_pids"][1], signal.SIGKILL)
        self.ended(job, 137, "server 1 failed: killed by SIGKILL (host h2")

    def test_a_killed_server_is_started_again_on_its_host(self):
        program = ("if [ $COHORT_ROLE = server ]; then trap 'exit 0' TERM; echo $(hostname) start $COHORT_SERVER_RESTART; "
                   "if [ $COHORT_ROLE_NUMBER$COHORT_SERVER_RESTART = 10 ]; then kill -9 $$; fi; "
                   "touch ready.$COHORT_ROLE_NUMBER; while :; do sleep 0.05; done; fi; ")
        done = self.run_job("-H", "h1:1,h2:1", "--servers", "2", "--server-restarts", "1", "sh", "-c", program + self.WAITS)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("server 1 on h2 is lost (killed by SIGKILL); it is started again (1 of 1 times", done.stderr)
        logs = pathlib.Path(self.folder) / "runs/latest/logs"
        self.assertEqual((logs / "server-1.out").read_text(), "h2 start 0\nh2 start 1\n")
        self.assertEqual(self.record()["server_restarts"][0]["host"], "h2")

    def test_a_killed_rank_takes_the_servers_along(self):
        job = self.start_up()
        os.kill(self.record()["pids"][1], signal.SIGKILL)
        self.ended(job, 137, "rank 1 failed: killed by SIGKILL (host h2")

    def test_a_killed_launcher_leaves_no_server(self):
        job = self.start_up()
        job.kill()
        job.wait()

    def test_a_killed_agent_leaves_no_server(self):
        job = self.start_up()
        os.kill(self.guard_and_agent("h2")[1], signal.SIGKILL)
        self.ended(job, 1, "the agent of h2")

    def test_hosts_of_the_servers_alone(self):
        done = self.run_job("-H", "h1:1,h2:1", "--server-hosts", "h3:2", "sh", "-c", self.SERVES + self.WAITS)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(line.split(" | ")[0].strip() for line in done.stdout.splitlines()),
                         ["h1:0", "h2:1", "h3:server 0", "h3:server 1"])
        self.assertIn("on 3 hosts (h1: rank 0, h2: rank 1, h3: servers 0-1)", done.stderr)
        self.assertIn("worker 1/2", done.stdout)

    def test_a_host_of_servers_that_is_lost_is_named(self):
        job = self.start_job("--grace", "1", "-H", "h1:1", "--server-hosts", "h3", "sh", "-c", self.LASTS)
        for _ in range(2):
            self.assertIn("up", job.stdout.readline())
        os.kill(self.guard_and_agent("h3")[1], signal.SIGKILL)
        self.ended(job, 1, "the agent of h3")

    def test_a_host_of_servers_that_is_lost_may_be(self):
        waits = "echo up; if [ $COHORT_ROLE = worker ]; then while [ ! -e go ]; do sleep 0.05; done; else exec sleep 1000; fi"
        for lost, status in (("2", 0), ("1", 1)):
            job = self.start_job("--grace", "1", "-H", "h1:1", "--server-hosts", "h2,h3:2", "--lost-servers", lost, "sh",
                                 "-c", waits)
            for _ in range(4):
                self.assertIn("up", job.stdout.readline())
            os.kill(self.guard_and_agent("h3")[1], signal.SIGKILL)
            wanted = "servers 1-2 on h3 are lost with their host" if status == 0 else "the agent of h3"
            self.assertTrue(any(wanted in line for line in iter(job.stderr.readline, "")))
            (pathlib.Path(self.folder) / "go").touch()
            self.ended(job, status)
            (pathlib.Path(self.folder) / "go").unlink()

    def test_servers_are_a_component_of_a_heterogeneous_job(self):
        ours = (COHORT, "run", "--server-hosts", "component 1", "sh", "-c", self.SERVES + self.WAITS)
        done = self.box.run("h1", "salloc", "-Q", "-N1", "-n1", ":", "-N1", "-n2", *ours, cwd=self.folder, timeout=90)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(done.stdout.count("bye"), 2, done.stdout + done.stderr)
        self.assertIn("worker 0/1", done.stdout)
        self.assertIn("1 process and 2 servers on 2 hosts (h1: rank 0, h2: servers 0-1)", done.stderr)

    def test_in_a_step_of_slurms_with_a_launcher_on_each_node(self):
        done = self.box.run("h1", "srun", "-N", "2", "--ntasks-per-node=1", COHORT, "run", "-np", "1", "--servers", "2",
                            "sh", "-c", self.SERVES + self.WAITS, cwd=self.folder, timeout=90)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("bye"), 2, done.stdout + done.stderr)
        self.assertIn("worker 1/2", done.stdout)

    def test_in_an_allocation_of_slurms(self):
        done = self.box.run("h1", "salloc", "-N", "2", "--ntasks-per-node=1", COHORT, "run", "--servers", "colocated",
                            "sh", "-c", self.SERVES + self.WAITS, cwd=self.folder, timeout=90)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("bye"), 2, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
