"""Parameters and buffers of a wrapped module that are cast, moved, added or replaced, and batches that are equal on all ranks
of `cohort run -np N`. Every gradient of rank R's batch is R + 1."""

import gc
import unittest

from support import needs_torch, stderr_of_process, torch
from support_nn import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort

if torch is not None:
    from cohort.data import DistributedSampler
    from cohort.nn import DistributedDataParallel, _reducer

    class Net(torch.nn.Module):
        def __init__(self, registers=None):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))
            self.v = torch.nn.Parameter(torch.ones(()))
            self.extra = None
            self.registers = registers

        def forward(self, x):
            if self.registers == "parameter" and self.extra is None:
                self.extra = torch.nn.Parameter(torch.zeros(3))
            if self.registers == "buffer" and not hasattr(self, "seen"):
                self.register_buffer("seen", torch.zeros(1))
            if self.registers == "buffer":
                self.seen.add_(float(x.mean()))
            return (self.w * x).sum() + self.v * x.mean() + (0 if self.extra is None else (self.extra * x).sum())


class Case(unittest.TestCase):
    def setUp(self):
        self.rank, self.size = cohort.rank(), cohort.size()
        self.mean = (self.size + 1) / 2

    def tearDown(self):
        cohort.world().barrier()

    def batch(self, dtype=None):
        return torch.full((3,), self.rank + 1.0, dtype=dtype)

    def check_step(self, net, model, factor=1.0):
        model(self.batch(net.w.dtype)).backward()
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                self.assertEqual(parameter.grad.unique().tolist(), [self.mean * factor], (name, self.rank))


@needs_torch
class Casts(Case):
    def test_there_and_back_changes_nothing(self):
        for before in 0, 2:
            for cast in "half", "double", "bfloat16":
                for keeps_gradients in False, True:
                    with self.subTest(before=before, cast=cast, keeps_gradients=keeps_gradients):
                        net = Net()
                        model = DistributedDataParallel(net)
                        for _ in range(before):
                            self.check_step(net, model)
                            model.zero_grad()
                        sums = 0
                        if keeps_gradients:
                            self.check_step(net, model)
                            sums = 1
                        getattr(model, cast)()
                        model.float()
                        for step in range(3):
                            self.check_step(net, model, sums + 1)
                            model.zero_grad()
                            sums = 0
                        self.assertEqual(model.stats().steps, before + keeps_gradients + 3)

    def test_one_parameter_at_the_same_address(self):
        # As an allocator gives it: nothing but autograd knows that there was a cast.
        net = Net()
        model = DistributedDataParallel(net)
        self.check_step(net, model)
        for gradients in "none", "summed":
            if gradients == "none":
                model.zero_grad()
            data = net.w.data
            net.w.data = data.double()
            net.w.data = data
            self.assertEqual(model._reducer.look_at_parameters(), True)
            model(self.batch()).backward()
            expected = self.mean * (1 if gradients == "none" else 2)
            self.assertEqual(net.w.grad.tolist(), [expected] * 3)
            self.assertEqual(net.v.grad.item(), expected)

    def test_a_parameter_that_is_frozen_between_forward_and_backward(self):
        for frees in (True, False) if self.size > 1 else (True,):
            net = Net()
            model = DistributedDataParallel(net)
            self.check_step(net, model)
            model.zero_grad()
            loss = model(self.batch())
            net.w.requires_grad_(not (frees or self.rank == 0))  # on all ranks, and on one alone
            loss.backward()
            self.assertEqual(net.v.grad.item(), self.mean)
            if frees:
                self.assertIsNone(net.w.grad)
            net.w.requires_grad_(True)
            model.zero_grad()
            self.check_step(net, model)

    def test_memory_that_is_shared_with_other_processes(self):
        # share_memory gives gradients, too, other memory, in which they stay where they are tensors over a bucket.
        net = Net()
        model = DistributedDataParallel(net)
        self.check_step(net, model)
        for _ in range(2):
            model.zero_grad(set_to_none=False)
            net.share_memory()
            self.check_step(net, model)
        net.share_memory()
        self.check_step(net, model, 2.0)

    def test_on_one_rank_alone(self):
        net = Net()
        model = DistributedDataParallel(net)
        if self.rank == 0:
            model.double()
            model.float()
        for _ in range(3):
            self.check_step(net, model)
            model.zero_grad()

    def test_within_no_sync_and_between_forward_and_backward(self):
        net = Net()
        model = DistributedDataParallel(net)
        self.check_step(net, model)
        model.zero_grad()
        with model.no_sync():
            model.double()
            model.float()
            model(self.batch()).backward()
        self.check_step(net, model, 2.0)
        model.zero_grad()
        loss = model(self.batch())
        model.double()
        model.float()
        loss.backward()
        self.assertEqual(net.w.grad.tolist(), [self.mean] * 3)
        model.zero_grad()
        if _reducer._HAS_HOOKS_AFTER:
            model.double()
            model.float()
            net(self.batch()).backward()  # not by way of the wrapper, which sees nothing
            self.assertEqual(net.w.grad.tolist(), [self.mean] * 3)

    def test_a_penalty_after_a_cast_is_no_step(self):
        net = Net()
        model = DistributedDataParallel(net)
        self.check_step(net, model)
        model.zero_grad()
        model.double()
        model.float()
        x = self.batch().requires_grad_()
        output = model(x)
        torch.autograd.grad(output, x, create_graph=True)
        output.backward()
        self.assertEqual(net.w.grad.tolist(), [self.mean] * 3)
        self.assertEqual(model.stats().steps, 2)

    def test_without_hooks_that_outlive_nodes(self):
        had, _reducer._HAS_HOOKS_AFTER = _reducer._HAS_HOOKS_AFTER, False  # as before torch 2.1
        try:
            for same_addresses in False, True:
                net = Net()
                model = DistributedDataParallel(net)
                for _ in range(2):
                    self.check_step(net, model)
                    model.zero_grad()
                for parameter in net.parameters():
                    data = parameter.data
                    parameter.data = data.double()
                    parameter.data = data if same_addresses else data.clone()
                for _ in range(3):
                    self.check_step(net, model)
                    model.zero_grad()
        finally:
            _reducer._HAS_HOOKS_AFTER = had

    def test_what_stays_cast_is_taken_in(self):
        for kind in torch.float64, torch.bfloat16:
            net = Net()
            model = DistributedDataParallel(net)
            self.check_step(net, model)
            model.zero_grad()
            model.to(kind)
            for _ in range(2):
                self.check_step(net, model)
                self.assertEqual(net.w.grad.dtype, kind)
                model.zero_grad()
            model(self.batch(kind))
            model.float()
            with self.assertRaisesRegex(cohort.InvalidArgument, "cast between a forward and its reduction"):
                model(self.batch())

    def test_gradients_whose_data_is_replaced(self):
        net = Net()
        model = DistributedDataParallel(net)
        for step in range(4):
            self.check_step(net, model)
            for parameter in net.parameters():
                parameter.grad.data = parameter.grad.data * 0.5
            if step == 2:
                self.check_step(net, model, 1.5)
            net.zero_grad(set_to_none=step != 1)

    def test_hooks_of_the_user_are_called(self):
        if not _reducer._HAS_HOOKS_AFTER:
            self.skipTest("needs torch 2.1")
        net, found = Net(), []
        model = DistributedDataParallel(net)
        handle = net.w.register_post_accumulate_grad_hook(lambda parameter: found.append(parameter.grad.tolist()))
        self.check_step(net, model)
        handle.remove()
        model.zero_grad()
        self.check_step(net, model)
        self.assertEqual(found, [[self.rank + 1.0] * 3])
        del model
        gc.collect()
        self.assertFalse(net.w._post_accumulate_grad_hooks)


@needs_torch
class Additions(Case):
    def test_a_parameter_is_averaged_from_its_first_step(self):
        for where in "net", "part", "no_sync":
            net = Net()
            model = DistributedDataParallel(net)
            for _ in range(3):
                self.check_step(net, model)
                model.zero_grad()
            extra = torch.nn.Parameter(torch.full((3,), float(self.rank)))
            if where == "part":
                net.part = torch.nn.Module()
                net.part.extra = net.extra = extra
            else:
                net.extra = extra
            if where == "no_sync":
                with model.no_sync():
                    model(self.batch()).backward()
                    model(self.batch()).backward()
                self.check_step(net, model, 3.0)
            else:
                self.check_step(net, model)
            self.assertEqual(extra.tolist(), [0.0] * 3)  # rank 0's
            model.zero_grad()
            self.check_step(net, model)

    def test_one_whose_data_gets_another_shape_is_taken_in(self):
        net = Net()
        model = DistributedDataParallel(net)
        for rows in 1, 2, 5:
            net.w.data = torch.ones(rows, 3)
            for _ in range(2):
                self.check_step(net, model)
                self.assertEqual(net.w.grad.shape, (rows, 3))
                model.zero_grad()

    def test_one_that_comes_too_late_is_refused(self):
        net = Net("parameter")
        model = DistributedDataParallel(net)
        with self.assertRaisesRegex(cohort.InvalidArgument, "'extra' was added or unfrozen after the forward"):
            model(self.batch()).backward()
        net.zero_grad()
        self.check_step(net, model)  # there it is known

    def test_one_that_is_unfrozen_too_late_is_refused(self):
        net = Net()
        net.v.requires_grad_(False)
        model = DistributedDataParallel(net)
        out = model(self.batch())
        net.v.requires_grad_(True)
        with self.assertRaisesRegex(cohort.InvalidArgument, "'v' was added or unfrozen after the forward"):
            (out + net.v * 2).backward()

    def test_parts_without_parameters_change_nothing(self):
        net = Net()
        model = DistributedDataParallel(net)
        before = model._attached
        net.act = torch.nn.ReLU()
        self.check_step(net, model)
        self.assertIs(model._attached, before)

    def test_buffers(self):
        net = Net("buffer")
        model = DistributedDataParallel(net)
        for _ in range(3):
            self.check_step(net, model)
            model.zero_grad()
        model.sync_buffers()
        self.assertEqual(net.seen.item(), 3.0)  # rank 0's
        net.part = torch.nn.BatchNorm1d(2, affine=False)
        net.part.running_mean.fill_(self.rank + 1.0)
        self.check_step(net, model)
        self.assertEqual(net.part.running_mean.tolist(), [1.0, 1.0])
        model.sync_buffers()
        model.require_same_parameters()

    def test_tensors_that_hold_others_are_refused(self):
        class Wrapper(torch.nn.Parameter):
            def __tensor_flatten__(self):
                return [], None

        net = Net()
        net.w = Wrapper(torch.ones(3))
        with self.assertRaisesRegex(cohort.InvalidArgument, "'w' is a Wrapper, which holds other tensors"):
            DistributedDataParallel(net)


@needs_torch
class Batches(Case):
    def lines(self, batches, **options):
        net = Net()
        with stderr_of_process() as lines:
            model = DistributedDataParallel(net, check_replicas=False, **options)
            for batch in batches:
                model(batch).backward()
                model.zero_grad()
        return [line for line in lines if "the same" in line]

    def test_those_of_another_epoch_are_told_once(self):
        if self.size == 1:
            self.skipTest("one rank")
        sampler = DistributedSampler(torch.zeros(24), batch_size=2)
        with stderr_of_process() as lines:
            model = DistributedDataParallel(Net(), sampler=sampler)
            for step in range(3):
                if step == 1 and self.rank == self.size - 1:
                    sampler.set_epoch(1)
                next(iter(sampler))
                model(self.batch()).backward()
                model.zero_grad()
                sampler.step()
        told = f"the sampler is in epoch 0 on rank 0, and in epoch 1 on rank {self.size - 1}"
        self.assertEqual(sum(told in line for line in lines), 1 if self.rank == 0 else 0, lines)

    def test_equal_ones_are_told_once(self):
        if self.size == 1:
            self.skipTest("one rank")
        own, same = self.batch(), torch.ones(3)
        told = self.lines([same, same + 1, same, same])
        self.assertEqual(len(told), 1 if self.rank == 0 else 0, told)
        if told:
            self.assertIn("the same 3 samples", told[0])
            self.assertIn("DistributedSampler", told[0])
            self.assertIn("COHORT_LOG=batches=off", told[0])
        for batches in ([own, same, same], [same, own, same], [own, own, same]):
            self.assertEqual(self.lines(batches), [])

    def test_of_ranks_without_samples_nothing_is_told(self):
        same = torch.ones(3)
        net = Net()
        with stderr_of_process() as lines:
            model = DistributedDataParallel(net)
            for _ in range(3):
                model.step_without_samples() if self.rank else model(same).backward()
        self.assertEqual([line for line in lines if "the same" in line], [])


if __name__ == "__main__":
    unittest.main()
