"""hvd with worlds that the tests start: parts of a world, the timeline, ranks that end or die, elastic.run."""

import json
import unittest

from support import run_world, torch


def setUpModule():
    if torch is None:
        raise unittest.SkipTest("torch is not installed")


HEAD = """
import os, sys, json, time
import torch
import cohort, cohort.horovod.torch as hvd
torch.set_num_threads(1)
_init = cohort.init
cohort.init = lambda: _init(os.environ["TEST_INIT"])  # as a launcher would set it
"""


class Worlds(unittest.TestCase):
    def run_all(self, script, size=2, expected=0, **environment):
        ends = run_world(HEAD + script, size, OMP_NUM_THREADS="1", **environment)
        for status, text in ends:
            self.assertEqual(status, expected, "\n".join(text for _, text in ends))
        return [text for _, text in ends]

    def test_the_world_and_parts_of_it(self):
        texts = self.run_all(
            """
hvd.init()
world = cohort.world()  # both APIs at once
size = world.size()
handle = hvd.allreduce_async(torch.ones(3), name="a", op=hvd.Sum)
data = torch.full((4,), 1.0)
work = world.all_reduce(data, async_op=True)
assert hvd.synchronize(handle).tolist() == [size] * 3
work.wait()
assert data.tolist() == [size] * 4
hvd.shutdown()
assert not cohort.is_initialized()

cohort.init()
rank = cohort.rank()
best = 9
for _ in range(10):
    cohort.world().barrier()
    began = time.perf_counter()
    hvd.init()
    hvd.shutdown()
    best = min(best, time.perf_counter() - began)
print("BEST", best)
try:
    hvd.init(comm=[0, 1] if rank < 2 else [0, 2])
    raise SystemExit("a rank that gave no list of its own was let in")
except ValueError:
    pass
assert not hvd.is_initialized()
hvd.init(comm=[1, 0] if rank < 2 else [2])
assert hvd.size() == (2 if rank < 2 else 1)
assert hvd.rank() == [1, 0, 0][rank]
assert hvd.allgather(torch.tensor([rank])).tolist() == ([1, 0] if rank < 2 else [2])
hvd.shutdown()
class Comm:  # mpi4py's
    def allgather(self, value):
        return [0, 1, 2]
hvd.init(comm=Comm())
assert (hvd.rank(), hvd.size()) == (rank, 3)
hvd.shutdown()
ours = hvd.ProcessSet([0, 2])
hvd.init(process_sets=[ours, hvd.ProcessSet([1, 2])])
assert (ours.process_set_id, ours.included()) == (1, rank != 1)
if ours.included():
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=ours).tolist() == [2.0]
hvd.shutdown()
assert ours.process_set_id is None
hvd.init(process_sets=[ours])
hvd.shutdown()
cohort.shutdown()
""",
            size=3,
        )
        self.assertLess(min(float(text.split("BEST ")[1].split()[0]) for text in texts), 0.5)

    def test_timeline(self):
        texts = self.run_all(
            """
hvd.init()
path = os.environ["FOLDER"] + "/timeline.json"
hvd.start_timeline(path, mark_cycles=True)
if hvd.rank() == 0:
    try:
        hvd.start_timeline(path)
        raise SystemExit("two timelines")
    except ValueError:
        pass
for step in range(3):
    if hvd.rank() == 1:
        time.sleep(0.1)
    hvd.allreduce(torch.ones(8), name="weights")
hvd.broadcast(torch.ones(2), 0, name="start")
try:
    hvd.allreduce(torch.ones(1 + hvd.rank()), name="wrong")
except hvd.HorovodInternalError:
    pass
hvd.barrier()
time.sleep(0.2)
child = os.fork()
if child == 0:
    sys.exit(0)  # with all that Python does at its end: the file is the parent's
os.waitpid(child, 0)
hvd.stop_timeline()
if hvd.rank() == 0:
    print("TIMELINE " + json.dumps(json.load(open(path))))
hvd.allreduce(torch.ones(8), name="weights")
hvd.shutdown()

os.environ["HOROVOD_TIMELINE"] = path = os.environ["FOLDER"] + "/whole.json"
hvd.init()
hvd.allreduce(torch.ones(8), name="weights")
rank = hvd.rank()
hvd.barrier()
time.sleep(0.2)
hvd.shutdown()
if rank == 0:
    print("EVENTS", len(json.load(open(path))))

del os.environ["HOROVOD_TIMELINE"]
path = os.environ["FOLDER"] + "/each.json"
hvd.init()
hvd.start_timeline(path, all_ranks=True)
for step in range(20):
    hvd.allreduce(torch.ones(8), name="weights")
hvd.shutdown()
own = json.load(open(path if rank == 0 else os.environ["FOLDER"] + "/each-rank-1.json"))
(start,) = [e["args"] for e in own if e["name"] == "start_time"]
print("EACH", start["rank"], start["size"], sum(e["name"] == "ALLREDUCE" for e in own) > 10)
"""
        )
        self.assertEqual([text.split("EACH ")[1].split()[:3] for text in texts], [["0", "2", "True"], ["1", "2", "True"]])
        (line,) = [line for line in texts[0].splitlines() if line.startswith("TIMELINE ")]
        events = json.loads(line[9:])
        rows = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
        self.assertLessEqual({"allreduce.weights", "broadcast.start", "allreduce.wrong"}, set(rows))
        mine = [e for e in events if e["pid"] == rows["allreduce.weights"] and e["ph"] == "X"]
        self.assertEqual([e["name"] for e in mine], ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"] * 3)
        self.assertEqual([e["ts"] for e in mine], sorted(e["ts"] for e in mine))
        for waiting, moving in zip(mine[::2], mine[1::2]):  # rank 1 is 100 ms late, which counts as negotiation
            self.assertGreater(waiting["dur"], 50_000)
            self.assertLess(moving["dur"], waiting["dur"])
            self.assertAlmostEqual(waiting["ts"] + waiting["dur"], moving["ts"], delta=0.01)
        self.assertTrue(any(e["name"] == "CYCLE_START" for e in events))
        self.assertTrue(any(e["name"] == "FAILED" and e["pid"] == rows["allreduce.wrong"] for e in events))
        self.assertGreater(int(texts[0].split("EVENTS ")[1].split()[0]), 5)
        self.assertTrue(any("start_time_since_epoch_in_micros" in e.get("args", {}) for e in events))

    def test_a_rank_that_dies(self):
        ends = run_world(
            HEAD
            + """
hvd.init()
hvd.allreduce(torch.ones(1))
if hvd.rank() == 1:
    os.kill(os.getpid(), 9)
began = time.monotonic()
try:
    hvd.allreduce(torch.ones(1), name="x")
except hvd.HorovodInternalError as error:
    print("SAID", type(error.__cause__).__name__, error)
    print("AFTER", time.monotonic() - began)
""",
            2,
            OMP_NUM_THREADS="1",
        )
        self.assertEqual(ends[1][0], -9)
        self.assertEqual(ends[0][0], 0, ends[0][1])
        self.assertIn("SAID", ends[0][1])
        self.assertLess(float(ends[0][1].split("AFTER ")[1].split()[0]), 10)

    def test_elastic_run(self):
        texts = self.run_all(
            """
cohort.init()  # stays when hvd forms its world anew
hvd.init()
rank = hvd.rank()
torch.manual_seed(rank)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, batch=rank, epoch=0)
resets, calls = [], []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])

@hvd.elastic.run
def train(state, what):
    calls.append((state.batch, state.model.weight.tolist(), list(state.sampler)))
    assert hvd.allgather_object(calls[-1][:2]) == [calls[-1][:2]] * 2  # all have what rank 0 had
    wrapped = hvd.DistributedOptimizer(state.optimizer, state.model.named_parameters())
    wrapped.zero_grad()
    state.model(torch.ones(1, 2)).sum().backward()
    wrapped.step()
    state.sampler.record_batch(0, 1)
    state.batch += 1
    if len(calls) == 1:
        state.commit()
        state.kept = state.model.weight.tolist()
        with torch.no_grad():
            state.model.weight.add_(100)  # not committed: it goes
        state.batch = 50
        raise hvd.HorovodInternalError("as if a rank had been lost")
    if len(calls) == 2:
        assert state.batch == 2 and calls[1][1] == state.kept, (state.batch, calls)
        state.on_hosts_updated(time.time(), 2) if rank == 0 else None
        try:
            state.commit()
        except hvd.elastic.HostsUpdatedInterrupt as change:
            assert not change.skip_sync
            raise
        raise SystemExit("nobody heard of the new hosts")
    return what, state.batch

assert train(state, what="done") == ("done", 3)
assert resets == [2, 2], resets
assert [c[0] for c in calls] == [0, 1, 2], calls
assert calls[0][2] == [0, 2, 4, 6] or rank == 1
assert calls[1][2] == [[2, 4, 6], [3, 5, 7]][rank], calls
assert calls[2][2] == [[4, 6], [5, 7]][rank], calls
assert optimizer.state_dict()["state"], "the momentum is gone"

@hvd.elastic.run
def wrong(state):
    calls.append(0)
    raise hvd.HorovodInternalError("always")

calls.clear()
try:
    wrong(state)
    raise SystemExit("no end")
except hvd.HorovodInternalError:
    assert len(calls) == 3
hvd.shutdown()
cohort.shutdown()
"""
        )
        self.assertEqual(len(texts), 2)

    def test_a_rank_that_ends(self):
        texts = self.run_all(
            """
hvd.init()
if hvd.rank() == 1:
    mine = hvd.allreduce_async(torch.ones(1), name="mine")
    hvd.shutdown()
    try:
        hvd.synchronize(mine)
        raise SystemExit("was done after the end")
    except hvd.HorovodInternalError:
        pass
else:
    handle = hvd.allreduce_async(torch.ones(1), name="left alone")
    try:
        hvd.synchronize(handle)
        raise SystemExit("was done without the other rank")
    except hvd.HorovodInternalError as error:
        print("SAID", error)
    try:
        hvd.allreduce(torch.ones(1))
        raise SystemExit("was accepted after the end")
    except hvd.HorovodInternalError:
        pass
    hvd.shutdown()
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
hvd.shutdown()

# The same within elastic.run, with a world of hvd's own.
addresses = iter([os.environ["TEST_INIT"]] + [os.environ["TEST_INIT"].replace("/meeting", f"/meeting{i}") for i in range(3)])
cohort.init = lambda: _init(next(addresses))
hvd.init()
rank = hvd.rank()
state = hvd.elastic.ObjectState(step=0)

@hvd.elastic.run
def train(state):
    while state.step < 4:
        state.step += 1
        if state.step == 2 and hvd.rank() == 1 and not os.environ.get("FAILED"):
            os.environ["FAILED"] = "1"
            hvd.shutdown()  # the other learns it from its next operation
            raise hvd.HorovodInternalError("mine")
        hvd.allreduce(torch.ones(1), name="step")
        state.commit()
    return state.step

assert train(state) == 4
hvd.shutdown()
"""
        )
        self.assertIn("SAID", texts[0])


if __name__ == "__main__":
    unittest.main()
