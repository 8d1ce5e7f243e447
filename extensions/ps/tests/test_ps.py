"""cohort.ps: arrays, errors, optimizers against torch's own, ranks under `cohort run`; cohort.ps.torch against torch.nn."""

import gc
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import threading
import unittest

from cohort import ps
from cohort.errors import Error, InvalidArgument, Mismatch, NonFinite, Timeout, Unavailable
from tiers import slow

try:
    import numpy
except ImportError:
    numpy = None
try:
    import torch
except ImportError:
    torch = None

NAMES = (f"@cohort-py-ps-{os.getpid()}-{number}" for number in range(1000))


class Case(unittest.TestCase):
    def setUp(self):
        if numpy is None:
            self.skipTest("no NumPy")
        self.servers = [ps.Server(next(NAMES)) for _ in range(2)]

    def tearDown(self):
        gc.collect()
        for server in self.servers:
            server.close()

    def connect(self, worker=0, workers=1, **options):
        return ps.connect([server.endpoint for server in self.servers], worker, workers, **options)


class Arrays(Case):
    def test_pushes_and_pulls(self):
        with self.connect() as client:
            table = client.table("t", 3, optimizer=ps.Sgd(lr=1.0), consistency=ps.Async(), initializer=0.5)
            keys = numpy.arange(100, dtype=numpy.int64)
            gradients = numpy.arange(300, dtype=numpy.float32).reshape(100, 3)
            table.push(keys, gradients)
            numpy.testing.assert_array_equal(table.pull(keys), 0.5 - gradients)
            numpy.testing.assert_array_equal(table.pull([1, 1, -7]), [[-2.5, -3.5, -4.5]] * 2 + [[0.5] * 3])
            out = numpy.empty((1, 3), numpy.float32)
            self.assertIs(table.pull([2], out), out)
            self.assertEqual(out[0, 0], -5.5)
            table.push([2], out, lr=0.0)
            self.assertEqual(table.push_pull([2], out)[0, 0], 0.0)
            table.assign([2], numpy.ones((1, 3), numpy.float32))
            self.assertEqual(table.pull([2])[0, 0], 1.0)
            table.erase([2])
            self.assertEqual(table.pull([2])[0, 0], 0.5)
            stats = table.stats()
            self.assertEqual((stats["rows"], sum(stats["rows_of_servers"])), (99, 99))

    def test_several_under_way(self):
        with self.connect() as client:
            table = client.table("t", 8, optimizer=ps.Sgd(lr=1.0), consistency=ps.Async())
            keys = numpy.arange(1000, dtype=numpy.uint64)
            pushes = [table.push(keys, numpy.full((1000, 8), -1, numpy.float32), async_op=True) for _ in range(20)]
            read = table.pull(keys, async_op=True)
            self.assertTrue((read.wait() == 20).all())
            self.assertEqual(read.pulled.version, 20000)
            for push in pushes:
                self.assertIsNone(push.wait())
            del pushes, read

    def test_variables(self):
        with self.connect() as client:
            weights = client.variable("w", (300, 100), optimizer=ps.Sgd(lr=0.5), initial=1.0)
            self.assertTrue((weights.pull() == 1).all())
            weights.push(numpy.ones((300, 100), numpy.float32))
            self.assertTrue((weights.pull() == 1).all(), "its clock has not ended")
            self.assertEqual(client.clock(), 1)
            self.assertEqual(weights.pull().shape, (300, 100))
            self.assertTrue((weights.pull() == 0.5).all())
            weights.assign(numpy.zeros((300, 100), numpy.float32))
            self.assertTrue((weights.push_pull(numpy.ones((300, 100), numpy.float32)) == 0).all())

    def test_snapshots(self):
        keys = numpy.arange(50, dtype=numpy.int64)
        with tempfile.TemporaryDirectory() as folder:
            with self.connect() as client:
                table = client.table("t", 3, optimizer=ps.Adam(), initializer=ps.uniform(-1, 1))
                with self.assertRaisesRegex(Unavailable, "there is no whole snapshot"):
                    client.restore(folder)
                table.push(keys, numpy.ones((50, 3), numpy.float32))
                client.clock()
                rows = table.pull(keys)
                self.assertTrue(os.path.isfile(os.path.join(client.snapshot(folder), "manifest.json")))
                client.snapshot(folder, keep=1)
                self.assertEqual(len(os.listdir(folder)), 1)
                del table
            with ps.Server(next(NAMES)) as server, ps.connect([server.endpoint]) as client:
                self.assertEqual(client.restore(folder), 1)
                table = client.table("t", 3, optimizer=ps.Adam(), initializer=ps.uniform(-1, 1))
                numpy.testing.assert_array_equal(table.pull(keys), rows)

    def test_what_is_wrong_is_said(self):
        with self.connect() as client:
            table = client.table("t", 2)
            with self.assertRaisesRegex(InvalidArgument, r"not contiguous -- pass numpy.ascontiguousarray\(array\)$"):
                table.pull(numpy.arange(10, dtype=numpy.int64)[::2])
            with self.assertRaisesRegex(InvalidArgument, "not contiguous .*copy the result back"):
                table.pull(numpy.arange(2, dtype=numpy.int64), numpy.empty((2, 4), numpy.float32)[:, ::2])
            with self.assertRaisesRegex(InvalidArgument, "keys have to be int64 or uint64"):
                table.pull(numpy.zeros(3, numpy.int32))
            with self.assertRaisesRegex(InvalidArgument, "push: gradients: an array of float64 -- float32 is wanted"):
                table.push([1], numpy.zeros((1, 2)))
            with self.assertRaisesRegex(NonFinite, "the row of key 7 is nan"):
                table.assign([7], numpy.full((1, 2), numpy.nan, numpy.float32))
            with self.assertRaisesRegex(InvalidArgument, "1 keys need 2 floats"):
                table.push([1], numpy.zeros(3, numpy.float32))
            with self.assertRaisesRegex(NonFinite, "gradient of key 7 is nan"):
                table.push([7], numpy.full((1, 2), numpy.nan, numpy.float32))
            with self.assertRaisesRegex(Mismatch, "dim 2 and 3; the optimizer: Sgd .lr 0.001. and Sgd .lr 0.001.; the initializer"):
                client.table("t", 3, optimizer=ps.Sgd(momentum=0.5), initializer=1.0)
            with self.assertRaisesRegex(InvalidArgument, r"keys: \[1.5\] -- integers"):
                table.pull([1.5])
            with self.assertRaisesRegex(InvalidArgument, "all of int64 or all of uint64"):
                table.pull([-1, 2**63])
            with self.assertRaisesRegex(InvalidArgument, r"push: gradients: an array of shape \[1, 4\] -- \[2, 2\]"):
                table.push([1, 2], numpy.zeros((1, 4), numpy.float32))
            with self.assertRaisesRegex(InvalidArgument, r"shape \[3, 2\] -- \[2, 3\] is wanted"):
                client.variable("v", (2, 3)).push(numpy.zeros((3, 2), numpy.float32))
            with self.assertRaisesRegex(InvalidArgument, "least_recent"):
                client.table("u", 3, victim="any")
            with self.assertRaisesRegex(InvalidArgument, "beta1"):
                client.table("u", 3, optimizer=ps.Adam(betas=(1.0, 0.9)))

    def test_options_can_be_pickled(self):
        optimizers = [ps.Sgd(0.3, 0.9, 0.1, 0.2), ps.Adagrad(eps=0.5), ps.RowAdagrad(0.5), ps.Adam(betas=(0.5, 0.6)), ps.AdamW(), ps.Ftrl(l1=2.0)]
        initializers = [ps.constant(2), ps.uniform(-1, 1), ps.normal(0, 3)]
        with self.connect() as client:
            for i, optimizer in enumerate(optimizers):
                options = {"optimizer": optimizer, "initializer": initializers[i % 3], "consistency": ps.Bounded(i)}
                again = pickle.loads(pickle.dumps(options))
                self.assertIs(type(again["optimizer"]), type(optimizer))
                client.table(f"t{i}", 2, **options)
                client.table(f"t{i}", 2, **again)  # the servers compare
                with self.assertRaises(Mismatch):
                    client.table(f"t{i}", 2, **{**again, "consistency": pickle.loads(pickle.dumps(ps.Async()))})

    def test_a_loss_is_raised_once(self):
        with self.assertRaises(Error) as raised, self.connect(timeout=1.0) as client:
            table = client.table("t", 1, consistency=ps.Async())
            for server in self.servers:
                server.close()
            table.push([1], numpy.ones((1, 1), numpy.float32))
        self.assertIsNone(raised.exception.__context__)

    def test_options_of_a_wrong_type_are_named(self):
        with self.connect() as client:
            table = client.table("t", 2)

            def make(**options):
                return lambda: client.table("u", 2, **options)

            for call, said in [
                (make(optimizer=ps.Sgd), "table 'u': optimizer is the class Sgd -- pass an instance of it: Sgd"),
                (make(optimizer="sgd"), "optimizer is 'sgd' -- servers step by those of cohort.ps: pass Sgd"),
                (make(consistency=ps.Async), "consistency is the function Async -- call it: Async()"),
                (make(consistency="bounded"), "consistency is 'bounded' -- pass Sync(), Bounded(2) or Async()"),
                (make(initializer="normal"), "initializer is 'normal' -- pass a number, constant"),
                (make(initializer=ps.normal), "initializer is the function normal"),
                (make(admission="3"), "admission is '3' -- pass an integer from 1 on"),
                (make(max_age=1.5), "max_age is 1.5 -- pass an integer"),
                (make(seed=-1), "seed is -1 -- pass an integer from 0 to"),
                (lambda: client.table("u", "2"), "dim is '2' -- pass an integer from 1 on"),
                (lambda: client.table(3, 2), "table: name is 3 -- pass a text"),
                (lambda: client.variable("v", None), "variable 'v': shape is None -- pass the array's lengths"),
                (lambda: client.variable("v", (-2, -3)), "shape.0. is -2 -- pass an integer from 0 on"),
                (lambda: client.variable("v", 3, initial="x"), "initial is 'x' -- pass a number"),
                (lambda: table.pull(7), "pull: keys is 7 -- pass a list of integers, .*: .7."),
                (lambda: table.erase(None), "erase: keys is None -- pass a list"),
                (lambda: table.push([7], numpy.zeros((1, 2), numpy.float32), lr="1"), "push: lr is '1' -- pass a number"),
                (lambda: ps.Sgd("0.1"), "Sgd: lr is '0.1' -- pass a number"),
                (lambda: ps.Adam(betas=0.9), "Adam: betas is 0.9 -- pass two numbers"),
                (lambda: ps.Bounded(-1), "Bounded: staleness is -1 -- pass an integer from 0 on"),
                (lambda: ps.uniform("a", 1), "uniform: low is 'a' -- pass a number"),
                (lambda: ps.Server(4711), "Server: endpoint is 4711 -- pass"),
                (lambda: ps.Server(next(NAMES), memory="6GB"), "memory is '6GB' -- pass bytes, or a text such as"),
                (lambda: ps.Server(next(NAMES), memory=-1), "memory is -1 -- pass bytes"),
                (lambda: ps.Server(next(NAMES), patience=-1), "patience is -1 -- pass seconds"),
                (lambda: ps.Server(next(NAMES), replicas=2), "replicas is 2 -- pass an integer from 0 to 1"),
                (lambda: ps.Server(next(NAMES), replicas=1), "leave replicas out, or start servers by `cohort run"),
                (lambda: ps.connect(self.servers, 0, 1), "servers.0. is a cohort.ps.Server -- pass an endpoint.*endpoint"),
                (lambda: ps.connect([]), "servers is .. -- pass the servers' endpoints"),
                (lambda: ps.connect(["@a"], "0", 1), "connect: worker is '0' -- pass an integer"),
                (lambda: ps.connect(["@a"], 0, 1, timeout=None), "timeout is None -- pass a number"),
                (lambda: ps.connect(["@a"], 0, 1, connect_timeout=float("nan")), "connect_timeout is nan -- pass seconds"),
                (lambda: client.snapshot(3), "snapshot: folder is 3 -- pass a path"),
                (lambda: client.snapshot("s", keep=-1), "snapshot: keep is -1 -- pass an integer from 0"),
                (lambda: ps.ClusterCoordinator(3), "ClusterCoordinator: client is 3 -- pass worker 0's"),
            ]:
                with self.subTest(said), self.assertRaisesRegex(InvalidArgument, said.replace("()", r"\(\)").replace("(2)", r"\(2\)")):
                    call()

    def test_texts_stand_for_options_where_they_say_all(self):
        with ps.Server(next(NAMES), memory="500M") as server, ps.connect(server.endpoint, 0, 1) as client:
            self.assertFalse(client.table("t", 2, consistency="async").adds_workers)
            self.assertTrue(client.table("u", numpy.int64(2), consistency="sync").adds_workers)
            self.assertEqual(client.variable("v", numpy.int64(3)).shape, (3,))
        with self.assertRaisesRegex(InvalidArgument, "worker 0 has left the servers -- connect anew"):
            client.clock()

    def test_who_holds_the_others_up_is_named(self):
        with self.connect(0, 2), self.connect(1, 2, timeout=0.6) as client:
            table = client.table("t", 1)
            client.clock()
            with self.assertRaisesRegex(Timeout, "waits for worker 0 on"):
                table.pull([1])

    def test_workers_that_are_threads(self):
        results = {}

        def work(worker, consistency):
            with self.connect(worker, 3) as client:
                table = client.table("t", 1, optimizer=ps.Sgd(lr=1.0), consistency=consistency)
                for _ in range(20):
                    table.pull([5])
                    table.push([5], numpy.full((1, 1), -1, numpy.float32))
                    client.clock()
                staleness = table.stats()["staleness"]
                self.assertEqual(sum(staleness.values()), 20)
                self.assertTrue(set(staleness) <= {0, 1, 2}, staleness)
                client.barrier()
                results[worker] = float(table.pull([5])[0, 0])
                client.barrier()

        threads = [threading.Thread(target=work, args=(worker, ps.Bounded(2))) for worker in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(results, {0: 60.0, 1: 60.0, 2: 60.0})


@unittest.skipIf(torch is None, "no torch")
class Optimizers(Case):
    """A thousand steps of rows at the server, and of torch's optimizer here."""

    def compare(self, mine, make, sparse=False, steps=1000):
        with self.connect() as client:
            table = client.table(next(NAMES), 6, optimizer=mine, consistency=ps.Async(), initializer=ps.normal(0, 1))
            keys = torch.arange(10)
            weight = torch.nn.Parameter(torch.from_numpy(table.pull(keys)).clone())
            optimizer = make([weight])
            random = torch.Generator().manual_seed(3)
            for step in range(steps):
                gradient = torch.randn(10, 6, generator=random)
                if step % 50 == 0:
                    gradient.zero_()
                weight.grad = torch.sparse_coo_tensor(keys[None], gradient, (10, 6)) if sparse else gradient.clone()
                table.push(keys, gradient)
                optimizer.step()
            torch.testing.assert_close(torch.from_numpy(table.pull(keys)), weight.detach(), rtol=2e-5, atol=2e-5)

    def test_sgd(self):
        self.compare(ps.Sgd(lr=0.01), lambda p: torch.optim.SGD(p, lr=0.01))
        self.compare(
            ps.Sgd(lr=0.01, momentum=0.9, weight_decay=1e-3),
            lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-3),
        )
        self.compare(
            ps.Sgd(lr=0.01, momentum=0.9, dampening=0.3),
            lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, dampening=0.3),
        )
        self.compare(
            ps.Sgd(lr=0.01, momentum=0.9, nesterov=True),
            lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
        )

    @slow
    def test_adagrad(self):
        self.compare(ps.Adagrad(lr=0.05), lambda p: torch.optim.Adagrad(p, lr=0.05))
        self.compare(ps.Adagrad(lr=0.05), lambda p: torch.optim.Adagrad(p, lr=0.05), sparse=True)
        self.compare(
            ps.Adagrad(lr=0.05, lr_decay=0.01, weight_decay=1e-3, initial_accumulator_value=0.1),
            lambda p: torch.optim.Adagrad(p, 0.05, lr_decay=0.01, weight_decay=1e-3, initial_accumulator_value=0.1),
        )

    @slow
    def test_adam(self):
        self.compare(ps.Adam(lr=0.01), lambda p: torch.optim.SparseAdam(p, lr=0.01), sparse=True)
        self.compare(
            ps.Adam(lr=0.01, betas=(0.8, 0.99), weight_decay=1e-3),
            lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), weight_decay=1e-3),
        )
        self.compare(ps.AdamW(lr=0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1))


@unittest.skipIf(torch is None, "no torch")
class Embeddings(Case):
    def setUp(self):
        super().setUp()
        from cohort.ps import torch as modules

        self.modules = modules
        self.client = self.connect()
        self.table = self.client.table("e", 5, optimizer=ps.Sgd(lr=0.1), initializer=ps.normal(0, 1))
        self.reference = torch.nn.Embedding.from_pretrained(
            torch.from_numpy(self.table.pull(numpy.arange(50, dtype=numpy.int64))), freeze=False
        )

    def tearDown(self):
        self.client.leave()
        del self.client, self.table
        super().tearDown()

    def test_embedding_trains_as_torchs(self):
        embedding = self.modules.Embedding(self.table, padding_idx=3)
        self.reference.padding_idx = 3
        optimizer = torch.optim.SGD(self.reference.parameters(), lr=0.1)
        random = torch.Generator().manual_seed(1)
        for step in range(20):
            ids = torch.randint(0, 50, (4, 7), generator=random)
            mine, expected = embedding(ids), self.reference(ids)
            if step == 0:
                self.assertTrue(torch.equal(mine, expected))
            torch.testing.assert_close(mine, expected)  # torch may fuse a step's multiplication with its addition
            optimizer.zero_grad()
            mine.square().sum().backward()
            expected.square().sum().backward()
            optimizer.step()
            self.client.clock()

    def test_bags(self):
        ids = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9])
        begins = torch.tensor([0, 4, 4])
        weights = torch.rand(8)
        for options, extra in [
            ({"mode": "sum"}, {}),
            ({"mode": "sum"}, {"per_sample_weights": weights}),
            ({"mode": "mean"}, {}),
            ({"mode": "max"}, {}),
            ({"mode": "sum", "include_last_offset": True}, {}),
            ({"mode": "mean", "padding_idx": 4}, {}),
        ]:
            offsets = torch.tensor([0, 4, 8]) if "include_last_offset" in options else begins
            mine = self.modules.EmbeddingBag(self.table, **options)(ids, offsets, **extra)
            theirs = torch.nn.EmbeddingBag.from_pretrained(self.reference.weight.detach(), **options)
            self.assertTrue(torch.equal(mine, theirs(ids, offsets, **extra)), options)

    def test_gradients_of_a_bag(self):
        ids, offsets = torch.tensor([7, 7, 8, 900, 7]), torch.tensor([0, 2])
        before = torch.from_numpy(self.table.pull([7, 8, 900]))
        self.modules.EmbeddingBag(self.table, mode="sum")(ids, offsets).sum().backward()
        self.client.clock()
        after = torch.from_numpy(self.table.pull([7, 8, 900]))
        torch.testing.assert_close(before - after, 0.1 * torch.tensor([[3.0], [1.0], [1.0]]).expand(3, 5))

    def test_without_gradients_no_row_is_made(self):
        with torch.no_grad():
            self.modules.Embedding(self.table)(torch.arange(1000))
        self.client.clock()
        self.assertEqual(self.table.stats()["rows"], 0)

    def test_ids_of_any_size(self):
        ids = torch.tensor([2**62, -(2**63), -1])
        rows = self.modules.Embedding(self.table)(ids)
        self.assertEqual(rows.unique(dim=0).shape, (3, 5))


class Ranks(unittest.TestCase):
    PROGRAM = """
import numpy
import cohort
from cohort import ps

if cohort.role() == "server":
    ps.serve()
else:
    with ps.connect() as client:
        table = client.table("t", 4, optimizer=ps.Sgd(lr=1.0))
        keys = numpy.arange(100)
        for _ in range(10):
            table.pull(keys)
            table.push(keys, numpy.full((100, 4), -1.0 - client.worker, numpy.float32))
            client.clock()
        print(client.worker, client.workers, set(table.pull(keys).ravel().tolist()), table.stats()["rows_of_servers"])
"""

    def run_job(self, folder, text, *words, ranks=2, options=()):
        """Runs a job of two servers, with this program."""
        program = pathlib.Path(folder, "program.py")
        program.write_text(text)
        command = [os.environ["COHORT_COMMAND"], "run", "-q", "--prefix", "none", "--timeout", "60", "-np", str(ranks)]
        command += ["--servers", "2", *options, sys.executable, program, *words]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90)

    @unittest.skipIf(numpy is None, "no NumPy")
    def test_servers_of_the_job_are_found(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_job(folder, self.PROGRAM)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = sorted(done.stdout.splitlines())
        self.assertRegex(lines[0], r"^0 2 \{30\.0\} \[\d+, \d+\]$")
        self.assertRegex(lines[1], r"^1 2 \{30\.0\} \[\d+, \d+\]$")

    def test_servers_that_differ_are_refused_also_where_one_has_no_replicas(self):
        program = "import cohort\nfrom cohort import ps\nps.serve(replicas=cohort.role_number()) if cohort.role() == 'server' else ps.connect()\n"
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_job(folder, program, ranks=1)
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, "parameter server [01] has (no replicas|1 replicas and no journal) -- the first one has .*; all have the same options")

    AGAIN = """
import os, sys
import numpy
import cohort
from cohort import ps

if cohort.role() == "server":
    ps.serve(journal="journals")
else:
    with ps.connect() as client:
        table = client.table("t", 1, optimizer=ps.Sgd(lr=1.0), consistency=ps.Async())
        table.push(range(40), -numpy.ones((40, 1), numpy.float32))
        client.barrier()
        print(set(table.pull(range(40)).ravel().tolist()), flush=True)
        client.barrier()
        if sys.argv[1] == "dies":
            os._exit(3)
"""

    @unittest.skipIf(numpy is None, "no NumPy")
    def test_a_journal_of_the_job_before_is_set_aside(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "journals").mkdir()
            for how, status, value in (("dies", 3, "{2.0}"), ("ends", 0, "{2.0}"), ("ends", 0, "{2.0}")):
                done = self.run_job(folder, self.AGAIN, how)
                self.assertEqual((done.returncode, done.stdout.split()), (status, [value] * 2), done.stderr)
            self.assertIn("server-1.journal is of an earlier job: it is", done.stderr)
            self.assertTrue(pathlib.Path(folder, "journals/server-1.journal.earlier").exists())
            self.assertTrue(pathlib.Path(folder, "journals/server-1.journal.earlier-2").exists())

    @unittest.skipIf(numpy is None, "no NumPy")
    def test_several_servers_need_a_folder_of_journals(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_job(folder, self.AGAIN, "ends")
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("journal journals: there are 2 servers, which need a file each -- name a folder that exists", done.stderr)
            self.assertFalse(pathlib.Path(folder, "journals").exists())

    #: Server 1 ends by itself while a worker needs it.
    ENDS = """
import os, time
import numpy
import cohort
from cohort import ps

if cohort.role() == "server":
    server = ps.Server()
    cohort.announce_server(server.endpoint)
    while not server.workers_gone and not os.path.exists(f"end-{cohort.role_number()}"):
        time.sleep(0.01)
else:
    table = ps.connect().table("t", 1, consistency="async")
    open("end-1", "w").close()
    while True:
        table.push(numpy.arange(40), numpy.full((40, 1), -1.0, numpy.float32))
"""

    @unittest.skipIf(numpy is None, "no NumPy")
    def test_a_server_that_ends_by_itself_is_not_waited_for(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_job(folder, self.ENDS, ranks=1)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, r"PeerLost: parameter server 1 at .*: it has ended \(exit code 0 after .* s\)")

    @unittest.skipIf(numpy is None, "no NumPy")
    def test_servers_without_a_program(self):
        served = f"{sys.executable} -m cohort.ps --memory 64M"
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_job(folder, self.PROGRAM, options=("--server-program", served))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(done.stdout.splitlines()), 2)

    #: Worker 0 kills servers meanwhile, one after another.
    KILLED = """
import json, os, signal, sys, time
import numpy
import cohort
from cohort import ps

def server_pids():
    with open(os.environ["COHORT_RUN_DIR"] + "/job.json") as record:
        return json.load(record)["server_pids"]

if cohort.role() == "server":
    ps.serve(**eval(sys.argv[1]))
else:
    with ps.connect() as client:
        table = client.table("t", 1, optimizer=ps.Sgd(lr=1.0), consistency=ps.Async())
        keys, ones = numpy.arange(40), numpy.full((40, 1), -1.0, numpy.float32)
        pushed = 0
        for victim in sys.argv[2]:
            if client.worker == 0:
                before = server_pids()[int(victim)]
                os.kill(before, signal.SIGKILL)
            while pushed % 50 or (client.worker == 0 and server_pids()[int(victim)] == before):
                table.push(keys, ones)
                pushed += 1
            for _ in range(50):
                table.push(keys, ones)
                pushed += 1
        everywhere = client.variable("pushed", 1, optimizer=ps.Sgd(lr=1.0), consistency=ps.Async())
        everywhere.push(numpy.full(1, -float(pushed), numpy.float32))
        client.barrier()
        print(client.worker, set(table.pull(keys).ravel().tolist()) == set(everywhere.pull().tolist()))
        client.barrier()
"""

    def run_killed(self, options, victims, *words):
        command = [os.environ["COHORT_COMMAND"], "run", "--prefix", "none", "--timeout", "80", "-np", "2", *words]
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "program.py")
            program.write_text(self.KILLED)
            pathlib.Path(folder, "journals").mkdir()
            done = subprocess.run(
                [*command, sys.executable, program, options, victims], cwd=folder, capture_output=True, text=True, timeout=90
            )
            record = json.loads(pathlib.Path(folder, "runs/latest/job.json").read_text())
        return done, record

    @unittest.skipIf(numpy is None, "no NumPy")
    def test_a_killed_server_comes_again_with_its_journal(self):
        done, record = self.run_killed("{'journal': 'journals'}", "0110", "--servers", "2", "--server-restarts", "4")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(done.stdout.splitlines()), ["0 True", "1 True"], done.stderr)
        self.assertEqual([failure["number"] for failure in record["server_restarts"]], [0, 1, 1, 0])
        self.assertIn("(4 of 4 times, --server-restarts)", done.stderr)

    @unittest.skipIf(numpy is None, "no NumPy")
    def test_servers_have_replicas_where_the_job_goes_on_when_one_dies(self):
        done, _ = self.run_killed("{}", "1", "--servers", "3", "--server-restarts", "1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(done.stdout.splitlines()), ["0 True", "1 True"], done.stderr)

    #: Server 0 has all rows, and server 1 their copies, but is stopped most of the time while the worker leaves.
    LEAVES = """
import json, os, signal, sys, threading, time
import cohort
from cohort import ps

def server_pids():
    with open(os.environ["COHORT_RUN_DIR"] + "/job.json") as record:
        return json.load(record)["server_pids"]

def hold(pid, left):
    while not left.is_set():
        os.kill(pid, signal.SIGSTOP)
        left.wait(0.3)
        os.kill(pid, signal.SIGCONT)
        left.wait(0.0002)

if cohort.role() == "server":
    ps.serve()
else:
    client, left = ps.connect(), threading.Event()
    before = server_pids()[1]
    os.kill(before, signal.SIGKILL)
    while server_pids()[1] == before:
        time.sleep(0.05)
    time.sleep(2)  # server 1 has copies of all rows then
    thread = threading.Thread(target=hold, args=(server_pids()[1], left))
    thread.start()
    time.sleep(0.1)
    try:
        client.leave()
        print("left")
    finally:
        left.set()
        thread.join()
"""

    def test_a_server_ends_when_the_last_worker_knows_that_it_has_left(self):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "program.py")
            program.write_text(self.LEAVES)
            words = ["--prefix", "none", "--timeout", "80", "-np", "1", "--servers", "2", "--server-restarts", "1"]
            command = [os.environ["COHORT_COMMAND"], "run", *words, sys.executable, program]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90)
        self.assertEqual((done.returncode, done.stdout), (0, "left\n"), done.stderr)

    @unittest.skipIf(numpy is None, "no NumPy")
    def test_what_a_server_without_memory_has_lost_ends_the_job(self):
        done, _ = self.run_killed("{'replicas': 0}", "1", "--servers", "2", "--server-restarts", "3")
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r"been started again without what it knew: \d+ of this worker's \d+ changes are lost")

    @unittest.skipIf(numpy is None, "no NumPy")
    def test_servers_with_replicas_and_journals_recover_whoever_is_killed(self):
        options = "{'journal': 'journals', 'replicas': 1}"
        done, record = self.run_killed(options, "0101", "--servers", "2", "--server-restarts", "4")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(done.stdout.splitlines()), ["0 True", "1 True"], done.stderr)
        self.assertEqual([failure["number"] for failure in record["server_restarts"]], [0, 1, 0, 1])

    @unittest.skipIf(numpy is None, "no NumPy")
    def test_a_wrong_option_of_a_server_ends_the_job_at_once(self):
        done, record = self.run_killed("{'patience': 0}", "0", "--servers", "2", "--server-restarts", "4")
        self.assertNotEqual(done.returncode, 0)
        self.assertNotIn("it is started again", done.stderr)
        self.assertEqual(record.get("server_restarts", []), [])
        self.assertRegex(done.stderr, r"a patience of 0 ms -- above 0(.|\n)*server \d")

    @unittest.skipIf(numpy is None, "no NumPy")
    def test_a_job_without_servers_is_told_of(self):
        with self.assertRaisesRegex(InvalidArgument, "--servers"):
            ps.connect()


if __name__ == "__main__":
    unittest.main()
