#!/usr/bin/env python3
"""Jobs over the hosts of a box that come to harm at random. Each has to end in time, with a failure, and leave nothing.

A rank, an agent, its guard, ssh, sshd or the launcher is killed, a cable is taken out, or several of these; at any moment,
while the job starts, too. Every job's line says what was done to it; --seed S --only N does it again.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import boxes

HOSTS = ("h1", "h2", "h3")
#: Of a job: what ssh's own daemon does about a cable that is out is not ours.
OURS = "cohort|^sh -c|sleep|^yes|^ssh "
PROGRAMS = ("sleep 1000", "(setsid sleep 1000 &); trap '' TERM; while :; do sleep 1; done", "yes", "sleep 0.4; exit 7",
            "[ $RANK = 1 ] && exit 9; sleep 1000")
#: What is killed: a pattern of its command line, and whether that is on the launcher's host.
HARM = {"rank": ("^sh -c|^yes|^sleep", False), "agent": ("agent --invited", False), "ssh": ("^ssh ", True),
        "sshd": ("^sshd: ", False), "launcher": (r"^[^ ]*cohort run", True)}
LIMIT = 45  # a host that is gone before it has an agent is named after the 30 s of --start-timeout


class Job:
    def __init__(self, box, before, seed, number):
        self.box, self.before, self.number = box, before, number
        self.random = random.Random(f"{seed} {number}")
        self.folder = tempfile.mkdtemp(prefix="cohort-faults-")

    def ours(self):
        return {pid: line for host in HOSTS for pid, line in self.box.processes(host, OURS).items()
                if pid not in self.before[host]}

    def kill(self, what, host):
        pattern, here = HARM[what]
        place = "h1" if here else host
        found = [pid for pid in self.box.processes(place, pattern) if pid not in self.before[place]]
        if not found:
            return "none"
        pid = self.random.choice(found)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return f"{pid} on {place}"

    def run(self, command):
        """Problems, and a line that says what was done."""
        hosts = self.random.choice(("h1:2,h2:2,h3", "h2,h3:2"))
        program = self.random.choice(PROGRAMS)
        moment = self.random.uniform(0, 1.5)
        harms = [self.random.choice([*HARM, "cut"]) for _ in range(self.random.choice((1, 1, 1, 2)))]
        host = self.random.choice(HOSTS[1:])
        words = self.box.words("h1", command, "run", "--grace", "0.5", "--no-logs", "-H", hosts, "sh", "-c", program)
        problems = []
        done = []
        with subprocess.Popen(words, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True) as job:
            time.sleep(moment)
            for harm in harms:
                if harm == "cut":
                    self.box.act("cut", host)
                    done.append(f"cut {host}")
                else:
                    done.append(f"{harm} {self.kill(harm, host)}")
            begun = time.monotonic()
            try:
                said = job.communicate(timeout=LIMIT if "cut" in harms else 6)[1]
            except subprocess.TimeoutExpired:
                # What was hit may be nothing that a job has to notice: a process that a rank has started, or none.
                done.append("told to end")
                job.send_signal(signal.SIGTERM)
                try:
                    said = job.communicate(timeout=LIMIT)[1]
                except subprocess.TimeoutExpired:
                    problems.append("it hangs")
                    job.kill()
                    said = job.communicate()[1]
            took = time.monotonic() - begun
        if job.returncode == 0:
            problems.append("its exit status is 0")
        limit = time.monotonic() + 15
        while self.ours() and time.monotonic() < limit:
            time.sleep(0.02)
        left = self.ours()
        if left:
            problems.append(f"left: {left}")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if "cut" in harms:
            self.box.act("heal", host)
        shutil.rmtree(self.folder)
        text = (f"{self.number}: {hosts} `{program}` at {moment:.2f} s: {', '.join(done)}: status {job.returncode} after "
                f"{took:.1f} s")
        if problems:
            text += f"\n   PROBLEM {'; '.join(problems)}\n   it said: {said.strip()[-1500:]}"
        return problems, text


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cohort", default=os.environ.get("COHORT_COMMAND", "cohort"), help="the command")
    options.add_argument("--count", type=int, default=10)
    options.add_argument("--seed", default="1")
    options.add_argument("--only", type=int, help="only this one of them")
    options = options.parse_args()
    try:
        box = boxes.Box("faults", "--hosts", "3")
    except unittest.SkipTest as reason:
        print(f"OK (skipped=1) {reason}")
        return 0
    before = {host: set(box.processes(host)) for host in HOSTS}
    failed = 0
    for number in range(options.count) if options.only is None else [options.only]:
        problems, text = Job(box, before, options.seed, number).run(options.cohort)
        print(text, flush=True)
        failed += bool(problems)
    box.down()
    print(f"{failed} jobs with problems" if failed else "no job had a problem")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
