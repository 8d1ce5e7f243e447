"""`cohort doctor` over hosts of a box in which one thing is broken at a time, and named. And `cohort run --network`."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

import boxes
from doctor_case import COHORT, PATIENCE, Cluster

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec* now) {
  static int (*real)(clockid_t, struct timespec*);
  char name[64] = "";
  if (!real) real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, now);
  if (clock == CLOCK_REALTIME && gethostname(name, sizeof name) == 0 && strcmp(name, "h2") == 0) now->tv_sec += 90;
  return result;
}
"""

class TestBetweenHosts(Cluster):
    def block(self, how):
        """h2 lets nothing in from h3 but ssh."""
        # The rule has to come before the one that finds local addresses.
        self.broken("h2", f"ip rule add pref 20 lookup local; ip rule del pref 0; ip rule add pref 10 from 10.77.0.3 ipproto tcp dport 1024-65534 {how}; "
                          f"ip -6 rule add pref 20 lookup local; ip -6 rule del pref 0; ip -6 rule add pref 10 from fd77::3 ipproto tcp dport 1024-65534 {how}",
                    "ip rule add pref 0 lookup local; ip rule del pref 20; ip rule del pref 10; "
                    "ip -6 rule add pref 0 lookup local; ip -6 rule del pref 20; ip -6 rule del pref 10")

    def test_a_firewall_that_drops(self):
        self.block("blackhole")
        report = self.report("-H", "h1,h2,h3", status=1)
        found = self.finding(report, "reach", "failed", "h3")
        self.assertEqual(found["to"], "h2")
        self.assertIn("10.77.0.2 (eth0): no answer", found["found"])
        self.assertIn("drops", found["mend"])
        self.finding(report, "reach", "ok", "h1")

    def test_a_firewall_that_says_no(self):
        self.block("prohibit")
        found = self.finding(self.report("-H", "h1,h2,h3", status=1), "reach", "failed", "h3")
        # (By IPv4 the kernel says so only where it forwards.)
        self.assertIn("fd77::2 (eth0): no route", found["found"])

    def test_a_port_that_is_refused(self):
        # On h3, h2's address is one of h3's own, where nobody listens.
        self.broken("h3", "ip addr add 10.77.0.2/32 dev lo; ip -6 addr add fd77::2/128 dev lo nodad",
                    "ip addr del 10.77.0.2/32 dev lo; ip -6 addr del fd77::2/128 dev lo")
        report = self.report("-H", "h1,h2,h3")
        found = [check for check in report["checks"] if check["row"] in ("reach", "direction") and check.get("to") == "h2"]
        self.assertTrue(found, report["checks"])
        self.assertIn("10.77.0.2 (eth0): refused", found[0]["found"])
        self.assertIn("rejects", found[0]["mend"])

    def test_a_network_that_leads_nowhere_before_the_right_one(self):
        for host in ("h2", "h3"):
            self.broken(host, f"ip link add aaa0 type bridge; ip addr add 10.66.0.{host[1]}/24 dev aaa0; ip link set aaa0 up",
                        "ip link del aaa0")
        report = self.report("-H", "h2,h3", "--network", "aaa0,eth0", host="h2")
        found = self.finding(report, "network", "warning", "h3")
        self.assertIn("aaa0", found["found"])
        self.assertIn("--network", found["mend"])

    def test_large_packets_that_are_lost(self):
        for host in ("h2", "h3"):
            self.broken(host, "ip link set eth0 mtu 9000", "ip link set eth0 mtu 1500")
        report = self.report("-H", "h1,h2,h3", status=1)
        found = self.finding(report, "large", "failed", "h3")
        self.assertIn("MTU 9000", found["found"])
        self.assertIn("mtu 1500", found["mend"])

    def test_a_slow_link_is_measured(self):
        self.box.act("shape", "h2", "80mbit")
        self.addCleanup(self.box.act, "shape", "h2", "none")
        report = self.report("-H", "h1,h2")
        speed = report["speeds"][0]
        for way in ("there", "back"):
            self.assertLess(speed[f"bytes_per_second_{way}"], 13e6, speed)
            self.assertGreater(speed[f"bytes_per_second_{way}"], 1e6, speed)
        self.assertIn("slow for training", self.finding(report, "speed", "warning")["found"])

    def test_names(self):
        hosts = (self.box.folder / "hosts").read_text()
        other = pathlib.Path(self.folder) / "etc-hosts"
        # As Debian writes it; and h3 is another one here.
        other.write_text("127.0.0.1 localhost\n127.0.1.1 h2\n10.77.0.1 h1\n10.99.0.3 h3\n")
        self.assertIn("h2", hosts)
        self.broken("h2", f"mount --bind {other} /etc/hosts", "umount /etc/hosts")
        report = self.report("-H", "h1,h2,h3")
        found = self.finding(report, "own-name", "warning", "h2")
        self.assertIn("127.0.1.1", found["found"])
        self.assertIn("10.77.0.2 h2", found["mend"])
        self.assertIn("h3 means 10.99.0.3", self.finding(report, "names", "warning", "h2")["found"])

    def test_a_clock_that_is_wrong(self):
        source = pathlib.Path(self.folder) / "clock.c"
        source.write_text(CLOCK)
        library = pathlib.Path(self.folder) / "clock.so"
        if shutil.which("cc") is None:
            self.skipTest("no C compiler")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
        report = self.report("-H", "h1,h2,h3", env=dict(os.environ, LD_PRELOAD=str(library)))
        found = self.finding(report, "clock", "warning", "h2")
        self.assertRegex(found["found"], r"(89|90|91)\.\d s ahead of h1's")
        self.assertIn("set-ntp", found["mend"])
        self.finding(report, "clock", "ok", "h3")

    def test_network_narrows_what_is_tried(self):
        report = self.report("-H", "h1,h2", "--network", "fd77::/64")
        self.assertEqual(report["speeds"][0]["address"][:4], "fd77")
        self.assertIn("fd77::/64", self.finding(report, "network-choice", "ok", "h2")["found"])
        # A name that only this host has.
        self.broken("h1", "ip link add only1 type bridge; ip addr add 10.55.0.1/24 dev only1; ip link set only1 up", "ip link del only1")
        report = self.report("-H", "h1,h2", "--network", "only1,10.77.0.1/32", status=1)
        self.assertIn("10.77.0.2 (eth0)", self.finding(report, "network-choice", "failed", "h2")["found"])


class TestOnAHost(Cluster):
    def test_limits(self):
        self.shell_reads("h2", "ulimit -n 200; ulimit -u 300; ulimit -c 0\n")
        report = self.report("-H", "h1,h2")
        self.assertIn("200", self.finding(report, "open-files", "warning", "h2")["found"])
        self.assertIn("300", self.finding(report, "processes", "warning", "h2")["found"])
        self.assertEqual(self.finding(report, "core-dumps", "ok", "h2")["found"], "off")

    def test_shared_memory(self):
        self.broken("h2", "mount -o remount,size=1m /dev/shm", "mount -o remount,size=50% /dev/shm")
        report = self.report("-H", "h1,h2")
        self.assertIn("1.0 MiB", self.finding(report, "shm", "warning", "h2")["found"])

    def test_cores_and_affinity(self):
        self.shell_reads("h2", "taskset -pc 0 $$ >/dev/null\n")
        report = self.report("-H", "h1:1,h2:3")
        found = self.finding(report, "cores", "warning", "h2")
        self.assertIn("3 ranks on 1 usable cores", found["found"])
        self.assertIn("cores: ", self.finding(report, "alike", "warning")["found"])

    def test_folders_that_are_not_the_same(self):
        self.broken("h2", f"mount -t tmpfs -o size=4m tmpfs {self.folder}", f"umount {self.folder}")
        report = self.report("-H", "h1,h2", status=1)
        self.finding(report, "same-folder", "warning", "h2")
        self.finding(report, "space", "failed", "h2")

    def test_a_folder_that_is_only_here(self):
        self.broken("h1", "mkdir /dev/shm/mine", "rmdir /dev/shm/mine")
        done = self.box.run("h1", "sh", "-c", f"cd /dev/shm/mine && {COHORT} doctor --json -H h1,h2", timeout=PATIENCE)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("/dev/shm/mine", self.finding(json.loads(done.stdout), "folder", "failed", "h2")["found"])

    def test_a_folder_that_may_not_be_written_to(self):
        self.broken("h2", f"mount --bind {self.folder} {self.folder}; mount -o remount,bind,ro {self.folder}", f"umount {self.folder}")
        report = self.report("-H", "h1,h2", status=1)
        self.assertIn("cannot be written to", self.finding(report, "folder", "failed", "h2")["found"])

    def test_another_python_and_another_mpi(self):
        def command(path, text):
            path = pathlib.Path(self.folder) / path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("#!/bin/sh\n" + text)
            path.chmod(0o755)
            return path.parent

        environment = command("venv/bin/python3", "[ $(hostname) = h2 ] || exec env -u VIRTUAL_ENV python3 \"$@\"\n"
                              "echo 'cohort-doctor {\"python\": \"2.7.18\", \"torch\": \"0.4\"}'\n").parent
        commands = command("bin/mpirun", "echo mpirun of $(hostname)\n")
        report = self.report("-H", "h1,h2", env=dict(os.environ, VIRTUAL_ENV=str(environment),
                                                     PATH=f"{commands}:{os.environ['PATH']}"))
        self.assertIn("2.7.18 (h2)", self.finding(report, "python", "warning")["found"])
        self.assertIn("0.4 (h2)", [check for check in report["checks"] if check["row"] == "torch"][0]["found"])
        self.assertEqual(self.finding(report, "mpi", "warning")["found"], "mpirun of h1 (h1); mpirun of h2 (h2)")

    def test_a_command_of_another_commit(self):
        # The same version and options, with another build id, as the linker makes it of other bytes.
        doctor = f"{COHORT}-doctor"
        program = bytearray(pathlib.Path(doctor).read_bytes())
        note = program.find(b"\4\0\0\0\x14\0\0\0\3\0\0\0GNU\0")
        self.assertGreater(note, 0)
        program[note + 16] ^= 0xff
        other = pathlib.Path(self.folder) / "cohort-doctor"
        other.write_bytes(program)
        other.chmod(0o755)
        self.broken("h2", f"mount --bind {other} {doctor}", f"umount {doctor}")
        found = self.finding(self.report("-H", "h1,h2"), "build", "warning")
        self.assertRegex(found["found"], r"\(h1\); .*\(h2\)|\(h2\); .*\(h1\)")

    def test_variables(self):
        def with_variables(status=None, **variables):
            return self.report("-H", "h1:2,h2:2", status=status, env=dict(os.environ, **variables))

        report = with_variables(1, COHORT_ALONE="1", GLOO_SOCKET_IFNAME="ib9", OMP_NUM_THREADS="64", MASTER_ADDR="127.0.0.1",
                                COHORT_PRETEND_HOSTS="2", http_proxy="http://proxy:3128")
        self.finding(report, "alone", "failed")
        self.finding(report, "master", "failed")
        self.finding(report, "pretend", "warning")
        self.finding(report, "proxy", "ok")
        self.assertIn("ib9", self.finding(report, "interface", "warning", "h2")["found"])
        self.assertIn("OMP_NUM_THREADS=64", self.finding(report, "threads", "warning", "h2")["found"])
        report = with_variables(None, OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="1")
        self.assertIn("-u OMPI_COMM_WORLD_RANK", self.finding(report, "leftovers", "warning")["mend"])
        report = with_variables(1, OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="1", WORLD_SIZE="1", RANK="0",
                                MASTER_ADDR="10.77.0.1", MASTER_PORT="29500")
        self.assertIn("WORLD_SIZE=1", self.finding(report, "launcher", "failed")["found"])


class TestRunNetwork(Cluster):
    """`cohort run --network`."""

    def run_job(self, *words, **options):
        return self.box.run("h1", COHORT, "run", *words, cwd=self.folder, timeout=PATIENCE, **options)

    def test_it_narrows_ranks_and_control_connections(self):
        program = "echo $COHORT_NETWORK $MASTER_ADDR $COHORT_STORE"
        done = self.run_job("--network", "fd77::/64", "-H", "h1,h2", "--prefix", "none", "sh", "-c", program)
        self.assertEqual(done.returncode, 0, done.stderr)
        for line in done.stdout.splitlines():
            network, master, store = line.split()
            self.assertEqual((network, master), ("fd77::/64", "fd77::1"))
            self.assertTrue(store.startswith("[fd77::1]") or store.startswith("127.0.0.1"), store)

    def test_from_the_configuration_file_and_the_variable(self):
        (pathlib.Path(self.folder) / "c.toml").write_text('[run]\nnetwork = "eth0"\n')
        done = self.run_job("--config", "c.toml", "-H", "h2", "--prefix", "none", "sh", "-c", "echo $COHORT_NETWORK")
        self.assertEqual(done.stdout, "eth0\n", done.stderr)
        done = self.run_job("-H", "h2", "--prefix", "none", "sh", "-c", "echo $COHORT_NETWORK",
                            env=dict(os.environ, COHORT_RUN_NETWORK="10.77.0.0/16"))
        self.assertEqual(done.stdout, "10.77.0.0/16\n", done.stderr)

    def test_one_that_is_not_there_names_those_that_are(self):
        for bad in ("ib9", "192.168.3.0/24", "10.0.0.0/77"):
            done = self.run_job("--network", bad, "-H", "h1,h2", "true")
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(f"--network {bad}", done.stderr)
            self.assertIn("10.77.0.1 (eth0)", done.stderr)


class TestSlurm(unittest.TestCase):
    def test_within_an_allocation(self):
        if not COHORT:
            raise unittest.SkipTest("COHORT_COMMAND is not set")
        box = boxes.Box("doctor-slurm", "--slurm", "--hosts", "2")
        folder = tempfile.mkdtemp(prefix="cohort-doctor-")
        try:
            done = box.run("h1", "salloc", "-Q", "-N", "2", "--ntasks-per-node=2", COHORT, "doctor", "--json", cwd=folder,
                           timeout=PATIENCE)
            self.assertIn(done.returncode, (0, 1), done.stderr)
            report = json.loads(done.stdout)
            self.assertEqual([(host["name"], host["slots"], host["examined"]) for host in report["hosts"]],
                             [("h1", 2, True), ("h2", 2, True)], done.stdout)
            self.assertEqual([check["row"] for check in report["checks"] if check["level"] == "failed"], [])
            self.assertTrue([check for check in report["checks"] if check["row"] == "batch" and check["level"] == "warning"],
                            report["checks"])
            done = box.run("h1", "salloc", "-Q", "-N", "1", COHORT, "doctor", "--json", "--starter", "slurm", "-H", "h9", cwd=folder,
                           timeout=PATIENCE)
            self.assertEqual(done.returncode, 1, done.stderr)
            rows = [check["row"] for check in json.loads(done.stdout)["checks"] if check["level"] == "failed"]
            self.assertIn("starter", rows)
        finally:
            box.down()
            shutil.rmtree(folder)


del Cluster

if __name__ == "__main__":
    unittest.main()
