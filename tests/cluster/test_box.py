"""The cluster in a box itself: hosts reach each other, links are shaped and cut, schedulers and MPI run, nothing is left."""

import os
import pathlib
import signal
import subprocess
import sys
import time
import unittest

import boxes


def send(box, source, target, address, mebibytes):
    """Seconds that so many MiB take from host to host."""
    taker = box.start(target, sys.executable, "-c",
                      "import socket\ns = socket.create_server(('', 0), family=socket.AF_INET6, dualstack_ipv6=True)\nprint(s.getsockname()[1], flush=True)\n"
                      "s.settimeout(20); c = s.accept()[0]\n"
                      "while c.recv(1 << 20): pass\nc.send(b'x')")
    with taker:
        port = taker.stdout.readline().strip()
        done = box.run(source, sys.executable, "-c",
                       "import socket, sys, time\nc = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)\n"
                       "t = time.monotonic(); c.sendall(bytes(int(sys.argv[3]) << 20)); c.shutdown(1); c.recv(1)\n"
                       "print(time.monotonic() - t)", address, port, mebibytes)
        if done.returncode != 0:
            raise AssertionError(done.stderr)
        return float(done.stdout)


class TestBox(boxes.InBox):
    wanted = ("test", "--slurm", "--hosts", "2")

    def test_hosts_reach_each_other_by_ssh(self):
        for source, target in (("h1", "h2"), ("h2", "h1"), ("h1", "10.77.0.2"), ("h1", "fd77::2")):
            done = self.box.run(source, "ssh", "-F", self.box.folder / "ssh_config", target, "hostname")
            want = target if target.startswith("h") else "h2"
            self.assertEqual((done.returncode, done.stdout), (0, want + "\n"), done.stderr)

    def test_hosts_are_reached_from_outside(self):
        done = subprocess.run(["ssh", "-F", self.box.folder / "ssh_config", "h2", "hostname; cat"], input="word\n",
                              stdout=subprocess.PIPE, text=True, timeout=30, check=False)
        self.assertEqual((done.returncode, done.stdout), (0, "h2\nword\n"))

    def test_both_address_families_carry_bytes_and_the_rate_is_shaped(self):
        for family in ("10.77.0.2", "fd77::2"):
            self.box.act("shape", "h2", "none")
            free = send(self.box, "h1", "h2", family, 4)
            self.box.act("shape", "h2", "40mbit")
            try:
                shaped = send(self.box, "h1", "h2", family, 4)
                back = send(self.box, "h2", "h1", family.replace("2", "1"), 4)
            finally:
                self.box.act("shape", "h2", "none")
            # 4 MiB are 33.6 Mbit, less what fits the bucket and the buffers.
            self.assertGreater(shaped, 0.6)
            self.assertGreater(back, 0.6)
            self.assertLess(free, shaped)

    def test_a_cut_link_carries_nothing_until_it_is_healed(self):
        probe = ["bash", "-c", "exec 3<>/dev/tcp/10.77.0.2/22 && read -r -t 5 -u 3 line && echo $line"]
        self.assertIn("SSH", self.box.run("h1", *probe).stdout)
        self.box.act("cut", "h2")
        try:
            self.assertEqual(self.box.run("h1", "timeout", "1", *probe).returncode, 124)
        finally:
            self.box.act("heal", "h2")
        self.assertIn("SSH", self.box.run("h1", "timeout", "20", *probe).stdout)

    def test_the_second_network_has_one_address_everywhere_and_leads_nowhere(self):
        for host in ("h1", "h2"):
            self.assertIn("172.17.0.1/16", self.box.run(host, "ip", "addr", "show", "docker0").stdout)
        answer = self.box.run("h1", "bash", "-c", "exec 3<>/dev/tcp/172.17.0.1/22; read -t 5 -u 3; ss -tn | cat")
        self.assertIn("172.17.0.1:22", answer.stdout)  # it was h1 itself that answered

    def test_hosts_do_not_share_memory_files(self):
        self.box.run("h1", "touch", "/dev/shm/mark")
        self.assertEqual(self.box.run("h2", "ls", "/dev/shm").stdout, "")
        self.assertEqual(self.box.run("h1", "ls", "/dev/shm").stdout, "mark\n")
        self.assertFalse(os.path.exists("/dev/shm/mark"))

    def test_slurm_runs_on_both_hosts(self):
        done = self.box.run("h1", "srun", "-N", "2", "--ntasks-per-node=2", "hostname")
        self.assertEqual(sorted(done.stdout.split()), ["h1", "h1", "h2", "h2"], done.stderr)

    def test_slurm_gives_fake_gpus(self):
        done = self.box.run("h1", "srun", "-N", "1", "--gres=gpu:2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
        self.assertEqual(done.stdout, "0,1\n", done.stderr)

    def test_open_mpi_and_mpich_cross_the_hosts(self):
        for command, slots in ((["mpirun.openmpi", "-np", "4", "-H"], "h1:2,h2:2"),
                               (["mpiexec.hydra", "-n", "4", "-hosts"], "h1:2,h2:2")):
            if subprocess.run(["which", command[0]], stdout=subprocess.DEVNULL, check=False).returncode != 0:
                continue
            # Not too short: hydra fails if a proxy is gone before it has written to it ("error writing to control socket").
            done = self.box.run("h1", *command, slots, "sh", "-c", "hostname; sleep 1")
            self.assertEqual(sorted(done.stdout.split()), ["h1", "h1", "h2", "h2"], command[0] + done.stderr)

    def test_a_second_box_of_the_name_is_refused(self):
        done = boxes.tool("up", "--name", self.box.name)
        self.assertEqual(done.returncode, 1)
        self.assertIn("is there already", done.stderr)


class TestEnds(unittest.TestCase):
    def left(self, name):
        places = [entry for entry in os.listdir("/run/netns") if entry.startswith(f"cb-{name}")]
        mounts = [line for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines() if f"box/{name}/" in line]
        return places + mounts + [str(p) for p in pathlib.Path("/run/cohort-box").glob(f"{name}*")]

    def test_down_leaves_nothing(self):
        box = boxes.Box("end")
        box.run("h2", "sh", "-c", "setsid -f sleep 1000 >/dev/null 2>&1")
        deadline = time.monotonic() + 30
        while not (held := list(box.processes("h2", "sleep 1000"))) and time.monotonic() < deadline:
            time.sleep(0.01)  # setsid returns before its child has become `sleep`
        self.assertEqual(len(held), 1)
        self.assertEqual(box.down().returncode, 0)
        self.assertFalse(boxes.alive(held[0]))
        self.assertEqual(self.left(box.name), [])

    def test_run_gives_the_status_and_leaves_nothing(self):
        boxes.require()
        name = f"once-{os.getpid()}"
        done = boxes.tool("run", "--name", name, "--", "sh", "-c", "hostname; exit 3")
        self.assertEqual((done.returncode, done.stdout), (3, "h1\n"), done.stderr)
        self.assertEqual(self.left(name), [])

    def test_a_killed_run_is_cleared_by_the_next_command(self):
        boxes.require()
        name, other = f"dead-{os.getpid()}", f"next-{os.getpid()}"
        with subprocess.Popen([sys.executable, boxes.TOOL, "run", "--name", name, "--", "sh", "-c", "echo up; sleep 1000"],
                              stdout=subprocess.PIPE, text=True) as running:
            self.assertEqual(running.stdout.readline(), "up\n")
            running.send_signal(signal.SIGKILL)
        self.assertNotEqual(self.left(name), [])
        self.assertEqual(boxes.tool("run", "--name", other, "--", "true").returncode, 0)
        self.assertEqual(self.left(name) + self.left(other), [])

    def test_a_half_made_box_can_be_brought_down(self):
        boxes.require()
        name = f"half-{os.getpid()}"
        with subprocess.Popen([sys.executable, boxes.TOOL, "up", "--name", name], stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL) as coming:
            limit = time.monotonic() + 10
            while not self.left(name) and time.monotonic() < limit:
                time.sleep(0.005)
            coming.kill()
        self.assertEqual(boxes.tool("down", "--name", name).returncode, 0)
        self.assertEqual(self.left(name), [])


if __name__ == "__main__":
    unittest.main()
