"""`cohort run --starter hand` over hosts of a box: agents that somebody starts, and strangers."""

import pathlib
import signal
import time
import unittest

from launch_case import COHORT, PATIENCE, Launch

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

#: A name service that takes questions and answers none.
MUTE = """
import socket, time

service = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
service.bind(("127.0.0.1", 53))
print("here we are", flush=True)
time.sleep(100)
"""
ASK_IT = """
mount --bind resolv.conf /etc/resolv.conf && mount --bind nsswitch.conf /etc/nsswitch.conf && exec "$@"
"""


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

    def test_a_name_service_that_does_not_answer_is_named_in_time(self):
        folder = pathlib.Path(self.folder)
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:30\n")
        (folder / "nsswitch.conf").write_text("hosts: dns\n")
        service = self.box.start("h2", "python3", "-c", MUTE)
        self.addCleanup(service.communicate)
        self.addCleanup(service.kill)
        self.assertIn("here we are", service.stdout.readline())
        begun = time.monotonic()
        done = self.box.run("h2", "unshare", "--mount", "sh", "-c", ASK_IT, "sh", COHORT, "agent", "--join", "first.cluster:4711",
                            "--secret-file", self.secret, "--timeout", "2", cwd=self.folder)
        self.assertLess(time.monotonic() - begun, 10)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("no answer from the name service about 'first.cluster' in time", done.stderr)

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
