"""`cohort run` over hosts of a box: what it starts, what it says of hosts that cannot be had, and that nothing is left."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import tempfile
import time
import unittest

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")
PATIENCE = 30

#: 400 connections to the launcher, half of which say something; it may not listen yet when the first of them comes.
CROWD = """
import contextlib, socket, time

def connect():
    limit = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(("h1", 4711), 20)
        except ConnectionRefusedError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.02)

crowd = []
for _ in range(200):
    crowd += [connect(), connect()]
    with contextlib.suppress(ConnectionError):  # turned away already
        crowd[-1].send(b"GET / HTTP/1.0\\r\\n\\r\\n")
print("here we are", flush=True)
time.sleep(100)
"""


def wait_until(condition, what, seconds=PATIENCE):
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"{what}: not after {seconds} s")


class Launch(unittest.TestCase):
    """One box for all; every test leaves its hosts as they were."""

    box = None

    @classmethod
    def setUpClass(cls):
        if not COHORT:
            raise unittest.SkipTest("COHORT_COMMAND is not set")
        cls.box = boxes.Box("launch", "--slurm", "--hosts", "3")
        cls.before = {host: set(cls.box.processes(host)) for host in cls.box_hosts()}

    @staticmethod
    def box_hosts():
        return ("h1", "h2", "h3")

    @classmethod
    def tearDownClass(cls):
        if cls.box:
            cls.box.down()

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


class TestStarts(Launch):
    def test_ranks_know_who_and_where_they_are(self):
        done = self.run_job("-H", "h1:1,h2:2,h3:1", "sh", "-c",
                            "echo $(hostname) $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $PWD")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = sorted(line.split(" | ") for line in done.stdout.splitlines())
        self.assertEqual([name for name, _ in lines], ["h1:0", "h2:1", "h2:2", "h3:3"])
        self.assertEqual([text for _, text in lines],
                         [f"h1 0/4 0/1 0 10.77.0.1 {self.folder}", f"h2 1/4 0/2 1 10.77.0.1 {self.folder}",
                          f"h2 2/4 1/2 1 10.77.0.1 {self.folder}", f"h3 3/4 0/1 2 10.77.0.1 {self.folder}"])
        self.assertIn("4 processes on 3 hosts", done.stderr)
        logs = pathlib.Path(self.folder) / "runs/latest/logs"
        self.assertEqual((logs / "rank-2.out").read_text(), f"h2 2/4 1/2 1 10.77.0.1 {self.folder}\n")
        self.assertTrue((logs / "rank-3.err").exists())
        self.assertEqual([host["name"] for host in self.record()["hosts"]], ["h1", "h2", "h3"])

    def test_the_store_and_the_master_are_reached_from_every_host(self):
        program = self.script(
            "python3 - <<'E'\nimport os, socket\n"
            "host, port = os.environ['COHORT_STORE'].rsplit(':', 1)\n"
            "socket.create_connection((host.strip('[]'), int(port)), 10).close()\n"
            "place = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
            "family = socket.AF_INET6 if ':' in place[0] else socket.AF_INET\n"
            "if os.environ['RANK'] == '0':\n"
            "    s = socket.create_server(place, family=family); s.settimeout(20)\n"
            "    for _ in range(int(os.environ['WORLD_SIZE']) - 1): s.accept()[0].send(b'x')\n"
            "else:\n"
            "    import time\n"
            "    for _ in range(100):\n"
            "        try: c = socket.create_connection(place, 10); break\n"
            "        except ConnectionRefusedError: time.sleep(.1)\n"
            "    assert c.recv(1) == b'x'\n"
            "print('met')\nE\n")
        for hosts in ("h1,h2", "h2,h1", "h2,h3", "[fd77::2],[fd77::3]"):
            done = self.run_job("-H", hosts, program)
            self.assertEqual((done.returncode, done.stdout.count("met")), (0, 2), hosts + done.stderr)

    def test_the_environment_goes_along_but_for_what_is_a_hosts_own(self):
        environment = dict(os.environ, KEPT="yes", TMPDIR="/here", DISPLAY=":7", HOME="/here")
        done = self.run_job("-H", "h2", "--env", "DISPLAY", "--env", "NEW=1", "sh", "-c",
                            'echo "$KEPT $NEW $DISPLAY ${TMPDIR-none} $HOME"', env=environment)
        home = self.box.folder / "home_h2"
        self.assertEqual(done.stdout, f"h2:0 | yes 1 :7 none {home}\n", done.stderr)

    def test_the_secret_is_neither_in_arguments_nor_in_the_environment(self):
        done = self.run_job("-H", "h2", "python3", "-c", "import os; print(os.pread(int(os.environ['COHORT_SECRET_FD']), 32, 0).hex())")
        secret = done.stdout.split(" | ")[1].strip()
        self.assertEqual(len(secret), 64)
        job = self.start_job("-H", "h2", "sh", "-c", "echo up; sleep 100")
        self.assertIn("up", job.stdout.readline())
        secret = None
        for host in ("h1", "h2"):
            for pid in self.box.processes(host, "ssh|cohort"):
                with contextlib.suppress(OSError):
                    text = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() + pathlib.Path(f"/proc/{pid}/environ").read_bytes()
                    self.assertNotRegex(text, rb"(^|[^0-9a-f])[0-9a-f]{64}([^0-9a-f]|$)")
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=PATIENCE)

    def test_a_file_of_hosts_and_nodes_and_per_node(self):
        (pathlib.Path(self.folder) / "hosts").write_text("# mine\nh2 slots=4\nh3:4\nh1\n")
        done = self.run_job("--hostfile", "hosts", "--nodes", "2", "--per-node", "1", "hostname")
        self.assertEqual(sorted(done.stdout.splitlines()), ["h2:0 | h2", "h3:1 | h3"], done.stderr)

    def test_input_goes_to_rank_0_on_another_host(self):
        with open(self.script("", "input"), "w", encoding="ascii") as file:
            file.write("a line\n" * 20000)
        words = self.box.words("h1", "sh", "-c", f"{COHORT} run -H h2:2 sh -c '[ $RANK != 0 ] || wc -l' < input")
        done = boxes.subprocess.run(words, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.stdout, "h2:0 | 20000\n", done.stderr)

    def test_much_output_of_another_host_is_complete(self):
        done = self.run_job("--prefix", "none", "-H", "h2", "sh", "-c", "seq 1 300000")
        self.assertEqual(done.stdout, "".join(f"{i}\n" for i in range(1, 300001)))
        self.assertEqual((pathlib.Path(self.folder) / "runs/latest/logs/rank-0.out").read_text(), done.stdout)

    def test_it_runs_by_mpirun_and_within_an_allocation_by_srun(self):
        done = self.run_job("--starter", "mpirun", "-H", "h2,h3", "hostname")
        self.assertEqual(sorted(done.stdout.splitlines()), ["h2:0 | h2", "h3:1 | h3"], done.stderr)
        done = self.box.run("h1", "salloc", "-N", "2", "--ntasks-per-node=2", "--gres=gpu:1", COHORT, "run", "sh", "-c",
                            "echo $(hostname) $RANK $CUDA_VISIBLE_DEVICES", cwd=self.folder, timeout=60)
        self.assertEqual(sorted(line.split(" | ")[1] for line in done.stdout.splitlines()),
                         ["h1 0 0", "h1 1 0", "h2 2 0", "h2 3 0"], done.stderr)

    def test_a_batch_script_runs_it(self):
        script = self.script(f"{COHORT} run --prefix none sh -c 'echo $(hostname) $RANK; exit $RANK'\n")
        done = self.box.run("h1", "sbatch", "--wait", "-N", "2", "-o", f"{self.folder}/out", script, cwd=self.folder, timeout=60)
        self.assertEqual(done.returncode, 1, done.stderr)
        text = (pathlib.Path(self.folder) / "out").read_text()
        self.assertIn("h2 1\n", text)
        self.assertIn("rank 1 failed: exit code 1 (host h2", text)


class TestCannotStart(Launch):
    def refused(self, *words, status=127, **options):
        begun = time.monotonic()
        done = self.run_job(*words, **options)
        self.assertEqual(done.returncode, status, done.stderr)
        self.assertLess(time.monotonic() - begun, 25)
        return done.stderr

    def test_a_shell_that_prints_does_no_harm(self):
        self.shell_reads("h2", "echo welcome; printf 'no end of line'; echo careful >&2; echo stale 1>&2\n")
        done = self.run_job("-H", "h2", "hostname")
        self.assertEqual((done.returncode, done.stdout), (0, "h2:0 | h2\n"), done.stderr)
        self.assertNotIn("careful", done.stderr)

    def test_a_shell_that_exits_early_is_named(self):
        self.shell_reads("h2", "echo only for terminals; exit 0\n")
        text = self.refused("-H", "h1,h2", "hostname")
        self.assertIn("no agent on h2", text)
        self.assertIn(".bashrc", text)
        self.assertIn("only for terminals", text)

    def test_a_shell_that_waits_is_named(self):
        self.shell_reads("h2", "sleep 8\n")  # ended by nobody: the shell is not ours
        text = self.refused("--start-timeout", "2", "-H", "h1,h2", "hostname")
        self.assertIn("h2", text)
        self.assertIn("no sign of life", text)

    def test_a_host_key_that_is_not_known_does_not_ask(self):
        config = (self.box.folder / "ssh_config").read_text()
        other = pathlib.Path(self.folder) / "config"
        other.write_text(config.replace("UserKnownHostsFile", "UserKnownHostsFile /dev/null #").replace(
            "StrictHostKeyChecking yes", "StrictHostKeyChecking ask"))
        text = self.refused("--ssh", f"ssh -F {other}", "-H", "h2", "hostname")
        self.assertIn("its host key is not known here", text)
        self.assertIn("`ssh h2` once by hand", text)

    def test_a_login_without_a_key_does_not_ask(self):
        config = (self.box.folder / "ssh_config").read_text()
        other = pathlib.Path(self.folder) / "config"
        other.write_text(config.replace("IdentityFile", "IdentityFile /dev/null #"))
        text = self.refused("--ssh", f"ssh -F {other}", "-H", "h2", "hostname")
        self.assertIn("ssh cannot log in without a password", text)
        self.assertIn("ssh-copy-id h2", text)

    def test_a_host_that_is_not_there_is_named(self):
        self.assertIn("h9", self.refused("-H", "h2,h9", "hostname"))
        self.box.act("cut", "h3")
        try:
            self.assertIn("h3", self.refused("--start-timeout", "3", "-H", "h2,h3", "hostname"))
        finally:
            self.box.act("heal", "h3")

    def test_all_hosts_that_cannot_be_had_are_named(self):
        self.shell_reads("h2", "exit 3\n")
        known = self.box.folder / "known_hosts"
        text = known.read_text()
        known.write_text("".join(line for line in text.splitlines(True) if not line.startswith("h3,")))
        self.addCleanup(known.write_text, text)
        text = self.refused("-H", "h1,h2,h3", "hostname")
        self.assertIn("2 hosts cannot be had", text)
        self.assertIn("no agent on h2", text)
        self.assertIn("status 3", text)
        self.assertIn("no agent on h3", text)
        self.assertIn("its host key is not known here", text)

    def test_a_command_that_is_not_there_is_named(self):
        text = self.refused("--remote-cohort", "/nowhere/cohort", "-H", "h2", "hostname")
        self.assertIn("/nowhere/cohort cannot be started there", text)

    def test_another_version_is_refused_with_both_sides(self):
        old = self.script(r"printf 'cohort-agent-is-here\t1\t0.0.1\tGNU 9\th2\t/old/cohort\n'; cat", "cohort")
        text = self.refused("--remote-cohort", old, "-H", "h2", "hostname")
        self.assertIn("Cohort is 0.0.1 on h2 (/old/cohort)", text)

    def test_a_folder_that_is_only_here_is_named(self):
        self.box.run("h1", "mkdir", "-p", "/dev/shm/mine")
        done = self.box.run("h1", "sh", "-c", f"cd /dev/shm/mine && {COHORT} run --run-dir {self.folder}/r -H h1,h2 hostname",
                            timeout=60)
        self.box.run("h1", "rm", "-r", "/dev/shm/mine")
        self.assertEqual(done.returncode, 127)
        self.assertIn("h2", done.stderr)
        self.assertIn("there is no folder /dev/shm/mine", done.stderr)

    def test_hosts_that_are_none_are_refused(self):
        for bad in ("-oProxyCommand=touch x", "h1,h1.somewhere", "a;b", "h2:0"):
            self.assertIn("cohort", self.refused("-H", bad, "hostname", status=2))
        self.assertFalse((pathlib.Path(self.folder) / "x").exists())


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

    def one(self, host, pattern):
        found = [pid for pid in self.box.processes(host, pattern) if pid not in self.before[host]]
        self.assertTrue(found, f"{pattern} on {host}")
        return found

    def guard_and_agent(self, host):
        found = self.one(host, "agent --invited")
        parents = {pid: int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) for pid in found}
        pairs = [(parent, pid) for pid, parent in parents.items() if parent in parents]
        self.assertEqual(len(pairs), 1, parents)
        return pairs[0]

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

    def test_a_link_is_cut_for_good(self):
        job = self.start_up()
        cut = time.monotonic()
        self.box.act("cut", "h2")
        try:
            err = self.ended(job, 1, "the agent of h2 is lost", "the link is cut, or the host is down")
            took = time.monotonic() - cut
            self.assertLess(took, 12, err)
            # The host that nobody reaches ends its part by itself.
            wait_until(lambda: set(self.box.processes("h2", "agent|sleep")) <= self.before["h2"], "h2 cleans up")
        finally:
            self.box.act("heal", "h2")

    def test_a_link_that_is_cut_for_a_second_is_survived(self):
        job = self.start_job("-H", "h1,h2", "sh", "-c", "echo up; read word < go; echo done; exit 0")
        os.mkfifo(pathlib.Path(self.folder) / "go")
        for _ in range(2):
            self.assertIn("up", job.stdout.readline())
        self.box.act("cut", "h2")
        time.sleep(1)
        self.box.act("heal", "h2")
        time.sleep(4)  # longer than a silent host is waited for
        self.assertIsNone(job.poll())
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


class TestByHand(Launch):
    def setUp(self):
        super().setUp()
        self.secret = str(pathlib.Path(self.folder) / "secret")
        self.assertEqual(self.box.run("h1", COHORT, "secret", self.secret).returncode, 0)

    def join(self, host, *words):
        return self.box.start(host, COHORT, "agent", "--join", "h1:4711", "--secret-file", self.secret, *words)

    def start_by_hand(self, hosts, *program):
        job = self.start_job("--starter", "hand", "--secret-file", self.secret, "--listen", "4711", "-H", hosts, *program)
        return job

    def test_agents_may_come_before_or_after_the_job(self):
        early = self.join("h2")
        time.sleep(0.5)
        job = self.start_by_hand("h1,h2,b", "sh", "-c", "echo $(hostname) $RANK")
        late = self.join("h3", "--name", "b")
        out, err = job.communicate(timeout=PATIENCE)
        self.assertEqual(sorted(line.split("| ")[1] for line in out.splitlines()), ["h1 0", "h2 1", "h3 2"], err)
        self.assertEqual(job.returncode, 0, err)
        self.assertIn("waiting for", err)
        for agent in (early, late):
            _, said = agent.communicate(timeout=PATIENCE)
            self.assertEqual(agent.returncode, 0, said)

    def test_an_agent_of_another_name_is_told_and_does_no_harm(self):
        job = self.start_by_hand("h2", "hostname")
        stranger = self.join("h3")
        _, said = stranger.communicate(timeout=PATIENCE)
        self.assertEqual(stranger.returncode, 1)
        self.assertIn("h3 is none of the job's; the job's hosts: h2", said)
        agent = self.join("h2")
        out, err = job.communicate(timeout=PATIENCE)
        self.assertEqual((job.returncode, out), (0, "h2:0 | h2\n"), err)
        agent.communicate(timeout=PATIENCE)

    def test_the_launchers_host_has_its_agent(self):
        early = self.join("h1")  # before the launcher's own
        job = self.start_by_hand("h1,h2", "hostname")
        late = self.join("h1")
        for agent in (early, late):
            _, said = agent.communicate(timeout=PATIENCE)
            self.assertEqual(agent.returncode, 1)
            self.assertIn("h1 is there already", said)
        agent = self.join("h2")
        out, err = job.communicate(timeout=PATIENCE)
        self.assertEqual((job.returncode, sorted(out.splitlines())), (0, ["h1:0 | h1", "h2:1 | h2"]), err)
        agent.communicate(timeout=PATIENCE)

    def test_without_the_secret_nobody_gets_in(self):
        other = str(pathlib.Path(self.folder) / "other")
        self.assertEqual(self.box.run("h1", COHORT, "secret", other).returncode, 0)
        job = self.start_by_hand("h2", "hostname")
        done = self.box.run("h2", COHORT, "agent", "--join", "h1:4711", "--secret-file", other, "--timeout", "1")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("authentication failed", done.stderr)
        self.assertIsNone(job.poll())
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=PATIENCE)
        self.assertEqual(job.returncode, 143)

    def test_a_crowd_of_strangers_keeps_no_agent_out(self):
        job = self.start_by_hand("h2", "hostname")
        crowd = self.box.start("h3", "python3", "-c", CROWD)
        self.addCleanup(crowd.communicate)
        self.addCleanup(crowd.kill)
        said = crowd.stdout.readline()
        self.assertIn("here we are", said, said or crowd.stderr.read())
        begun = time.monotonic()
        agent = self.join("h2")
        out, err = job.communicate(timeout=PATIENCE)
        self.assertEqual((job.returncode, out), (0, "h2:0 | h2\n"), err)
        self.assertLess(time.monotonic() - begun, 10)
        agent.communicate(timeout=PATIENCE)

    def test_the_launcher_is_killed_or_its_host_is_gone(self):
        for how in ("killed", "gone"):
            with self.subTest(how):
                job = self.start_by_hand("h2,h3", "sh", "-c", "echo up; (setsid sleep 1000 &); sleep 1000")
                agents = [self.join("h2"), self.join("h3")]
                for _ in range(2):
                    self.assertIn("up", job.stdout.readline())
                if how == "gone":
                    self.box.act("cut", "h1")
                else:
                    job.kill()
                for agent in agents:
                    agent.communicate(timeout=PATIENCE)
                    self.assertEqual(agent.returncode, 1)
                self.box.act("heal", "h1")
                job.communicate(timeout=PATIENCE)
                self.nothing_is_left()


del Launch

if __name__ == "__main__":
    unittest.main()
