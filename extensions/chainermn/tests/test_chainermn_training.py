"""cohort.chainermn's optimizers, data sets, iterators, evaluators, checkpoints and batch normalization on all ranks."""

import copy
import os
import pathlib
import shutil
import tempfile
import unittest

from support import numpy, torch
from support_nn import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them
from test_chainermn_communicator import Case

import cohort
from cohort.metrics import Averages, Mean

if torch is not None:
    from cohort import chainermn
    from cohort._batch_norm import replaced
    from cohort.chainermn.extensions import AllreducePersistent


def make_model(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()


class Training(Case):
    """Batches of the same size on all ranks, compared with one process that has all of them."""

    def batch(self, step):
        generator = torch.Generator()
        generator.manual_seed(step)
        rows = torch.randn(4 * self.size, 5, generator=generator, dtype=torch.float64)
        return rows[:, :3], rows[:, 3:]

    def mine_of(self, batch):
        return [part[4 * self.rank : 4 * self.rank + 4] for part in batch]

    @staticmethod
    def loss(model, x, y):
        return torch.nn.functional.mse_loss(model(x), y)

    def alone(self, make_optimizer, steps, stale=0):
        """stale: the number of steps by which each gradient is late."""
        model = make_model()
        optimizer = make_optimizer(model)
        waiting = []
        for step in range(steps):
            optimizer.zero_grad()
            self.loss(model, *self.batch(step)).backward()
            waiting.append([parameter.grad.clone() for parameter in model.parameters()])
            if len(waiting) > stale:
                for parameter, gradient in zip(model.parameters(), waiting.pop(0)):
                    parameter.grad = gradient
                optimizer.step()
        return list(model.parameters())

    def assert_trained(self, model, expected, tolerance=1e-11):
        self.assert_close([p.detach() for p in model.parameters()], [p.detach() for p in expected], tolerance)
        self.assert_same_bits_on_all_ranks([p.detach() for p in model.parameters()])

    MAKERS = {
        "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
        "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    }

    def test_update(self):
        for name, make in self.MAKERS.items():
            with self.subTest(optimizer=name):
                model = make_model(seed=1 + self.rank)  # all ranks get rank 0's
                optimizer = chainermn.create_multi_node_optimizer(make(model), self.comm).setup(model)
                self.assertIs(optimizer.target, model)
                self.assertIsInstance(optimizer, getattr(torch.optim, name))
                for step in range(4):
                    loss = optimizer.update(self.loss, model, *self.mine_of(self.batch(step)))
                    self.assertFalse(loss.requires_grad)
                self.assert_trained(model, self.alone(make, 4))

    def test_step_and_schedulers(self):
        make = self.MAKERS["SGD"]
        model = make_model(seed=1 + self.rank)
        optimizer = chainermn.create_multi_node_optimizer(make(model), self.comm)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for step in range(3):
            optimizer.zero_grad()
            self.loss(model, *self.mine_of(self.batch(step))).backward()
            optimizer.step()
            scheduler.step()
        self.assertEqual(optimizer.param_groups[0]["lr"], 0.1 / 8)
        alone = make_model()
        other = make(alone)
        scheduler = torch.optim.lr_scheduler.StepLR(other, step_size=1, gamma=0.5)
        for step in range(3):
            other.zero_grad()
            self.loss(alone, *self.batch(step)).backward()
            other.step()
            scheduler.step()
        self.assert_trained(model, list(alone.parameters()))

    def test_a_rate_that_one_rank_changes_is_named(self):
        for compares in (True, False):
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            optimizer = chainermn.create_multi_node_optimizer(optimizer, self.comm, compare_ranks=compares)
            optimizer.param_groups[0]["lr"] -= 0.25 * (self.rank == self.size - 1)

            def train(optimizer=optimizer, model=model):
                for _ in range(20):
                    optimizer.update(lambda: model(torch.ones(2, 3).double()).sum())

            if compares and self.size > 1:
                where = f"'lr' of parameter group 0 is 0.5 on rank 0 and 0.25 on rank {self.size - 1}, in step 20 "
                with self.assertRaisesRegex(cohort.errors.Mismatch, where):
                    train()
            else:
                train()

    def test_double_buffering(self):
        make = self.MAKERS["SGD"]
        for name in ("pure_nccl", "naive"):
            model = make_model(seed=1 + self.rank)
            optimizer = chainermn.create_multi_node_optimizer(make(model), chainermn.create_communicator(name), double_buffering=True)
            before = [parameter.detach().clone() for parameter in make_model().parameters()]
            for step in range(5):
                optimizer.update(self.loss, model, *self.mine_of(self.batch(step)))
                if step == 0:
                    self.assert_trained(model, before)
                self.comm.allreduce_obj(step)  # other operations run at the same time
            self.assert_trained(model, self.alone(make, 5, stale=1))
            with self.assertRaisesRegex(ValueError, "closure"):
                optimizer.step(lambda: None)

    def test_double_buffering_of_what_is_trained_later(self):
        """A step does not change a parameter that the step before did not have, on all ranks."""
        for how in "unfrozen", "added":
            model = make_model()
            weight = next(model.parameters())
            weight.requires_grad_(how == "added")
            given = [one for one in model.parameters() if how == "unfrozen" or one is not weight]
            optimizer = torch.optim.SGD(given, lr=0.1)
            optimizer = chainermn.create_multi_node_optimizer(optimizer, self.comm, double_buffering=True)
            begin, others = weight.detach().clone(), [one.detach().clone() for one in given]
            for step in range(4):
                if step == 2 and how == "unfrozen":
                    weight.requires_grad_(True)
                elif step == 2:
                    optimizer.add_param_group({"params": [weight]})
                optimizer.update(self.loss, model, *self.mine_of(self.batch(step)))
                self.assertEqual(torch.equal(weight, begin), step < 3, (how, step))
                moved = any(not torch.equal(one, other) for one, other in zip(given, others) if one is not weight)
                self.assertEqual(moved, step > 0)
                others = [one.detach().clone() for one in given]
                everyone = self.comm.allgather_obj([one.tolist() for one in model.parameters()])
                self.assertTrue(all(one == everyone[0] for one in everyone), (how, step))

    def test_frozen_before_the_step(self):
        """A parameter frozen after its backward is stepped by the mean; with double buffering it is not moved any more."""
        for doubled in False, True:
            model = make_model()
            weight = next(model.parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = chainermn.create_multi_node_optimizer(optimizer, self.comm, double_buffering=doubled)
            for step in range(4):
                begin = weight.detach().clone()
                optimizer.zero_grad()
                self.loss(model, *self.mine_of(self.batch(step))).backward()
                weight.requires_grad_(step < 2)
                optimizer.step()
                self.assertEqual(torch.equal(weight, begin), step != 1 if doubled else step == 3, (doubled, step))
                everyone = self.comm.allgather_obj(weight.tolist())
                self.assertTrue(all(one == everyone[0] for one in everyone), (doubled, step))

    def test_ranks_that_freeze_different_layers_are_refused(self):
        """Gradients of layers of the same shapes are never averaged with each other."""
        if self.size == 1:
            return
        for how in "zero_fill", "gaps", "double", "communicator":
            for when in "before", "after":  # freezes before or after the backward
                model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).double()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer = chainermn.create_multi_node_optimizer(
                    optimizer, self.comm, zero_fill=how != "gaps", double_buffering=how == "double"
                ).setup(model)
                mine, other = model[self.rank % 2], model[1 - self.rank % 2]
                mine.requires_grad_(when == "after")
                (other if when == "before" else mine)(torch.ones(2, 3).double()).sum().backward()
                model.requires_grad_(False) if when == "after" else None
                with self.assertRaisesRegex(cohort.errors.Mismatch, "gradient"):
                    if how == "communicator":
                        self.comm.multi_node_mean_grad(model)
                    else:
                        optimizer.step()
                        optimizer.step()  # with double buffering, the first step that uses gradients

    def test_double_buffering_refuses_ranks_that_freeze_different_layers_since(self):
        if self.size == 1:
            return
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = chainermn.create_multi_node_optimizer(optimizer, self.comm, double_buffering=True).setup(model)
        name, weight = next(iter(model.named_parameters()))
        for step in range(2):
            optimizer.zero_grad()
            self.loss(model, *self.mine_of(self.batch(step))).backward()
            if step == 0:
                optimizer.step()
        weight.requires_grad_(self.rank != 1)
        here = f"'{name}'" if self.rank == 1 else "none"
        with self.assertRaisesRegex(cohort.errors.Mismatch, rf"frozen different parameters .*here: {here}\)"):
            optimizer.step()

    def test_double_buffering_names_gradients_that_differ(self):
        if self.size == 1:
            return
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = chainermn.create_multi_node_optimizer(optimizer, self.comm, double_buffering=True)
        model[0].requires_grad_(self.rank != 1)
        model(torch.ones(2, 3).double()).sum().backward()
        with self.assertRaisesRegex(cohort.errors.Mismatch, "bring different ones"):
            optimizer.step()
            optimizer.step()

    def test_parameters_without_a_shape_are_refused(self):
        lazy = torch.nn.LazyLinear(3)
        with self.assertRaisesRegex(cohort.InvalidArgument, "parameter 0 of group 0 has no shape yet"):
            chainermn.create_multi_node_optimizer(torch.optim.SGD(lazy.parameters(), lr=0.1), self.comm)

    def test_options_that_differ_are_refused(self):
        if self.size == 1:
            return
        for name in "double_buffering", "zero_fill", "compare_ranks":
            with self.assertRaisesRegex(cohort.errors.Mismatch, name):
                chainermn.create_multi_node_optimizer(
                    torch.optim.SGD(make_model().parameters(), lr=0.1), self.comm, **{name: self.rank == 1}
                )

    def test_double_buffering_counts_each_gradient_once(self):
        """The first step leaves no gradient that a second backward would add to."""
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = chainermn.create_multi_node_optimizer(optimizer, self.comm, double_buffering=True)
        self.loss(model, *self.mine_of(self.batch(0))).backward()
        optimizer.step()
        self.assertTrue(all(one.grad is None for one in model.parameters()))

    @unittest.skipUnless(hasattr(getattr(torch, "amp", None), "GradScaler"), "no GradScaler for CPU")
    def test_grad_scaler(self):
        """All ranks leave out a step that overflows on one rank."""
        make = self.MAKERS["SGD"]
        for unscale in False, True:
            model, alone = make_model(), make_model()
            optimizer, single = chainermn.create_multi_node_optimizer(make(model), self.comm), make(alone)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
            for step in range(4):
                optimizer.zero_grad()
                loss = scaler.scale(self.loss(model, *self.mine_of(self.batch(step))))
                (loss * float("inf") if step == 1 and self.rank == 0 else loss).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                self.assertEqual(scaler.get_scale(), 1024.0 if step < 1 else 512.0)
                if step != 1:
                    single.zero_grad()
                    self.loss(alone, *self.batch(step)).backward()
                    single.step()
            self.assert_trained(model, list(alone.parameters()))
        optimizer = chainermn.create_multi_node_optimizer(make(make_model()), self.comm, double_buffering=True)
        with self.assertRaisesRegex(ValueError, "leave out one of the two"):
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.ones(1))
            scaler.step(optimizer)

    def test_closure(self):
        def make(model):
            return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

        def trained(model, optimizer, batch):
            def closure():
                optimizer.zero_grad()
                loss = self.loss(model, *batch)
                loss.backward()
                return loss

            optimizer.step(closure)
            return model

        model, alone = make_model(seed=1 + self.rank), make_model()
        trained(model, chainermn.create_multi_node_optimizer(make(model), self.comm), self.mine_of(self.batch(0)))
        trained(alone, make(alone), self.batch(0))
        self.assert_trained(model, list(alone.parameters()), 1e-9)

    def test_parameters_that_some_use(self):
        def train(zero_fill):
            model = make_model()
            optimizer = chainermn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), self.comm, zero_fill=zero_fill)
            optimizer.setup(model)
            if self.rank == 0:
                optimizer.update(lambda: (model[0].bias * torch.arange(4)).sum())
            else:
                optimizer.update(lambda: model[2].bias.sum())
            return model

        model, before = train(True), make_model()
        expected = before[0].bias.detach() - torch.arange(4).double() / self.size
        self.assert_close([model[0].bias.detach()], [expected])
        self.assert_same_bits_on_all_ranks([parameter.detach() for parameter in model.parameters()])
        if self.size > 1:
            with self.assertRaisesRegex(cohort.Mismatch, "'0.bias' has a gradient on some ranks only"):
                train(False)

    def test_groups_that_come_later(self):
        model = make_model(seed=1 + self.rank)
        optimizer = chainermn.create_multi_node_optimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), self.comm)
        with self.assertRaisesRegex(ValueError, "not given the module's '2.weight'"):
            optimizer.setup(model)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        optimizer.setup(model)
        for step in range(3):
            optimizer.update(self.loss, model, *self.mine_of(self.batch(step)))
        self.assert_trained(model, self.alone(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 3))

    def test_type_of_the_reduction(self):
        comm = chainermn.create_communicator("pure_nccl", allreduce_grad_dtype="float16")
        model = make_model()
        optimizer = chainermn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
        optimizer.update(self.loss, model, *self.mine_of(self.batch(0)))
        for parameter in model.parameters():
            self.assertTrue(torch.equal(parameter.grad, parameter.grad.half().double()))
        self.assert_trained(model, self.alone(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 1), 1e-3)

    def test_refused(self):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with self.assertRaisesRegex(TypeError, "an optimizer of torch is needed, not Sequential"):
            chainermn.create_multi_node_optimizer(model, self.comm)
        made = chainermn.create_multi_node_optimizer(optimizer, self.comm)
        with self.assertRaisesRegex(ValueError, "multi-node optimizer already"):
            chainermn.create_multi_node_optimizer(made, self.comm)
        if self.size > 1:
            other = torch.nn.Linear(3 + self.rank, 1)
            with self.assertRaisesRegex(cohort.Mismatch, r"create_multi_node_optimizer: .*\[1, 3\], rank 1 has .*\[1, 4\]"):
                chainermn.create_multi_node_optimizer(torch.optim.SGD(other.parameters(), lr=0.1), self.comm)


class Data(Case):
    def test_index(self):
        for equal in (True, False):
            for count in (0, 1, self.size, 3 * self.size + 1, 7 * self.size - 1, 199):
                parts = self.comm.allgather_obj(
                    chainermn.scatter_index(count if self.rank == 0 else None, self.comm, force_equal_length=equal))
                self.assertTrue(all(0 <= begin <= end <= count for begin, end in parts), parts)
                covered = [i for begin, end in parts for i in range(begin, end)]
                self.assertEqual(set(covered), set(range(count)))
                lengths = [end - begin for begin, end in parts]
                if equal:
                    self.assertEqual(set(lengths), {-(-count // self.size)})
                    self.assertEqual([begin for begin, _ in parts], [count * rank // self.size for rank in range(self.size)])
                else:
                    self.assertEqual(covered, list(range(count)))
                    self.assertEqual(lengths, sorted(lengths, reverse=True))
        last = self.size - 1
        self.assertEqual(chainermn.scatter_index(self.size if self.rank == last else -5, self.comm, root=last), (self.rank, self.rank + 1))
        for wrong in (-1, None, 2.0):
            with self.assertRaisesRegex(ValueError, "scatter_index"):
                chainermn.scatter_index(wrong if self.rank == 0 else 1, self.comm)

    def test_dataset(self):
        count = 3 * self.size + 1
        data = torch.utils.data.TensorDataset(torch.arange(count) * 10, torch.arange(count))
        for root in range(self.size):
            mine = chainermn.scatter_dataset(data if self.rank == root else None, self.comm, root=root, max_buf_len=1000)
            begin, end = chainermn.scatter_index(count, self.comm)
            self.assertEqual([label.item() for _, label in mine[:]], list(range(begin, end)))
            self.assertEqual((len(mine), mine[-1][0].item()), (end - begin, 10 * (end - 1)))
            with self.assertRaises(IndexError):
                mine[len(mine)]
            batches = list(torch.utils.data.DataLoader(mine, batch_size=2))
            self.assertEqual(torch.cat([labels for _, labels in batches]).tolist(), list(range(begin, end)))

    def test_shuffled(self):
        data, orders = list(range(5 * self.size)), {}
        for seed in (0, 7, 2**63 + 5, None):
            mine = chainermn.scatter_dataset(data if self.rank == 0 else None, self.comm, shuffle=True, seed=seed)
            parts = self.comm.allgather_obj(mine[:])
            orders[seed] = sum(parts, [])
            self.assertEqual(sorted(orders[seed]), data)
        again = chainermn.scatter_dataset(data if self.rank == 0 else None, self.comm, shuffle=True, seed=7)
        self.assertEqual(sum(self.comm.allgather_obj(again[:]), []), orders[7])
        self.assertGreater(len({tuple(order) for order in orders.values()}), 3 if self.size > 1 else 1)
        uneven = chainermn.scatter_dataset(data[:-1] if self.rank == 0 else None, self.comm, shuffle=True, force_equal_length=False)
        self.assertEqual(sorted(sum(self.comm.allgather_obj(uneven[:]), [])), data[:-1])

    def test_what_is_no_data_set(self):
        with self.assertRaises(TypeError if self.rank == 0 else ValueError):
            chainermn.scatter_dataset(7, self.comm)
        with self.assertRaisesRegex(ValueError, "seed -1"):
            chainermn.scatter_dataset([1], self.comm, shuffle=True, seed=-1)

    def test_empty(self):
        self.assertEqual(chainermn.create_empty_dataset([5, 6, 7]), [(), (), ()])
        self.assertTrue(issubclass(chainermn.DataSizeError, RuntimeError))


class Counting:
    """An iterator like Chainer's."""

    def __init__(self, count):
        self.count, self.current_position, self.epoch, self.is_new_epoch = count, 0, 0, False

    def __iter__(self):
        return self

    def __next__(self):
        if self.epoch == 2:
            raise StopIteration
        self.current_position += 1
        self.is_new_epoch = self.current_position == self.count
        if self.is_new_epoch:
            self.current_position, self.epoch = 0, self.epoch + 1
        return [(self.current_position, "sample")]


class Iterators(Case):
    def test_batches_of_the_master(self):
        for master in range(self.size):
            torch.manual_seed(self.rank)
            data = torch.utils.data.TensorDataset(torch.arange(7).float() + 100 * self.rank, torch.arange(7))
            loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True) if self.rank == master else None
            iterator = chainermn.create_multi_node_iterator(loader, self.comm, rank_master=master)
            self.assertEqual(len(iterator), 4)
            for _ in range(2):
                batches = [(images.tolist(), labels.tolist()) for images, labels in iterator]
                self.assertEqual([len(labels) for _, labels in batches], [2, 2, 2, 1])
                for images, labels in batches:
                    self.assertEqual(images, [100 * master + label for label in labels])
                self.assertEqual(self.comm.allgather_obj(batches), [batches] * self.size)

    def test_position_of_the_master(self):
        iterator = chainermn.create_multi_node_iterator(Counting(2) if self.rank == 0 else None, self.comm)
        seen = []
        for batch in iterator:
            seen.append((batch[0][0], iterator.current_position, iterator.epoch, iterator.is_new_epoch))
        self.assertEqual(seen, [(1, 1, 0, False), (0, 0, 1, True), (1, 1, 1, False), (0, 0, 2, True)])
        with self.assertRaises(TypeError):
            len(iterator)
        with self.assertRaisesRegex(AttributeError, "has no 'epoch_detail'"):
            iterator.epoch_detail
        with self.assertRaises(StopIteration):
            iterator.next()

    def test_error_of_the_master(self):
        def failing():
            yield 1
            raise LookupError("no more disk")

        iterator = chainermn.create_multi_node_iterator(failing() if self.rank == 0 else None, self.comm)
        self.assertEqual(next(iterator), 1)
        with self.assertRaisesRegex(LookupError if self.rank == 0 else ValueError, "no more disk"):
            next(iterator)
        with self.assertRaisesRegex(ValueError, "the root is rank 9"):
            chainermn.create_multi_node_iterator([], self.comm, 9)

    def test_synchronized(self):
        data = torch.arange(50)
        sampler = torch.utils.data.RandomSampler(data)
        for loader in (torch.utils.data.DataLoader(data, batch_size=8, shuffle=True),
                       torch.utils.data.DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(sampler, 8, False))):
            def epochs_of_seed(seed):
                torch.manual_seed(seed)
                iterator = chainermn.create_synchronized_iterator(loader, self.comm)
                self.assertIs(iterator, loader)
                return [torch.cat(list(iterator)).tolist() for _ in range(2)]

            epochs = epochs_of_seed(self.rank)  # rank 0's seed is used
            self.assertEqual(epochs_of_seed(0), epochs)
            self.assertNotEqual(*epochs)
            self.assertEqual(sorted(epochs[0]), data.tolist())
            self.assertEqual(self.comm.allgather_obj(epochs), [epochs] * self.size)
        in_order = torch.utils.data.DataLoader(data, batch_size=8)
        self.assertIs(chainermn.create_synchronized_iterator(in_order, self.comm), in_order)
        for wrong in ([1, 2], torch.utils.data.DataLoader(data, sampler=[3, 4])):
            with self.assertRaisesRegex(ValueError, "with a sampler that has a generator"):
                chainermn.create_synchronized_iterator(wrong, self.comm)


class Evaluation(Case):
    def test_object(self):
        class Evaluator:
            def evaluate(self):
                return self.result

        evaluator = Evaluator()
        evaluator.result = {"main/loss": float(self.rank), "main/accuracy": torch.tensor(2.0 * self.rank)}
        self.assertIs(chainermn.create_multi_node_evaluator(evaluator, self.comm), evaluator)
        mean = sum(range(self.size)) / self.size
        self.assertEqual(evaluator.evaluate(), {"main/loss": mean, "main/accuracy": 2 * mean})

    def test_weighted(self):
        averages = Averages(["loss", "nothing"])
        averages.add("loss", self.rank, self.rank + 1)
        result = chainermn.create_multi_node_evaluator(lambda factor: averages.local(), self.comm)(2)
        count = sum(rank + 1 for rank in range(self.size))
        self.assertEqual(result, {"loss": Mean(sum(rank * (rank + 1) for rank in range(self.size)) / count, count), "nothing": Mean(0.0, 0)})

    def test_refused(self):
        with self.assertRaisesRegex(TypeError, "a method evaluate, or a function"):
            chainermn.create_multi_node_evaluator(7, self.comm)
        if self.size > 1:
            with self.assertRaisesRegex(cohort.Mismatch, r"rank 0 has \['loss'\], rank 1 \['accuracy'\]"):
                chainermn.create_multi_node_evaluator(lambda: {"accuracy" if self.rank == 1 else "loss": 1.0}, self.comm)()

    def test_persistents(self):
        model = torch.nn.BatchNorm1d(2)
        model.running_mean.fill_(self.rank)
        model.num_batches_tracked.fill_(self.rank)
        AllreducePersistent(model, self.comm)()
        self.assertEqual(model.running_mean.tolist(), [sum(range(self.size)) / self.size] * 2)
        self.assertEqual(model.num_batches_tracked.item(), self.rank)


class Checkpoints(Case):
    def setUp(self):
        super().setUp()
        self.path = self.comm.bcast_obj(tempfile.mkdtemp(prefix="cohort-chainermn-") if self.rank == 0 else None)

    def tearDown(self):
        self.comm.communicator.barrier()
        if self.rank == 0:
            shutil.rmtree(self.path)

    def make(self, **options):
        return chainermn.create_multi_node_checkpointer("digits", self.comm, path=self.path, **options)

    def target(self):
        """Returns a model that differs by rank, as in a model that is spread over ranks."""
        model = torch.nn.Linear(2 + self.rank, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.9))
        return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4])}

    def train(self, target, steps):
        for _ in range(steps):
            target["optimizer"].zero_grad()
            (target["model"](torch.randn(3, 2 + self.rank)) ** 2).mean().backward()
            target["optimizer"].step()
            target["scheduler"].step()

    def parameters(self, target):
        return [parameter.tolist() for parameter in target["model"].parameters()]

    def test_goes_on_as_if_it_had_not_stopped(self):
        for place in ("rank0", "shared", "local"):
            with self.subTest(place=place):
                torch.manual_seed(self.rank)
                whole = self.target()
                self.train(whole, 5)
                torch.manual_seed(self.rank)
                target, checkpointer = self.target(), self.make(place=place)
                self.assertEqual(checkpointer.maybe_load(target), 0)
                self.train(target, 3)
                checkpointer.save(target, 3)
                self.train(target, 1)

                torch.manual_seed(99)
                resumed, checkpointer = self.target(), self.make(place=place)
                self.assertEqual(checkpointer.maybe_load(resumed, optimizer=resumed["optimizer"]), 3)
                self.assertEqual(resumed["scheduler"].last_epoch, 3)
                self.assertEqual(list(resumed["scheduler"].milestones.elements()), [2, 4, 4])
                self.train(resumed, 2)
                self.assertEqual(self.parameters(resumed), self.parameters(whole))
                checkpointer.finalize()
                self.assertEqual(self.make().maybe_load(resumed), 0)

    def test_an_optimizer_s_state_is_as_it_was_and_where_it_was(self):
        model = make_model()
        base = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(base, 1, 0.5)  # the scheduler refers to `base`
        optimizer = chainermn.create_multi_node_optimizer(base, self.comm)
        optimizer.update(lambda: model(torch.ones(2, 3).double()).sum())
        group, state, weight = optimizer.param_groups[0], optimizer.state, model[0].weight
        buffer = state[weight]["momentum_buffer"]
        told = {"count": torch.tensor(3), "codes": torch.tensor([7], dtype=torch.uint8), "half": torch.ones(2).half()}
        state[weight].update(told, pair=(1, None), seen=True)
        checkpointer = self.make()
        checkpointer.save({"optimizer": optimizer}, 1)
        group["lr"] = 7.0
        for name in ("count", "codes", "half", "pair", "seen"):
            del state[weight][name]
        checkpointer.maybe_load({"optimizer": optimizer})
        self.assertIs(optimizer.param_groups[0], group)
        self.assertIs(optimizer.state, state)
        self.assertIs(state[weight]["momentum_buffer"], buffer)
        for name, value in told.items():
            self.assertEqual((state[weight][name].dtype, state[weight][name].tolist()), (value.dtype, value.tolist()))
        self.assertEqual((state[weight]["pair"], state[weight]["seen"]), ((1, None), True))
        self.assertEqual(group["lr"], 0.5)
        scheduler.step()
        self.assertEqual(optimizer.param_groups[0]["lr"], 0.25)
        with self.assertRaisesRegex(TypeError, "cannot be copied or pickled"):
            copy.deepcopy(optimizer)
        checkpointer.finalize()

    def test_newest_that_is_whole(self):
        target, checkpointer = self.target(), self.make(cp_interval=2)
        values = {}
        for iteration in (10, 20, 30):
            self.train(target, 1)
            checkpointer(target, iteration)
            values[iteration] = self.parameters(target)
        kept = sorted(pathlib.Path(self.path, "digits").iterdir())
        self.assertEqual(len(kept), 2)
        self.comm.communicator.barrier()
        if self.rank == self.size - 1:
            part = kept[-1] / f"rank-{self.rank:05}.safetensors"
            content = bytearray(part.read_bytes())
            content[-1] ^= 1
            part.write_bytes(content)
        self.comm.communicator.barrier()
        other = self.target()
        with self.assertLogs("cohort.checkpoint", "WARNING") if self.rank == 0 else self.subTest():
            self.assertEqual(self.make().maybe_load(other), 20)
        self.assertEqual(self.parameters(other), values[20])
        stats = checkpointer.get_stats()
        self.assertEqual(stats["count"], 3)
        self.assertTrue(0 < stats["min"] <= stats["avg"] <= stats["max"])
        self.assertEqual(self.make().get_stats()["count"], 0)

    def test_one_module(self):
        model, other = make_model(1 + self.rank), make_model(50)
        elsewhere = os.path.join(self.path, "elsewhere")
        chainermn.create_multi_node_checkpointer("digits", self.comm, path=elsewhere).save(model, 4)
        self.assertEqual(self.make().maybe_load(other), 0)
        self.assertEqual(self.make().maybe_load(other, path=elsewhere), 4)
        self.assert_close(list(other.parameters()), list(model.parameters()), 0)

    def test_what_does_not_fit(self):
        checkpointer = self.make()
        checkpointer.save({"model": make_model()}, 1)
        other = torch.nn.Linear(3, 2).double()
        before = other.weight.tolist()
        wanted = {"model": other if self.rank == self.size - 1 else make_model()}
        with self.assertRaisesRegex(ValueError, "model does not fit the module -- different or missing: 0.bias, 0.weight, 2.bias, 2.weight, bias"):
            checkpointer.maybe_load(wanted)
        self.assertEqual(other.weight.tolist(), before)
        with self.assertRaisesRegex(ValueError, r"has the state of \['model'\], and \['net'\] is to be loaded"):
            checkpointer.maybe_load({"net": make_model()})
        cohort.checkpoint.CheckpointFolder(os.path.join(self.path, "digits")).save(torch.nn.Module(), step=2)
        with self.assertRaisesRegex(ValueError, "not saved by a multi-node checkpointer"):
            checkpointer.maybe_load({"model": make_model()})

    def test_another_number_of_ranks(self):
        if self.size == 1:
            self.skipTest("for two ranks or more")
        self.make().save(make_model(), 1)
        part = self.comm.split(0 if self.rank == 0 else 1, 0)
        with self.assertRaisesRegex(ValueError, f"saved by {self.size} ranks, and this job has {part.size} "):
            chainermn.create_multi_node_checkpointer("digits", part, path=self.path).maybe_load(make_model())

    def test_refused(self):
        for options in ({"cp_interval": 0}, {"gc_interval": 0}):
            with self.assertRaisesRegex(ValueError, "at least 1 each"):
                self.make(**options)
        with self.assertRaisesRegex(ValueError, "no name of a folder"):
            chainermn.create_multi_node_checkpointer("a/b", self.comm)

        class WithSet:
            def state_dict(self):
                return {"seen": {1, 2}}

            load_state_dict = state_dict

        last = self.rank == self.size - 1
        for wrong, why in ((7, "has no state_dict|which has no state_dict"), (WithSet(), "cannot save state/target/seen: it is a set")):
            with self.assertRaisesRegex(ValueError, why):
                self.make().save(wrong if last else make_model(), 1)
        self.assertEqual(self.make().maybe_load(make_model()), 0)


class BatchNormalization(Case):
    def rows(self, rank, channels=3):
        generator = torch.Generator()
        generator.manual_seed(rank)
        return torch.randn(rank + 2, channels, 4, dtype=torch.float64, generator=generator) + rank

    def check(self, layer, alone, call=lambda layer, x: layer(x)):
        """Compares with torch's layer over all ranks' rows in one process."""
        x = self.rows(self.rank).requires_grad_()
        everything = torch.cat([self.rows(rank) for rank in range(self.size)]).requires_grad_()
        factors = torch.linspace(1, 2, 4, dtype=torch.float64)
        (call(layer, x) ** 2 * factors).sum().backward()
        result = alone(everything)
        (result**2 * factors).sum().backward()
        begin = sum(rank + 2 for rank in range(self.rank))
        torch.testing.assert_close(x.grad, everything.grad[begin : begin + self.rank + 2])
        for one, other in zip(layer.parameters(), alone.parameters()):
            torch.testing.assert_close(self.comm.allreduce(one.grad), other.grad)
        if alone.running_mean is not None:
            torch.testing.assert_close(layer.running_mean, alone.running_mean)
            torch.testing.assert_close(layer.running_var, alone.running_var)

    def test_as_one_process(self):
        layer = chainermn.MultiNodeBatchNormalization(3, self.comm, dtype=torch.float64)
        alone = torch.nn.BatchNorm1d(3, eps=2e-5, momentum=0.1).double()
        for _ in range(2):
            layer.zero_grad()
            alone.zero_grad()
            self.check(layer, alone)
        layer.eval()
        alone.eval()
        torch.testing.assert_close(layer(self.rows(self.rank)), alone(self.rows(self.rank)))
        self.assertEqual(list(layer.state_dict()), list(alone.state_dict()))

    def test_options(self):
        layer = chainermn.MultiNodeBatchNormalization(3, self.comm, decay=0.8, eps=0.1, dtype=torch.float64, use_beta=False, initial_gamma=2)
        alone = torch.nn.BatchNorm1d(3, eps=0.1, momentum=0.2).double()
        torch.nn.init.constant_(alone.weight, 2)
        alone.register_parameter("bias", None)
        self.check(layer, alone)
        self.assertEqual([name for name, _ in layer.named_parameters()], ["weight"])
        layer = chainermn.MultiNodeBatchNormalization(3, self.comm, dtype=torch.float64, use_gamma=False, initial_beta=[1.0, 2.0, 3.0])
        self.assertEqual(layer.bias.tolist(), [1.0, 2.0, 3.0])
        layer.eval()
        self.assertEqual(layer(torch.zeros(1, 3, dtype=torch.float64)).tolist(), [[1.0, 2.0, 3.0]])
        if numpy is not None:
            layer = chainermn.MultiNodeBatchNormalization(2, self.comm, initial_gamma=numpy.array([3.0, 4.0]))
            self.assertEqual(layer.weight.tolist(), [3.0, 4.0])
        plain = chainermn.MultiNodeBatchNormalization(3, self.comm, dtype=torch.float64, use_gamma=False, use_beta=False)
        self.check(plain, torch.nn.BatchNorm1d(3, eps=2e-5, affine=False).double())

    def test_finetuning(self):
        layer = chainermn.MultiNodeBatchNormalization(3, self.comm, dtype=torch.float64)
        alone = torch.nn.BatchNorm1d(3, eps=2e-5, momentum=None).double()
        layer(self.rows(self.rank) * 100)
        layer.start_finetuning()
        for _ in range(3):
            layer.zero_grad()
            alone.zero_grad()
            self.check(layer, alone, lambda layer, x: layer(x, finetune=True))

    def test_backends(self):
        for name, backend in (("naive", "auto"), ("naive", "mpi"), ("pure_nccl", "nccl")):
            comm = chainermn.create_communicator(name)
            chainermn.MultiNodeBatchNormalization(3, comm, communication_backend=backend)(torch.randn(2, 3))
        for backend in ("nccl", "gloo"):
            with self.assertRaisesRegex(ValueError, "communication_backend"):
                chainermn.MultiNodeBatchNormalization(3, self.comm, communication_backend=backend)
        layer = chainermn.MultiNodeBatchNormalization(3, self.comm)
        for wrong in (torch.zeros(3), torch.zeros(2, 4)):
            with self.assertRaises(ValueError):
                layer(wrong)

    def test_create_mnbn_model(self):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sequential(torch.nn.BatchNorm1d(3, eps=0.5, momentum=0.3)))
        model[1][0].running_mean.fill_(5)
        made = chainermn.create_mnbn_model(model, self.comm)
        layer = made[1][0]
        self.assertIsInstance(layer, chainermn.MultiNodeBatchNormalization)
        self.assertIs(type(model[1][0]), torch.nn.BatchNorm1d)
        self.assertEqual((layer.eps, round(layer.momentum, 9), layer.running_mean.tolist()), (0.5, 0.3, [5.0] * 3))
        self.assertIs(layer.comm, self.comm)
        self.assertIsNot(made[0].weight, model[0].weight)
        self.assertIsInstance(chainermn.create_mnbn_model(model[1][0], self.comm, "mpi"), chainermn.MultiNodeBatchNormalization)
        with self.assertRaisesRegex(ValueError, "momentum"):
            chainermn.create_mnbn_model(torch.nn.BatchNorm1d(3, momentum=None), self.comm)

    def test_create_mnbn_model_loses_nothing(self):
        class Activated(torch.nn.BatchNorm1d):
            def forward(self, x):
                return torch.relu(super().forward(x))

        class Named(torch.nn.BatchNorm1d):
            pass

        with self.assertRaisesRegex(ValueError, "Activated '1' does more than normalize"):
            chainermn.create_mnbn_model(torch.nn.Sequential(torch.nn.BatchNorm1d(3), Activated(3)), self.comm)
        with self.assertRaisesRegex(ValueError, "LazyBatchNorm1d '0' has no channels yet"):
            replaced(torch.nn.Sequential(torch.nn.LazyBatchNorm1d()), chainermn.MultiNodeBatchNormalization, None)
        shared = Named(3)
        calls = []
        shared.register_forward_hook(lambda _module, _args, output: calls.append(1) or output + 1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), shared, torch.nn.Sequential(shared), shared).eval()
        made = chainermn.create_mnbn_model(model, self.comm)
        self.assertIsInstance(made[1], chainermn.MultiNodeBatchNormalization)
        self.assertIs(made[1], made[2][0])
        self.assertIs(made[1], made[3])
        x = torch.randn(2, 3)
        torch.testing.assert_close(made(x), model(x))
        self.assertEqual(len(calls), 6)

    def test_a_batch_without_samples_on_any_rank(self):
        layer, reference = chainermn.MultiNodeBatchNormalization(3, self.comm), torch.nn.BatchNorm1d(3)
        for module in layer, reference:
            x = torch.zeros(0, 3, requires_grad=True)
            got = module(x)
            got.sum().backward()
            self.assertEqual((got.shape, x.grad.shape), ((0, 3), (0, 3)))
            self.assertEqual(module.running_mean.tolist() + module.running_var.tolist(), [0.0] * 3 + [1.0] * 3)
            self.assertEqual(int(module.num_batches_tracked), 1)
            self.assertEqual(module.weight.grad.tolist() + module.bias.grad.tolist(), [0.0] * 6)


if __name__ == "__main__":
    unittest.main()
