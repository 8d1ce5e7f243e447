#!/usr/bin/env python3
"""Jobs over the hosts of a box that come to harm at random; what each promise says of such a job is checked.

Job N of a seed is always the same one: how it is started (ssh, Slurm, mpirun), on which hosts, which program, with or
without restarts, and what happens to it at which moment, from its first process to its last. A part of it is killed, a
host's processes are stopped, a cable is out for a second, for good or in one direction, a host is down at once, or slow.
What is checked:

  ends      the job ends in time, with a failure or with its results: never neither
  same      if it ends well, all its ranks have the bits of an undisturbed job; what has to be survived is
  named     else it says which rank or host it was, and of a host that is cut off so after seconds
  left      nothing of it remains on any host: no process, also on a host that is still cut off; no listening port, nothing
            in /dev/shm, no temporary file

A job that is over before it could come to harm is done again, and harmed earlier; where that does not help it counts as
"none".

--jobs N: so many boxes side by side. Prints a line per job, and a table. Exit status 1 if anything was not as it should be,
or if fewer than half of the jobs came to harm.
"""

import collections
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import boxes
from soak import processes, series
from faults_plan import ALL, HARMS, HOSTS, NAMED, OURS, ROUNDS, STOPPED, Plan, possible, words_of

PATIENCE = 5  # seconds for something to be there that can be struck
BEGUN = 0.3  # seconds that a rank has been there
TRIES = 3  # of a job, until it is struck
NAMING = 8  # seconds until a host that has gone is named
START = re.compile(r"\d+ process(?:es)? on \d+ hosts? \(")  # the notice that names all hosts, whatever happens to them
PREFIX = re.compile(r"^(?:h\d:\d+|\[[0-9, -]+\]) \| ")  # of a rank's line: it says who speaks, not of whom
LINE = re.compile(r"rank (\d+) of \d+, local \S+ of \d+, host \d+ of \d+: ([0-9a-f]{16})")


class Ground:
    """A box, and what is found on its hosts."""

    def __init__(self, name, options):
        self.options, self.name = options, name
        self.slurm = not boxes.tool("check", "--slurm").returncode
        self.box = None
        self.normal = {}  # (launcher, layout) -> (seconds, digest)
        self.renew()

    def abandon(self):
        """Without a box from now on. Raises nothing."""
        box, self.box = self.box, None
        if box:
            with contextlib.suppress(Exception):
                box.down()

    def renew(self):
        self.abandon()
        self.box = boxes.Box(self.name, "--hosts", "3", *(["--slurm"] if self.slurm else []))

    def listening(self):
        """(host, port) of each listening socket."""
        found = set()
        for host in HOSTS:
            tables = self.box.run(host, "cat", "/proc/net/tcp", "/proc/net/tcp6").stdout
            found |= {(host, port) for port in processes.listening(tables).values()}
        return found

    def shared_memory(self):
        return {f"{host}:{name}" for host in HOSTS for name in self.box.run(host, "ls", "-A", "/dev/shm").stdout.split()}

    def undisturbed(self, launcher, layout):
        """Time that such a job takes, and its digest."""
        if (launcher, layout) not in self.normal:
            words = words_of(launcher, layout, self.options, [self.options.peer, f"x{ROUNDS}"])
            since = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="cohort-faults-") as folder:  # for its record
                done = self.box.run("h1", *words, cwd=folder, timeout=120)
            digests = set(digest for _, digest in LINE.findall(done.stdout))
            if done.returncode != 0 or len(digests) != 1:
                raise RuntimeError(f"undisturbed job: {words}: status {done.returncode}: {done.stdout}{done.stderr}")
            self.normal[launcher, layout] = (time.monotonic() - since, digests.pop())
        return self.normal[launcher, layout]


class Job:
    def __init__(self, ground, plan, folder):
        self.ground, self.box, self.plan, self.folder = ground, ground.box, plan, folder
        self.problems, self.done, self.lines = [], [], []
        self.struck = None
        self.process = None
        self.too_long = False  # what was to be short was not, on a busy machine: the job need not survive it
        self.starting = False  # by Slurm or Open MPI alone, at the time: what they do about it then is theirs
        self.stopped, self.undo = [], []

    def note(self, stream, kind):
        for line in stream:
            self.lines.append((time.monotonic(), kind, line.rstrip("\n")))

    def said(self, kind=None):
        return "\n".join(line for _, each, line in self.lines if kind in (None, each))

    def told(self):
        """By the job, and by Slurm if it is of it."""
        errors = self.box.slurm_errors() if self.plan.launcher in ("slurm", "srun") else ""
        return f"{self.said()[-2500:]}\n{errors[-1500:]}"

    def said_since(self):
        """(when, what) was said on stderr since it came to harm, without the names of those who said it."""
        return [(at, PREFIX.sub("", line)) for at, kind, line in list(self.lines)
                if kind == "err" and at > self.struck and not START.search(line)]

    def named_after(self):
        """Seconds from the harm until its host is named; None: it is not."""
        return next((at - self.struck for at, line in self.said_since() if re.search(rf"\b{self.plan.host}\b", line)), None)

    # --- harm ---

    def wait_for_victims(self, harm):
        processes.wait_for_nothing(lambda: self.process.poll() is None and not self.victims(harm), PATIENCE)
        return self.victims(harm)

    def victims(self, harm):
        pattern = HARMS[harm].pattern
        if pattern == "PROGRAM":
            pattern = f"^{re.escape(self.ground.options.peer)} " if not self.plan.shell else "^sh -c|^yes|^sleep"
        hosts = {"host": (self.plan.host,), "launcher": ("h1",), "any": HOSTS}[HARMS[harm].place]
        return sorted(pid for host in hosts for pid in self.box.processes(host, pattern)
                      if pid not in self.before or harm == "slurmd")

    def all_have_begun(self):
        """True if every rank has been there for a moment: its starter has been told so by then."""
        begun = sum(processes.age_of(pid) > BEGUN for host in HOSTS
                    for pid in self.box.processes(host, f"^{re.escape(self.ground.options.peer)} "))
        return begun >= self.plan.ranks

    def signal_host(self, number):
        """To all processes of the host, until no new ones appear."""
        reached = set()
        while True:
            found = set(self.box.processes(self.plan.host)) - reached
            processes.send(found, number)
            reached |= found
            if not found:
                return sorted(reached)

    def thaw(self):
        processes.send(self.stopped, signal.SIGCONT)
        self.stopped = []

    def strike(self, harm):
        """False if there is nothing that it could strike."""
        host = "h1" if harm == "home" else self.plan.host
        if HARMS[harm].pattern:
            found = self.wait_for_victims(harm)
            if not found:
                return False
            self.struck = time.monotonic()
            pid = self.plan.random.choice(found)
            self.done.append(f"{pid} {processes.command_of(pid)[:40]}")
            processes.send([pid])
            if harm == "slurmd":
                self.undo.append(lambda: self.box.act("slurmd", host))
            return True
        if harm == "slow":
            self.box.act("shape", host, "300mbit")
            self.undo.append(lambda: self.box.act("shape", host, "none"))
        if harm in ("freeze", "nap", "hang", "down"):
            self.stopped = self.signal_host(signal.SIGSTOP)
        if harm == "nap":
            time.sleep(1)
            self.thaw()
            self.too_long = time.monotonic() - self.struck > STOPPED
        if harm == "blink":
            # In one go: on a busy machine each command may take a while.
            port, switch = f"p{host[1:]}", f"cb-{self.box.name}"
            since = time.monotonic()
            subprocess.run(["sh", "-c", f"ip -n {switch} link set {port} nomaster; sleep 0.8; ip -n {switch} link set {port} master br0"],
                           check=True, timeout=30)
            self.too_long = time.monotonic() - since > 1.5
        if harm in ("cut", "home", "hang", "down"):
            self.box.act("cut", host)
        if harm.startswith("mute"):
            self.box.act("mute", host, harm[5:])
        if harm in ("cut", "home", "hang", "down") or harm.startswith("mute"):
            self.undo.append(lambda: self.box.act("heal", host))
        if harm == "down":
            self.stopped = []
            self.signal_host(signal.SIGKILL)
            self.undo.append(lambda: self.box.act("sshd", host))
            if self.ground.slurm:
                self.undo.append(lambda: self.box.act("slurmd", host))
        return True

    # --- what remains ---

    def left(self):
        # The reaction of Slurm, Open MPI and ssh's daemon to an unplugged cable is not tested here.
        theirs = r"^sshd|^/usr/sbin/|slurmstepd|^srun|^salloc|^mpirun|orted"
        return {pid: what for pid, what in self.box.new_processes(theirs).items() if pid not in self.before}

    def check_left(self):
        """Seconds after which nothing was left."""
        left, seconds = ({}, 0.0) if self.stopped else processes.wait_for_nothing(self.left, 12)  # also on a host that is cut off
        self.thaw()
        for action in self.undo:
            action()
        left = {} if self.starting else left
        left = {**left, **processes.wait_for_nothing(self.left, 8)[0]} if self.undo or not left else left
        if left:
            self.problems.append(f"left: {left}")
            processes.send(left)
        if self.plan.launcher in OURS and not self.undo:  # daemons of a host that was down listen anew
            # Open MPI's own daemons notice after a while that their mpirun has gone.
            ports, _ = processes.wait_for_nothing(lambda: self.ground.listening() - self.ports, 10 if "mpirun" in self.plan.launcher else 1)
            if ports:
                self.problems.append(f"ports: {ports}")
        memory = self.ground.shared_memory() - self.memory
        if memory and self.plan.launcher in OURS and "mpirun" not in self.plan.launcher:
            self.problems.append(f"/dev/shm: {memory}")
        files = [str(path) for path in pathlib.Path(self.folder, "tmp").rglob("*")]
        if files and self.plan.launcher in ("ssh", "slurm"):
            self.problems.append(f"files: {files}")
        return seconds

    # --- the job ---

    def run(self):
        try:
            return self.run_and_judge()
        finally:
            self.thaw()
            if self.process and self.process.poll() is None:
                self.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)

    def run_and_judge(self):
        plan, options = self.plan, self.ground.options
        normal, digest = self.ground.undisturbed(plan.launcher, plan.layout)
        self.before = set(self.box.all_processes())
        self.ports, self.memory = self.ground.listening(), self.ground.shared_memory()
        pathlib.Path(self.folder, "tmp").mkdir(parents=True)
        program = ["sh", "-c", plan.shell] if plan.shell else [options.peer, f"x{ROUNDS}"]
        words = self.box.words("h1", "env", f"TMPDIR={self.folder}/tmp",
                               *words_of(plan.launcher, plan.layout, options, program, plan.restarts))
        harm = plan.harms[0]
        self.process = process = subprocess.Popen(words, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                                  stderr=subprocess.PIPE, text=True, errors="replace")
        readers = [threading.Thread(target=self.note, args=(stream, kind), daemon=True)
                   for stream, kind in ((process.stdout, "out"), (process.stderr, "err"))]
        if plan.shell == "yes":
            readers[0] = threading.Thread(target=lambda: collections.deque(process.stdout, maxlen=0), daemon=True)
        for reader in readers:
            reader.start()
        time.sleep(plan.moment * (1.5 if plan.shell else normal))
        was_over = process.poll() is not None
        running = len(self.box.processes(plan.host, re.escape(options.peer))) > 0 or bool(plan.shell)
        self.starting = plan.launcher not in OURS and not was_over and not self.all_have_begun()
        self.struck = time.monotonic()
        struck = not was_over and self.strike(harm)
        survives = not struck or (HARMS[harm].survived and not self.too_long and not self.starting)
        status, asked = self.end_of(process, HARMS[harm].limit if struck else 30, survives, normal)
        took = time.monotonic() - self.struck
        for reader in readers:
            reader.join(5)
        left_seconds = self.check_left()
        self.judge(harm, struck, survives and not asked, status, digest)
        named = self.named_after()
        if harm in NAMED and struck and status and running and not plan.shell:
            if named is None:
                self.problems.append(f"it never names {plan.host}")
            elif named > NAMING and took > NAMING and not plan.restarts:
                self.problems.append(f"named after {named:.1f} s")
        return {"harm": harm if struck else "none", "status": status, "survived": status == 0, "seconds": round(took, 2),
                "named": named and round(named, 2), "left_seconds": round(left_seconds, 2), "done": self.done,
                "problems": self.problems, "said": self.told() if self.problems else ""}

    def end_of(self, process, limit, survives, normal):
        """Exit status, and whether it had to be asked to end."""
        plan = self.plan
        endless = plan.shell and survives
        wait = 2 if endless else limit + 6 * normal * (1 + plan.restarts)
        if plan.launcher not in OURS:
            wait = max(wait, 30)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(wait), False
        # The fault may have hit something that such a job does not have to notice.
        noticed = not plan.shell or plan.harms[0] not in ("rank", "slurmd")
        if not endless and plan.launcher in OURS and noticed:
            self.problems.append(f"it goes on after {wait:.0f} s")
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(30), True
        self.problems.append("it hangs")
        process.kill()
        return process.wait(), True

    def judge(self, harm, struck, survives, status, digest):
        plan = self.plan
        if harm == "launcher" and struck and plan.launcher == "slurm" and status == 0:
            return  # salloc's, of a command that was killed
        if status == 0 and not plan.shell:
            found = LINE.findall(self.said("out"))
            ranks = {rank for rank, _ in found}
            if len(ranks) != plan.ranks or any(each != digest for _, each in found):
                self.problems.append(f"other bits, or not all: {found}, expected {plan.ranks} times {digest}")
        elif not plan.shell and survives:
            self.problems.append(f"it should have survived; its status is {status}")
        elif plan.shell and status == 0:
            self.problems.append("its exit status is 0")
        elif struck and harm != "launcher" and plan.launcher in OURS and not plan.shell and HARMS[harm].words:
            words = HARMS[harm].words.replace("HOST", rf"\b{plan.host}\b")
            if not any(re.search(words, line) for _, line in self.said_since()):
                self.problems.append(f"it does not say {words}")


class Harness:
    def __init__(self, options):
        self.options = options
        self.grounds = []
        self.series = series.Series(options, "cluster-faults", every=1, again=["harm"], plan=self.plan, one=self.one)

    def plan(self, number):
        return Plan(self.options.seed, number, self.harms, self.launchers)

    def one(self, plan, folder):
        ground = self.grounds.pop()
        try:
            if not ground.box or (plan.launcher in ("slurm", "srun")
                                  and boxes.tool("idle", "--name", ground.box.name).returncode):
                ground.renew()
            return self.struck(ground, plan, folder)
        except Exception:  # of the harness, or of the box: a new one for the next job
            ground.abandon()
            raise
        finally:
            self.grounds.append(ground)

    @staticmethod
    def struck(ground, plan, folder):
        """The result of a job that came to harm, or of the last try to have one."""
        for attempt in range(TRIES):
            result = Job(ground, plan, folder / str(attempt)).run()
            if result["harm"] != "none" or result["problems"] or attempt + 1 == TRIES:
                return result
            plan.moment /= 2  # it was over, or what was to be struck had gone

    def run(self):
        options = self.options
        try:
            self.grounds = [Ground(f"faults{index}", options) for index in range(options.jobs)]
        except unittest.SkipTest as reason:
            print(f"OK (skipped=1) {reason}")
            return 0
        try:
            slurm = self.grounds[0].slurm
            self.launchers = [name for name in ALL if slurm or name not in ("slurm", "srun")]
            self.harms = possible(options.harm or list(HARMS), self.launchers)
            if not self.harms:
                print(f"OK (skipped=1) {', '.join(options.harm)}: needs Slurm, which is not here")
                return 0
            self.series.run()
        finally:
            for ground in self.grounds:
                ground.abandon()
        return self.table()

    def table(self):
        self.series.table("harm", ("survived", "survived", sum), ("median seconds", "seconds", series.median), ("most", "seconds", max),
                          ("until named", "named", max), ("until none left", "left_seconds", max))
        results = self.series.results.values()
        struck = sum(result.get("harm", "none") != "none" for result in results)
        few = 2 * struck < len(results)
        if few:
            print(f"only {struck} of {len(results)} jobs came to harm: that shows nothing")
        return self.series.report() or int(few)


def main():
    parser = series.parser("cluster-faults", __doc__, count=10, jobs=1)
    parser.add_argument("--cohort", default=os.environ.get("COHORT_COMMAND"), help="the command, where the build folder has it not")
    parser.add_argument("--peer", default=os.environ.get("COHORT_HOSTS_PEER"), help="the program hosts_peer, likewise")
    parser.add_argument("--harm", action="append", default=[], choices=HARMS, help="only this kind; repeatable")
    options = parser.parse_args()
    options.cohort = options.cohort or str(series.program(options.build, "cohort"))
    options.peer = options.peer or str(series.program(options.build, "hosts_peer"))
    return Harness(options).run()


if __name__ == "__main__":
    sys.exit(main())
