"""cohort.optim.LocalSGD and DiLoCo on the ranks of `cohort run -np N`, against a plain loop over the ranks."""

import contextlib
import copy
import functools
import os
import pickle
import tempfile
import unittest

from support import needs_torch, torch
from support_nn import Ranks, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort
import cohort.checkpoint
from cohort._collective import broadcast_bytes
from cohort.errors import InvalidArgument, Mismatch, NonFinite

if torch is not None:
    from nn_models import Mlp, batch_of, copies, loss_of, with_values

    from cohort.nn import DistributedDataParallel
    from cohort.optim import DiLoCo, LocalSGD


def backward(model, step, rank, size, each=4):
    dtype = torch.float64 if any(one.dtype == torch.float64 for one in model.parameters()) else torch.float32
    x, y = batch_of(step, each * size, dtype)
    mine = slice(rank * each, (rank + 1) * each)
    model.zero_grad()
    loss_of(model(x[mine]), y[mine]).backward()


def reference(size, steps, fragments, sync_every, delay=0, alpha=0.0, make=None):
    """As the papers have it: one loop over the ranks, and an outer optimizer of torch. Returns the outer parameters."""
    nets = [with_values(Mlp()) for _ in range(size)]
    inner = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in nets]
    outer = [one.detach().clone() for one in nets[0].parameters()]
    optimizer = (make or functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True))(outer)
    apart = sync_every // len(fragments)
    for step in range(1, steps + 1):
        for rank, net in enumerate(nets):
            backward(net, step - 1, rank, size)
            inner[rank].step()
        of = [list(net.parameters()) for net in nets]
        fragment = fragments[(step - 1) // apart % len(fragments)]
        with torch.no_grad():
            if step % apart == (apart - delay) % apart:
                for i in fragment:
                    outer[i].grad = sum(outer[i] - one[i] for one in of) / size
            if step % apart == 0:
                optimizer.step()
                for i in fragment:
                    outer[i].grad = None
                    for one in of:
                        one[i].copy_(outer[i] + alpha * (one[i] - outer[i]))
    return outer


class Odd(torch.nn.Module if torch is not None else object):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
        self.scale = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.count = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        self.frozen = torch.nn.Parameter(torch.full((2,), float(cohort.rank())), requires_grad=False)

    def forward(self, x):
        return self.last(self.norm(self.first(x))) * self.scale.float()


@needs_torch
class Local(Ranks):
    def train(self, net, local, optimizer, steps, first=0):
        for step in range(first, steps):
            backward(net, step, self.rank, self.size)
            optimizer.step()
            local.step()

    def test_each_step_synchronised_is_data_parallel(self):
        model = DistributedDataParallel(with_values(Mlp()))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(5):
            x, y = batch_of(step, 4 * self.size)
            mine = slice(self.rank * 4, self.rank * 4 + 4)
            optimizer.zero_grad()
            loss_of(model(x[mine]), y[mine]).backward()
            optimizer.step()
        for make in (
            functools.partial(LocalSGD, sync_every=1),
            functools.partial(LocalSGD, sync_every=100, warm_up_steps=5),
            functools.partial(DiLoCo, sync_every=1, outer_learning_rate=1, outer_momentum=0),
        ):
            net = with_values(Mlp(), self.rank)  # rank 0's counts
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            self.train(net, make(net, optimizer), optimizer, 5)
            self.assert_same_bits_on_all_ranks(copies(net))
            self.assert_close(copies(net), copies(model), 1e-13)

    def test_diloco_is_that_of_the_papers(self):
        whole, two = [[0, 1, 2, 3, 4, 5]], [[0, 1, 2], [3, 4, 5]]
        adam = functools.partial(torch.optim.Adam, lr=0.01)
        for told, fragments in (
            ({"sync_every": 3}, whole),
            ({"sync_every": 3, "alpha": 0.5}, whole),
            ({"sync_every": 6, "fragments": 2}, two),
            ({"sync_every": 6, "fragments": 2, "delay": 1, "alpha": 0.25}, two),
            ({"sync_every": 3, "make": adam}, whole),
        ):
            with self.subTest(told=told):
                how = {"fragment_sync_delay": told.get("delay", 0), "fragment_update_alpha": told.get("alpha", 0.0),
                       "fragments": told.get("fragments", 1), "outer_optimizer": told.get("make")}  # fmt: skip
                net = with_values(Mlp())
                optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
                diloco = DiLoCo(net, optimizer, sync_every=told["sync_every"], **how)
                self.train(net, diloco, optimizer, 12)
                ours = [one.outer for one in diloco._fragments]
                self.assert_same_bits_on_all_ranks(ours)
                told = {key: value for key, value in told.items() if key != "fragments"}
                right = reference(self.size, 12, fragments, **told)
                self.assert_close(ours, [torch.cat([right[i].reshape(-1) for i in part]) for part in fragments], 1e-12)
                diloco.synchronize()
                self.assert_same_bits_on_all_ranks(copies(net))

    def test_ranks_are_alike_after_each_synchronisation(self):
        for wire in (None, "int4"):
            net = Odd()
            optimizer = torch.optim.AdamW([{"params": net.first.parameters()}, {"params": net.norm.parameters(), "lr": 0.1},
                                           {"params": [*net.last.parameters(), net.scale]}], 1e-2)  # fmt: skip
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
            diloco = DiLoCo(net, optimizer, sync_every=4, fragments=2, wire_format=wire)
            for step in range(15):
                backward(net, step, self.rank, self.size)
                torch.nn.utils.clip_grad_norm_([one for one in net.parameters() if one.grad is not None], 1.0)
                optimizer.step()
                diloco.step(0 if self.rank == 1 else 3)
                schedule.step()
                if step % 2:
                    self.assert_same_bits_on_all_ranks([one.outer for one in diloco._fragments])
            self.assertEqual(diloco.steps_left, 1)
            diloco.synchronize()
            before = copies(net)
            diloco.synchronize()  # no step, no momentum
            for one, other in zip(copies(net), before):
                self.assertTrue(torch.equal(one, other))
            self.assert_same_bits_on_all_ranks([one for one in before if one.is_floating_point()])
            # If no rank had samples, outer parameters and momentum stay, and buffers become no zeros.
            was = [one.clone() for one in (*diloco._outer().values(), *net.parameters())]
            backward(net, 15, self.rank, self.size)
            optimizer.step()
            diloco.step(0)
            diloco.synchronize()
            for one, other in zip((*diloco._outer().values(), *net.parameters()), was):
                self.assertTrue(torch.equal(one, other))
            self.assert_same_bits_on_all_ranks([net.norm.running_mean, net.norm.running_var])
            self.assertGreater(float(net.norm.running_var.min()), 0.01)
            self.assertEqual(net.frozen.tolist(), [0, 0])
            other = Odd()
            joined = DiLoCo(other, torch.optim.AdamW(other.parameters()), sync_every=4, fragments=2)
            with torch.no_grad():
                other.frozen.fill_(7)
            joined.load_state_dict(diloco.state_dict(), own=False)
            for one, right in zip((*other.parameters(), *other.buffers()), (*net.parameters(), *net.buffers())):
                self.assertTrue(torch.equal(one, right))
            self.assertFalse(torch.equal(net.scale, torch.ones(3, dtype=torch.bfloat16)))

    def test_goes_on_from_its_state_to_the_bit(self):
        name = tempfile.mkdtemp().encode() if self.rank == 0 else b""
        folder = bytes(broadcast_bytes(self.world, name)).decode()
        adam = functools.partial(torch.optim.Adam, lr=0.01)
        for number, (saved, make) in enumerate(((5, None), (7, None), (7, adam))):  # within a round, on the way

            def start(salt, make=make):
                net = with_values(Mlp(), salt)
                optimizer = torch.optim.AdamW([{"params": net.first.parameters()}, {"params": net.second.parameters()},
                                               {"params": net.last.parameters(), "lr": 0.02}], 0.01)  # fmt: skip
                return net, optimizer, DiLoCo(net, optimizer, make, 4, fragment_sync_delay=2, fragment_update_alpha=0.5)

            net, optimizer, diloco = start(0)
            self.train(net, diloco, optimizer, saved)
            checkpoints = cohort.checkpoint.CheckpointFolder(os.path.join(folder, str(number)))
            checkpoints.save(net, optimizer, step=saved, state=diloco.state_dict())
            self.train(net, diloco, optimizer, 14, saved)

            other, optimizer, diloco = start(9)
            self.assertEqual(checkpoints.load_latest(other, optimizer).progress.step, saved)
            diloco.load_state_dict(checkpoints.rank_state())
            self.train(other, diloco, optimizer, 14, saved)
            for one, right in zip(copies(other), copies(net)):
                self.assertTrue(torch.equal(one, right))

            # A rank that there was not: what all have alike.
            of_0 = checkpoints.parts([0])[0]
            other, _, diloco = start(8)
            diloco.load_state_dict(of_0, own=False)
            self.assertEqual(diloco.steps_left, 4 - saved % 4)
            self.assertTrue(torch.equal(other.first.weight.reshape(-1), of_0["outer/parameters/0"][:85]))
            diloco._drop()

    def test_follows_each_step_within_a_with(self):
        nets = []
        for within, first in (True, True), (True, False), (False, True):  # is the schedule made before
            net = with_values(Mlp())
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if first else None
            local = LocalSGD(net, optimizer, 3)
            with local if within else contextlib.nullcontext():
                schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
                for step in range(6):
                    backward(net, step, self.rank, self.size)
                    optimizer.step()
                    if not within:
                        local.step()
                    schedule.step()
            self.assertEqual(local._steps, 6)
            optimizer.step()
            self.assertEqual(local._steps, 6)
            nets.append(copies(net))
        for net in nets[1:]:
            for one, other in zip(net, nets[0]):
                self.assertTrue(torch.equal(one, other))

    def test_fragments_are_independent(self):
        found = []
        for turned in False, True:
            net = with_values(Mlp())
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            parts = [net.first, net.second, net.last]
            diloco = DiLoCo(parts[::-1] if turned else parts, optimizer, sync_every=300)
            for part in range(2):
                self.train(net, diloco, optimizer, 5 * part + 5, 5 * part)
                diloco.synchronize()
            self.assert_same_bits_on_all_ranks(copies(net))
            found.append(copies(net))
        for one, other in zip(*found):
            self.assertTrue(torch.equal(one, other))

    def test_what_would_not_be_averaged_is_refused(self):
        def unfreeze(net, _):
            net.first.weight.requires_grad_(True)

        def replace(net, _):
            net.last.bias = torch.nn.Parameter(net.last.bias.detach().clone())

        def add(_, optimizer):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})

        for change, said in ((unfreeze, "'first.weight' is trained"), (replace, "'last.bias' is trained"),
                             (add, r"of shape \[3\] in group 1")):  # fmt: skip
            for make in LocalSGD, DiLoCo:
                net = with_values(Mlp())
                net.first.weight.requires_grad_(False)
                optimizer = torch.optim.SGD(net.parameters(), 0.1)
                local = make(net, optimizer, sync_every=2)
                self.train(net, local, optimizer, 3)
                local.synchronize()
                change(net, optimizer)
                for call in local.synchronize, local.step:
                    with self.assertRaisesRegex(InvalidArgument, said):
                        call()
                if change is not add:
                    optimizer = torch.optim.SGD(net.parameters(), 0.1)
                    local = make(net, optimizer, sync_every=2)
                    self.train(net, local, optimizer, 5, 3)
                    local.synchronize()
                    self.assert_same_bits_on_all_ranks(copies(net))
        # A parameter that is frozen later is averaged as before.
        net = with_values(Mlp())
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        local = LocalSGD(net, optimizer, 4)
        self.train(net, local, optimizer, 2)
        net.first.weight.requires_grad_(False)
        self.train(net, local, optimizer, 4, 2)
        local.synchronize()
        self.assert_same_bits_on_all_ranks(copies(net))
        with self.assertRaisesRegex(InvalidArgument, r"of shape \[3, 17\] in group 0"):
            DiLoCo([net.first, net.second], torch.optim.SGD(net.parameters(), 0.1), sync_every=2)

    def test_buffers_that_a_forward_replaces_are_averaged(self):
        class Mean(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = torch.nn.Linear(5, 3)
                self.register_buffer("mean", torch.zeros(5))

            def forward(self, x):
                self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
                return self.fc(x)

        net = with_values(Mean())
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        local = LocalSGD(net, optimizer, 2)
        self.train(net, local, optimizer, 4)
        self.assert_same_bits_on_all_ranks([net.mean])
        self.assertGreater(float(net.mean.abs().max()), 0)

    def test_buffers_that_are_added_while_a_synchronisation_is_under_way(self):
        net = with_values(Mlp())
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        local = DiLoCo(net, optimizer, sync_every=3, fragment_sync_delay=2)
        self.train(net, local, optimizer, 1)
        net.register_buffer("late", torch.full((3,), float(self.rank)))
        local.synchronize()
        self.assertEqual(net.late.tolist(), [(self.size - 1) / 2] * 3)
        self.train(net, local, optimizer, 1)
        del net.late
        net.register_buffer("another", torch.full((3,), 10.0 + self.rank))  # of the same size
        local.synchronize()
        self.assertEqual(net.another.tolist(), [10 + (self.size - 1) / 2] * 3)
        self.assert_same_bits_on_all_ranks(copies(net))

    def test_weights_that_are_loaded_afterwards(self):
        hooks = hasattr(torch.optim.Optimizer, "register_step_pre_hook")
        for make in LocalSGD, DiLoCo:
            net = with_values(Mlp())
            optimizer = torch.optim.SGD(net.parameters(), 0.0)
            local = make(net, optimizer, sync_every=2)
            self.train(net, local, optimizer, 3)
            local.synchronize()
            loaded = {name: torch.full_like(one, 0.25) for name, one in net.state_dict().items()}
            kept = {name: one.clone() for name, one in net.state_dict().items()}
            net.load_state_dict(loaded)
            net.load_state_dict(kept)  # as an average that is evaluated
            local.synchronize()
            net.load_state_dict(loaded)
            with self.assertRaisesRegex(InvalidArgument, r"parameters_written\(\)"):
                local.synchronize()
            if hooks and make is DiLoCo:
                backward(net, 3, self.rank, self.size)
                with self.assertRaisesRegex(InvalidArgument, r"parameters_written\(\)"):
                    optimizer.step()
            local.parameters_written()
            self.assertEqual(local.steps_left, 2)
            self.train(net, local, optimizer, 9, 3)
            local.synchronize()
            for one in net.parameters():
                self.assertTrue(torch.equal(one, torch.full_like(one, 0.25)))
            # From other weights on each rank: rank 0's.
            with torch.no_grad():
                for one in net.parameters():
                    one.fill_(self.rank)
            local.parameters_written()
            self.assertFalse(bool(net.first.weight.any()))
        net = with_values(Mlp())
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        adagrad = functools.partial(torch.optim.Adagrad, lr=0.1)  # whose state is there from the beginning
        diloco = DiLoCo(net, optimizer, adagrad, sync_every=2)
        self.train(net, diloco, optimizer, 2)
        diloco.parameters_written()
        self.train(net, diloco, optimizer, 4, 2)
        self.assert_same_bits_on_all_ranks(copies(net))

    def test_nan_of_a_rank_stays_there(self):
        bad = self.size - 1
        for make in LocalSGD, DiLoCo:
            net = with_values(Mlp())
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            local = make(net, optimizer, sync_every=2)
            self.train(net, local, optimizer, 3)
            outer = [one.outer.clone() for one in local._fragments]
            backward(net, 3, self.rank, self.size)
            optimizer.step()
            if self.rank == bad:
                with torch.no_grad():
                    net.second.weight[0, 0] = float("nan")
            with self.assertRaisesRegex(NonFinite, f"'second.weight' of rank {bad} "):
                local.step()
            for fragment, before in zip(local._fragments, outer):
                self.assertTrue(torch.equal(fragment.outer, before))

    def test_of_a_damaged_state_nothing_is_taken(self):
        def start():
            net = with_values(Mlp())
            optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
            return net, optimizer, DiLoCo(net, optimizer, sync_every=4, fragment_sync_delay=2)

        net, optimizer, diloco = start()
        self.train(net, diloco, optimizer, 3)
        state = {name: one.clone() for name, one in diloco.state_dict().items()}
        self.train(net, diloco, optimizer, 4, 3)
        expected = copies(net)
        flat = state["outer/momentum_buffer/0"]
        for name, value in (("outer/difference", None), ("outer/rest", None), ("outer/difference", flat[1:]),
                            ("outer/momentum_buffer/7", flat), ("outer/momentum_buffer/x", flat),
                            ("outer/momentum_buffer/0", flat[1:])):  # fmt: skip
            damaged = {key: one for key, one in state.items() if key != name}
            if value is not None:
                damaged[name] = value
            net, optimizer, diloco = start()
            before = {key: one.clone() for key, one in diloco.state_dict().items()}
            with self.assertRaisesRegex(InvalidArgument, name):
                diloco.load_state_dict(damaged)
            after = diloco.state_dict()
            self.assertEqual(sorted(after), sorted(before))
            for key, one in after.items():
                self.assertTrue(torch.equal(one, before[key]), key)
            diloco.load_state_dict(state)
            self.train(net, diloco, optimizer, 4, 3)
            for one, right in zip(copies(net), expected):
                self.assertTrue(torch.equal(one, right))

    def test_refuses_what_has_no_meaning(self):
        net = Mlp()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for told, said in (
            ({"sync_every": 0}, "sync_every"),
            ({"sync_every": 10, "fragments": 3}, "multiple"),
            ({"sync_every": 70, "fragments": 7}, "more fragments than parameters"),
            ({"sync_every": 4, "fragments": 2, "fragment_sync_delay": 2}, "delay"),
            ({"fragment_update_alpha": 1.5}, "alpha"),
            ({"outer_momentum": 1}, "outer_momentum"),
        ):
            with self.assertRaisesRegex(InvalidArgument, said):
                DiLoCo(net, optimizer, **told)
        diloco = DiLoCo(net, optimizer)
        with self.assertRaisesRegex(InvalidArgument, "outer/counts"):
            diloco.load_state_dict({})
        for at, value in ((0, -1.0), (2, -1.0), (3, 1.0), (3, -2.0), (4, 0.5), (5, float("nan")),
                          (7, float("nan")), (8, -1.0)):  # fmt: skip
            damaged = diloco.state_dict()
            damaged["outer/counts"][at] = value
            with self.assertRaisesRegex(InvalidArgument, "it is damaged"):
                diloco.load_state_dict(damaged)
        with self.assertRaisesRegex(InvalidArgument, "outer/momentum_buffer/0"):
            diloco.load_state_dict(LocalSGD(net, optimizer).state_dict())
        if self.size > 1:
            rate = 0.5 if self.rank == 1 else 0.7
            for told in {"outer_learning_rate": rate}, {"outer_optimizer": lambda flat: torch.optim.Adam(flat, rate)}:
                diloco = DiLoCo(net, optimizer, sync_every=1, **told)
                with self.assertRaises(Mismatch):
                    diloco.step()

    def test_a_rank_that_goes_on_from_another_step_is_found(self):
        if self.size == 1:
            return
        net = with_values(Mlp())
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        local = LocalSGD(net, optimizer, sync_every=2)

        def step(number):
            backward(net, number, self.rank, self.size)
            optimizer.step()
            local.step()

        for number in range(4):
            if number == 2:
                state = copy.deepcopy(local.state_dict())
            step(number)
        if self.rank == 1:
            local.load_state_dict(state)
        with self.assertRaisesRegex(Mismatch, "number of steps = [46]"):
            for number in range(4, 6):
                step(number)

    def test_a_number_of_samples_that_cannot_be_is_an_error_on_all_ranks(self):
        for bad in (float("nan"), float("inf"), -1.0):
            for delay in (0, 1):
                net = with_values(Mlp())
                optimizer = torch.optim.SGD(net.parameters(), 0.1)
                diloco = DiLoCo(net, optimizer, sync_every=4, fragment_sync_delay=delay)

                def step(number, samples, net=net, optimizer=optimizer, diloco=diloco):
                    backward(net, number, self.rank, self.size)
                    optimizer.step()
                    diloco.step(samples)

                step(0, 4)
                step(1, bad if self.rank == 0 and self.size > 1 else 4)
                step(2, 4)
                if self.size > 1:
                    with self.assertRaisesRegex(Mismatch, f"rank 0 has number of samples = {bad} in step 2"):
                        step(3, 4)
                else:
                    with self.assertRaisesRegex(InvalidArgument, f"is 0 or more, not {bad} in step 4"):
                        step(3, bad)
                    step(3, 4)
                for number in range(4, 8):
                    step(number, 4)
                diloco.synchronize()
                same = torch.stack([one.detach().sum() for one in net.parameters()])
                most = same.clone()
                if self.size > 1:
                    diloco._comm.all_reduce(most, op="max")
                self.assertTrue(torch.equal(most, same))
                if self.size > 1:
                    for number in range(8, 11):
                        step(number, bad)
                    with self.assertRaisesRegex(InvalidArgument, f"is 0 or more, not {bad} in step 9"):
                        step(11, 4)

    def test_it_is_not_copied(self):
        net = Mlp()
        for made in (LocalSGD(net, torch.optim.SGD(net.parameters(), 0.1)), DiLoCo(net, torch.optim.SGD(net.parameters(), 0.1))):
            for copied in (copy.copy, copy.deepcopy, pickle.dumps):
                with self.assertRaisesRegex(InvalidArgument, f"{type(made).__name__}: it cannot be copied .*load_state_dict"):
                    copied(made)


if __name__ == "__main__":
    unittest.main()
