#!/usr/bin/env python3
"""Elastic trainings whose ranks and hosts come, leave and are lost at random; each has to end as one that nobody disturbed.

A training (tests/e2e/elastic_training_peer.cpp) runs in an elastic job over hosts that this machine pretends to be. For some seconds,
several at once or as soon as a change is announced, workers get SIGKILL, SIGSTOP or SIGTERM, agents and guards as well, hosts are
drained, removed, added, listed or not, or lost as they start. Always somebody stays that has the training's state and that nothing
happens to (or, in some runs, that has only been told to leave).

  ends     with 0 before the deadline; with 75 only where all that have the state were to leave, and then it is saved, or
           where the last one that has it may not have said so yet; with 1 or 124 only if all others had ended their training
  audit    each sample is used once in each epoch, and no world begins before a step that another had ended
  weights  equal to the bit on all that ended, and to rounding those of a training that is left alone; with virtual ranks, which
           a third of the trainings have, to the bit
  nothing  is left: no process, no orders' socket
"""

import contextlib
import json
import math
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
import attempts  # noqa: E402
from soak import job, processes, series  # noqa: E402

SAMPLES, BATCH, EPOCHS, PACE_MS = 1003, 4, 2, 25
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
REPORTED = 1  # seconds after which the launcher knows that a worker has the state
VIRTUAL = {"ELASTIC_VIRTUAL": "8"}
ENDED = re.compile(r"ended with 0 after (\d+) steps: (\w+) ([\d.]+)")


class Plan:
    """Describes run `number` of a seed. (The times of its events depend on the machine, too.)"""

    def __init__(self, seed, number):
        draw = self.draw = random.Random(f"{seed}/{number}")
        self.script = draw.random() < 0.5
        self.spares = draw.random() < 0.15
        self.local_steps = draw.random() < 0.2
        self.virtual = draw.random() < 0.45 and not self.local_steps
        self.early = draw.random() < 0.2 and not self.spares  # (which may be all that is left)
        self.hard = draw.random() < 0.25
        self.seconds = draw.uniform(3, 6)
        self.hosts = {"a": 2, "b": draw.randint(1, 2)}

    def __str__(self):
        flags = [name for name in ("script", "spares", "local_steps", "virtual", "early", "hard") if getattr(self, name)]
        return ", ".join([f"{sum(self.hosts.values())} ranks", *flags])

    def words(self):
        listed = ",".join(f"{name}:{slots}" for name, slots in self.hosts.items())
        hosts = ["--host-discovery-script", "cat hosts"] if self.script else ["-H", listed]
        ranks = str(sum(self.hosts.values()) - 1)
        spares = ["--spares", "1", "--max-np" if self.script else "-np", ranks] if self.spares else ["--max-np", "5"]
        return ["--min-np", "1", "--starter", "local", "--stopped-timeout", "2", "--preempt-grace", "6", *hosts, *spares,
                "--blacklist-cooldown-range", "1", "2"]


class Training(attempts.Attempt):
    """One job, and whoever troubles it."""

    def __init__(self, options, place, plan, folder):
        self.plan, self.draw, self.folder = plan, plan.draw, folder
        self.cohort = series.program(options.build, "cohort")
        self.peer = series.program(options.build, "elastic_training_peer")
        self.list(plan.hosts)
        self.acts, self.begun = [], time.monotonic()
        self.struck, self.leaving = set(), set()  # workers
        self.formed = {}  # when a worker was first seen to be in a world
        self.close = False  # those that are known to have the state were struck just as another got it
        self.env = {"ELASTIC_DILOCO": "6"} if plan.local_steps else VIRTUAL if plan.virtual else {}
        super().__init__(place, self.cohort, ["-q", *plan.words()], [self.peer, SAMPLES, BATCH, EPOCHS, PACE_MS], folder, 0,
                         environment=self.env)
        self.run = folder / "job-0"

    def list(self, hosts):
        (self.folder / "new").write_text("".join(f"{name}:{slots}\n" for name, slots in hosts.items()))
        (self.folder / "new").rename(self.folder / "hosts")

    def log(self, worker):
        with contextlib.suppress(OSError):
            return (self.run / "logs" / f"rank-{worker}.out").read_text(errors="replace")
        return ""

    def workers(self):
        """{number: (host, pid, agent's pid)}"""
        found = {}
        for pid, line in self.place.processes().items():
            names = dict(each.partition("=")[::2] for each in processes.read(pid, "environ").decode(errors="replace").split("\0"))
            if line.startswith(str(self.peer)) and "COHORT_WORKER" in names:
                found[int(names["COHORT_WORKER"])] = (names["COHORT_HOST"], pid, processes.parent_of(pid))
        return found

    def ctl(self, *words):
        environment = self.place.environment()
        done = subprocess.run([self.cohort, "ctl", self.run, *words], env=environment, capture_output=True, text=True, timeout=30)
        return (done.stdout + done.stderr).strip()

    def safe_without(self, going, workers):
        """Somebody else has the state, and stays."""
        struck = self.struck | (set() if self.plan.hard else self.leaving)
        stay = [one for one in workers if one not in struck and one not in going and "world " in self.log(one)]
        now = time.monotonic()
        formed = [self.formed.setdefault(one, now) for one in stay]
        self.close |= bool(stay) and all(now - since < REPORTED for since in formed)
        return bool(stay)

    def act(self):
        draw, workers = self.draw, self.workers()
        kinds = ("worker", "worker", "worker", "agent", "guard", "fresh", "starting", "drain", "drain", "add", "add", "list", "list")
        kind = draw.choice((*kinds, "desert", "desert", "desert") if self.plan.hard else kinds)
        how = draw.choice(("kill", "kill", "stop", "term") if kind in ("worker", "fresh") else ("kill", "term", "stop"))
        at = f"{time.monotonic() - self.begun:.1f}"
        if kind in ("worker", "fresh", "agent", "guard") and workers:
            some = [one for one in workers if kind != "fresh" or "world " not in self.log(one)]
            if not some:
                return
            worker = draw.choice(some)
            host, pid, agent = workers[worker]
            going = {worker} if kind in ("worker", "fresh") else {one for one, (_, _, of) in workers.items() if of == agent}
            if kind == "guard" and how == "stop" or not self.safe_without(going, workers):
                return
            pid = {"agent": agent, "guard": processes.parent_of(agent)}.get(kind, pid)
            # (A worker that is told to end does so, whatever becomes of the others.)
            (self.leaving if how == "term" and kind in ("agent", "guard") else self.struck).update(going)
            done = bool(pid > 1 and processes.send([pid], SIGNALS[how]))
            self.acts.append(f"{at} {how} {kind} of worker {worker} on {host}: {done}")
        elif kind == "starting":
            owners = {agent for _, _, agent in workers.values()}
            owners |= {processes.parent_of(agent) for agent in owners}
            idle = [pid for pid, line in self.place.processes().items() if "cohort agent " in line and pid not in owners]
            if idle:
                self.acts.append(f"{at} kill an agent that has no workers: {processes.send([draw.choice(idle)])}")
        elif kind == "drain":
            host = draw.choice("abcd")
            going = {one for one, (on, _, _) in workers.items() if on == host}
            if going and self.safe_without(going, workers):
                order = draw.choice(("drain", "drain", "remove"))
                (self.struck if order == "remove" else self.leaving).update(going)
                self.acts.append(f"{at} {order} {host}: {self.ctl(order, host)}")
        elif kind == "desert":  # all but those that have just been told to leave
            host = draw.choice("ab")
            others = [one for one, (on, _, _) in workers.items() if on != host]
            if others and self.safe_without(others, workers):
                self.leaving |= workers.keys() - set(others)
                self.struck.update(others)
                said = self.ctl("drain", host)
                self.acts.append(f"{at} drain {host} and kill {others}: {said}; {processes.send([workers[one][1] for one in others])}")
        elif kind == "add":
            host, slots = draw.choice((("b", 1), ("b", 2), ("c", 1), ("d", 2), ("a", 2)))
            there = {one for one, (on, _, _) in workers.items() if on == host}
            going = there if len(there) > slots else set()  # (a host that is added again with fewer slots)
            if not going or self.safe_without(going, workers):
                self.leaving |= going
                self.acts.append(f"{at} add: {self.ctl('add', f'{host}:{slots}')}")
        elif kind == "list" and self.plan.script:
            hosts = {name: draw.randint(1, 2) for name in "abcd" if draw.random() < 0.6}
            going = {one for one, (on, _, _) in workers.items() if hosts.get(on, 0) < 2}
            if hosts and self.safe_without(going, workers):
                self.leaving |= going
                self.list(hosts)
                self.acts.append(f"{at} list {hosts}")

    def somebody_stayed(self):
        """Somebody that had the state was neither struck nor had left when the others had gone on."""
        holders = [path for path in (self.run / "logs").glob("rank-*.out") if "world " in path.read_text(errors="replace")]
        numbers = {int(path.stem.partition("-")[2]): path.with_suffix(".err") for path in holders}
        return any("leaves the job after" not in path.read_text(errors="replace")
                   for number, path in numbers.items() if number not in self.struck)

    def trouble(self):
        draw, end = self.draw, time.monotonic() + self.plan.seconds
        if self.plan.early:
            time.sleep(draw.uniform(0, 0.8))
            agents = [pid for pid, line in self.place.processes().items() if "cohort agent " in line]
            if agents:
                self.acts.append(f"kill an agent at the start: {processes.send([draw.choice(agents)])}")
        self.until(lambda: any("world " in self.log(worker) for worker in range(4)), end + 20, every=0.05)
        end = time.monotonic() + self.plan.seconds
        while self.running() and time.monotonic() < end:
            if draw.random() < 0.3:  # at once when something changes
                changes = self.complaints().count("goes on with")
                self.until(lambda: self.complaints().count("goes on with") > changes, min(end, time.monotonic() + 1.5))
            for _ in range(draw.choice((1, 1, 1, 2, 3))):
                self.act()
            time.sleep(draw.choice((0.02, 0.1, 0.3, 0.8)))


class Trainings:
    def __init__(self, options):
        self.options, self.alone = options, {}
        sys.path.insert(0, str(options.build / "python"))
        from cohort.elastic import audit

        self.audit = audit

    def left_alone(self, ranks, environment):
        """The ending of a training on so many ranks that nothing happens to."""
        if ranks not in self.alone:
            place, peer = job.Here(), series.program(self.options.build, "elastic_training_peer")
            with tempfile.TemporaryDirectory() as folder, attempts.Attempt(
                    place, series.program(self.options.build, "cohort"), ["-np", str(ranks or 1), "--min-np", "1"],
                    [peer, SAMPLES, BATCH, EPOCHS, 0], folder, 0, environment=environment) as attempt:
                assert attempt.wait(time.monotonic() + 60) == 0, f"a training that is left alone: {attempt.output()}"
                self.alone[ranks] = ENDED.search(attempt.said()).groups()
        return self.alone[ranks]

    def one(self, plan, folder):
        place = job.Here()
        with Training(self.options, place, plan, folder) as training:
            training.trouble()
            status = training.wait(time.monotonic() + self.options.deadline)
            what = "\n".join([f"status {status}", *training.acts, training.complaints()[-6000:]])
            if status is None:
                what += f"\nstill there: {place.processes()}"
            try:
                assert status is not None, "ends: it does not"
                self.check(plan, training, status)
                left, _ = processes.wait_for_nothing(place.processes, attempts.LEFT_LIMIT)
                assert not left, f"nothing: left {attempts.LEFT_LIMIT:g} s after the end: {left}"
                assert not (training.run / "control").exists(), "nothing: the socket of orders is left"
            except AssertionError as problem:
                raise AssertionError(f"{problem}\n{what}") from None
        changes = training.complaints().count("goes on with")
        return {"acts": len(training.acts), "changes": changes, "saved": int(status == 75)}

    def check(self, plan, training, status):
        logs = [path.read_text(errors="replace") for path in (training.run / "logs").glob("rank-*.out")]
        begins = [{**json.loads(line), "of": path.name} for path in training.run.glob("samples-*.jsonl")
                  for line in path.read_text().splitlines() if '"size"' in line and line.endswith("}")]
        ends = (75, 124, 137, 143) if any(" term agent " in act or " term guard " in act for act in training.acts) else (75, 124, 137)
        if plan.hard and status in ends and not training.somebody_stayed():
            status = 75  # nobody was left that could save
        elif status in (1, 124) and any(map(ENDED.search, logs)):
            # The training was over, and an agent or a worker that was struck could not say so.
            unfinished = {int(path.stem.partition("-")[2]) for path in (training.run / "logs").glob("rank-*.out")
                          if "world " in path.read_text(errors="replace") and not ENDED.search(path.read_text(errors="replace"))}
            # (At the start an agent is killed before its workers can be known.)
            lost = re.findall(r"workers? (\d+)(?:-(\d+))? (?:is|are) lost with", training.complaints())
            gone = {worker for first, last in lost for worker in range(int(first), int(last or first) + 1)}
            left = unfinished - training.struck - training.leaving - (gone if plan.early else set())
            assert not left, f"ends: with {status}, and {left} have not ended"
            status = 0
        elif status == 75 and not training.close:
            assert plan.hard, "ends: with 75, although somebody has the state and stays"
            saved = [int(step) for log in logs for step in re.findall(r"saved after step (\d+)", log)]
            furthest = max((begin["step"] for begin in begins), default=0)
            assert saved and max(saved) >= furthest, f"ends: with 75, and saved {saved} of {furthest} steps"
        elif status != 75:
            assert status == 0, f"ends: with status {status}"
        found = self.audit(training.run, {"sampler": SAMPLES})
        assert found, f"audit: {found.problems}"
        if status != 0:
            return
        assert found.epochs == {("sampler", epoch): SAMPLES for epoch in range(EPOCHS)}, f"audit: {found.epochs}"
        endings = {match.groups() for log in logs for match in ENDED.finditer(log)}
        assert len(endings) == 1, f"weights: {endings}"
        first = min(begins, key=lambda begin: begin["world"])
        if first["of"] != "samples-0.jsonl":
            return  # each worker begins with weights of its own
        if plan.virtual:
            assert endings == {self.left_alone(0, VIRTUAL)}, f"weights: {endings} instead of {self.left_alone(0, VIRTUAL)}"
            return
        # (A world that loses a rank in its first step is the first, too.)
        worlds = [match.groups() for log in logs for match in re.finditer(r"world \d+ of (\d+) in epoch (\d+)", log)]
        size, _ = min(worlds, key=lambda world: int(world[1]))
        wanted = float(self.left_alone(int(size), {})[2])
        limit = 0.02 if plan.local_steps else 1e-8
        got = float(endings.pop()[2])
        assert math.isclose(got, wanted, rel_tol=limit), f"weights: {got} instead of {wanted}"


def main():
    parser = series.parser("elastic-faults", __doc__, count=20, jobs=2, deadline=45)
    options = parser.parse_args()
    trainings = Trainings(options)
    runs = series.Series(options, "elastic-faults", first=1, every=20, plan=lambda number: Plan(options.seed, number),
                         one=trainings.one)
    runs.run()
    return runs.report()


if __name__ == "__main__":
    sys.exit(main())
