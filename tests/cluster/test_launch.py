"""`cohort run` over hosts of a box: what it starts, and what it says of hosts that cannot be had."""

import contextlib
import os
import pathlib
import signal
import time
import unittest

import boxes
from launch_case import COHORT, PATIENCE, Launch


class TestStarts(Launch):
    def test_ranks_know_who_and_where_they_are(self):
        done = self.run_job("-H", "h1:1,h2:2,h3:1", "sh", "-c",
                            "echo $(hostname) $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $PWD")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = sorted(line.split(" | ") for line in done.stdout.splitlines())
        self.assertEqual([name for name, _ in lines], ["h1:0", "h2:1", "h2:2", "h3:3"])
        # The address by which an agent came first: IPv6 is tried 20 ms after IPv4, which a busy machine may take.
        master = lines[0][1].split()[4]
        self.assertIn(master, ("10.77.0.1", "fd77::1"))
        self.assertEqual([text for _, text in lines],
                         [f"h1 0/4 0/1 0 {master} {self.folder}", f"h2 1/4 0/2 1 {master} {self.folder}",
                          f"h2 2/4 1/2 1 {master} {self.folder}", f"h3 3/4 0/1 2 {master} {self.folder}"])
        self.assertIn("4 processes on 3 hosts", done.stderr)
        logs = pathlib.Path(self.folder) / "runs/latest/logs"
        self.assertEqual((logs / "rank-2.out").read_text(), f"h2 2/4 1/2 1 {master} {self.folder}\n")
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

    def test_an_mpirun_whose_folder_another_one_removed_is_started_again(self):
        # Open MPI's word for it; so that it is certain to happen, by a command that then is the real one.
        commands = pathlib.Path(self.folder) / "bin"
        commands.mkdir()
        mpirun = commands / "mpirun"
        mpirun.write_text("#!/bin/sh\nn=$(cat \"$LUCK.$4\" 2>/dev/null || echo 0)\necho $((n + 1)) > \"$LUCK.$4\"\n"
                          # The real ones have a folder each: they might remove each other's in earnest.
                          "if [ $n -ge $BAD ]; then mkdir -p \"$LUCK.$4.d\"; export OMPI_MCA_orte_tmpdir_base=\"$LUCK.$4.d\"\n"
                          "exec mpirun.openmpi \"$@\"; fi\necho '  orte_session_dir failed' >&2\nexit 1\n")
        mpirun.chmod(0o755)
        for bad in (2, 3):
            luck = f"{self.folder}/starts-{bad}"
            done = self.run_job("--starter", "mpirun", "-H", "h2,h3", "hostname",
                                env=dict(os.environ, PATH=f"{commands}:{os.environ['PATH']}", LUCK=luck, BAD=str(bad)))
            starts = [int(pathlib.Path(f"{luck}.{host}").read_text()) for host in ("h2", "h3")]
            self.assertEqual(max(starts), 3)
            if bad == 2:
                self.assertEqual(starts, [3, 3])
                self.assertEqual(sorted(done.stdout.splitlines()), ["h2:0 | h2", "h3:1 | h3"], done.stderr)
            else:
                self.assertNotEqual(done.returncode, 0)
                self.assertRegex(done.stderr, "no agent on h[23] -- by mpirun: .*may you write there")

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
        self.assertIn(f"`ssh -F {other} h2` once by hand", text)

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
        for bad in ("-oProxyCommand=touch x", "a;b", "h2:0"):
            self.assertIn("cohort", self.refused("-H", bad, "hostname", status=2))
        self.assertFalse((pathlib.Path(self.folder) / "x").exists())


del Launch

if __name__ == "__main__":
    unittest.main()
