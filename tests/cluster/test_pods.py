"""The manifests of packaging/kubernetes on hosts of a box: each is a pod, started with exactly what the manifest and the
control plane give it. Names resolve late, and a pod is started again."""

import json
import os
import pathlib
import re
import secrets
import shutil
import subprocess
import tempfile
import time

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")
PACKAGE = os.environ.get("COHORT_PYTHON_PACKAGE", "")
MANIFESTS = pathlib.Path(__file__).resolve().parents[2] / "packaging/kubernetes"
# Each rank adds 1 in each step, and rank 0 saves the step.
PROGRAM = """
import os, sys, time
import cohort
cohort.init()
world, steps = cohort.world(), int(os.environ["STEPS"])
step = int(open("step").read()) if os.path.exists("step") else 0
print(f"rank {cohort.rank()} of {cohort.size()} begins at step {step}", flush=True)
while step < steps:
    data = bytearray([1])
    world.all_reduce(data)
    assert data[0] == cohort.size()
    step += 1
    if cohort.rank() == 0:
        open("step.new", "w").write(str(step))
        os.replace("step.new", "step")
    time.sleep(float(os.environ.get("PAUSE", "0")))
world.barrier()
print(f"rank {cohort.rank()} has ended", flush=True)
"""
# The same, and goes on with whoever is there, until it is told that it may end.
ELASTIC = """
import os, time
import cohort, cohort.elastic

@cohort.elastic.run
def train(state, world):
    print(f"{world.size} ranks go on after step {state.steps}", flush=True)
    told = 0
    while not told:
        data = bytearray([1, os.path.exists("enough")])
        world.comm.all_reduce(data)
        assert data[0] == world.size
        told = data[1]
        state.step()
        if state.steps == 5:
            print("has taken 5 steps", flush=True)
        time.sleep(0.1)

train(cohort.elastic.State())
print("has ended", flush=True)
"""


def manifests(name):
    """By kind. PyYAML is the tests' Python's, where it has it, else Debian's."""
    for python in filter(shutil.which, (os.environ.get("COHORT_PACKAGE_PYTHON", ""), "python3", "/usr/bin/python3")):
        script = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(sys.stdin))))"
        done = subprocess.run([python, "-c", script], input=(MANIFESTS / name).read_text(), capture_output=True, text=True)
        if done.returncode == 0:
            return {one["kind"]: one for one in json.loads(done.stdout)}
    raise boxes.unittest.SkipTest("no Python here has PyYAML: tools/setup --for cluster")


class Pods(boxes.InBox):
    needs = ("COHORT_COMMAND", "COHORT_PYTHON_PACKAGE")
    wanted = ("pods", "--hosts", "2")

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="cohort-pods-"))
        self.addCleanup(shutil.rmtree, self.folder)
        (self.folder / "train.py").write_text(PROGRAM)
        self.secret = secrets.token_hex(32)
        self.hosts = self.box.folder / "hosts"
        before = self.hosts.read_text()
        self.addCleanup(self.hosts.write_text, before)
        self.addCleanup(self.box.expect_nothing_new, 15)

    def resolve(self, *names):
        """As when the pods' addresses come into DNS: `names` are those of h1 and h2, in order."""
        with open(self.hosts, "a", encoding="ascii") as file:
            file.writelines(f"10.77.0.{number} {name}\n" for number, name in enumerate(names, 1))

    def pod(self, number, container, given, **more):
        """Starts a container as the kubelet does. `given`: what the control plane knows."""
        environment = {}
        for one in container.get("env", []):
            source = one.get("valueFrom", {})
            if "secretKeyRef" in source:
                self.assertEqual(source["secretKeyRef"], {"name": "train", "key": "secret"})
            environment[one["name"]] = one.get("value") or (
                self.secret if "secretKeyRef" in source else given[source["fieldRef"]["fieldPath"]])
        environment.update({name: value for name, value in given.items() if name.isidentifier()}, **more)
        words = [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word) for word in container["command"]]
        words = [{"python": "python3", "cohort": COHORT}.get(word, word) for word in words]
        clean = ["env", "-i", "PATH=/usr/bin:/bin", f"PYTHONPATH={PACKAGE}", f"HOME={self.folder}",
                 "KUBERNETES_SERVICE_HOST=10.96.0.1"]  # as in every pod
        job = self.box.start(f"h{number + 1}", *clean, *(f"{key}={value}" for key, value in environment.items()), *words,
                             cwd=self.folder)  # fmt: skip
        self.addCleanup(self.end, job)
        return job

    @staticmethod
    def kill(job):
        """With what its shell has started, as a container ends."""
        subprocess.run(["pkill", "-KILL", "-P", str(job.pid)])
        job.kill()

    def end(self, job):
        if job.poll() is None:
            self.kill(job)
        job.wait()
        for stream in (job.stdout, job.stderr):
            stream.close()

    def ended(self, jobs, status=0, seconds=60):
        texts = []
        for job in jobs:
            out, err = job.communicate(timeout=seconds)
            texts.append(out + err)
            self.assertEqual(job.returncode == 0, status == 0, out + err)
        return texts

    def wait_for_step(self, step):
        limit = time.monotonic() + 60
        while not (self.folder / "step").exists() or int((self.folder / "step").read_text() or 0) < step:
            self.assertLess(time.monotonic(), limit, "no steps")
            time.sleep(0.05)

    def test_an_indexed_job_whose_names_resolve_late(self):
        job = manifests("job.yaml")["Job"]["spec"]
        container = job["template"]["spec"]["containers"][0]
        self.assertEqual({one["name"]: one.get("value") for one in container["env"]}["WORLD_SIZE"], str(job["completions"]))
        pods = [self.pod(number, container, {"JOB_COMPLETION_INDEX": str(number)}, STEPS="5") for number in range(2)]
        time.sleep(2)
        self.assertEqual([pod.poll() for pod in pods], [None, None])
        self.resolve("train-0.train", "train-1.train")
        texts = self.ended(pods)
        self.assertIn("rank 0 of 2 begins at step 0", texts[0])
        self.assertIn("rank 1 has ended", texts[1])

    def test_a_pod_of_an_indexed_job_that_is_started_again(self):
        container = manifests("job.yaml")["Job"]["spec"]["template"]["spec"]["containers"][0]
        self.resolve("train-0.train", "train-1.train")
        start = lambda number: self.pod(number, container, {"JOB_COMPLETION_INDEX": str(number)}, STEPS="60", PAUSE="0.1")  # noqa: E731
        pods = [start(0), start(1)]
        self.wait_for_step(10)
        pods[1].kill()
        lost = self.ended(pods, status=1)
        self.assertIn("rank 1", lost[0])
        texts = self.ended([start(1), start(0)])  # OnFailure
        self.assertNotIn("begins at step 0", texts[0])
        self.assertIn("rank 0 has ended", texts[1])

    def test_the_secret_is_needed(self):
        container = manifests("job.yaml")["Job"]["spec"]["template"]["spec"]["containers"][0]
        self.resolve("train-0.train", "train-1.train")
        self.secret = "no secret"
        text = self.ended([self.pod(0, container, {"JOB_COMPLETION_INDEX": "0"}, STEPS="1")], status=1)[0]
        self.assertIn("the variable TRAIN_SECRET does not hold 64 hexadecimal digits", text)
        self.assertNotIn(self.secret, text.replace("makes such a secret", ""))

    def test_a_stateful_set_of_which_a_pod_is_away_for_a_while(self):
        container = manifests("statefulset.yaml")["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
        (self.folder / "train.py").write_text(ELASTIC)
        self.resolve("train-0.train", "train-1.train")
        index = "metadata.labels['apps.kubernetes.io/pod-index']"
        start = lambda number: self.pod(number, container, {index: str(number)})  # noqa: E731
        pods = [start(0), start(1)]
        said = self.follow(pods[0])
        said("4 ranks go on after step 0")
        said("has taken 5 steps")
        self.kill(pods[1])
        said(r"2 ranks go on after step [1-9]")
        again = start(1)
        said(r"4 ranks go on after step [1-9]")
        (self.folder / "enough").touch()
        said("has ended")
        said("finished -- kubectl delete")  # and is not started again
        self.follow(again)("finished -- kubectl delete")
        self.assertEqual([pods[0].poll(), again.poll()], [None, None])

    def follow(self, job):
        """A function that waits for a line of the job's."""
        lines = iter(job.stdout.readline, "")

        def wait_for(pattern):
            seen = []
            for line in lines:
                seen.append(line)
                if re.search(pattern, line):
                    return
            self.fail(f"no {pattern!r} in {seen}; {job.stderr.read()}")

        return wait_for

    def test_a_train_job(self):
        found = manifests("trainjob.yaml")
        runtime, job = found["TrainingRuntime"]["spec"], found["TrainJob"]["spec"]["trainer"]
        template = runtime["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
        container = {**template, "command": job["command"]}
        # As the Trainer's plug-in for torch sets them.
        given = {"PET_NNODES": str(job["numNodes"]), "PET_NPROC_PER_NODE": str(job["numProcPerNode"]),
                 "PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29500"}  # fmt: skip
        pods = [self.pod(number, container, {**given, "PET_NODE_RANK": str(number), "JOB_COMPLETION_INDEX": str(number)}, STEPS="5")
                for number in range(2)]  # fmt: skip
        time.sleep(1)
        self.resolve("train-node-0-0.train", "train-node-0-1.train")
        texts = self.ended(pods, seconds=90)
        self.assertIn("rank 3 of 4 begins at step 0", "".join(texts))


if __name__ == "__main__":
    boxes.unittest.main()
