"""`cohort doctor` over hosts of a box that are well, and where one of them cannot be had."""

import json
import os
import pathlib
import signal
import time
import unittest

from doctor_case import COHORT, PATIENCE, Cluster


class TestHealthy(Cluster):
    def test_three_hosts_that_are_well(self):
        begun = time.monotonic()
        report = self.report("-H", "h1:1,h2:1,h3:1")
        self.assertLess(time.monotonic() - begun, 60)
        self.assertEqual(self.failures(report), set())
        self.assertEqual([host["examined"] for host in report["hosts"]], [True] * 3)
        ways = {(way["from"], way["to"], way["address"]): way["result"] for way in report["ways"]}
        for a, b in (("h1", "h2"), ("h2", "h1"), ("h3", "h1"), ("h2", "h3")):
            for address in (f"10.77.0.{b[1]}", f"fd77::{b[1]}"):
                self.assertEqual(ways[a, b, address], "reached")
            self.assertNotEqual(ways[a, b, "172.17.0.1"], "reached")
        self.assertEqual({tuple(sorted((speed["from"], speed["to"]))) for speed in report["speeds"]},
                         {("h1", "h2"), ("h1", "h3"), ("h2", "h3")})
        self.assertTrue(all(speed["bytes_per_second_there"] > 1e6 for speed in report["speeds"]), report["speeds"])
        self.assertIn("docker0", self.finding(report, "network", "ok", "h2")["found"])
        self.assertEqual(len(self.finding(report, "python", "ok")["hosts"]), 3)
        for row in ("start", "own-name", "names", "reach", "clock", "open-files", "shm", "folder", "same-folder", "space",
                    "core-dumps", "processes", "locked", "build", "version", "launcher"):
            self.finding(report, row, "ok")

    def test_the_table_is_narrow_and_short_when_it_is_piped(self):
        done = self.run_doctor("-H", "h1,h2,h3")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        lines = done.stdout.splitlines()
        self.assertEqual(lines[0], "cohort doctor: 3 hosts (h1, h2, h3), by ssh")
        self.assertNotIn("\033", done.stdout)
        self.assertLess(len(lines), 120)
        self.assertEqual([line for line in lines if len(line) > 80 and max(map(len, line.split())) < 40], [])

    def test_this_host_alone(self):
        report = self.report()
        self.assertEqual([host["name"] for host in report["hosts"]], ["h1"])
        self.assertEqual(report["ways"], [])

    def test_a_file_of_hosts_and_hosts_that_are_not_this_one(self):
        (pathlib.Path(self.folder) / "hosts").write_text("h2 slots=2\nh3:1\n")
        report = self.report("--hostfile", "hosts")
        self.assertEqual([(host["name"], host["slots"], host["examined"]) for host in report["hosts"]],
                         [("h2", 2, True), ("h3", 1, True)])
        self.assertEqual(self.failures(report), set())

    def test_by_mpirun(self):
        report = self.report("--starter", "mpirun", "-H", "h2,h3")
        self.assertEqual([host["examined"] for host in report["hosts"]], [True, True])
        self.assertEqual(self.failures(report), set())

    def test_what_makes_no_sense_is_refused(self):
        for words in (("-H", "a;b"), ("--network", "nosuch0"), ("--network", "10.0.0.0/99"), ("--starter", "smoke")):
            done = self.run_doctor(*words)
            self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("10.77.0.1 (eth0)", self.run_doctor("--network", "nosuch0").stderr)


class TestWayToAHost(Cluster):
    def refused(self, row, *words, host="h2", **options):
        begun = time.monotonic()
        report = self.report("-H", "h1,h2,h3", *words, status=1, **options)
        self.assertLess(time.monotonic() - begun, 60)
        found = self.finding(report, row, "failed", host)
        self.assertTrue(found["mend"], found)
        # The others are looked at all the same.
        others = [each for each in report["hosts"] if each["name"] != host]
        return found, [each["examined"] for each in others]

    def test_a_host_key_that_is_not_known(self):
        known = self.box.folder / "known_hosts"
        text = known.read_text()
        known.write_text("".join(line for line in text.splitlines(True) if not line.startswith("h2,")))
        self.addCleanup(known.write_text, text)
        found, others = self.refused("ssh-host-key")
        self.assertIn(f"`ssh -F {self.box.folder}/ssh_config h2` once by hand", found["mend"])
        self.assertEqual(others, [True, True])

    def test_a_host_key_that_has_changed(self):
        known = self.box.folder / "known_hosts"
        text = known.read_text()
        lines = text.splitlines()
        key = {line.split(",")[0]: line.split(" ", 1)[1] for line in lines}
        known.write_text("\n".join(line.split(" ", 1)[0] + " " + (key["h3"] if line.startswith("h2,") else line.split(" ", 1)[1])
                                   for line in lines) + "\n")
        self.addCleanup(known.write_text, text)
        found, _ = self.refused("ssh-key-changed")
        self.assertIn("ssh-keygen -R h2", found["mend"])

    def test_a_login_that_is_refused(self):
        found, _ = self.refused("ssh-login", "--ssh", self.config("IdentityFile", "IdentityFile /dev/null #"))
        self.assertIn("ssh-copy-id", found["mend"])

    def test_a_name_that_ssh_does_not_know(self):
        report = self.report("-H", "h1,nosuchhost.invalid", status=1)
        self.finding(report, "ssh-name", "failed", "nosuchhost.invalid")
        self.assertIn("nosuchhost.invalid", self.finding(report, "names", "warning", "h1")["found"])

    def test_no_sshd(self):
        pid = int((self.box.folder / "sshd_h2.pid").read_text())
        os.kill(pid, signal.SIGTERM)
        self.addCleanup(self.restart_sshd)
        found, others = self.refused("ssh-reach")
        self.assertIn("sshd", found["mend"])
        self.assertEqual(others, [True, True])

    def restart_sshd(self):
        known = set(self.box.processes("h2"))
        self.box.act("sshd", "h2")
        self.box.before |= set(self.box.processes("h2")) - known

    def test_a_configuration_that_ssh_does_not_take(self):
        self.refused("ssh-config", "--ssh", self.config("Host *", "NoSuchOption yes\nHost *"))

    def test_a_shell_that_exits(self):
        self.shell_reads("h2", "echo only for terminals; exit 3\n")
        found, others = self.refused("shell-exits")
        self.assertIn(".bashrc", found["mend"])
        self.assertIn("only for terminals", found["found"])
        self.assertEqual(others, [True, True])

    def test_a_shell_that_waits_and_a_shell_that_prints(self):
        self.shell_reads("h2", "sleep 20\n")
        self.shell_reads("h3", "echo welcome to h3\n")
        report = self.report("-H", "h1,h2,h3", "--start-timeout", "6", status=1)
        self.finding(report, "silent", "failed", "h2")
        self.assertIn("welcome to h3", self.finding(report, "shell-prints", "warning", "h3")["found"])
        for pid in self.box.processes("h2", "^sleep 20"):  # the shell is not ours
            os.kill(pid, signal.SIGKILL)

    def test_a_host_that_is_off(self):
        self.box.act("cut", "h2")
        self.addCleanup(self.box.act, "heal", "h2")
        begun = time.monotonic()
        report = self.report("-H", "h1,h2,h3", status=1)
        self.assertLess(time.monotonic() - begun, 45)
        rows = {check["row"] for check in report["checks"] if check["level"] == "failed" and "h2" in check["hosts"]}
        self.assertTrue(rows & {"silent", "ssh-reach"}, rows)

    def test_no_cohort_and_another_version(self):
        found, _ = self.refused("command", "--remote-cohort", "/nowhere/cohort")
        self.assertIn("/nowhere/cohort", found["found"])
        old = pathlib.Path(self.folder) / "cohort"
        old.write_text("#!/bin/sh\nprintf 'cohort-agent-is-here\\t1\\t0.0.1\\tGNU 9\\th2\\t/old/cohort\\n'; cat\n")
        old.chmod(0o755)
        found, _ = self.refused("version", "--remote-cohort", str(old))
        self.assertIn("0.0.1", found["found"])

    def test_no_command_to_start_with(self):
        begun = time.monotonic()
        report = self.report("-H", "h1,h2,h3", "--ssh", "/nowhere/ssh", status=1)
        self.assertLess(time.monotonic() - begun, 40)
        for host in ("h2", "h3"):
            self.assertIn("/nowhere/ssh", self.finding(report, "starter", "failed", host)["found"])
        self.assertTrue(report["hosts"][0]["examined"])

    def test_an_agent_that_cannot_come_back(self):
        # It gets no address that leads here.
        self.broken("h2", "ip route add unreachable 10.77.0.1/32; ip -6 route add unreachable fd77::1/128; "
                          "ip rule add pref 5 ipproto tcp sport 22 lookup 77; ip route add 10.77.0.0/24 dev eth0 table 77; "
                          "ip rule add pref 6 ipproto tcp sport 22 lookup local",
                    "ip route del unreachable 10.77.0.1/32; ip -6 route del unreachable fd77::1/128; "
                    "ip rule del pref 5; ip rule del pref 6; ip route flush table 77")
        found, others = self.refused("control")
        self.assertIn("firewall", found["mend"])
        self.assertEqual(others, [True, True])

    def test_the_way_ends_in_the_midst(self):
        job = self.box.start("h1", COHORT, "doctor", "--json", "-H", "h1,h2,h3", cwd=self.folder)
        limit = time.monotonic() + PATIENCE
        workers = {}
        while not workers and time.monotonic() < limit:
            workers = self.box.processes("h2", "cohort doctor-host")
            time.sleep(0.01)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        out, err = job.communicate(timeout=PATIENCE)
        self.assertEqual(job.returncode, 1, err)
        found = self.finding(json.loads(out), "lost", "failed", "h2")
        self.assertIn("silent", found["found"])

    def test_a_host_that_hangs_does_not_hold_up_the_others(self):
        self.shell_reads("h2", "sleep 60\n")
        job = self.box.start("h1", COHORT, "doctor", "--json", "-H", "h1,h2,h3", cwd=self.folder)
        begun = time.monotonic()
        out, err = job.communicate(timeout=PATIENCE)
        self.assertLess(time.monotonic() - begun, 40, "30 s, and some for a busy machine")
        self.assertEqual(job.returncode, 1, err)
        report = json.loads(out)
        self.finding(report, "silent", "failed", "h2")
        self.assertEqual([(speed["from"], speed["to"]) for speed in report["speeds"]], [("h1", "h3")])
        for pid in self.box.processes("h2", "^sleep 60"):
            os.kill(pid, signal.SIGKILL)

    def test_told_to_end_it_leaves_nothing(self):
        for number in (signal.SIGINT, signal.SIGKILL):
            job = self.box.start("h1", COHORT, "doctor", "-H", "h1,h2,h3", cwd=self.folder)
            limit = time.monotonic() + PATIENCE
            while not self.box.processes("h3", "cohort doctor-host") and time.monotonic() < limit:
                time.sleep(0.01)
            for pid in self.box.processes("h1", r"^[^ ]*cohort doctor -H"):
                os.kill(pid, number)
            job.communicate(timeout=PATIENCE)
            self.assertNotEqual(job.returncode, 0)
            self.nothing_is_left()

    def test_killed_while_there_is_its_file(self):
        # A host that does not see it looks for a while.
        self.broken("h2", f"mount -t tmpfs tmpfs {self.folder}", f"umount {self.folder}")
        job = self.box.start("h1", COHORT, "doctor", "-H", "h1,h2,h3", cwd=self.folder)
        limit = time.monotonic() + PATIENCE
        seen = False
        while not seen and job.poll() is None and time.monotonic() < limit:
            seen = any(name.startswith(".cohort-doctor-") for name in os.listdir(self.folder))
        self.assertTrue(seen, "the file was there")
        for pid in self.box.processes("h1", r"^[^ ]*cohort doctor -H"):
            os.kill(pid, signal.SIGKILL)
        job.communicate(timeout=PATIENCE)


del Cluster

if __name__ == "__main__":
    unittest.main()
