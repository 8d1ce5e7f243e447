"""Hooks in the place of the average: torch's own and ours, over our DistributedDataParallel and torch's, on the ranks of
`cohort run -np N`. The measure is the training without a hook."""

import copy
import gc
import pickle
import types
import unittest

from support import needs_torch, torch
from support_group import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort
from tiers import slow

if torch is not None:
    import torch.distributed as dist
    from nn_models import Mlp, batch_of, copies, loss_of, with_values
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    from cohort.nn import DistributedDataParallel, comm_hooks
    from cohort.nn._hooks import GradBucket, Hooked

SMALL = {"bucket_cap_mb": 4000 / 2**20, "first_bucket_bytes": 500}


@needs_torch
class Case(unittest.TestCase):
    def setUp(self):
        self.comm = dist.group.WORLD.communicator
        self.rank, self.size = self.comm.rank(), self.comm.size()

    def model(self, hook=None, state=None, **options):
        model = DistributedDataParallel(with_values(Mlp(torch.float32, 37)), **{**SMALL, **options})
        if hook is not None:
            model.register_comm_hook(state, hook)
        return model

    def torch_model(self, hook, state):
        model = TorchDDP(with_values(Mlp(torch.float32, 37)), bucket_cap_mb=0.004)
        model.register_comm_hook(state, hook)
        return model

    def train(self, model, steps=6, samples=None, lr=0.1, batches=1000):
        samples = samples or [4] * self.size
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        begin = sum(samples[: self.rank])
        for step in range(steps):
            x, y = batch_of(step % batches, sum(samples), torch.float32)
            optimizer.zero_grad()
            mine = slice(begin, begin + samples[self.rank])
            loss_of(model(x[mine]), y[mine]).backward()
            optimizer.step()
        return copies(model.module)

    def close(self, ours, theirs, tolerance):
        for one, other in zip(ours, theirs):
            self.assertTrue(torch.allclose(one, other, tolerance, tolerance), (one - other).abs().max())

    def same_bits(self, tensors):
        for tensor in tensors:
            others = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
            self.comm.all_gather(tensor.contiguous(), others)
            for other in others:
                self.assertTrue(torch.equal(tensor, other))


class Hooks(Case):
    def test_torchs_hooks_are_right_without_a_change(self):
        expected = self.train(self.model())
        gloo = dist.new_group(backend="gloo")
        sent = []

        def own(state, bucket):
            sent.append((bucket.index(), bucket.is_last()))
            self.assertEqual([g.shape for g in bucket.gradients()], [p.shape for p in bucket.parameters()])
            work = dist.all_reduce(bucket.buffer().div_(self.size), group=state, async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        for hook, state, places in (
            (own, None, 1e-6),
            (default_hooks.allreduce_hook, None, 1e-6),
            (default_hooks.allreduce_hook, gloo, 1e-6),
            (default_hooks.fp16_compress_hook, None, 1e-2),
            (default_hooks.bf16_compress_hook, None, 5e-2),
            (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), None, 1e-2),
        ):
            with self.subTest(hook, state=state):
                model = self.model(hook, state)
                result = self.train(model)
                self.same_bits(result)
                self.close(result, expected, places)
        buckets = self.model().stats().buckets
        self.assertGreater(buckets, 2)
        self.assertEqual(sent, [(index, index == buckets - 1) for _ in range(6) for index in range(buckets)])

    def test_post_local_sgd(self):
        try:
            from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
        except ImportError:
            self.skipTest("this torch cannot import it")
        group = dist.group.WORLD
        alone = [dist.new_group([rank]) for rank in range(self.size)][self.rank]
        state = PostLocalSGDState(group, alone, start_localSGD_iter=2, post_local_gradient_allreduce=True)
        # Replicas differ between averages of the parameters.
        result = self.train(self.model(post_localSGD_hook, state, check_replicas=False))
        rows = torch.empty((self.size, *result[0].shape))
        self.comm.all_gather(result[0].contiguous(), rows)
        self.assertFalse(all(torch.equal(row, result[0]) for row in rows))

    def test_ours_for_both(self):
        expected = self.train(self.model())
        for hook, places in (
            (comm_hooks.allreduce_hook, 1e-6),
            (comm_hooks.fp16_compress_hook, 1e-2),
            (comm_hooks.bf16_compress_hook, 5e-2),
        ):
            for make in (self.model, self.torch_model):
                if make == self.torch_model and hook is comm_hooks.bf16_compress_hook:
                    hook = types.FunctionType(hook.__code__, hook.__globals__, "renamed")  # torch wants NCCL by the name
                for state in (None, dist.group.WORLD):
                    with self.subTest(hook, make=make, state=state):
                        result = self.train(make(hook, state))
                        self.same_bits(result)
                        self.close(result, expected, places)
        gloo = dist.new_group(backend="gloo")
        with self.assertRaisesRegex(cohort.InvalidArgument, "a hook on gradients: process_group"):
            self.train(self.model(comm_hooks.allreduce_hook, gloo))

    def test_narrow_formats_between_hosts(self):
        bucket = types.SimpleNamespace(buffer=lambda: torch.empty(7, device="meta"), parameters=list, index=int)
        lost = comm_hooks.WireState().residual_of(bucket)  # of a bucket that is not in the host's memory
        self.assertEqual((lost.device.type, lost.tolist()), ("cpu", [0.0] * 7))
        expected = self.train(self.model(), 20)
        for hook, state, places in (
            (comm_hooks.int8_compress_hook, None, 0.02),
            (comm_hooks.int8_compress_hook, comm_hooks.WireState(error_feedback=True), 0.02),
            (comm_hooks.int8_compress_hook, dist.group.WORLD, 0.02),
            (comm_hooks.int4_compress_hook, comm_hooks.WireState(dist.group.WORLD), 0.1),
        ):
            for make in (self.model, self.torch_model):
                with self.subTest(hook, make=make, state=state):
                    if isinstance(state, comm_hooks.WireState):
                        state = comm_hooks.WireState(state.process_group, state.error_feedback)
                    result = self.train(make(hook, state), 20)
                    self.same_bits(result)
                    self.close(result, expected, places)
                    kept = [] if not isinstance(state, comm_hooks.WireState) else list(state._residuals.values())
                    if kept:
                        hosts = self.comm.size() > self.comm.local_size()
                        self.assertEqual(any(residual.any() for _, residual in kept), hosts)
        with self.assertRaisesRegex(cohort.InvalidArgument, "give a WireState"):
            self.train(self.model(comm_hooks.int4_compress_hook), 1)

    def test_weights_by_samples_and_ranks_without(self):
        rows = lambda x: x.shape[0]  # noqa: E731
        for samples in (list(range(1, self.size + 1)), [0] + [5] * (self.size - 1)):
            expected = self.train(self.model(samples=rows), samples=samples)
            for hook in (default_hooks.allreduce_hook, comm_hooks.allreduce_hook):
                with self.subTest(hook, samples=samples):
                    result = self.train(self.model(hook, samples=rows), samples=samples)
                    self.same_bits(result)
                    self.close(result, expected, 1e-5)
        model = self.model(comm_hooks.allreduce_hook)
        x, y = batch_of(0, 3, torch.float32)
        if self.rank == 0:
            model.set_sample_count(3)
            loss_of(model(x), y).backward()
        else:
            self.assertTrue(model.step_without_samples())
        alone = with_values(Mlp(torch.float32, 37))
        loss_of(alone(x), y).backward()
        self.close([p.grad for p in model.module.parameters()], [p.grad for p in alone.parameters()], 1e-5)
        self.assertFalse(model.step_without_samples())

    def test_no_sync_and_what_is_not_finite(self):
        calls = []

        def counting(state, bucket):
            calls.append(bucket.index())
            return comm_hooks.allreduce_hook(state, bucket)

        model, plain = self.model(counting, non_finite="raise"), self.model()
        for one in (model, plain):
            for step in range(2):
                x, y = batch_of(step + self.rank, 4, torch.float32)
                if step == 0:
                    with one.no_sync():
                        loss_of(one(x), y).backward()
                else:
                    loss_of(one(x), y).backward()
        self.assertEqual(len(calls), model.stats().buckets)
        self.close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], 1e-6)
        x, y = batch_of(0, 4, torch.float32)
        with self.assertRaises(cohort.nn.NonFiniteError) as caught:
            (loss_of(model(x), y) * (float("nan") if self.rank == 1 else 1)).backward()
        self.assertEqual(caught.exception.gradient.rank, 1)
        model.zero_grad()
        loss_of(model(x), y).backward()

    def test_nothing_is_kept_of_a_step_that_is_refused_or_skipped(self):
        narrow = {"wire_format": "int4"}
        power = {"start_powerSGD_iter": 0, "min_compression_rate": 1}
        for name, make in (
            ("option", lambda mode: self.model(non_finite=mode, **narrow)),
            ("int4", lambda mode: self.model(comm_hooks.int4_compress_hook, comm_hooks.WireState(), non_finite=mode)),
            ("powerSGD", lambda mode: self.model(comm_hooks.powerSGD_hook, comm_hooks.PowerSGDState(**power), non_finite=mode)),
            ("int4, torch's", lambda _: self.torch_model(comm_hooks.int4_compress_hook, comm_hooks.WireState())),
            ("powerSGD, torch's", lambda _: self.torch_model(comm_hooks.powerSGD_hook, comm_hooks.PowerSGDState(**power))),
        ):
            for mode in ("raise", "ignore"):
                with self.subTest(name, mode=mode):
                    self.steps_around_a_damaged_one(make(mode))

    def steps_around_a_damaged_one(self, model):
        for step in range(5):
            x, y = batch_of(step + self.rank, 4, torch.float32)
            model.zero_grad()
            loss = loss_of(model(x), y)
            if step == 2:  # gradients that are large, and one that is infinite
                loss = loss * 1e30 + (model.module.last.bias.sum() * float("inf") if self.rank == 0 else 0)
            try:
                loss.backward()
            except cohort.nn.NonFiniteError:
                self.assertEqual(step, 2)
                continue
            largest = max(float(p.grad.abs().max()) for p in model.parameters())
            self.assertTrue(step == 2 or largest < 10, (step, largest))

    def test_what_was_kept_of_a_step_that_the_program_skips_can_be_dropped(self):
        state = comm_hooks.WireState()
        self.train(self.model(comm_hooks.int4_compress_hook, state), 1)
        state.drop_residuals()
        self.assertEqual(state._residuals, {})
        state = comm_hooks.PowerSGDState(start_powerSGD_iter=0, min_compression_rate=1)
        self.train(self.model(comm_hooks.powerSGD_hook, state), 1)
        self.assertGreater(len(state.state_dict()), 1)
        state.drop_residuals()
        self.assertEqual(list(state.state_dict()), ["powerSGD.iter"])

    def test_a_bucket_tells_names_strides_and_whether_the_last_step_was_refused(self):
        seen, refused = {}, []

        def looking(state, bucket):
            seen.update(zip(bucket.names(), bucket.gradients()))
            if bucket.index() == 0:
                refused.append(bucket.last_step_refused())
            return comm_hooks.allreduce_hook(state, bucket)

        net = with_values(Mlp(torch.float32, 37))
        net.last.weight = torch.nn.Parameter(net.last.weight.detach().t().contiguous().t())
        model = DistributedDataParallel(net, non_finite="raise", **SMALL)
        model.register_comm_hook(None, looking)
        for step in range(3):
            x, y = batch_of(0, 4, torch.float32)
            model.zero_grad()
            try:
                (loss_of(model(x), y) * (float("nan") if step == 1 else 1)).backward()
            except cohort.nn.NonFiniteError:
                continue
        self.assertEqual(refused, [False, False, True])
        self.assertEqual(set(seen), {name for name, _ in net.named_parameters()})
        for name, parameter in net.named_parameters():
            self.assertEqual(seen[name].stride(), parameter.stride())
            self.assertTrue(torch.equal(seen[name], parameter.grad), name)

    def test_a_copy_says_that_it_has_no_hook(self):
        calls = []

        def counting(state, bucket):
            calls.append(bucket.index())
            return comm_hooks.allreduce_hook(state, bucket)

        model = self.model(counting)
        self.train(model, 1)
        other = copy.deepcopy(copy.deepcopy(model))
        with self.assertRaisesRegex(cohort.InvalidArgument, "copy of a model with a hook .*counting"):
            self.train(other, 1)
        before = len(calls)
        other.register_comm_hook(None, counting)
        self.train(other, 1)
        self.assertGreater(len(calls), before)

    def test_parameters_that_are_unfrozen_go_through_it(self):
        seen = set()

        def noting(state, bucket):
            seen.update(map(id, bucket.parameters()))
            return comm_hooks.allreduce_hook(state, bucket)

        net = with_values(Mlp(torch.float32))
        net.last.bias.requires_grad_(False)
        model = DistributedDataParallel(net)
        model.register_comm_hook(None, noting)
        self.train(model, 2)
        self.assertEqual(len(seen), 5)
        net.last.bias.requires_grad_(True)
        self.train(model, 2)
        self.assertEqual(len(seen), 6)


class Refused(Case):
    def test_what_cannot_be_right(self):
        for options, why in (
            ({"sharding": "gradients"}, "sharding"),
            ({"sharding": "parameters"}, "sharding"),
            ({"wire_format": "bfloat16"}, "leave out wire_format"),
        ):
            with self.subTest(**options), self.assertRaisesRegex(cohort.InvalidArgument, why):
                self.model(comm_hooks.allreduce_hook, **options)
        model = self.model(comm_hooks.allreduce_hook)
        with self.assertRaisesRegex(cohort.InvalidArgument, "there is one already"):
            model.register_comm_hook(None, comm_hooks.allreduce_hook)
        with self.assertRaisesRegex(cohort.InvalidArgument, "step_without_samples"), model.join():
            pass
        trained = self.model()
        self.train(trained, 1)
        with self.assertRaisesRegex(cohort.InvalidArgument, "before training"):
            trained.register_comm_hook(None, comm_hooks.allreduce_hook)
        with self.assertRaisesRegex(cohort.InvalidArgument, "hook is a NoneType"):
            self.model().register_comm_hook(comm_hooks.allreduce_hook, None)
        with self.assertRaisesRegex(cohort.InvalidArgument, "a PowerSGDState is wanted"):
            self.train(self.model(comm_hooks.powerSGD_hook), 1)

    def test_a_state_is_of_one_model(self):
        for hook, state in (
            (comm_hooks.powerSGD_hook, comm_hooks.PowerSGDState(start_powerSGD_iter=0, min_compression_rate=1)),
            (comm_hooks.int4_compress_hook, comm_hooks.WireState()),
        ):
            with self.subTest(hook=hook.__name__):
                model, other = self.model(hook, state), self.model()
                self.train(model, 2)
                with self.assertRaisesRegex(cohort.InvalidArgument, "give each model a state of its own"):
                    other.register_comm_hook(state, hook)
                self.train(other, 1)  # without a hook
                net = model.module
                del model
                gc.collect()
                again = DistributedDataParallel(net, **SMALL)  # takes the same module over
                again.register_comm_hook(state, hook)
                self.train(again, 2)
                self.same_bits(copies(net))
                del again, net
                gc.collect()
                with self.assertRaisesRegex(cohort.InvalidArgument, "give each model a state of its own"):
                    other.register_comm_hook(state, hook)  # what it has kept is still the other one's
        copied = copy.deepcopy(state)
        self.train(self.model(comm_hooks.int4_compress_hook, copied), 1)

    def test_what_hooks_do_wrong_is_backwards_error(self):
        def throws(state, bucket):
            raise KeyError("of the hook")

        def later(value):
            future = torch.futures.Future()
            future.set_result(value)
            return future

        def fails(state, bucket):
            return later(None).then(lambda _: 1 // 0)

        for hook, error, why in (
            (throws, KeyError, "of the hook"),
            (fails, Exception, "ZeroDivisionError|division"),
            (lambda state, bucket: None, cohort.InvalidArgument, "NoneType -- a torch.futures.Future"),
            (lambda state, bucket: later(bucket.buffer()[1:]), cohort.InvalidArgument, "tensor of float32 .* elements"),
            (lambda state, bucket: later(bucket.buffer().int()), cohort.InvalidArgument, "tensor of int32"),
            (lambda state, bucket: later(3), cohort.InvalidArgument, "is a int"),
        ):
            with self.subTest(why):
                model = self.model(hook)
                with self.assertRaisesRegex(error, why):
                    self.train(model, 1)
                with self.assertRaisesRegex(cohort.Aborted, "out of step"):
                    self.train(model, 1)

        def other_on_rank_1(state, bucket):
            sent = bucket.buffer().half() if self.rank == 1 else bucket.buffer()
            return dist.all_reduce(sent, async_op=True).get_future().then(lambda future: future.value()[0])

        for hook in (other_on_rank_1, comm_hooks.fp16_compress_hook if self.rank == 1 else comm_hooks.allreduce_hook):
            with self.assertRaisesRegex(cohort.Mismatch, "rank 1 brought all_reduce.float16") as caught:
                self.train(self.model(hook), 1)
            self.assertEqual((caught.exception.code, caught.exception.rank), ("Mismatch", self.rank))
        bucket = GradBucket(3, True, torch.zeros(2), [], [], types.SimpleNamespace(
            timeout=lambda: 0.05, rank=lambda: 7, host=lambda: "there"))  # fmt: skip
        never = Hooked(lambda state, bucket: torch.futures.Future(), None, bucket)
        with self.assertRaisesRegex(cohort.Timeout, "bucket 3: .* rank 7 of there"):
            never.finish()


class PowerSGD(Case):
    def state(self, rank=2, **options):
        return comm_hooks.PowerSGDState(None, rank, **{"start_powerSGD_iter": 2, "min_compression_rate": 1, **options})

    def loss_after(self, model):
        """Loss after a training on one batch."""
        self.same_bits(self.train(model, 150, batches=1))
        x, y = batch_of(0, 4 * self.size, torch.float32)
        with torch.no_grad():
            return float(loss_of(model.module(x), y))

    @slow
    def test_both_trainings_are_as_good_as_the_uncompressed_one_and_torchs(self):
        plain = self.loss_after(self.model())
        ours = self.loss_after(self.model(comm_hooks.powerSGD_hook, self.state()))
        torchs = self.loss_after(self.torch_model(comm_hooks.powerSGD_hook, self.state()))
        self.assertLess(max(ours, torchs), 1.2 * plain + 3e-3)
        exact = self.train(self.model(comm_hooks.powerSGD_hook, self.state(64, min_compression_rate=0.01)))
        self.close(exact, self.train(self.model()), 1e-5)
        try:
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as of_torch
        except (ImportError, AttributeError):
            return
        state = of_torch.PowerSGDState(dist.group.WORLD, 2, start_powerSGD_iter=2, min_compression_rate=1)
        # One bucket: with several, torch's callbacks start operations in an order of their own on each rank.
        one_bucket = {"bucket_cap_mb": 1, "first_bucket_bytes": 1 << 20}
        theirs = self.loss_after(self.model(of_torch.powerSGD_hook, state, **one_bucket))
        self.assertLess(ours, 3 * theirs + 1e-3)

    def test_complex_gradients_of_torchs_buckets(self):
        """torch's buckets show half of the numbers of a complex gradient: all of them are averaged."""
        weight = torch.nn.Parameter(torch.ones(8, dtype=torch.complex64))

        class Complex(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = weight

            def forward(self, x):
                return (x * self.weight).imag.sum()

        model = torch.nn.parallel.DistributedDataParallel(Complex())
        model.register_comm_hook(self.state(1, start_powerSGD_iter=2), comm_hooks.powerSGD_hook)
        for _ in range(4):
            model.zero_grad()
            model((1 + self.rank) * torch.ones(8, dtype=torch.complex64)).backward()
            self.assertTrue(torch.equal(weight.grad, torch.full((8,), 1j * (1 + self.size) / 2)), weight.grad)

    def test_failed_steps_are_not_counted_and_ranks_are_alike(self):
        gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))

        def start(core):
            buffer = gradient.flatten().clone()
            core.start(self.comm, buffer.data_ptr(), buffer.numel(), "torch.float32", [("w", 1, 0, 64, 64)], buffer)
            return buffer

        core = self.state(start_powerSGD_iter=0)._core
        start(core)
        core.forget()
        result = start(core)
        core.finish(self.comm)
        error = torch.frombuffer(bytearray(core.kept()[0][3]), dtype=torch.float32)
        self.assertTrue(torch.allclose(error + result, gradient.flatten(), atol=1e-5))
        with self.assertRaises(cohort.Mismatch):
            core = self.state(start_powerSGD_iter=0, random_seed=self.rank)._core
            start(core)
            core.finish(self.comm)

    def test_what_it_keeps_goes_into_checkpoints(self):
        state = self.state()
        model = self.model(comm_hooks.powerSGD_hook, state)
        self.train(model, 4)
        saved = {name: tensor.clone() for name, tensor in state.state_dict().items()}
        self.assertEqual(int(saved["powerSGD.iter"]), 4)
        self.assertEqual(state.iter, 4)
        shapes = {tuple(tensor.tolist()) for name, tensor in saved.items() if name.endswith("shape")}
        self.assertEqual(shapes, {(37, 37), (37, 5), (3, 37)})
        again = self.state()
        again.load_state_dict({**saved, "another.name": torch.zeros(1)})
        self.assertEqual(set(again.state_dict()), set(saved))
        for name, tensor in again.state_dict().items():
            self.assertTrue(torch.equal(tensor, saved[name]), name)
        other = DistributedDataParallel(with_values(Mlp(torch.float32, 37)), **SMALL)
        other.load_state_dict(model.state_dict())
        other.register_comm_hook(again, comm_hooks.powerSGD_hook)
        self.assertTrue(all(map(torch.equal, self.train(other, 3), self.train(model, 3))))
        rate, before, after = state.compression_stats()
        sent = (37 + 37) * 2 + (37 + 5) * 2 + (3 + 37) * 2 + 37 + 37 + 3
        whole = 37 * 37 + 37 * 5 + 3 * 37 + 37 + 37 + 3
        self.assertEqual((before, after), (5 * whole, 5 * sent))
        self.assertAlmostEqual(rate, whole / sent)
        for options in ({"matrix_approximation_rank": 0}, {"min_compression_rate": 0}, {"orthogonalization_epsilon": -1},
                        {"orthogonalization_epsilon": 1}, {"orthogonalization_epsilon": float("inf")}):  # fmt: skip
            with self.assertRaises(cohort.InvalidArgument):
                comm_hooks.PowerSGDState(None, **options)

    def test_a_copy_is_for_another_model_and_shares_nothing(self):
        for group in (None, dist.group.WORLD):
            state = comm_hooks.PowerSGDState(group, 2, start_powerSGD_iter=0, min_compression_rate=1)
            model = self.model(comm_hooks.powerSGD_hook, state)
            self.train(model, 3)
            for copied in (copy.copy(state), copy.deepcopy(state), *([] if group else [pickle.loads(pickle.dumps(state))])):
                self.assertIs(copied.process_group, group)
                kept = copied.state_dict()
                self.assertEqual(int(kept["powerSGD.iter"]), 3)
                self.assertEqual(set(kept), set(state.state_dict()))
                other = copy.deepcopy(model)
                other.register_comm_hook(copied, comm_hooks.powerSGD_hook)
                before = {name: tensor.clone() for name, tensor in state.state_dict().items()}
                self.train(other, 2)
                self.assertTrue(all(torch.equal(tensor, before[name]) for name, tensor in state.state_dict().items()))
                again = self.state(start_powerSGD_iter=0)
                again.load_state_dict(kept)
                third = copy.deepcopy(model)
                third.register_comm_hook(again, comm_hooks.powerSGD_hook)
                self.train(third, 2)
                self.assertTrue(all(map(torch.equal, copies(third.module), copies(other.module))))
        with self.assertRaisesRegex(cohort.InvalidArgument, "a process group goes into no pickle"):
            pickle.dumps(state)
        wire = comm_hooks.WireState(dist.group.WORLD, True)
        self.train(self.model(comm_hooks.int8_compress_hook, wire), 2)
        self.assertTrue(wire._residuals)
        for copied in (copy.copy(wire), copy.deepcopy(wire)):
            self.assertEqual((copied.process_group, copied.error_feedback, copied._residuals), (dist.group.WORLD, True, {}))
            self.train(self.model(comm_hooks.int8_compress_hook, copied), 1)

    def test_what_is_damaged_or_of_something_else_is_not_loaded(self):
        state = self.state()
        self.train(self.model(comm_hooks.powerSGD_hook, state), 4)
        saved = state.state_dict()
        key = "powerSGD.last.weight."
        self.assertIn(key + "error", saved)
        nan = torch.full_like(saved[key + "error"], float("nan"))
        for name, value, why in (
            ("powerSGD.x", torch.zeros(1), "not one of its names"),
            ("powerSGD.x.y", torch.zeros(1), "not one of its names"),
            ("powerSGD.x.q", torch.zeros(1), "of a 0 x 0 matrix"),
            (key + "shape", torch.tensor([1, 2, 3]), "not two integers"),
            (key + "shape", torch.tensor(3), "not two integers"),
            (key + "shape", torch.tensor([3.0, 37.0]), "not two integers"),
            (key + "shape", torch.tensor([-3, 37]), "of a -3 x 37 matrix"),
            ("powerSGD.iter", torch.tensor([1, 2]), "not one integer"),
            ("powerSGD.iter", torch.tensor([-5]), "-5 steps"),
            (key + "q", torch.zeros(7), "7 elements of q"),
            (key + "error", torch.zeros(3), "3 elements of error"),
            (key + "error", nan, "not finite"),
            (key + "error", nan.to(torch.complex64), "real numbers"),
            (key + "error", 3, "is a int"),
        ):
            with self.subTest(name, why=why), self.assertRaisesRegex(cohort.InvalidArgument, why):
                self.state().load_state_dict({**saved, name: value})

    def test_state_goes_by_the_parameters_names(self):
        def net(trained):
            net = with_values(Mlp(torch.float32, 37))
            net.first.requires_grad_("first" in trained)
            return net

        state, thawed = self.state(start_powerSGD_iter=0), net([])
        model = DistributedDataParallel(thawed, **SMALL)
        model.register_comm_hook(state, comm_hooks.powerSGD_hook)
        self.train(model, 2)
        thawed.first.requires_grad_(True)
        self.train(model, 2)
        saved = state.state_dict()
        self.assertIn("powerSGD.first.weight.error", saved)
        again = self.state(start_powerSGD_iter=0)
        again.load_state_dict(saved)
        other = DistributedDataParallel(net(["first"]), **SMALL)
        other.load_state_dict(model.state_dict())
        other.register_comm_hook(again, comm_hooks.powerSGD_hook)
        self.assertTrue(all(map(torch.equal, self.train(other, 2), self.train(model, 2))))
        frozen = DistributedDataParallel(net([]), **SMALL)
        fresh = self.state(start_powerSGD_iter=0)
        fresh.load_state_dict(saved)
        frozen.register_comm_hook(fresh, comm_hooks.powerSGD_hook)
        with self.assertRaisesRegex(cohort.InvalidArgument, "'first.weight' is for none of the gradients"):
            self.train(frozen, 1)

    def test_a_weight_that_lies_column_by_column(self):
        for torchs in (False, True):
            net = torch.nn.Linear(96, 64, bias=False)
            net.weight = torch.nn.Parameter(torch.sin(torch.arange(96 * 64.0)).view(96, 64).t())
            model = TorchDDP(net) if torchs else DistributedDataParallel(net)
            model.register_comm_hook(self.state(1, start_powerSGD_iter=0, use_error_feedback=False), comm_hooks.powerSGD_hook)
            x = torch.sin(torch.arange(96.0)).view(1, 96)
            for _ in range(3):
                model.zero_grad()
                model(x).pow(2).sum().backward()  # of rank 1, which is exact
            (expected,) = torch.autograd.grad(net(x).pow(2).sum(), net.weight)
            self.assertLess(float((net.weight.grad - expected).norm() / expected.norm()), 1e-4)


if __name__ == "__main__":
    unittest.main()
