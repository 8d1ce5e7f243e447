"""`cohort run` over hosts of a box: how jobs end, whatever becomes of their parts, and that nothing is left."""

import contextlib
import os
import pathlib
import signal
import time
import unittest

from launch_case import COHORT, PATIENCE, Launch, wait_until

PEER = os.environ.get("COHORT_HOSTS_PEER", "")


class TestEnds(Launch):
    PROGRAM = "sh -c 'setsid sleep 1000' & trap '' TERM; echo up; sleep 1000 & wait; sleep 1000"

    def start_up(self, *words, hosts="h1:1,h2:2,h3:1", ranks=4):
        job = self.start_job("--grace", "1", *words, "-H", hosts, "sh", "-c", self.PROGRAM)
        for _ in range(ranks):
            self.assertIn("up", job.stdout.readline())
        return job

    def ended(self, job, status, *texts):
        _, err = job.communicate(timeout=PATIENCE)
        self.assertEqual(job.returncode, status, err)
        for text in texts:
            self.assertIn(text, err)
        return err

    def test_the_first_failing_rank_gives_the_status_with_its_host(self):
        job = self.start_job("-H", "h1:1,h2:2,h3:1", "sh", "-c",
                             "[ $RANK != 2 ] || { echo why >&2; exit 9; }; (setsid sleep 1000 &); sleep 1000")
        self.ended(job, 9, "rank 2 failed: exit code 9 (host h2", "why")

    def test_a_killed_rank_is_named_with_its_host(self):
        job = self.start_up()
        os.kill(self.record()["pids"][3], signal.SIGKILL)
        self.ended(job, 137, "rank 3", "host h3")

    def test_ctrl_c_reaches_ranks_on_all_hosts(self):
        job = self.start_job("-H", "h2:1,h3:1", "sh", "-c", "trap 'echo asked; exit 0' INT; echo up; sleep 1000 & wait")
        for _ in range(2):
            self.assertIn("up", job.stdout.readline())
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=PATIENCE)
        self.assertEqual((job.returncode, out.count("asked")), (130, 2), err)

    def test_the_launcher_is_killed(self):
        job = self.start_up()
        job.kill()
        job.wait()

    def test_the_launcher_is_killed_while_it_starts(self):
        self.shell_reads("h2", "sleep 1\n")
        job = self.start_job("-H", "h1,h2,h3", "sleep", "1000")
        wait_until(lambda: self.box.processes("h2", "sleep 1"), "ssh is there")
        job.kill()
        job.wait()

    def test_an_agent_is_killed(self):
        job = self.start_up()
        os.kill(self.guard_and_agent("h2")[1], signal.SIGKILL)
        self.ended(job, 1, "the agent of h2")

    def test_a_guard_is_killed(self):
        job = self.start_up()
        os.kill(self.guard_and_agent("h2")[0], signal.SIGKILL)
        self.ended(job, 1, "h2")

    def test_sshd_is_killed(self):
        job = self.start_up()
        for pid in self.one("h2", "^sshd: "):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.ended(job, 1, "h2")

    def test_ssh_is_killed(self):
        job = self.start_up()
        os.kill(self.one("h1", "^ssh .*-- h3 ")[0], signal.SIGKILL)
        self.ended(job, 1, "h3")

    def test_a_command_that_outlives_its_agent_is_ended(self):
        lingers = self.script(f'ssh -F {self.box.folder}/ssh_config "$@"; echo still here >&2; trap "" TERM; sleep 1000', "lingers")
        job = self.start_job("--ssh", lingers, "-H", "h1,h2", "sh", "-c", "echo fine")
        begun = time.monotonic()
        out, err = job.communicate(timeout=PATIENCE)
        self.assertEqual((job.returncode, out.count("fine")), (0, 2), err)
        self.assertIn("h2: nothing of the job is left there, and its ssh has not ended after 5 s", err)
        self.assertGreater(time.monotonic() - begun, 5)

    def test_a_link_is_cut_for_good(self):
        job = self.start_up()
        cut = time.monotonic()
        self.box.act("cut", "h2")
        try:
            err = self.ended(job, 1, "the agent of h2 is lost", "the link is cut, or the host is down")
            took = time.monotonic() - cut
            self.assertLess(took, 12, err)
            # The host that nobody reaches ends its part by itself.
            wait_until(lambda: set(self.box.processes("h2", "agent|sleep")) <= self.box.before, "h2 cleans up")
        finally:
            self.box.act("heal", "h2")

    @unittest.skipUnless(PEER, "needs COHORT_HOSTS_PEER")
    def test_ranks_that_fall_with_a_lost_host_are_not_the_cause(self):
        job = self.start_job("-H", "h1:1,h2:1", PEER, "1000")
        wait_until(lambda: self.box.processes("h2", "hosts_peer"), "the ranks are there")
        time.sleep(3)
        self.box.act("cut", "h2")
        try:
            err = self.ended(job, 1, "the agent of h2 was lost (nothing has come from", "the link is cut, or the host is down")
            self.assertNotIn("rank 0 failed", err)
        finally:
            self.box.act("heal", "h2")

    def test_a_link_that_is_cut_for_a_second_is_survived(self):
        job = self.start_job("-H", "h1,h2", "sh", "-c", "echo up; read word < go; echo done; exit 0")
        os.mkfifo(pathlib.Path(self.folder) / "go")
        for _ in range(2):
            self.assertIn("up", job.stdout.readline())
        self.box.act("cut", "h2", "--for", "1")
        time.sleep(4)  # longer than a silent host is waited for
        self.assertIsNone(job.poll(), "" if job.poll() is None else job.stderr.read())
        with open(pathlib.Path(self.folder) / "go", "w", encoding="ascii") as go:
            go.write("x\nx\n")
            go.flush()
            out, err = job.communicate(timeout=PATIENCE)
        self.assertEqual((job.returncode, out.count("done")), (0, 2), err)

    def test_a_stopped_launcher_is_not_a_lost_one(self):
        job = self.start_job("-H", "h2", "sh", "-c", "echo up; sleep 6; echo done")
        self.assertIn("up", job.stdout.readline())
        job.send_signal(signal.SIGSTOP)
        time.sleep(4)
        job.send_signal(signal.SIGCONT)
        out, err = job.communicate(timeout=PATIENCE)
        self.assertEqual((job.returncode, out), (0, "h2:0 | done\n"), err)

    def test_under_srun_the_launcher_or_a_step_is_killed(self):
        for victim in ("launcher", "srun"):
            with self.subTest(victim):
                job = self.box.start("h1", "salloc", "-Q", "-N", "2", COHORT, "run", "--grace", "1", "sh", "-c", self.PROGRAM,
                                     cwd=self.folder)
                for _ in range(2):
                    self.assertIn("up", job.stdout.readline())
                pattern = "^[^ ]*cohort run" if victim == "launcher" else "^srun .*nodelist=h[2-9]"  # h2 may still be tidying up
                os.kill(self.one("h1", pattern)[0], signal.SIGKILL)
                job.communicate(timeout=PATIENCE)
                if victim == "srun":
                    self.assertNotEqual(job.returncode, 0)
                self.nothing_is_left()

    def test_under_mpirun_the_launcher_is_killed(self):
        job = self.start_up("--starter", "mpirun", hosts="h2,h3", ranks=2)
        job.kill()
        job.wait()

    def test_restarts_begin_anew_on_all_hosts(self):
        job = self.start_job("--max-restarts", "1", "-H", "h1,h2", "sh", "-c",
                             "[ $RANK != 1 -o $COHORT_RESTART = 1 ] || exit 3; [ $COHORT_RESTART = 1 ] || sleep 1000; echo fine")
        out, err = job.communicate(timeout=PATIENCE)
        self.assertEqual((job.returncode, out.count("fine")), (0, 2), err)


class TestElastic(Launch):
    """Jobs that go on (`--min-np`): ranks are shells that end once there is a file `end`."""

    # As one that forms a world: it says by its status page (`StatusLayout::forming`) that it waits to be a member.
    PROGRAM = (
        "printf '\\377\\377\\377\\377' | dd of=/proc/self/fd/$COHORT_STATUS_FD bs=1 seek=16 conv=notrunc 2>/dev/null; "
        "echo worker $COHORT_WORKER up; while [ ! -e end ]; do sleep 0.1; done"
    )

    def start_up(self, *words, workers):
        job = self.start_job("--min-np", "2", *words, "sh", "-c", self.PROGRAM)
        up = {job.stdout.readline().split("worker ")[1] for _ in range(workers)}
        self.assertEqual(up, {f"{worker} up\n" for worker in range(workers)})
        return job

    def end_well(self, job):
        (pathlib.Path(self.folder) / "end").touch()
        _, err = job.communicate(timeout=PATIENCE)
        self.assertEqual(job.returncode, 0, err)
        return err

    def test_it_goes_on_without_a_host_whose_link_is_cut(self):
        job = self.start_up("-H", "h1:1,h2:2,h3:1", workers=4)
        self.box.act("cut", "h2")
        try:
            begun = time.monotonic()
            line = job.stderr.readline()
            while "workers 1-2 are lost with their host h2 (" not in line:
                self.assertNotEqual(line, "")
                line = job.stderr.readline()
            self.assertIn("; epoch 1 goes on with 2 of 4 workers (ranks 0-1 are workers 0,3)", line)
            self.assertLess(time.monotonic() - begun, 12)
            wait_until(lambda: set(self.box.processes("h2", "agent|sleep")) <= self.box.before, "h2 cleans up")
            self.end_well(job)
        finally:
            self.box.act("heal", "h2")

    def test_hosts_come_and_go(self):
        hosts = pathlib.Path(self.folder) / "hosts"

        def listed(text):
            (pathlib.Path(self.folder) / "new").write_text(text)
            os.replace(pathlib.Path(self.folder) / "new", hosts)

        listed("h1\nh2\n")
        job = self.start_up("--host-discovery-script", f"cat {hosts}", workers=2)
        listed("h1\nh2\nnobody\nh3:2\n")
        up = {job.stdout.readline().split("worker ")[1] for _ in range(2)}
        self.assertEqual(up, {"2 up\n", "3 up\n"})
        wait_until(lambda: self.record()["members"][-1]["workers"] == [0, 1, 2, 3], "they are members")
        listed("h2\nh3:2\n")
        wait_until(lambda: self.record()["members"][-1]["workers"] == [1, 2, 3], "h1 is left")
        err = self.end_well(job)
        self.assertIn("host h3 has come with workers 2-3; epoch 1 goes on with 4 workers, 2 of them new", err)
        self.assertIn("; the job goes on without nobody", err)


del Launch

if __name__ == "__main__":
    unittest.main()
