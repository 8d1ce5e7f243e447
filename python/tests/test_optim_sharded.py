"""cohort.optim.Sharded on the ranks of `cohort run -np N`: the bits of DistributedDataParallel without it."""

import contextlib
import copy
import pickle
import shutil
import tempfile
import unittest

from support import needs_torch, torch
from support_nn import Ranks, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort
import cohort.checkpoint

if torch is not None:
    from nn_models import batch_of, copies, loss_of, with_values

    from cohort._collective import all_gather_bytes, broadcast_bytes
    from cohort.nn import DistributedDataParallel
    from cohort.optim import Sharded

MODES = ("optimizer", "gradients", "parameters")


def model_of(dtype=None):
    # Some parameters are reduced from where autograd made them, and all are divided somewhere.
    net = torch.nn.Sequential(torch.nn.Linear(5, 541), torch.nn.Tanh(), torch.nn.Linear(541, 501), torch.nn.Tanh(),
                              torch.nn.Linear(501, 3))  # fmt: skip
    return with_values(net.to(dtype or torch.float32))


@needs_torch
class Bits(Ranks):
    def train(self, model, optimizer, steps=4, accumulated=1, schedule=None, clip=None):
        dtype = next(model.parameters()).dtype
        for step in range(steps):
            x, y = batch_of(step, 4 * self.size * accumulated, dtype)
            for part in range(accumulated):
                begin = 4 * (self.rank * accumulated + part)
                if part + 1 < accumulated:
                    with model.no_sync():
                        loss_of(model(x[begin : begin + 4]), y[begin : begin + 4]).backward()
                else:
                    loss_of(model(x[begin : begin + 4]), y[begin : begin + 4]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
        return copies(model)

    def expect_bits(self, base, told=None, **options):
        told = told or {}
        def schedule(optimizer):
            return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

        plain = DistributedDataParallel(model_of())
        optimizer = base(plain.parameters(), **options)
        expected = self.train(plain, optimizer, schedule=schedule(optimizer), **told)
        for mode in MODES:
            with self.subTest(mode=mode, optimizer=base.__name__):
                model = DistributedDataParallel(model_of(), sharding=mode)
                optimizer = Sharded(model, base, **options)
                self.assertIsInstance(optimizer, base)
                for ours, theirs in zip(self.train(model, optimizer, schedule=schedule(optimizer), **told), expected):
                    self.assertTrue(torch.equal(ours, theirs))

    def test_optimizers_have_the_bits_of_the_whole(self):
        self.expect_bits(torch.optim.Adam, {"steps": 8}, lr=1e-2, amsgrad=True, weight_decay=0.01)
        self.expect_bits(torch.optim.AdamW, lr=1e-2)
        self.expect_bits(torch.optim.SGD, {"accumulated": 3}, lr=0.1, momentum=0.9, nesterov=True)
        self.expect_bits(torch.optim.RMSprop, lr=1e-3, momentum=0.9)

    def test_clips_by_the_global_norm(self):
        x, y = batch_of(self.rank, 4, torch.float32)
        plain = DistributedDataParallel(model_of())
        (loss_of(plain(x), y) * 100).backward()
        expected = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        for mode in MODES:
            model = DistributedDataParallel(model_of(), sharding=mode)
            optimizer = Sharded(model, torch.optim.SGD, lr=0.1)
            (loss_of(model(x), y) * 100).backward()
            self.assertAlmostEqual(optimizer.clip_grad_norm(0.5), expected, delta=expected * 1e-5)
            optimizer.step()
            self.assert_close(copies(model), copies(plain), 1e-5)

    def test_gradients_are_gone_after_a_backward_and_sums_stay(self):
        for mode in MODES[1:]:
            model = DistributedDataParallel(model_of(), sharding=mode)
            optimizer = Sharded(model, torch.optim.SGD, lr=1.0)
            before = copies(model)
            x, y = batch_of(1, 4, torch.float32)
            for _ in range(2):
                loss_of(model(x), y).backward()
                self.assertTrue(all(parameter.grad is None for parameter in model.parameters()))
            optimizer.step()
            reference = model_of()
            loss_of(reference(x), y).backward()
            for ours, start, parameter in zip(copies(model), before, reference.parameters()):
                self.assertTrue(torch.allclose(ours, start - 2 * parameter.grad, 1e-4, 1e-6))

    def test_halves_are_stepped_in_float32(self):
        for mode in MODES:
            net = model_of(torch.bfloat16)
            first = net[0].weight.detach().clone()
            model = DistributedDataParallel(net, sharding=mode)
            optimizer = Sharded(model, torch.optim.SGD, lr=1e-4)
            for _ in range(30):
                x, y = batch_of(1, 4, torch.bfloat16)
                (loss_of(model(x), y) * 8).backward()
                optimizer.step()
                optimizer.zero_grad()
            # Steps far below the digits of bfloat16 add up.
            self.assertFalse(torch.equal(net[0].weight, first))
            self.assertTrue(all(piece.tensor.dtype == torch.float32 for piece in optimizer.pieces))
            self.assert_same_bits_on_all_ranks([tensor.float() for tensor in copies(net)])

    @contextlib.contextmanager
    def folder(self):
        own = tempfile.mkdtemp(prefix="cohort-sharded-") if self.rank == 0 else ""
        name = broadcast_bytes(self.world, own.encode()).decode()
        try:
            yield name
        finally:
            self.world.barrier()
            if self.rank == 0:
                shutil.rmtree(name)

    def test_checkpoints_are_of_the_whole(self):
        with self.folder() as folder:
            for dtype in (torch.float32, torch.bfloat16):
                for mode in MODES:
                    with self.subTest(mode=mode, dtype=dtype):
                        self.save_and_resume(f"{folder}/{mode}-{dtype}", mode, dtype)

    def save_and_resume(self, folder, mode, dtype):
        options = {"lr": 1e-2, "amsgrad": True}
        checkpoints = cohort.checkpoint.CheckpointFolder(folder, comm=self.world)

        def make(sharding):
            net = model_of(dtype)
            model = DistributedDataParallel(net, sharding=sharding, protect_parameters=sharding == "parameters")
            if sharding == "none":
                return net, model, torch.optim.Adam(net.parameters(), **options)
            return net, model, Sharded(model, torch.optim.Adam, **options)

        net, model, optimizer = make(mode)
        self.train(model, optimizer, steps=3)
        checkpoints.save(net, optimizer, step=3)
        expected = self.train(model, optimizer, steps=2)
        for other in (mode, "parameters", "none") if dtype == torch.float32 else (mode, "optimizer"):
            net, model, optimizer = make(other)
            self.assertEqual(checkpoints.load_latest(net, optimizer).progress.step, 3)
            for ours, theirs in zip(self.train(model, optimizer, steps=2), expected):
                self.assertTrue(torch.equal(ours, theirs), other)

    def test_memory_that_is_shared_with_other_processes(self):
        x, y = batch_of(1, 4, torch.float32)
        for mode in MODES:
            with self.subTest(mode=mode):
                net = model_of()
                model = DistributedDataParallel(net, sharding=mode)
                optimizer = Sharded(model, torch.optim.SGD, lr=0.1)
                net.share_memory()
                with self.assertRaisesRegex(cohort.InvalidArgument, "'0.weight' was given other memory"):
                    model(x)
                with self.assertRaisesRegex(cohort.InvalidArgument, "'0.weight' was moved"):
                    model.parameters_written()
                del optimizer

    def test_a_gradient_that_one_rank_drops(self):
        x, y = batch_of(1, 4, torch.float32)
        net = model_of()
        model = DistributedDataParallel(net, sharding="optimizer")
        optimizer = Sharded(model, torch.optim.SGD, lr=0.1)
        for drops in range(self.size):
            for clips in False, True:
                loss_of(model(x), y).backward()
                if self.rank == drops:
                    net[0].weight.grad = None
                with self.assertRaisesRegex(cohort.Mismatch, r"'0\.weight' without a gradient"):
                    if clips:
                        optimizer.clip_grad_norm(1.0)
                    optimizer.step()
                optimizer.zero_grad()
        loss_of(model(x), y).backward()
        net[0].weight.grad = None  # on all ranks
        optimizer.step()

    def test_gradients_that_no_sync_has_left(self):
        x, y = batch_of(1, 4 * self.size, torch.float32)
        mine = slice(4 * self.rank, 4 * self.rank + 4)
        for mode in MODES:
            with self.subTest(mode=mode):
                net = model_of()
                model = DistributedDataParallel(net, sharding=mode)
                optimizer = Sharded(model, torch.optim.SGD, lr=0.1)

                def accumulate(model=model):
                    with model.no_sync():
                        loss_of(model(x[mine]), y[mine]).backward()

                before = copies(net)
                divided = mode != "optimizer"
                error, text = (cohort.InvalidArgument, "was accumulated in no_sync") if divided else (
                    cohort.Mismatch, "which no backward outside of no_sync has averaged")  # fmt: skip
                for act in (optimizer.step, lambda optimizer=optimizer: optimizer.clip_grad_norm(1.0)):
                    accumulate()
                    if self.size > 1 or divided:
                        self.assertRaisesRegex(error, text, act)
                    optimizer.zero_grad()
                optimizer.step()  # there are no gradients
                for one, other in zip(copies(net), before):
                    self.assertTrue(torch.equal(one, other))
                accumulate()
                if not divided:  # the program averages by itself
                    for parameter in net.parameters():
                        model.communicator.all_reduce(parameter.grad, op="average")
                else:
                    loss_of(model(x[mine]), y[mine]).backward()
                optimizer.step()
                self.assertFalse(torch.equal(copies(net)[0], before[0]))
                model.require_same_parameters()

    def test_parameters_that_others_write_to(self):
        x, y = batch_of(1, 4, torch.float32)
        for mode in MODES:
            with self.subTest(mode=mode):
                net = model_of()
                model = DistributedDataParallel(net, sharding=mode)
                optimizer = Sharded(model, torch.optim.SGD, lr=0.1)
                net[0].weight.data = torch.full_like(net[0].weight, 0.5)
                with self.assertRaisesRegex(cohort.InvalidArgument, "'0.weight' was given other memory"):
                    model(x)
                model.parameters_written()
                loss_of(model(x), y).backward()
                model.zero_grad(set_to_none=False)  # divided ones are gone, too
                loss_of(model(x), y).backward()
                optimizer.step()
                reference = model_of()
                with torch.no_grad():
                    reference[0].weight.fill_(0.5)
                loss_of(reference(x), y).backward()
                torch.optim.SGD(reference.parameters(), lr=0.1).step()
                self.assert_close(copies(net), copies(reference), 1e-5)
        for mode in MODES[1:]:
            model = DistributedDataParallel(model_of(), sharding=mode)
            loss_of(model(x), y).backward()
            with self.assertRaisesRegex(cohort.InvalidArgument, "nothing steps it"):
                model(x)
        for mode in MODES:
            net = model_of(torch.bfloat16)
            model = DistributedDataParallel(net, sharding=mode)
            optimizer = Sharded(model, torch.optim.SGD, lr=1e-6)
            self.world.barrier()
            with torch.no_grad():
                net[0].weight.fill_(0.25)
            if mode == "parameters":
                model.parameters_written()
            loss_of(model(x.bfloat16()), y.bfloat16()).backward()
            optimizer.step()
            self.assertTrue(torch.allclose(net[0].weight.float(), torch.tensor(0.25), 1e-2, 1e-3))

    def test_numbers_among_parameters(self):
        class Scaled(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = torch.nn.Parameter(torch.tensor(0.75))
                self.fc = torch.nn.Linear(5, 3)

            def forward(self, x):
                return self.fc(x) * self.scale

        with self.folder() as folder:
            checkpoints = cohort.checkpoint.CheckpointFolder(folder, comm=self.world)
            for steps in range(4):  # each goes on from what the one before saved; the last one is whole
                net = with_values(Scaled())
                model = DistributedDataParallel(net, sharding="optimizer" if steps < 3 else "none")
                adam = Sharded(model, torch.optim.Adam, lr=1e-2) if steps < 3 else torch.optim.Adam(net.parameters(), lr=1e-2)
                if steps:
                    self.assertEqual(checkpoints.load_latest(net, adam).progress.step, steps)
                x, y = batch_of(steps, 4, torch.float32)
                loss_of(model(x), y).backward()
                adam.step()
                checkpoints.save(net, adam, step=steps + 1)
            expected = with_values(Scaled())
            adam = torch.optim.Adam(expected.parameters(), lr=1e-2)
            for steps in range(4):
                adam.zero_grad()
                x, y = batch_of(steps, 4, torch.float32)
                loss_of(expected(x), y).backward()
                adam.step()
            self.assert_close(copies(net), copies(expected), 1e-5)

    def test_parameters_are_given_as_to_torch(self):
        expected = None
        for mode in ("none", *MODES):
            for given in "all", "parameters", "named", "groups", "later", "one by one":
                net = model_of()
                net[2].bias.requires_grad_(False)  # passed over
                model = DistributedDataParallel(net, sharding=mode)
                first, rest = [net[0].weight, net[0].bias], list(net.parameters())[2:]
                params = {"all": net.parameters() if mode == "none" else None, "parameters": model.parameters(),
                          "named": model.named_parameters() if mode != "none" else net.parameters(),
                          "groups": [{"params": first}, {"params": iter(rest)}], "later": first,
                          "one by one": [{"params": first[0]}]}[given]  # fmt: skip
                if mode == "none":
                    optimizer = torch.optim.Adam(params, lr=1e-2)
                else:
                    optimizer = Sharded(model, torch.optim.Adam, params, lr=1e-2)
                if given == "later":
                    optimizer.add_param_group({"params": rest})
                elif given == "one by one":
                    for parameter in (first[1], *rest):
                        optimizer.add_param_group({"params": parameter})
                with self.subTest(mode=mode, given=given):
                    got = self.train(model, optimizer)
                    expected = expected or got
                    for ours, theirs in zip(got, expected):
                        self.assertTrue(torch.equal(ours, theirs))
                    if mode != "none":
                        pieces = len(optimizer.pieces)
                        for again in [first[0]], [torch.ones(3)]:
                            with self.assertRaisesRegex(cohort.InvalidArgument, "does not train, or that is in a group"):
                                optimizer.add_param_group({"params": again})
                        self.assertEqual(len(optimizer.pieces), pieces)
        net = model_of()
        model = DistributedDataParallel(net, sharding="gradients")
        optimizer = Sharded(model, torch.optim.SGD, net[0].parameters(), lr=0.1)
        torch.optim.Optimizer.add_param_group(optimizer, {"params": [net[2].weight]})
        with self.assertRaisesRegex(cohort.InvalidArgument, "other tensors than this rank's pieces"):
            optimizer.step()

    def test_options_that_differ_are_named_on_all_ranks(self):
        if self.size == 1:
            return
        x, y = batch_of(1, 4, torch.float32)
        odd = self.rank == 1

        def rate(optimizer):
            optimizer.param_groups[1]["lr"] = 1e-8 if odd else 0.1

        def betas(optimizer):
            optimizer.param_groups[0]["betas"] = (0.9, 0.5 if odd else 0.999)

        for mode in MODES:
            for change, clip, said in (
                (rate, None, r"rank 0 has lr of parameter group 1 = 0.1, rank 1 has lr of parameter group 1 = 1e-08"),
                (rate, 1.0, r"rank 0 has lr of parameter group 1 = 0.1, rank 1 has lr of parameter group 1 = 1e-08"),
                (betas, None, r"betas of parameter group 0 = \(0.9, 0.999\), rank 1 .* = \(0.9, 0.5\)"),
                (None, 2.0 if odd else 1.0, r"max_norm of clip_grad_norm = 1.0, rank 1 has max_norm of clip_grad_norm = 2.0"),
                ("groups", None, r"'2.weight' in parameter group 0, rank 1 has '2.weight' in parameter group 1"),
            ):
                with self.subTest(mode=mode, said=said):
                    net = model_of()
                    model = DistributedDataParallel(net, sharding=mode)
                    whole, cut = list(net.parameters()), 2 if change == "groups" and odd else 3
                    groups = [{"params": whole[:cut]}, {"params": whole[cut:]}]
                    optimizer = Sharded(model, torch.optim.Adam, groups, lr=0.1)
                    for step in range(3):
                        loss_of(model(x), y).backward()
                        if step == 1 and callable(change):
                            change(optimizer)
                        before = copies(model)
                        if step == 0 and change != "groups" and (clip is None or callable(change)):
                            if clip:
                                optimizer.clip_grad_norm(clip)
                            optimizer.step()
                            continue
                        with self.assertRaisesRegex(cohort.Mismatch, said):
                            if clip:
                                optimizer.clip_grad_norm(clip)
                            optimizer.step()
                        for ours, theirs in zip(copies(model), before):
                            self.assertTrue(torch.equal(ours, theirs))
                        break
                    optimizer.zero_grad()
                    self.world.barrier()

    def test_hooks_of_a_step_run_once(self):
        torch.optim.Adam(torch.nn.Linear(2, 2).parameters())
        torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
        x, y = batch_of(1, 4, torch.float32)
        for base in torch.optim.Adam, torch.optim.AdamW:
            model = DistributedDataParallel(model_of(), sharding="optimizer")
            optimizer = Sharded(model, base, lr=1e-3)
            if not hasattr(optimizer, "register_step_pre_hook"):
                self.skipTest("torch 1.13 has no hooks")
            ran = []
            optimizer.register_step_pre_hook(lambda *_, ran=ran: ran.append("before"))
            optimizer.register_step_post_hook(lambda *_, ran=ran: ran.append("after"))
            for _ in range(3):
                loss_of(model(x), y).backward()
                optimizer.step()
            self.assertEqual(ran, ["before", "after"] * 3)

    def test_who_clips_by_torch_is_told(self):
        x, y = batch_of(1, 4, torch.float32)
        for mode, told in (("optimizer", False), ("gradients", True), ("gradients", False)):
            if mode == "optimizer" or told:
                cohort.optim._told_of_clipping = False
            model = DistributedDataParallel(model_of(), sharding=mode)
            optimizer = Sharded(model, torch.optim.SGD, lr=0.1)
            loss_of(model(x), y).backward()
            with contextlib.ExitStack() as stack:
                seen = None
                if told and self.rank == 0:
                    seen = stack.enter_context(self.assertLogs("cohort.optim", "WARNING"))
                elif hasattr(self, "assertNoLogs"):  # since Python 3.10
                    stack.enter_context(self.assertNoLogs("cohort.optim"))
                optimizer.step()
            if seen is not None:
                self.assertIn("clip_grad_norm(max_norm) of the optimizer", seen.output[0])

    def test_state_dict_has_master_weights(self):
        x, y = batch_of(1, 4, torch.bfloat16)

        def make():
            model = DistributedDataParallel(model_of(torch.bfloat16), sharding="optimizer")
            return model, Sharded(model, torch.optim.SGD, lr=1e-4, momentum=0.9)

        def steps(model, optimizer, count):
            for _ in range(count):
                loss_of(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

        model, optimizer = make()
        steps(model, optimizer, 20)
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        masters = [piece.tensor.clone() for piece in optimizer.pieces]
        steps(model, optimizer, 20)
        for weights_first in True, False:
            other, resumed = make()
            if not weights_first:
                resumed.load_state_dict(copy.deepcopy(state))  # which torch takes as it is
            other.load_state_dict(weights)
            other.parameters_written()
            if weights_first:
                resumed.load_state_dict(copy.deepcopy(state))
            for piece, master in zip(resumed.pieces, masters):
                self.assertTrue(torch.equal(piece.tensor, master))
            steps(other, resumed, 20)
            for ours, theirs in zip(resumed.pieces, optimizer.pieces):
                self.assertTrue(torch.equal(ours.tensor, theirs.tensor))
        if masters:
            strange = {**state, "masters": {**state["masters"], 0: torch.ones(1)}}
            before = [piece.tensor.clone() for piece in resumed.pieces]
            with self.assertRaisesRegex(cohort.InvalidArgument, "of other pieces"):
                resumed.load_state_dict(strange)
            for piece, master in zip(resumed.pieces, before):
                self.assertTrue(torch.equal(piece.tensor, master))

    def test_the_state_of_another_rank_is_refused(self):
        def make(kind):
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
            model = DistributedDataParallel(net, sharding=kind)
            return model, Sharded(model, torch.optim.AdamW, lr=0.1)

        for kind in "optimizer", "gradients", "parameters":
            model, optimizer = make(kind)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            states = [pickle.loads(one) for one in all_gather_bytes(cohort.world(), pickle.dumps(optimizer.state_dict()))]
            _, other = make(kind)
            other.load_state_dict(states[self.rank])
            for rank, state in enumerate(states):
                if rank != self.rank:
                    with self.assertRaisesRegex(cohort.InvalidArgument, "of other pieces"):
                        other.load_state_dict(state)

    def test_what_cannot_be_is_refused(self):
        plain = DistributedDataParallel(model_of())
        with self.assertRaisesRegex(cohort.InvalidArgument, "with sharding="):
            Sharded(plain, torch.optim.SGD, lr=1.0)
        with self.assertRaisesRegex(cohort.InvalidArgument, "sharding='half'"):
            DistributedDataParallel(model_of(), sharding="half")
        model = DistributedDataParallel(model_of(), sharding="parameters")
        for name in "LBFGS", "Adafactor", "Muon":
            if hasattr(torch.optim, name):
                with self.assertRaisesRegex(cohort.InvalidArgument, f"{name} does not work on each element"):
                    Sharded(model, getattr(torch.optim, name), elementwise=True)

        class Own(torch.optim.AdamW):
            def step(self, closure=None):
                return super().step(closure)

        with self.assertRaisesRegex(cohort.InvalidArgument, "elementwise=True"):
            Sharded(model, Own)
        Sharded(model, Own, elementwise=True, lr=1e-3)
        with self.assertRaisesRegex(cohort.InvalidArgument, "no class of torch.optim"):
            Sharded(model, model.parameters())
        with self.assertRaisesRegex(cohort.InvalidArgument, "does not train"):
            Sharded(model, torch.optim.SGD, [{"params": [torch.ones(3)]}], lr=1.0)
        with self.assertRaisesRegex(cohort.InvalidArgument, "step_without_samples"), model.join():
            pass
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        model.parameters_written()
        x, _ = batch_of(0, 4, torch.float32)
        model(x)
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)
        with self.assertRaisesRegex(cohort.InvalidArgument, f"rank {self.rank} has written to parameter '0.weight'"):
            model(x)


if __name__ == "__main__":
    unittest.main()
