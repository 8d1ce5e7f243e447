"""cohort.ps.torch: a step and a checkpoint for dense parts and tables together, and what is left of them after kills; dense
parameters on servers."""

import gc
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from support import numpy, torch

from cohort import ps
from cohort.errors import InvalidArgument, NonFinite, Unavailable

NAMES = (f"@cohort-hybrid-{os.getpid()}-{number}" for number in itertools.count())


class Case(unittest.TestCase):
    """One worker, two servers; a model of an embedding and a linear part, here and as torch alone has it."""

    memory = 0

    def setUp(self):
        if torch is None or numpy is None:
            self.skipTest("no torch, or no NumPy")
        from cohort.ps import torch as modules

        self.modules = modules
        self.servers = [ps.Server(next(NAMES), memory=self.memory) for _ in range(2)]
        self.client = self.connect()
        self.table = self.client.table("e", 4, optimizer=ps.Sgd(lr=0.1), initializer=ps.normal(0, 1))
        self.embedding = modules.Embedding(self.table)
        torch.manual_seed(1)
        self.linear = torch.nn.Linear(4, 1)
        self.local = torch.nn.Embedding.from_pretrained(torch.from_numpy(self.table.pull(list(range(50)))), freeze=False)
        self.local_linear = torch.nn.Linear(4, 1)
        self.local_linear.load_state_dict(self.linear.state_dict())
        self.reference = torch.optim.SGD([*self.local.parameters(), *self.local_linear.parameters()], lr=0.1)
        self.dense = torch.optim.SGD(self.linear.parameters(), lr=0.1)

    def tearDown(self):
        if hasattr(self, "client"):
            self.client.leave()
            del self.client, self.table, self.embedding
            gc.collect()
            for server in self.servers:
                server.close()

    def connect(self, worker=0, workers=1, **options):
        return ps.connect([server.endpoint for server in self.servers], worker, workers, **options)

    def losses(self, step):
        ids = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(step))
        return self.linear(self.embedding(ids)).square().mean(), self.local_linear(self.local(ids)).square().mean()

    def assert_same(self):
        torch.testing.assert_close(torch.from_numpy(self.table.pull(list(range(50)))), self.local.weight.detach())
        torch.testing.assert_close(self.linear.weight, self.local_linear.weight)


@unittest.skipIf(torch is None, "no torch")
class Steps(Case):
    def test_trains_as_torch_does(self):
        optimizer = self.modules.HybridOptimizer(self.dense, [self.embedding])
        schedules = [torch.optim.lr_scheduler.StepLR(one, 5, 0.5) for one in (optimizer, self.reference)]
        for step in range(20):
            optimizer.zero_grad()
            self.reference.zero_grad()
            for part in range(2):  # two passes add up
                mine, theirs = self.losses(2 * step + part)
                mine.backward()
                theirs.backward()
            optimizer.step()
            self.reference.step()
            for schedule in schedules:
                schedule.step()
        self.assertEqual(optimizer.table_rates(), {"e": 0.1 / 16})
        self.assert_same()
        self.assertEqual(self.client.now, 20)

    def test_a_closure_is_called_once(self):
        optimizer = self.modules.HybridOptimizer(self.dense, [self.embedding])
        calls = []

        def closure():
            calls.append(1)
            optimizer.zero_grad()
            loss = self.losses(1)[0]
            loss.backward()
            return loss

        with torch.no_grad():
            loss = optimizer.step(closure)
        self.assertEqual((len(calls), loss.requires_grad), (1, True))
        self.losses(1)[1].backward()
        self.reference.step()
        self.assert_same()

    def test_gradients_that_are_dropped_are_not_pushed(self):
        optimizer = self.modules.HybridOptimizer(self.dense, [self.embedding])
        self.losses(1)[0].backward()
        optimizer.zero_grad()
        optimizer.step()
        self.assertEqual(self.table.stats()["rows"], 0)

    def test_modules_over_one_table(self):
        bag = self.modules.EmbeddingBag(self.table, mode="sum")
        optimizer = self.modules.HybridOptimizer(self.dense, [self.embedding, bag])
        self.assertEqual(len(optimizer.param_groups), 2)
        ids = torch.tensor([[3, 4]])
        before = torch.from_numpy(self.table.pull([3]))
        (self.embedding(ids).sum() + bag(ids).sum()).backward()
        optimizer.step()
        torch.testing.assert_close(before - torch.from_numpy(self.table.pull([3])), torch.full((1, 4), 0.2))

    def test_what_is_not_finite_leaves_both_parts_alone(self):
        optimizer = self.modules.HybridOptimizer(self.dense, [self.embedding])
        before = self.linear.weight.detach().clone()
        (self.losses(1)[0] * float("nan")).backward()
        with self.assertRaisesRegex(NonFinite, "gradient of key"):
            optimizer.step()
        self.assertTrue(torch.equal(self.linear.weight, before))
        optimizer.zero_grad()
        self.losses(1)[0].backward()
        optimizer.step()
        self.losses(1)[1].backward()
        self.reference.step()
        self.assert_same()

    def test_a_rate_that_a_table_refuses_leaves_both_parts_alone(self):
        table = self.client.table("f", 4, optimizer=ps.Ftrl(lr=0.1))
        embedding = self.modules.Embedding(table)
        optimizer = self.modules.HybridOptimizer(self.dense, [embedding])
        before = self.linear.weight.detach().clone()
        (self.linear(embedding(torch.tensor([1, 2]))) - 1).square().mean().backward()
        optimizer.param_groups[-1]["lr"] = 0.05
        with self.assertRaisesRegex(InvalidArgument, "Ftrl's is 0.1"):
            optimizer.step()
        self.assertTrue(torch.equal(self.linear.weight, before))
        optimizer.param_groups[-1]["lr"] = 0.1
        optimizer.step()
        self.assertEqual(table.stats()["rows"], 2)

    def test_a_rate_that_a_later_table_refuses_leaves_earlier_ones_alone(self):
        tables = [self.client.table("first", 4), self.client.table("second", 4, optimizer=ps.Ftrl(lr=0.1))]
        embeddings = [self.modules.Embedding(table) for table in tables]
        optimizer = self.modules.HybridOptimizer(self.dense, embeddings)
        keys = torch.tensor([1, 2])
        (self.linear(embeddings[0](keys) + embeddings[1](keys)) - 1).square().mean().backward()
        optimizer.param_groups[-1]["lr"] = 0.05
        with self.assertRaisesRegex(InvalidArgument, "Ftrl's is 0.1"):
            optimizer.step()
        optimizer.param_groups[-1]["lr"] = 0.1
        optimizer.step()
        self.assertEqual([table.stats()["steps"] for table in tables], [2, 2])

    def test_the_state(self):
        optimizer = self.modules.HybridOptimizer(self.dense, [self.embedding])
        optimizer.param_groups[1]["lr"] = 0.5
        other = self.modules.HybridOptimizer(
            torch.optim.SGD(self.linear.parameters(), lr=3.0), [self.modules.Embedding(self.table)]
        )
        other.load_state_dict(optimizer.state_dict())
        self.assertEqual([group["lr"] for group in other.param_groups], [0.1, 0.5])

    def test_what_cannot_be_is_refused(self):
        make = self.modules.HybridOptimizer
        with self.assertRaisesRegex(InvalidArgument, "no tables"):
            make(self.dense, [])
        with self.assertRaisesRegex(InvalidArgument, "Linear is no Embedding"):
            make(self.dense, [self.linear])
        with self.assertRaisesRegex(InvalidArgument, "tables is a .*Embedding -- pass a list of modules"):
            make(self.dense, self.embedding)
        with self.assertRaisesRegex(InvalidArgument, "dense is a .*Linear -- pass the dense part's optimizer"):
            make(self.linear, [self.embedding])
        with self.assertRaisesRegex(InvalidArgument, "CheckpointFolder: client is 'folder' -- pass this rank's"):
            self.modules.CheckpointFolder(self.client, "folder")
        for module in (self.modules.Embedding, self.modules.EmbeddingBag):
            with self.assertRaisesRegex(InvalidArgument, f"{module.__name__}: table is 10 -- pass a table.*client.table"):
                module(10, "mean")
        with self.assertRaisesRegex(InvalidArgument, "padding_idx is 'a' -- pass an integer"):
            self.modules.Embedding(self.table, "a")
        with self.assertRaisesRegex(InvalidArgument, "mode is 'median' -- pass \"sum\", \"mean\" or \"max\""):
            self.modules.EmbeddingBag(self.table, "median")
        with self.assertRaisesRegex(TypeError, "Embedding: ids are .1, 2. -- pass a tensor of int32 or int64"):
            self.embedding([1, 2])
        with self.assertRaisesRegex(InvalidArgument, "LBFGS"):
            make(torch.optim.LBFGS(self.linear.parameters()), [self.embedding])
        optimizer = make(self.dense, [self.embedding])
        with self.assertRaisesRegex(InvalidArgument, "another one steps"):
            make(self.dense, [self.embedding])
        with self.assertRaisesRegex(InvalidArgument, "GradScaler"):
            optimizer.step(grad_scaler=object())


class WithoutMemory(Case):
    memory = 4 << 20

    def test_after_a_step_that_failed_in_its_midst_no_more_are_taken(self):
        optimizer = self.modules.HybridOptimizer(self.dense, [self.embedding])
        self.embedding(torch.arange(1_000_000)).sum().backward()
        with self.assertRaisesRegex(Unavailable, "no memory"):
            optimizer.step()
        optimizer.zero_grad()
        with self.assertRaisesRegex(InvalidArgument, "an earlier step failed in its midst"):
            optimizer.step()


class Checkpoints(Case):
    def test_both_parts_come_back(self):
        optimizer = self.modules.HybridOptimizer(self.dense, [self.embedding])
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = self.modules.CheckpointFolder(folder, self.client, keep=2)
            self.assertIsNone(checkpoints.load_latest(self.linear, optimizer))
            for step in range(4):
                self.losses(step)[0].backward()
                optimizer.step()
                optimizer.param_groups[1]["lr"] = 0.5
                checkpoints.save(self.linear, optimizer, step=step, values={"mine": "yes"})
            self.assertEqual(len(os.listdir(os.path.join(folder, "tables"))), 2)
            rows, weight = self.table.pull(list(range(50))), self.linear.weight.detach().clone()
            with self.assertRaisesRegex(InvalidArgument, "table 'e' has .* rows already"):
                checkpoints.load_latest(self.linear, optimizer)
            with ps.Server(next(NAMES)) as server, ps.connect([server.endpoint]) as client:
                table = client.table("e", 4, optimizer=ps.Sgd(lr=0.1), initializer=ps.normal(0, 1))
                linear = torch.nn.Linear(4, 1)
                again = self.modules.HybridOptimizer(
                    torch.optim.SGD(linear.parameters(), lr=0.1), [self.modules.Embedding(table)]
                )
                info = self.modules.CheckpointFolder(folder, client).load_latest(linear, again)
                self.assertEqual((info.progress.step, info.progress.values["mine"]), (3, "yes"))
                numpy.testing.assert_array_equal(table.pull(list(range(50))), rows)
                self.assertTrue(torch.equal(linear.weight, weight))
                self.assertEqual(again.table_rates(), {"e": 0.5})

    def test_tables_that_a_manifest_may_name_stay(self):
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = self.modules.CheckpointFolder(folder, self.client, keep=1)

            def save(step):
                return checkpoints.save(self.linear, step=step).progress.values["parameter servers"]

            tables = pathlib.Path(folder, "tables")
            first = save(0)
            newer = pathlib.Path(folder, "checkpoint-000000-step-0")
            newer.mkdir()
            newer.joinpath("manifest.json").write_text(f'{{"version": 99, "tables": "{first}"}}')
            second = save(1)
            self.assertEqual({path.name for path in tables.iterdir()}, {first, second})
            newer.joinpath("manifest.json").unlink()
            newer.joinpath("manifest.json").mkdir()  # cannot be read at the moment
            third = save(2)
            self.assertEqual({path.name for path in tables.iterdir()}, {first, second, third})
            newer.joinpath("manifest.json").rmdir()
            newer.rmdir()
            other = self.modules.CheckpointFolder(folder, self.client)
            other._hold_tables()  # another job saves: its tables are there, and its dense part is not
            tables.joinpath("step-7-other").mkdir()
            fourth = save(3)
            self.assertEqual({path.name for path in tables.iterdir()}, {first, second, third, fourth, "step-7-other"})
            other.close()
            fifth = save(4)
            self.assertEqual({path.name for path in tables.iterdir()}, {fifth})

    def test_in_the_background(self):
        optimizer = self.modules.HybridOptimizer(self.dense, [self.embedding])
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = self.modules.CheckpointFolder(folder, self.client)
            for step in range(3):
                self.losses(step)[0].backward()
                optimizer.step()
                checkpoints.save_async(self.linear, optimizer, step=step)
            checkpoints.close()
            self.assertEqual([info.progress.step for info in checkpoints.list()], [0, 1, 2])
            with self.assertRaisesRegex(InvalidArgument, "local"):
                self.modules.CheckpointFolder(folder, self.client, place="local")


class Dense(Case):
    def test_parameters_on_servers_train_as_torchs(self):
        served = self.modules.DistributedOptimizer(
            self.client, self.linear.named_parameters(), optimizer=ps.Sgd(lr=0.1, momentum=0.9)
        )
        theirs = torch.optim.SGD(self.local_linear.parameters(), lr=0.1, momentum=0.9)
        for step in range(20):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            for model, optimizer in ((self.linear, served), (self.local_linear, theirs)):
                optimizer.zero_grad()
                (model(x).square().sum() / 8).backward()
                optimizer.step()
        torch.testing.assert_close(self.linear.weight, self.local_linear.weight)
        torch.testing.assert_close(self.linear.bias, self.local_linear.bias)

    def test_what_it_is_made_without_is_named(self):
        make, named = self.modules.DistributedOptimizer, self.linear.named_parameters
        for call, said in [
            (lambda: make(self.linear.parameters()), "client is a generator -- pass this worker's first"),
            (lambda: make(self.client), "named_parameters is None -- pass module.named_parameters"),
            (lambda: make(self.client, self.linear), "named_parameters is a .*Linear -- pass module.named_parameters"),
            (lambda: make(self.client, self.linear.parameters()), "has a .*Parameter, and not pairs of a name and a parameter"),
            (lambda: make(self.client, named(), optimizer=torch.optim.SGD), "optimizer is the class SGD -- servers step by"),
            (lambda: make(self.client, named(), consistency=3), "consistency is 3 -- pass Sync"),
            (lambda: make(self.client, [("w", torch.ones(2, device="meta"))]), "w is not float32, contiguous and on the CPU"),
        ]:
            with self.subTest(said), self.assertRaisesRegex(InvalidArgument, said):
                call()
        sparse = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = make(self.client, sparse.named_parameters(), prefix="sparse.")
        sparse(torch.tensor([1])).sum().backward()
        with self.assertRaisesRegex(InvalidArgument, "the gradient of weight is sparse"):
            optimizer.step()


PROGRAM = """
import hashlib, os, pathlib, signal, sys
import numpy, torch
import cohort
from cohort import ps

out, kind, strike, steps = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], 12
if cohort.role() == "server":
    ps.serve()
    sys.exit()

torch.set_num_threads(1)
cohort.init()
from cohort import checkpoint
from cohort.ps import torch as modules

rank, size = cohort.rank(), cohort.size()
client = ps.connect()
table = client.table("e", 4, optimizer=ps.Adagrad(lr=0.1), initializer=ps.normal(0, 1))
embedding = modules.Embedding(table)
torch.manual_seed(1)
linear = torch.nn.Linear(4, 1)
if kind == "nn":
    model = cohort.nn.DistributedDataParallel(linear)
    dense = torch.optim.SGD(linear.parameters(), lr=0.1, momentum=0.9)
else:
    import cohort.horovod.torch as hvd
    hvd.init()
    model = linear
    dense = hvd.DistributedOptimizer(torch.optim.SGD(linear.parameters(), lr=0.1, momentum=0.9), linear.named_parameters())
optimizer = modules.HybridOptimizer(dense, [embedding])
checkpoints = modules.CheckpointFolder(out, client, keep=3)

def die_within(owner, name, number, mine):
    # After the so-manieth call has done its work, before its caller goes on.
    call, count = getattr(owner, name), 0
    def called(*args, **kwargs):
        nonlocal count
        result = call(*args, **kwargs)
        count += 1
        if count == number and mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, called)

if strike == "between":
    die_within(dense, "step", 7, rank == 1)
elif strike == "saving":
    die_within(client, "snapshot", 2, rank == 0)

first = 0
if found := checkpoints.load_latest(linear, optimizer):
    first = found.progress.step
for step in range(first, steps):
    random = torch.Generator().manual_seed(step * size + rank)
    ids = torch.randint(0, 1000, (16,), generator=random)
    optimizer.zero_grad()
    model(embedding(ids)).square().mean().backward()
    optimizer.step()
    if (step + 1) % 3 == 0:
        checkpoints.save(linear, optimizer, step=step + 1)
rows = table.pull(numpy.arange(1000))
if rank == 0:
    whole = hashlib.sha256(rows.tobytes() + b"".join(p.detach().numpy().tobytes() for p in linear.parameters()))
    print("from", first, "to", whole.hexdigest())
client.leave()
"""

# The same model twice: its embedding on servers, and on every rank under DistributedDataParallel.
SAME = """
import sys
import numpy, torch
import cohort
from cohort import ps

if cohort.role() == "server":
    ps.serve()
    sys.exit()

torch.set_num_threads(1)
cohort.init()
from cohort.nn import DistributedDataParallel
from cohort.ps import torch as modules

class Model(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        torch.manual_seed(1)
        self.rows, self.dense = rows, torch.nn.Linear(4, 1)

    def forward(self, ids):
        return self.dense(torch.nn.functional.relu(self.rows(ids)))

client = ps.connect()
table = client.table("e", 4, optimizer=ps.Sgd(lr=0.5), initializer=ps.normal(0, 1))
rows = torch.from_numpy(table.pull(numpy.arange(200)))
here, there = Model(torch.nn.Embedding.from_pretrained(rows.clone(), freeze=False)), Model(modules.Embedding(table))
local, served = DistributedDataParallel(here), DistributedDataParallel(there)
whole = torch.optim.SGD(here.parameters(), lr=0.5)
hybrid = modules.HybridOptimizer(torch.optim.SGD(there.parameters(), lr=0.5), [there.rows])
for step in range(50):
    ids = torch.randint(0, 200, (32,), generator=torch.Generator().manual_seed(2 * step + cohort.rank()))
    for model, optimizer in ((local, whole), (served, hybrid)):
        optimizer.zero_grad()
        (model(ids) - 1).square().mean().backward()
        optimizer.step()
found = torch.from_numpy(table.pull(numpy.arange(200)))
with torch.no_grad():
    print("rows differ by", float((found - here.rows.weight).abs().max()), "dense by",
          float((here.dense.weight - there.dense.weight).abs().max()), "trained by", float((rows - found).abs().max()))
client.leave()
"""


class Alike(unittest.TestCase):
    def test_embeddings_on_servers_train_as_those_on_every_rank(self):
        if torch is None or numpy is None:
            self.skipTest("no torch, or no NumPy")
        command = [os.environ["COHORT_COMMAND"], "run", "-q", "--prefix", "none", "--timeout", "200", "-np", "2", "--servers", "3"]
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "program.py").write_text(SAME)
            done = subprocess.run([*command, sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, timeout=230)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = re.findall(r"rows differ by (\S+) dense by (\S+) trained by (\S+)", done.stdout)
        self.assertEqual(len(found), 2, done.stdout)
        for rows, dense, trained in found:
            self.assertLess(float(rows), 1e-5)
            self.assertLess(float(dense), 1e-5)
            self.assertGreater(float(trained), 0.01)


@unittest.skipIf(torch is None or numpy is None, "no torch, or no NumPy")
class Killed(unittest.TestCase):
    """Two ranks and their servers: a killed training goes on to the bits of one that was not."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        (cls.folder / "program.py").write_text(PROGRAM)
        cls.bits = {}

    def train(self, out, kind, strike="none", servers=2):
        command = [os.environ["COHORT_COMMAND"], "run", "-q", "--prefix", "none", "--timeout", "200", "-np", "2"]
        command += ["--servers", str(servers), "--", sys.executable, "program.py", out, kind, strike]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=230)
        found = re.search(r"from (\d+) to (\w+)", done.stdout)
        return done, (int(found[1]), found[2]) if found else None

    def trained(self, *args, **options):
        done, result = self.train(*args, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return result

    def whole(self, kind):
        """The bits of a training that nothing happens to."""
        if kind not in self.bits:
            first, self.bits[kind] = self.trained(f"whole-{kind}", kind)
            self.assertEqual(first, 0)
        return self.bits[kind]

    def killed_within_a_step(self, kind):
        done, result = self.train(f"killed-{kind}", kind, "between")
        self.assertNotEqual(done.returncode, 0)
        self.assertIsNone(result)
        self.assertEqual(self.trained(f"killed-{kind}", kind, servers=3), (6, self.whole(kind)))

    def test_between_the_dense_step_and_the_clock(self):
        self.killed_within_a_step("nn")

    def test_between_the_step_of_horovods_optimizer_and_the_clock(self):
        self.killed_within_a_step("hvd")

    def test_between_the_two_parts_of_a_checkpoint(self):
        bits = self.whole("nn")
        self.assertNotEqual(self.train("saving", "nn", "saving")[0].returncode, 0)
        tables = self.folder / "saving" / "tables"
        self.assertEqual(len(list(tables.iterdir())), 2, "the second has no dense part")
        self.assertEqual(self.trained("saving", "nn"), (3, bits))
        self.assertEqual(len(list(tables.iterdir())), 3)

    def test_damaged_tables_are_passed_over(self):
        bits = self.whole("nn")
        shutil.copytree(self.folder / "whole-nn", self.folder / "damaged")
        newest = max((self.folder / "damaged" / "tables").iterdir(), key=lambda path: int(path.name.split("-")[1]))
        damaged = next(path for path in newest.glob("*/*") if path.name != "manifest.json")
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(data)
        done, result = self.train("damaged", "nn")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(result, (9, bits))
        self.assertIn("passed over", done.stderr)


if __name__ == "__main__":
    unittest.main()
