"""`cohort run --trace` and `cohort trace`: what ranks did, read by the command and as viewers of Chrome's format do."""

import collections
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
except ImportError:
    torch = None

COMMAND = os.environ.get("COHORT_COMMAND") or shutil.which("cohort")
SECONDS = 100

# Rank 1 is late to each operation.
PROGRAM = """
import array, os, signal, sys, time
import cohort, cohort.track
from cohort._core import count_step
cohort.init()
world = cohort.world()
data = array.array("f", [1.0] * 4096)

@cohort.track.span("decorated")
def work(depth):
    time.sleep(0.001 if cohort.rank() == 0 else 0.006)
    if depth:
        work(depth - 1)

for step in range(20):
    with cohort.track.span("forward \\u00e4"):
        work(1 if step == 3 else 0)
    world.all_reduce(data)
    count_step()
if "die" in sys.argv:
    world.barrier()
    if cohort.rank() == 1:
        with cohort.track.span("last"):
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)
cohort.shutdown()
"""

PROFILED = """
import sys, torch
import cohort, cohort.track
cohort.init()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    for step in range(5):
        with cohort.track.span("matrix product"):
            torch.ones(300, 300) @ torch.ones(300, 300)
        cohort.world().all_reduce(torch.ones(100))
profile.export_chrome_trace(f"{sys.argv[1]}/profile-{cohort.rank()}.json")
cohort.shutdown()
"""

TRAINING = """
import sys, torch
import cohort, cohort.checkpoint, cohort.nn
cohort.init()
torch.manual_seed(0)
model = cohort.nn.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(8))), bucket_cap_mb=300_000 / 2**20)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    optimizer.zero_grad()
    model(torch.ones(4, 200)).sum().backward()
    optimizer.step()
cohort.shutdown()
"""


@unittest.skipIf(COMMAND is None, "needs the command: COHORT_COMMAND")
class Traced(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="cohort-trace-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.run_folder = self.folder / "run"

    def train(self, program, *words, status=0, options=("--trace",)):
        script = self.folder / "program.py"
        script.write_text(program)
        done = subprocess.run([COMMAND, "run", *options, "--run-dir", self.run_folder, "-np", "2", sys.executable, script, *words],
                              capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual(done.returncode, status, done.stderr)
        return done

    def trace(self, *words, status=0):
        done = subprocess.run([COMMAND, "trace", *map(str, words)], capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout if status == 0 else done.stderr

    def chrome(self, *others):
        output = self.folder / "all.json"
        self.trace("merge", self.run_folder, *others, "-o", output)
        return json.loads(output.read_text())


class Command(Traced):
    def test_the_late_rank_is_named(self):
        done = self.train(PROGRAM)
        self.assertIn("trace.json: ", done.stderr)
        report = json.loads(self.trace("report", self.run_folder, "--json"))
        early, late = report["ranks"]
        self.assertEqual((early["steps"], late["steps"]), (19, 19))  # the beginning of the first step is not known
        self.assertGreater(late["last"], early["last"])
        self.assertGreater(late["made_wait_seconds"], 0.02)
        self.assertGreater(early["exposed_seconds"], 0.02)
        self.assertEqual(early["events_lost"], 0)
        self.assertIn(("all_reduce", 16384, 40), [(o["name"], o["bytes"], o["count"]) for o in report["operations"]])
        self.assertEqual(report["remarks"], [])
        self.assertIn("all_reduce", self.trace("report", self.run_folder))

    def test_spans_and_operations_of_all_ranks_are_there(self):
        self.train(PROGRAM)
        whole = self.chrome()
        self.assertEqual(whole["distributedInfo"], {"backend": "cohort", "world_size": 2})
        found = collections.Counter((e["pid"], e["name"]) for e in whole["traceEvents"] if e["ph"] == "X")
        for rank in (0, 1):
            self.assertEqual(found[rank, "forward \u00e4"], 20)
            self.assertEqual(found[rank, "decorated"], 21)
            self.assertEqual(found[rank, "step"], 19)
            self.assertGreaterEqual(found[rank, "all_reduce"], 20)
        # The inner of two calls lies within the outer one.
        spans = sorted((e["ts"], -e["dur"]) for e in whole["traceEvents"] if e["name"] == "decorated" and e["pid"] == 0)
        within = [a for a, b in zip(spans, spans[1:]) if b[0] - b[1] <= a[0] - a[1]]
        self.assertEqual(len(within), 1)

    def test_what_a_killed_rank_did_is_kept(self):
        self.train(PROGRAM, "die", status=137)
        events = self.chrome()["traceEvents"]
        self.assertEqual(sum(e["name"] == "last" and e["pid"] == 1 for e in events), 1)

    def test_restarts_have_tracks_of_their_own(self):
        self.train("import os\n" + PROGRAM.replace('"die" in sys.argv', 'os.environ["COHORT_RESTART"] == "0"'),
                   options=("--trace", "--max-restarts", "1"))
        self.assertIn("restart 1", (self.run_folder / "trace.json").read_text())
        report = json.loads(self.trace("report", self.run_folder, "--json"))
        self.assertEqual(report["ranks"][0]["steps"], 38)

    @unittest.skipIf(torch is None, "needs torch")
    def test_steps_and_buckets_of_a_training_are_there_by_themselves(self):
        self.train(TRAINING)
        events = self.chrome()["traceEvents"]
        for rank in (0, 1):
            found = collections.Counter(e["name"] for e in events if e["ph"] == "X" and e["pid"] == rank)
            self.assertEqual(found["step"], 5)
            self.assertGreaterEqual(found["bucket"], 12)
            self.assertGreaterEqual(found["all_reduce"], 12)
        self.assertGreater(json.loads(self.trace("report", self.run_folder, "--json"))["ranks"][0]["communication_seconds"], 0)

    def test_without_the_option_nothing_is_kept(self):
        self.train(PROGRAM, options=())
        self.assertFalse((self.run_folder / "trace").exists())
        self.assertIn("was the run started with `cohort run --trace`?", self.trace("report", self.run_folder, status=1))

    @unittest.skipIf(torch is None or torch.__version__ < "2.2", "torch's profiler does not say when it began before 2.2")
    def test_torchs_profiler_is_on_the_same_time_base(self):
        self.train(PROFILED, self.folder)
        events = self.chrome(*(f"{rank}={self.folder}/profile-{rank}.json" for rank in (0, 1)))["traceEvents"]
        for rank in (0, 1):
            (theirs,) = {e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == f"rank {rank}: torch profiler"}
            spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "matrix product" and e["pid"] == rank)
            products = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "aten::matmul" and e["pid"] == theirs)
            self.assertEqual((len(spans), len(products)), (5, 5))
            for (begun, ended), (inner_begun, inner_ended) in zip(spans, products):
                # The profiler's clock is the time of day by the processor's counter, so it is accurate to 1 ms.
                self.assertGreater(inner_begun, begun - 1000)
                self.assertLess(inner_ended, ended + 1000)
        self.assertIn("name the rank", self.trace("merge", self.run_folder, self.folder / "profile-0.json", status=2))
        self.assertIn("-o -: ", self.trace("merge", self.run_folder, "-o", "-", status=2))


class Format(Traced):
    """Checks files against the Trace Event Format, by which Perfetto and chrome://tracing read them."""

    def check(self, events):
        names, slices, flows = {}, collections.defaultdict(list), collections.defaultdict(list)
        for event in events:
            self.assertIn(event["ph"], ("X", "i", "M", "C"))
            if event["ph"] == "M":
                names.setdefault((event["name"], event["pid"], event["tid"]), event["args"])
                continue
            self.assertGreaterEqual(event["ts"], 0)
            if event["ph"] == "C":
                self.assertEqual([type(value) for value in event["args"].values()], [int])
                continue
            self.assertIn(("process_name", event["pid"], 0), names)
            if event["ph"] == "i":
                self.assertEqual(event["s"], "t")
                continue
            self.assertIn(("thread_name", event["pid"], event["tid"]), names)
            slices[event["pid"], event["tid"]].append((round(event["ts"] * 1000), -round(event["dur"] * 1000)))
            if "bind_id" in event:
                flows[event["bind_id"]].append((event["ts"], event.get("flow_in", False), event["flow_out"]))
        for row in slices.values():  # slices are nested or disjoint
            ends = []
            for begun, minus_lasted in sorted(row):
                while ends and ends[-1] <= begun:
                    ends.pop()
                self.assertTrue(not ends or begun - minus_lasted <= ends[-1])
                ends.append(begun - minus_lasted)
        return flows

    def test_the_merged_trace(self):
        self.train(PROGRAM)
        whole = json.loads((self.run_folder / "trace.json").read_text())
        flows = self.check(whole["traceEvents"])
        # Arrows join each collective over both ranks, from the rank that was first.
        joined = [sorted(members) for members in flows.values() if len(members) == 2]
        self.assertGreaterEqual(len(joined), 20)
        for first, second in joined:
            self.assertEqual((first[1:], second[1:]), ((False, True), (True, True)))
        processes = [e["args"]["name"] for e in whole["traceEvents"] if e["name"] == "process_name"]
        self.assertEqual(sorted(name.split(" (")[0].split(" of ")[0] for name in processes), ["clock", "rank 0", "rank 1"])
        self.assertTrue(any(e["ph"] == "C" for e in whole["traceEvents"]))

    def test_a_hosts_file_is_a_trace_without_its_end(self):
        self.train(PROGRAM, "die", status=137)
        text = (self.run_folder / "trace/host-0.json").read_text()
        self.check(json.loads(text + "]"))
        self.assertTrue(all(line.startswith(("[", "{")) for line in text.splitlines()))


if __name__ == "__main__":
    unittest.main()
