"""`cohort run --agents`: ranks below agents that the job's owner has started, as tasks of Spark do; here by threads, and with
names of hosts that this machine does not have."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import unittest

from run_support import Folder, captured

import cohort
from cohort._launch import command as _command, functions as _functions
from cohort._spark import stage as spark_stage
from cohort._spark import task


def place():
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "COHORT_HOST", "CUDA_VISIBLE_DEVICES")
    return [os.environ.get(name) for name in names] + [os.environ.get("OWN"), os.getcwd()]


def total():
    import array

    cohort.init()
    values = array.array("d", [cohort.rank() + 1.0])
    cohort.world().all_reduce(values)
    return values[0]


def fail_once(path):
    first = not os.path.exists(path)
    cohort.init()
    cohort.world().barrier()
    if os.environ["RANK"] == "1" and first:
        pathlib.Path(path).touch()
        raise LookupError("once")
    return os.environ["COHORT_RESTART"]


class Owner:
    """The part of a Stage that `_functions` needs: `agents` are (host, ranks, GPUs)."""

    def __init__(self, agents, folder, spoil=lambda number, invitation: invitation):
        self._agents = agents
        self._folder = folder
        self._spoil = spoil
        self.complaints = []

    program = staticmethod(spark_stage.Stage.program)

    def words(self):
        return []

    def environment(self):
        return spark_stage.Stage.environment(os.environ, None)

    def run(self, make_job):
        job = make_job(agents=len(self._agents))
        starter = threading.Thread(target=self._start, args=(job,))
        starter.start()
        try:
            return job, job.run()
        finally:
            starter.join(60)

    def _start(self, job):
        announcement, _, invitation = job.invitation().partition("\n")
        if not invitation:
            return
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "OWN": "yes", "PYTHONPATH": os.pathsep.join(sys.path)}
        threads = []
        for number, (host, ranks, gpus) in enumerate(self._agents):
            words = [_command.find(), "agent", "--invited", "--name", host, "--ranks", str(ranks)]
            words += ["--devices", gpus] if gpus else []
            mine = self._spoil(number, invitation.replace("\nhost 0\n", f"\nhost {number}\n"))
            # Their folder is theirs, too.
            words = ["/bin/sh", "-c", f'cd "{self._folder}" && exec "$0" "$@"', *words]
            thread = threading.Thread(target=self._watch, args=(words, environment, mine, announcement, host))
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join(100)

    def _watch(self, words, environment, invitation, announcement, host):
        try:
            task._watch(words, environment, invitation, {"announcement": announcement}, host)
        except RuntimeError as error:
            self.complaints.append(str(error))


class Agents(Folder):
    def call(self, agents, function, *args, options=(), **more):
        owner = Owner(agents, self.folder, **more)
        with captured() as (_, err):
            try:
                outcomes = _functions.call_on_ranks(
                    function, args, {}, words=[*owner.words(), *options], environment=owner.environment(), all_values=True,
                    stage=owner,
                )
            finally:
                self.said = err.getvalue()
        return [_functions._load(rank, outcome) for rank, outcome in enumerate(outcomes)]

    def test_ranks_are_numbered_by_host_and_see_its_gpus(self):
        here = str(self.folder)
        self.assertEqual(
            self.call([("a", 1, "4"), ("b", 2, "0,1"), ("a", 2, "6,4"), ("b", 1, "")], place),
            [
                ["0", "0", "3", "0", "2", "a", "4,6", "yes", here],
                ["1", "1", "3", "0", "2", "a", "4,6", "yes", here],
                ["2", "2", "3", "0", "2", "a", "4,6", "yes", here],
                ["3", "0", "3", "1", "2", "b", "0,1", "yes", here],
                ["4", "1", "3", "1", "2", "b", "0,1", "yes", here],
                ["5", "2", "3", "1", "2", "b", "0,1", "yes", here],
            ],
        )
        self.assertIn("6 processes on 2 hosts (a: ranks 0-2, b: ranks 3-5)", self.said)

    def test_ranks_meet(self):
        self.assertEqual(self.call([("a", 1, ""), ("a", 1, "")], total), [3.0, 3.0])

    def test_ranks_are_started_again(self):
        path = str(self.folder / "failed")
        agents = [("a", 1, ""), ("a", 1, "")]
        self.assertEqual(self.call(agents, fail_once, path, options=["--max-restarts", "1"]), ["1", "1"])

    def test_who_has_another_secret_is_not_let_in(self):
        def spoil(number, invitation):
            word, digits, rest = invitation.split(None, 2)
            other = digits[::-1] if number else digits
            return f"{word} {other}\n{rest}"

        with self.assertRaisesRegex(cohort.Unavailable, "agent 1 has not come"):
            self.call([("a", 1, ""), ("a", 1, "")], total, spoil=spoil, options=["--start-timeout", "3"])

    def test_the_command_says_what_it_wants(self):
        for words, told in (
            (["--agents", "2"], "--agents 2: two numbers are wanted, N,FD"),
            (["--agents", "2,9", "-np", "2"], "--agents: neither hosts nor a number of processes are wanted"),
            (["--agents", "2,999"], "--agents: descriptor 999: Bad file descriptor"),
        ):
            done = subprocess.run([_command.find(), "run", *words, "true"], capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 2)
            self.assertIn(told, done.stderr)

    def test_the_end_of_a_lifeline_ends_the_job(self):
        with tempfile.TemporaryDirectory() as private:
            command = _command.find()
            taken, given = os.pipe()
            owner = [command, "run", "--owner", str(os.getpid()), "--agents", f"1,{given}", "--run-dir",
                     f"{private}/run", "--no-python", "--", "/bin/sleep", "300"]
            job = subprocess.Popen(owner, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, pass_fds=(given,))
            os.close(given)
            try:
                with open(taken) as pipe:
                    invitation = pipe.read().partition("\n")[2]
                agent = subprocess.Popen(
                    [command, "agent", "--invited", "--ranks", "1", "--name", "a"], stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL, env={**os.environ, "COHORT_TEST_MARK": str(self.folder)}, text=True,
                )
                agent.stdin.write(invitation)
                agent.stdin.flush()
                self.eventually(lambda: os.path.exists(f"{private}/run/job.json"), "the job runs")
                agent.stdin.close()
                self.assertNotEqual(agent.wait(20), 0)
                _, said = job.communicate(timeout=30)
                self.assertRegex(said, "the agent of a|guard")
                self.assertEqual(self.processes(), [])
            finally:
                job.send_signal(signal.SIGKILL)
                job.wait(10)
                job.stderr.close()


if __name__ == "__main__":
    unittest.main()
