"""hvd.DistributedOptimizer and SyncBatchNorm on all ranks of `cohort run -np N`: each rank runs this."""

import copy
import gc
import pickle
import time
import unittest
import warnings
from collections import defaultdict, deque

from support import SECONDS, torch
from support_hvd import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort

if torch is not None:
    import cohort.horovod.torch as hvd


def network(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()


def batches(steps, size):
    """Returns whole batches, and for each rank its parts of them."""
    generator = torch.Generator().manual_seed(7)
    whole = [
        (torch.randn(4 * size, 6, generator=generator).double(), torch.randint(0, 3, (4 * size,), generator=generator))
        for _ in range(steps)
    ]
    rank = hvd.rank()
    return whole, [(x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]) for x, y in whole]


loss_of = torch.nn.functional.cross_entropy if torch is not None else None


class Case(unittest.TestCase):
    def setUp(self):
        self.rank, self.size = hvd.rank(), hvd.size()

    def tearDown(self):
        hvd.barrier()

    def alike(self, model, other, **tolerance):
        for (name, one), two in zip(model.state_dict().items(), other.state_dict().values()):
            torch.testing.assert_close(one, two, msg=lambda text: f"{name}: {text}", **tolerance)

    def on_all_ranks(self, model):
        mine = torch.cat([tensor.reshape(-1).double() for tensor in model.state_dict().values()])
        every = hvd.allgather(mine.unsqueeze(0))
        self.assertTrue(all(torch.equal(every[0], one) for one in every))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


class BySamples(Case):
    """The reference is one process that trains on all samples. Ranks have different numbers of them, and one may have none."""

    def train(self, **options):
        alone, model = network(), network()
        single = OPTIMIZERS["SGD"](alone.parameters())
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](model.parameters()), named_parameters=model.named_parameters(), average_by="samples",
            **(options.pop("groups_of", lambda _: {})(model)), **options,
        )
        generator = torch.Generator().manual_seed(7)
        for step in range(4):
            counts = [(3 * rank + 2 * step + 1) % 7 for rank in range(self.size)]
            counts[step % self.size] += 1
            inputs = torch.randn(sum(counts), 6, generator=generator).double()
            labels = torch.randint(0, 3, (sum(counts),), generator=generator)
            single.zero_grad()
            loss_of(alone(inputs), labels).backward()
            single.step()
            first, mine = sum(counts[: self.rank]), counts[self.rank]
            optimizer.zero_grad()
            optimizer.set_sample_count(mine)
            if mine:
                loss_of(model(inputs[first : first + mine]), labels[first : first + mine]).backward()
            optimizer.step()
        self.alike(model, alone)
        self.on_all_ranks(model)

    def test_gives_the_average_of_all_samples(self):
        self.train()
        self.train(groups=2)
        self.train(gradient_predivide_factor=2.0)
        self.train(groups_of=lambda model: {"groups": [list(model[0].parameters())]})

    def test_a_rank_without_samples_brings_nothing(self):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), average_by="samples"
        )
        optimizer.set_sample_count(0 if self.rank else 1)
        (model(torch.ones(1, 6).double()).sum() * (float("nan") if self.rank else 1.0)).backward()
        optimizer.synchronize()
        self.assertEqual(model[2].bias.grad.tolist(), [1.0] * 3)
        with optimizer.skip_synchronize():
            optimizer.step()

    def test_what_has_no_meaning_is_refused(self):
        model = network()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        for options in dict(op=hvd.Sum), dict(backward_passes_per_step=2), dict(op=hvd.Adasum):
            with self.assertRaisesRegex(ValueError, "average_by='samples' goes with"):
                hvd.DistributedOptimizer(plain, average_by="samples", **options)
        with self.assertRaisesRegex(ValueError, "'ranks' and 'samples' are possible"):
            hvd.DistributedOptimizer(plain, average_by="batches")
        with self.assertRaisesRegex(ValueError, "averages by ranks"):
            hvd.DistributedOptimizer(torch.optim.SGD(network().parameters(), lr=0.1)).set_sample_count(1)
        optimizer = hvd.DistributedOptimizer(plain, average_by="samples")
        for wrong in -1, 1.5, True:
            with self.assertRaisesRegex(ValueError, "a number from 0"):
                optimizer.set_sample_count(wrong)
        with self.assertRaisesRegex(ValueError, "goes with 1 alone"):
            optimizer.set_backward_passes_per_step(2)
        if self.size > 1:
            with self.assertRaisesRegex(ValueError, "call optimizer.set_sample_count"):
                model(torch.ones(1, 6).double()).sum().backward()
            optimizer.set_sample_count(1)
            with self.assertRaisesRegex(ValueError, "it was called for this step"):
                optimizer.set_sample_count(1)
            optimizer.load_state_dict(optimizer.state_dict())


class Training(Case):
    def train(self, options=None, make=OPTIMIZERS["SGD"], steps=3, passes=1, step=None, tolerance=None):
        """Trains N ranks on parts and one process on the whole, and asserts that the results are alike."""
        whole, parts = batches(steps * passes, self.size)
        alone = network()
        single = make(alone.parameters())
        model = network(seed=1 if self.rank == 0 else 99)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        options = dict(options(model) if options else {"named_parameters": model.named_parameters()})
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), **options)
        for i in range(0, len(whole), passes):
            single.zero_grad()
            optimizer.zero_grad()
            for j in range(i, i + passes):
                loss_of(alone(whole[j][0]), whole[j][1]).backward()
                loss_of(model(parts[j][0]), parts[j][1]).backward()
            single.step()
            step(optimizer, model) if step else optimizer.step()
        self.alike(model, alone, **(tolerance or {}))
        self.on_all_ranks(model)
        return optimizer

    def test_as_one_process_on_the_whole_batch(self):
        for name, make in OPTIMIZERS.items():
            with self.subTest(optimizer=name):
                optimizer = self.train(make=make)
                self.assertIsInstance(optimizer, getattr(torch.optim, name))

    def test_without_names(self):
        self.train(lambda model: {})

    def test_several_passes(self):
        self.train(lambda model: {"backward_passes_per_step": 2}, passes=2)

    def test_predivided(self):
        self.train(lambda model: {"gradient_predivide_factor": 3.0})
        self.train(lambda model: {"gradient_predivide_factor": 3.0, "groups": 1})

    def test_sum(self):
        lr = 0.1 / self.size

        def options(model):
            return {"op": hvd.Sum}

        def summed(parameters):
            return torch.optim.SGD(parameters, lr=lr)

        whole, parts = batches(2, self.size)
        alone, model = network(), network()
        single = torch.optim.SGD(alone.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(summed(model.parameters()), model.named_parameters(), op=hvd.Sum)
        for (x, y), (px, py) in zip(whole, parts):
            single.zero_grad(), optimizer.zero_grad()
            loss_of(alone(x), y).backward(), loss_of(model(px), py).backward()
            single.step(), optimizer.step()
        self.alike(model, alone)

    def test_groups(self):
        for groups in (1, 2, 100):
            self.train(lambda model: {"named_parameters": model.named_parameters(), "groups": groups})
        self.train(lambda model: {"groups": [[model[0].weight, model[2].bias], [model[0].bias]]})
        with self.assertWarns(DeprecationWarning):
            self.train(lambda model: {"num_groups": 2})

    def test_compression(self):
        loose = {"rtol": 0.02, "atol": 0.02}
        self.train(lambda model: {"compression": hvd.Compression.fp16}, tolerance=loose)
        self.train(lambda model: {"compression": hvd.Compression.bf16, "groups": 2}, tolerance=loose)
        self.train(lambda model: {"compression": hvd.Compression.int8, "groups": 2}, tolerance=loose)
        self.train(lambda model: {"compression": hvd.Compression.int4}, tolerance={"rtol": 0.3, "atol": 0.3})

    def test_clipping_between(self):
        norms = []

        def step(optimizer, model):
            optimizer.synchronize()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
            with optimizer.skip_synchronize():
                optimizer.step()

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.train(step=step)
        self.assertEqual(len(set(hvd.allgather_object(norms[-1]))), 1)

    def test_a_second_reduction_is_warned_of(self):
        def step(optimizer, model):
            optimizer.synchronize()
            with self.assertWarnsRegex(UserWarning, r"optimizer.step\(\) called without optimizer.skip_synchronize\(\)"):
                optimizer.step()

        self.train(step=step)

    def test_closure(self):
        whole, parts = batches(1, self.size)
        for make in (OPTIMIZERS["SGD"], lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe")):
            alone, model = network(), network()
            single = make(alone.parameters())
            optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())

            def closure(optimizer, model, x, y):
                optimizer.zero_grad()
                loss = loss_of(model(x), y)
                loss.backward()
                return loss

            for _ in range(2):
                single.step(lambda: closure(single, alone, *whole[0]))
                optimizer.step(lambda: closure(optimizer, model, *parts[0]))
            self.alike(model, alone, rtol=1e-5, atol=1e-6)
            self.on_all_ranks(model)

    def test_schedulers(self):
        for early in (True, False):
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if early else None
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
            scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            loss_of(model(torch.randn(2, 6).double()), torch.tensor([0, 1])).backward()
            optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scheduler.step()
            self.assertEqual(optimizer.param_groups[0]["lr"], 0.5)
            self.on_all_ranks(model)

    @unittest.skipUnless(torch is not None and hasattr(torch, "amp") and hasattr(torch.amp, "GradScaler"), "no GradScaler for CPU")
    def test_grad_scaler(self):
        for unscale in (False, True):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
            whole, parts = batches(4, self.size)
            alone, model = network(), network()
            single = OPTIMIZERS["SGD"](alone.parameters())
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), model.named_parameters())
            for i, ((x, y), (px, py)) in enumerate(zip(whole, parts)):
                optimizer.zero_grad()
                loss = scaler.scale(loss_of(model(px), py))
                if i == 1 and self.rank == 0:
                    loss = loss * float("inf")  # one rank overflows, so all skip the step
                loss.backward()
                if unscale:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                self.assertEqual(scaler.get_scale(), 1024.0 if i < 1 else 512.0)
                if i != 1:
                    single.zero_grad()
                    loss_of(alone(x), y).backward()
                    single.step()
            self.alike(model, alone)
            self.on_all_ranks(model)

    def test_under_way_while_others_never_come(self):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("never", weight)])
        weight.sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        if self.rank == 0:
            weight.sum().backward()
            began = time.monotonic()
            optimizer.load_state_dict(state)  # like elastic.run after a failure
            self.assertLess(time.monotonic() - began, SECONDS / 2)
            optimizer.zero_grad()
            hvd.barrier()
        else:
            hvd.barrier()
            weight.sum().backward()  # contributes now, for the next test's sake
            optimizer.step()

    def test_parameters_that_ranks_do_not_use(self):
        class Either(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.c = (torch.nn.Linear(2, 1, bias=False) for _ in range(3))

        for groups in (None, 2):
            model = Either()
            hvd.broadcast_parameters(model.state_dict(), 0)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), groups=groups)
            before = copy.deepcopy(model)
            layer = model.a if self.rank == 0 else model.b
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            self.on_all_ranks(model)
            torch.testing.assert_close(model.a.weight, before.a.weight - 1 / self.size)
            torch.testing.assert_close(model.b.weight, before.b.weight - (self.size - 1) / self.size)
            torch.testing.assert_close(model.c.weight, before.c.weight)

    def test_sparse(self):
        for as_dense in (False, True):
            torch.manual_seed(3)
            table = torch.nn.Embedding(8, 2, sparse=True)
            whole = torch.nn.Embedding.from_pretrained(table.weight.detach().clone(), freeze=False)
            single = torch.optim.SGD(whole.parameters(), lr=0.5)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(table.parameters(), lr=0.5), table.named_parameters(), sparse_as_dense=as_dense
            )
            for step in range(2):
                optimizer.zero_grad(), single.zero_grad()
                table(torch.tensor([0, self.rank + 1, self.rank + 1])).sum().backward()
                indices = [i for rank in range(self.size) for i in (0, rank + 1, rank + 1)]
                (whole(torch.tensor(indices)).sum() / self.size).backward()
                optimizer.step(), single.step()
                self.assertTrue(table.weight.grad.is_sparse)
                self.assertEqual(table.weight.grad.sparse_dim(), 1)
            self.alike(table, whole)

    def test_sparse_as_dense_for_optimizers_of_sparse_gradients(self):
        for options in ({}, {"groups": 1}, {"compression": hvd.Compression.bf16}, {"backward_passes_per_step": 2}):
            with self.subTest(options=str(options)):
                torch.manual_seed(3)
                table = torch.nn.Embedding(8, 2, sparse=True)
                whole = torch.nn.Embedding.from_pretrained(table.weight.detach().clone(), freeze=False, sparse=True)
                single = torch.optim.SparseAdam(list(whole.parameters()), lr=0.5)
                optimizer = torch.optim.SparseAdam(list(table.parameters()), lr=0.5)
                optimizer = hvd.DistributedOptimizer(optimizer, table.named_parameters(), sparse_as_dense=True, **options)
                passes = options.get("backward_passes_per_step", 1)
                for step in range(3):
                    optimizer.zero_grad(), single.zero_grad()
                    for _ in range(passes):
                        if step < 2 or self.rank == 0:  # in the end only one rank has a gradient
                            table(torch.tensor([0, self.rank + 1])).sum().backward()
                        active = range(self.size if step < 2 else 1)
                        indices = [i for rank in active for i in (0, rank + 1)]
                        (whole(torch.tensor(indices)).sum() / self.size).backward()
                    optimizer.step(), single.step()
                    self.assertTrue(table.weight.grad.is_sparse)
                self.alike(table, whole, rtol=1e-2, atol=1e-2)
                self.on_all_ranks(table)

    def test_a_parameter_that_is_sparse_now_and_dense_then(self):
        table = torch.nn.Embedding(4, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, table.named_parameters(), sparse_as_dense=True)
        for sparse in (True, False, True):
            optimizer.zero_grad(set_to_none=True)
            (table(torch.tensor([1])) if sparse else table.weight).sum().backward()
            optimizer.step()
            self.assertEqual(table.weight.grad.is_sparse, sparse)

    def test_a_table_that_some_ranks_do_not_use_yet(self):
        for make, as_dense in (
            (lambda p: torch.optim.SparseAdam(list(p), lr=0.5), False),
            (lambda p: torch.optim.SparseAdam(list(p), lr=0.5), True),
            (lambda p: torch.optim.SGD(p, lr=0.5), False),
        ):
            torch.manual_seed(3)
            tables = torch.nn.ModuleList(torch.nn.Embedding(6, 2, sparse=True) for _ in range(2))
            whole = copy.deepcopy(tables)
            single = make(whole.parameters())
            optimizer = make(tables.parameters())
            optimizer = hvd.DistributedOptimizer(optimizer, tables.named_parameters(), sparse_as_dense=as_dense)
            # First no rank uses the second table, then only one rank, which the others cannot know.
            for step, users in enumerate(((0,), (self.size - 1,), range(self.size))):
                optimizer.zero_grad(), single.zero_grad()
                for rank in users:
                    used = torch.tensor([rank, 1, 5])
                    layers = (0,) if step == 0 else (0, 1)
                    (sum(whole[i](used).sum() for i in layers) / self.size).backward()
                    if rank == self.rank:
                        sum(tables[i](used).sum() for i in layers).backward()
                optimizer.step(), single.step()
                if step == 0:
                    self.assertIsNone(tables[1].weight.grad)
                self.assertTrue(tables[0].weight.grad.is_sparse)
            self.alike(tables, whole)
            self.on_all_ranks(tables)

    def test_sparse_on_some_ranks_and_dense_on_others(self):
        for as_dense, first in ((False, "mixed"), (True, "mixed"), (False, "sparse"), (False, "dense")):
            with self.subTest(as_dense=as_dense, first=first):
                torch.manual_seed(3)
                table = torch.nn.Embedding(4, 2, sparse=True)
                whole = torch.nn.Embedding.from_pretrained(table.weight.detach().clone(), freeze=False)
                single = torch.optim.SGD(whole.parameters(), lr=0.5)
                optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
                optimizer = hvd.DistributedOptimizer(optimizer, table.named_parameters(), sparse_as_dense=as_dense)
                for step, kind in enumerate((first, "mixed", "mixed")):
                    optimizer.zero_grad(set_to_none=True), single.zero_grad(set_to_none=True)
                    for rank in range(self.size):
                        sparse = kind == "sparse" or (kind == "mixed" and (rank + step) % 2 == 0)
                        loss = lambda t: t(torch.tensor([rank % 4])).sum() if sparse else (rank + 1) * t.weight.sum()  # noqa: E731
                        (loss(whole) / self.size).backward()
                        if rank == self.rank:
                            loss(table).backward()
                            mine = sparse
                    optimizer.step(), single.step()
                    self.assertEqual(table.weight.grad.is_sparse, mine)  # like this rank's own gradient
                self.alike(table, whole)
                self.on_all_ranks(table)

    def test_kinds_of_gradients_are_agreed_anew_after_a_join(self):
        table = torch.nn.Embedding(4, 2, sparse=True)
        hvd.broadcast_parameters(table.state_dict(), 0)
        optimizer = torch.optim.SparseAdam(list(table.parameters()))
        optimizer = hvd.DistributedOptimizer(optimizer, table.named_parameters())
        for epoch in range(2):
            if self.rank == epoch:  # the others have no batch, and do not know the kind of this rank's gradients
                optimizer.zero_grad()
                table(torch.tensor([1])).sum().backward()
                optimizer.step()
            hvd.join()
        hvd.broadcast_parameters(table.state_dict(), 1)

    def test_parameters_that_come_to_be_trained(self):
        for at in ("zero_grad", "step"):  # when the optimizer notices
            for options in ({}, {"groups": 1}, {"backward_passes_per_step": 2}):
                model = network(seed=1)
                for parameter in model[0].parameters():
                    parameter.requires_grad_(False)
                alone = copy.deepcopy(model)
                whole, parts = batches(4 * options.get("backward_passes_per_step", 1), self.size)
                single = OPTIMIZERS["SGD"](alone.parameters())
                optimizer = OPTIMIZERS["SGD"](model.parameters())
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
                passes = options.get("backward_passes_per_step", 1)
                for step in range(4):
                    if step == 2:
                        for parameter in (*model[0].parameters(), *alone[0].parameters()):
                            parameter.requires_grad_(True)
                    single.zero_grad()
                    optimizer.zero_grad() if at == "zero_grad" else model.zero_grad()
                    for j in range(step * passes, (step + 1) * passes):
                        loss_of(alone(whole[j][0]), whole[j][1]).backward()
                        loss_of(model(parts[j][0]), parts[j][1]).backward()
                    single.step(), optimizer.step()
                self.alike(model, alone)
                self.on_all_ranks(model)
        frozen = network().requires_grad_(False)  # the whole model is frozen at first
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(frozen.parameters(), lr=0.1), frozen.named_parameters())
        optimizer.step()
        frozen.requires_grad_(True)
        loss_of(frozen(torch.randn(2, 6).double() + self.rank), torch.tensor([0, 1])).backward()
        optimizer.step()
        self.on_all_ranks(frozen)

    def test_parameters_that_some_ranks_alone_train(self):
        model = network()
        model[2].bias.requires_grad_(self.rank == 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        names = optimizer._parameter_names
        loss_of(model(torch.randn(2, 6).double()), torch.tensor([0, 1])).backward()
        began = time.monotonic()
        with self.assertRaisesRegex(cohort.Mismatch, f"'{names[model[2].bias]}' requires a gradient on some ranks only"):
            optimizer.step()
        self.assertLess(time.monotonic() - began, SECONDS / 2)
        if self.rank:  # for the next test's sake
            hvd.allreduce(torch.zeros(3).double(), name=optimizer._reducer._meet[model[2].bias])
        optimizer._reducer.forget()

    def test_two_networks_of_which_one_learns_through_the_other(self):
        make, judge = network(1), torch.nn.Linear(3, 1).double()
        hvd.broadcast_parameters(judge.state_dict(), 0)
        twins = copy.deepcopy(make), copy.deepcopy(judge)
        both = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1), m.named_parameters()) for m in (make, judge)]
        singles = [torch.optim.SGD(m.parameters(), 0.1) for m in twins]
        whole, parts = batches(3, self.size)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for (x, _), (px, _) in zip(whole, parts):
                for (g, d), optimizers, inputs in (((make, judge), both, px), (twins, singles, x)):
                    optimizers[1].zero_grad()
                    d(g(inputs).detach()).square().mean().backward()
                    optimizers[1].step()
                    optimizers[0].zero_grad()
                    d(g(inputs)).mean().backward()  # gives the discriminator unwanted gradients
                    optimizers[0].step()
                    if optimizers is both:
                        with self.assertRaisesRegex(AssertionError, r"this optimizer's synchronize\(\) before its zero_grad"):
                            optimizers[1].zero_grad()
                        optimizers[1].synchronize()
        self.alike(make, twins[0]), self.alike(judge, twins[1])

    def test_copies_are_refused(self):
        model = network()
        for op in (hvd.Average, hvd.Adasum):
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=op)
            for copied in (copy.copy, copy.deepcopy, pickle.dumps):
                with self.assertRaisesRegex(TypeError, r"wrapped for all ranks \(SGD\) cannot be copied .* its state_dict\(\)"):
                    copied(optimizer)

    def test_ranks_that_train_apart_are_told_apart(self):
        def train(change, steps=60, wrap=None, **options):
            model = network()
            base = torch.optim.SGD([{"params": [one]} for one in model.parameters()], lr=0.5, momentum=0.25)
            optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), **options)
            for step in range(steps):
                if step == 25 and self.rank == self.size - 1:
                    change(optimizer, model)
                optimizer.zero_grad()
                loss_of(model(torch.ones(2, 6).double() + self.rank), torch.tensor([0, 1])).backward()
                try:
                    optimizer.step()
                except cohort.Mismatch as error:
                    hvd.barrier()
                    return step, str(error)
            return None

        def rate(optimizer, model):
            optimizer.param_groups[2]["lr"] = 0.125

        def weights(optimizer, model):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter[0] += 1.0

        last = self.size - 1
        for options in ({}, {"op": hvd.Adasum}):
            step, text = train(rate, **options)
            self.assertIn(step, range(25, 47))
            self.assertRegex(text, rf"'lr' of parameter group 2 is 0.5 on rank 0 and 0.125 on rank {last}, in step 40 ")
        step, text = train(weights)
        self.assertIn(step, range(25, 47))
        self.assertRegex(text, rf"'0.bias' is .* on rank 0 and .* on rank {last} in one place")
        for change in rate, weights:
            self.assertIsNone(train(change, compare_ranks=False))
        self.assertIsNone(train(lambda *_: None))
        # Rounding does not count as a difference.
        self.assertIsNone(train(lambda _, model: model[0].weight.data.mul_(1 + 1e-6)))
        self.assertIsNone(train(lambda optimizer, _: optimizer.param_groups[0].update(lr=0.5 * (1 + 1e-12))))

    def test_set(self):
        ours = hvd.add_process_set([0, 1]) if self.size > 2 else hvd.global_process_set
        model = network(seed=self.rank)
        if self.rank < 2:
            hvd.broadcast_parameters(model.named_parameters(), 0, process_set=ours)
        before = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=ours)
        loss_of(model(torch.full((2, 6), 1.0 + self.rank).double()), torch.tensor([0, 1])).backward()
        own = model[0].weight.grad.clone() if self.rank >= 2 else None
        optimizer.step()
        if self.rank < 2:
            every = hvd.allgather(model[0].weight.detach().unsqueeze(0), process_set=ours)
            self.assertTrue(torch.equal(every[0], every[1]))
        else:
            torch.testing.assert_close(model[0].weight, before[0].weight - own)
        if self.size > 2:
            hvd.remove_process_set(ours)

    def test_two_networks(self):
        one, two = network(), network(2)
        both = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1), m.named_parameters()) for m in (one, two)]
        for step in range(2):
            for model, optimizer in zip((one, two), both):
                optimizer.zero_grad()
                loss_of(model(torch.randn(2, 6).double()), torch.tensor([0, 1])).backward()
                optimizer.step()
        self.on_all_ranks(one), self.on_all_ranks(two)

    def test_wrapped_anew(self):
        model = network()
        for _ in range(3):  # as in a notebook; earlier optimizers must not reduce any more
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
            gc.collect()
            loss_of(model(torch.randn(2, 6).double()), torch.tensor([0, 1])).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.on_all_ranks(model)

    def test_more_parameters_later(self):
        model = network()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), 0.1))
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.2})
        loss_of(model(torch.randn(2, 6).double()), torch.tensor([0, 1])).backward()
        optimizer.step()
        self.on_all_ranks(model)

    def test_adasum(self):
        vectors = [torch.zeros(self.size) for _ in range(self.size)]
        for i, one in enumerate(vectors):
            one[i] = 1.0
        weight = torch.nn.Parameter(torch.zeros(self.size))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), [("w", weight)], op=hvd.Adasum)
        (weight * vectors[self.rank]).sum().backward()
        with self.assertRaises(AssertionError):
            with optimizer.skip_synchronize():
                pass
        optimizer.synchronize()
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full((self.size,), -0.5))
        optimizer.zero_grad(set_to_none=True)
        weight.sum().backward()  # equal on all ranks, so it is one step
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full((self.size,), -1.0))


class Misuse(Case):
    def test_arguments(self):
        model = network()
        make = lambda: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
        named = list(model.named_parameters())
        for options in (
            {"named_parameters": [p for _, p in named]},
            {"named_parameters": [(named[0][0], p) for _, p in named]},
            {"named_parameters": named[1:]},
            {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
            {"groups": [[named[0][1]], [named[0][1]]]},
            {"groups": [named[0][1]]},
            {"groups": -1},
            {"groups": [["a"]]},
            {"backward_passes_per_step": 0},
        ):
            with self.subTest(options=str(options)), self.assertRaises(ValueError):
                hvd.DistributedOptimizer(make(), **options)

    def test_passes(self):
        model = network()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        x, y = torch.randn(2, 6).double(), torch.tensor([0, 1])
        loss_of(model(x), y).backward()
        with self.assertRaises(AssertionError):
            optimizer.zero_grad()
        with self.assertRaises(AssertionError):
            loss_of(model(x), y).backward()
        optimizer.synchronize()
        optimizer.zero_grad(set_to_none=False)
        self.assertEqual(float(model[0].weight.grad.abs().sum()), 0.0)
        optimizer.zero_grad(set_to_none=True)
        self.assertIsNone(model[0].weight.grad)
        optimizer.set_backward_passes_per_step(2)
        loss_of(model(x), y).backward()
        loss_of(model(x), y).backward()
        optimizer.step()
        self.assertEqual(sorted(optimizer._parameter_names.values()), sorted(dict(model.named_parameters())))

    def test_load_state_dict(self):
        model = network()
        make = lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
        optimizer = hvd.DistributedOptimizer(make(), model.named_parameters())
        calls = []
        if hasattr(optimizer, "register_step_post_hook"):
            optimizer.register_step_post_hook(lambda *_: calls.append(1))
        for step in range(2):
            loss_of(model(torch.randn(2, 6).double()), torch.tensor([0, 1])).backward()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # forgets operations under way
            optimizer.zero_grad()
            loss_of(model(torch.randn(2, 6).double()), torch.tensor([0, 1])).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.on_all_ranks(model)
        if hasattr(optimizer, "register_step_post_hook"):
            self.assertEqual(len(calls), 2)


class States(Case):
    def test_broadcast_optimizer_state(self):
        for name, make in OPTIMIZERS.items():
            for wrapped in (False, True):
                with self.subTest(optimizer=name, wrapped=wrapped):
                    model = network()
                    optimizer = make(model.parameters())
                    if self.rank == 0:  # the others have no state yet
                        loss_of(model(torch.randn(2, 6).double()), torch.tensor([0, 1])).backward()
                        optimizer.step()
                        optimizer.param_groups[0]["lr"] = 0.123
                    if wrapped:
                        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
                    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
                    self.assertEqual(optimizer.param_groups[0]["lr"], 0.123)
                    states = hvd.allgather_object(optimizer.state_dict())
                    for state in states[1:]:
                        self.assertEqual(state["param_groups"], states[0]["param_groups"])
                        self.assertEqual(state["state"].keys(), states[0]["state"].keys())
                        for i in state["state"]:
                            for key, value in state["state"][i].items():
                                torch.testing.assert_close(value, states[0]["state"][i][key], rtol=0, atol=0)
        with self.assertRaises(ValueError):
            hvd.broadcast_optimizer_state(torch.optim.LBFGS(network().parameters()), 0)

    def test_who_holds_groups_and_states_goes_on_to_see_them(self):
        for wrap in (None, hvd.Average, hvd.Adasum):
            for door in ("broadcast", "load_state_dict", "elastic"):
                with self.subTest(wrap=wrap, door=door):
                    model = network(seed=3)
                    base = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
                    scheduler = torch.optim.lr_scheduler.StepLR(base, 1, 0.5)  # the scheduler refers to `base`
                    optimizer = base
                    if wrap is not None:
                        optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), op=wrap)
                    loss_of(model(torch.ones(2, 6).double()), torch.tensor([0, 1])).backward()
                    optimizer.step()
                    weight = model[0].weight
                    groups, group, state = optimizer.param_groups, optimizer.param_groups[0], optimizer.state
                    buffer = state[weight]["momentum_buffer"]
                    kept = copy.deepcopy(optimizer.state_dict())
                    elastic = hvd.elastic.TorchState(optimizer=optimizer)
                    if self.rank == 0:
                        group["weight_decay"] = 0.25
                    if door == "broadcast":
                        group["lr"], expected = (0.75, 0.75) if self.rank == 0 else (0.5, 0.75)
                        hvd.broadcast_optimizer_state(optimizer, 0)
                    else:
                        group["lr"], expected = 7.0, 1.0
                        buffer.fill_(9)
                        if door == "load_state_dict" and wrap is None:
                            continue  # torch's own load_state_dict
                        optimizer.load_state_dict(kept) if door == "load_state_dict" else elastic.restore()
                        self.assertNotEqual(float(buffer.max()), 9)
                    self.assertIs(optimizer.param_groups, groups)
                    self.assertIs(groups[0], group)
                    self.assertIs(optimizer.state, state)
                    self.assertIs(state[weight]["momentum_buffer"], buffer)
                    self.assertEqual(group["weight_decay"], 0.25 if door == "broadcast" else 0)
                    self.assertEqual(group["lr"], expected)
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        scheduler.step()
                    self.assertEqual(optimizer.param_groups[0]["lr"], expected / 2)

    def test_wrappers_around_optimizers(self):
        class Within(torch.optim.Optimizer):
            """Like SAM: its step calls the step of another optimizer, with which it shares the groups."""

            def __init__(self, parameters):
                super().__init__(parameters, {"rho": 0.5})
                self.base = torch.optim.SGD(self.param_groups, lr=1.0, momentum=0.9)
                self.param_groups = self.base.param_groups

            def step(self, closure=None):
                return self.base.step()

            def load_state_dict(self, state):
                super().load_state_dict(state)
                self.base.param_groups = self.param_groups

        class Around(torch.optim.Optimizer):
            """Like Lookahead: it is given another optimizer."""

            def __init__(self, base):
                self.base, self.defaults, self.state, self.slow = base, base.defaults, defaultdict(dict), 0
                self.param_groups = base.param_groups

            def step(self, closure=None):
                self.slow += 1
                return self.base.step()

            def state_dict(self):
                return {**self.base.state_dict(), "slow": self.slow}

            def load_state_dict(self, state):
                self.slow = state["slow"]
                self.base.load_state_dict({name: one for name, one in state.items() if name != "slow"})
                self.param_groups = self.base.param_groups

        for make in (Within, lambda p: Around(torch.optim.SGD(p, lr=1.0, momentum=0.9))):
            for door in ("broadcast", "load_state_dict", "elastic"):
                model = network()
                optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
                base, groups, group, weight = optimizer.base, optimizer.param_groups, optimizer.param_groups[0], model[0].weight

                def step(optimizer=optimizer, model=model):
                    loss_of(model(torch.ones(2, 6).double()), torch.tensor([0, 1])).backward()
                    optimizer.step()

                step()
                if self.rank == 0:
                    group["lr"] = 0.75
                    base.state[weight]["count"] = torch.tensor(3)
                kept, state = copy.deepcopy(optimizer.state_dict()), hvd.elastic.TorchState(optimizer=optimizer)
                buffer, expected = base.state[weight]["momentum_buffer"], base.state[weight]["momentum_buffer"].clone()
                if door == "broadcast":
                    buffer.mul_(self.rank + 1)
                    hvd.broadcast_optimizer_state(optimizer, 0)
                    self.assertEqual(base.state[weight]["count"].dtype, torch.int64)
                else:
                    group["lr"] = 7.0
                    optimizer.zero_grad()
                    step()
                    optimizer.load_state_dict(kept) if door == "load_state_dict" else state.restore()
                self.assertEqual(group["lr"], 0.75 if self.rank == 0 or door == "broadcast" else 1.0)
                for one in (optimizer.param_groups, base.param_groups):
                    self.assertIs(one, groups)
                    self.assertIs(one[0], group)
                self.assertIs(base.state[weight]["momentum_buffer"], buffer)
                if make is not Within or door != "load_state_dict":  # the state_dict of Within lacks the inner one's
                    self.assertTrue(torch.equal(buffer, expected))
                self.assertNotIn("__setstate__", vars(optimizer))

    def test_any_state_comes_as_it_is(self):
        class Odd(torch.optim.Optimizer):
            """An optimizer with a state of many kinds, some of it on only one rank."""

            def __init__(self, parameters):
                super().__init__(parameters, {"lr": 1, "rate": torch.tensor(0.5), "flags": (True, None)})

            def fill(self, count):
                for n, parameter in enumerate(self.param_groups[0]["params"]):
                    if n % 2:
                        continue
                    self.state[parameter] = {
                        "count": torch.tensor(count), "wide": torch.full((2,), count, dtype=torch.float64),
                        "codes": torch.arange(count, dtype=torch.uint8), "mask": parameter.detach() > 0,
                        "half": parameter.detach().bfloat16(), "step": 2**53 + count, "seen": True, "none": None,
                        "rate": 0.1 * count, "pair": (count, torch.tensor([count])), "last": deque([1, torch.ones(2).half()]),
                        "channels": torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last),
                    }  # fmt: skip
                self.state["global"] = {"n": count}

        class Own(Odd):
            """An optimizer whose state_dict holds more than torch's."""

            extra = 0

            def state_dict(self):
                return {**super().state_dict(), "extra": self.extra}

            def load_state_dict(self, state):
                self.extra = state["extra"]
                super().load_state_dict(state)

        def told(value):
            if isinstance(value, torch.Tensor):
                return value.dtype, tuple(value.shape), value.stride(), str(value.device), value.tolist()
            if isinstance(value, dict):
                return {key: told(one) for key, one in value.items()}
            if isinstance(value, (list, tuple, deque)):
                return type(value), [told(one) for one in value]
            return type(value), value

        def whole(optimizer):
            parameters = optimizer.param_groups[0]["params"]
            states = {n: told(optimizer.state[one]) for n, one in enumerate(parameters) if one in optimizer.state}
            groups = told([{k: v for k, v in one.items() if k != "params"} for one in optimizer.param_groups])
            return states, groups, told(optimizer.state["global"]), getattr(optimizer, "extra", None)

        for kind in (Odd, Own):
            for others in ("nothing", "less", "something else"):
                model = network()
                optimizer = hvd.DistributedOptimizer(kind(model.parameters()), model.named_parameters())
                if self.rank == 0:
                    optimizer.fill(5)
                    if kind is Own:
                        optimizer.extra = 11
                    optimizer.param_groups[0].update(rate=torch.tensor(0.75), lr=3, new="text")
                elif others == "something else":
                    optimizer.fill(3)
                    optimizer.state[model[0].bias]["stale"] = torch.ones(1)
                elif others == "less":
                    optimizer.state[model[0].weight]["count"] = 4.0
                hvd.broadcast_optimizer_state(optimizer, 0)
                every = hvd.allgather_object(whole(optimizer))
                for one in every[1:]:
                    self.assertEqual(one, every[0])
                self.assertEqual(every[0][0][0]["count"], told(torch.tensor(5)))
                state = hvd.elastic.TorchState(optimizer=optimizer)
                optimizer.fill(1)
                optimizer.param_groups[0]["lr"] = 2.5
                state.restore()
                self.assertEqual(whole(optimizer), every[0])
                state.restore()  # the kept state has not become the optimizer's
                self.assertEqual(whole(optimizer), every[0])

    def test_gradients_where_there_was_no_state(self):
        model = network()
        model[0].bias.requires_grad_(False)
        table = torch.nn.Embedding(4, 2, sparse=True)
        for wrapped in (False, True):
            for parameter in (*model.parameters(), table.weight):
                parameter.grad = None
            before = copy.deepcopy(model.state_dict())
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1)
            if wrapped:
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    self.assertEqual(parameter.grad.abs().sum().item(), 0.0, name)
                    self.assertEqual(parameter.grad.dtype, parameter.dtype)
                    self.assertFalse(parameter.grad.requires_grad)
                else:
                    self.assertIsNone(parameter.grad, name)
                self.assertTrue(torch.equal(parameter, before[name]))
        # Gradients are sparse where backward makes sparse ones, so that it can add to them.
        for make in (
            lambda: torch.optim.SparseAdam(list(table.parameters())),
            lambda: torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9),
        ):
            hvd.broadcast_optimizer_state(make(), root_rank=0, model=table)
            self.assertTrue(table.weight.grad.is_sparse)
            table(torch.tensor([1, 1])).sum().backward()
            self.assertEqual(table.weight.grad.to_dense()[1].tolist(), [2.0, 2.0])
        # An optimizer that has a state keeps its gradients.
        loss_of(model(torch.randn(2, 6).double()), torch.tensor([0, 1])).backward()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer.step()
        kept = model[0].weight.grad.clone()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        self.assertTrue(torch.equal(model[0].weight.grad, kept))


class BatchNorm(Case):
    def check(self, shapes, dtype, momentum=0.1, affine=True, tolerance=None):
        """Compares with torch's own on the whole batch. `shapes`: the shape of each rank's part."""
        channels = shapes[0][1]
        generator = torch.Generator().manual_seed(5)
        parts = [(torch.randn(shape, generator=generator) * 3 + 100).to(dtype) for shape in shapes]
        dims = len(shapes[0])
        kind = torch.nn.BatchNorm1d if dims <= 3 else torch.nn.BatchNorm2d
        whole = kind(channels, momentum=momentum, affine=affine).to(dtype)
        torch.manual_seed(3)
        model = torch.nn.Sequential(copy.deepcopy(whole))
        if affine:
            torch.nn.init.normal_(whole.weight), torch.nn.init.normal_(whole.bias)
            model[0].load_state_dict(whole.state_dict())
        model = copy.deepcopy(hvd.SyncBatchNorm.convert_sync_batchnorm(model))
        self.assertIsInstance(model[0], hvd.SyncBatchNorm)
        for step in range(2):
            everything = torch.cat(parts).requires_grad_()
            mine = parts[self.rank].clone().requires_grad_()
            weights = (torch.arange(everything.numel()) % 7).reshape(everything.shape).to(dtype)
            begin = sum(shape[0] for shape in shapes[: self.rank])
            rows = slice(begin, begin + shapes[self.rank][0])
            expected, got = whole(everything), model(mine)
            close = tolerance or {}
            torch.testing.assert_close(got, expected[rows], **close)
            whole.zero_grad(), model.zero_grad()
            (expected * weights).sum().backward()
            (got * weights[rows]).sum().backward()
            torch.testing.assert_close(mine.grad, everything.grad[rows], **close)
            if affine:
                for own, of_all in ((model[0].weight, whole.weight), (model[0].bias, whole.bias)):
                    torch.testing.assert_close(hvd.allreduce(own.grad, op=hvd.Sum), of_all.grad, **close)
        torch.testing.assert_close(model[0].running_mean, whole.running_mean, **close)
        torch.testing.assert_close(model[0].running_var, whole.running_var, **close)
        self.assertEqual(int(model[0].num_batches_tracked), 2)
        model.eval(), whole.eval()
        torch.testing.assert_close(model(parts[0]), whole(parts[0]), **close)

    def test_as_on_the_whole_batch(self):
        fine = {"rtol": 1e-8, "atol": 1e-8}
        self.check([(4, 3, 2, 2)] * self.size, torch.float64, tolerance=fine)
        self.check([(rank + 1, 3) for rank in range(self.size)], torch.float64, tolerance=fine)
        self.check([(2 if rank else 0, 3, 5) for rank in range(self.size)], torch.float64, tolerance=fine)
        self.check([(4, 3)] * self.size, torch.float64, momentum=None, tolerance=fine)
        self.check([(4, 3)] * self.size, torch.float64, affine=False, tolerance=fine)
        self.check([(4, 3, 2, 2)] * self.size, torch.float32, tolerance={"rtol": 1e-4, "atol": 1e-3})

    def test_other_types(self):
        layer = hvd.SyncBatchNorm(3)
        got = layer(torch.randn(4, 3).bfloat16())
        self.assertEqual(got.dtype, torch.bfloat16)
        with self.assertRaises(ValueError):
            layer(torch.randn(3))
        with self.assertRaises(RuntimeError):
            layer(torch.randn(2, 4))


if __name__ == "__main__":
    unittest.main()
