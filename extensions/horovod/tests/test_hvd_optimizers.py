"""hvd.DistributedOptimizer together with clipping, GradScaler, frozen layers, several optimizers, schedules.

Each rank of `cohort run -np N` runs this.
"""

import copy
import unittest
import warnings

from support import torch
from support_hvd import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them
from test_hvd_training import OPTIMIZERS, Case, loss_of, network

import cohort

if torch is not None:
    import cohort.horovod.torch as hvd

has_scaler = hasattr(getattr(torch, "amp", None), "GradScaler")


class TwoLayers(torch.nn.Module if torch is not None else object):
    """A model of which ranks may leave out the second layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, both=True):
        y = self.a(x)
        return (self.b(y) if both else y).sum()


class Touched(Case):
    """Gradients that are changed between backward and step."""

    def optimizer(self, model, **options):
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), **options)

    def test_is_refused_by_name(self):
        if self.size == 1:
            self.skipTest("nothing is reduced")

        def clip(parameters):
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)

        def clip_last(parameters):
            parameters[3].grad.mul_(0.5)

        def replace(parameters):
            parameters[3].grad = parameters[3].grad.clamp(-0.1, 0.1)

        def drop(parameters):
            parameters[3].grad = None

        for options in ({}, {"groups": 2}, {"compression": hvd.Compression.fp16}):
            for change, name in ((clip, "0.weight"), (clip_last, "2.bias"), (replace, "2.bias"), (drop, "2.bias")):
                model = network()
                optimizer = self.optimizer(model, **options)
                for finish in optimizer.step, optimizer.synchronize:
                    loss_of(model(torch.ones(2, 6).double()), torch.tensor([0, 1])).backward()
                    change(list(model.parameters()))
                    before = copy.deepcopy(model.state_dict())
                    with self.assertRaisesRegex(ValueError, r"of '(\d\.\w+)' was changed .* call optimizer.synchronize\(\)") as got:
                        finish()
                    if name == "2.bias":
                        self.assertIn(name, str(got.exception))
                    self.assertTrue(all(torch.equal(one, before[key]) for key, one in model.state_dict().items()))
                    optimizer.zero_grad()
                loss_of(model(torch.ones(2, 6).double()), torch.tensor([0, 1])).backward()  # training continues
                optimizer.synchronize()
                clip(list(model.parameters()))
                with optimizer.skip_synchronize():
                    optimizer.step()
                self.on_all_ranks(model)

    def test_gradients_in_one_buffer_or_one_tensor_are_written_to_for_each_other(self):
        class Sum(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))

        for shared in False, True:
            model = Sum()
            optimizer = self.optimizer(model)
            flat = torch.zeros(6)
            model.a.grad, model.b.grad = (flat[:3], flat[:3]) if shared else (flat[:3], flat[3:])
            for _ in range(3):
                optimizer.zero_grad(set_to_none=False)
                ((model.a + 2 * model.b) * (1 + self.rank)).sum().backward()
                optimizer.synchronize()

    def test_through_the_groups_all_have_to_be_there(self):
        """Gradients read through the groups are averages, as far as this rank has gradients."""
        for skips in False, True:
            if skips and self.size == 1:
                continue
            model = TwoLayers()
            optimizer = self.optimizer(model)
            model(torch.ones(2, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            model(torch.ones(2, 4), not skips or self.rank > 0).backward()
            if not skips or self.rank == 0:
                torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)
            if skips and self.rank == 0:
                self.assertRaisesRegex(ValueError, "'a.bias' was changed", optimizer.step)
            else:
                optimizer.step()


@unittest.skipUnless(has_scaler, "no GradScaler for CPU")
class Scaled(Case):
    def loop(self, model, optimizer, steps, both, inputs=lambda step: 1.0, unscale=False, clear=None):
        """Returns the gradients after each step, as a GradScaler has left them, with its scales."""
        scaler, seen = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000), []
        for step in range(steps):
            (clear or optimizer.zero_grad)()
            scaler.scale(model(torch.full((2, 4), inputs(step)), both(step))).backward()
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            scaler.step(optimizer)
            scaler.update()
            gradient = model.b.bias.grad
            seen.append((None if gradient is None else float(gradient[0]), scaler.get_scale()))
        return seen

    def test_a_rank_that_does_not_use_a_layer(self):
        for fused in (False, True):
            if fused and torch.__version__ < "2.4":
                continue
            for unscale in False, True:
                for first in 0, 2:
                    model = TwoLayers()
                    made = torch.optim.SGD(model.parameters(), lr=0.01, **({"fused": True} if fused else {}))
                    optimizer = hvd.DistributedOptimizer(made, model.named_parameters())
                    seen = self.loop(model, optimizer, 4, lambda step: step != first or self.rank > 0, unscale=unscale)
                    for step, (gradient, scale) in enumerate(seen):
                        self.assertEqual(scale, 1024.0)
                        if not fused or unscale:  # otherwise the step unscales, and the gradient stays scaled
                            self.assertAlmostEqual(gradient, 2.0 * (1 - (step == first) / self.size), places=5)
                    self.on_all_ranks(model)

    def test_an_overflow_where_a_rank_does_not_use_a_layer(self):
        for clears_model in False, True:
            model = TwoLayers()
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
            seen = self.loop(model, optimizer, 4, lambda step: step != 1 or self.rank > 0,
                             lambda step: 3e38 if step == 1 else 1.0, clear=model.zero_grad if clears_model else None)  # fmt: skip
            self.assertEqual([scale for _, scale in seen], [1024.0, 512.0, 512.0, 512.0])
            self.assertEqual([gradient for gradient, _ in seen[2:]], [2.0, 2.0])
            self.on_all_ranks(model)

    def test_adasum_leaves_out_steps_on_all_ranks(self):
        for fused in (False, True):
            if fused and torch.__version__ < "2.4":
                continue
            model = TwoLayers()
            made = torch.optim.SGD(model.parameters(), lr=0.01, **({"fused": True} if fused else {}))
            optimizer = hvd.DistributedOptimizer(made, model.named_parameters(), op=hvd.Adasum)
            weights = []
            optimizer.register_step_post_hook(lambda *_: weights.append(1)) if hasattr(optimizer, "register_step_post_hook") else None
            seen = self.loop(model, optimizer, 5, lambda step: True, lambda step: 3e38 if step == 1 and self.rank == 0 else 1.0)
            self.assertEqual([scale for _, scale in seen], [1024.0] + [512.0] * 4)
            self.on_all_ranks(model)
            if not fused and weights:
                self.assertEqual(len(weights), 4)
            # A rank without any gradient takes part.
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            optimizer.zero_grad()
            if self.rank == 0:
                scaler.scale(model(torch.ones(2, 4))).backward()
            else:
                scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            self.on_all_ranks(model)


class Adasum(Case):
    def test_more_parameters_later(self):
        for by_call in True, False:
            model = network()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model[2].parameters(), 0.1), model[2].named_parameters(), op=hvd.Adasum
            )
            if by_call:
                optimizer.add_param_group({"params": list(model[0].parameters())})
            else:
                optimizer.param_groups[0]["params"] += list(model[0].parameters())
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model(torch.full((2, 6), 1.0 + self.rank + step).double()), torch.tensor([0, 1])).backward()
                optimizer.step()
            self.on_all_ranks(model)

    def test_layers_frozen_before_the_step(self):
        """A parameter with a gradient is stepped on all ranks, even if some have frozen it since."""
        for where in ({1}, set(range(self.size))):
            model = network()
            weight = model[0].weight
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), op=hvd.Adasum)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model(torch.full((2, 6), 1.0 + self.rank + step).double()), torch.tensor([0, 1])).backward()
                begin = weight.detach().clone()
                weight.requires_grad_(step != 2 or self.rank not in where)
                optimizer.step()
                weight.requires_grad_(True)
                self.assertFalse(torch.equal(weight, begin))
                self.on_all_ranks(model)

    def test_a_layer_that_some_ranks_used_before_all_froze_it(self):
        model = network()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), op=hvd.Adasum)
        for step in range(3):
            optimizer.zero_grad()
            used = model if step == 0 or self.rank == 0 else model[2:]
            loss_of(used(torch.ones(2, next(used.parameters()).shape[1]).double()), torch.tensor([0, 1])).backward()
            model[0].requires_grad_(step == 0)
            optimizer.step()
            self.on_all_ranks(model)

    def test_factors_and_steps_are_compared(self):
        if self.size == 1:
            self.skipTest("no ranks to compare")
        last = self.size - 1
        for name, factors in (("prescale_factor", {}), ("postscale_factor", {})):
            with self.assertRaisesRegex(hvd.HorovodInternalError, rf"{name} is 1.0 on rank 0 and 2.0 on rank {last} -- give") as got:
                hvd.allreduce(torch.ones(2), op=hvd.Adasum, name=name, **{name: 2.0 if self.rank == last else 1.0})
            self.assertIsInstance(got.exception.__cause__, cohort.Mismatch)
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), [("steps", weight)], op=hvd.Adasum)
        for step in range(3):
            optimizer.zero_grad()
            weight.sum().backward()
            if step == 1 and self.rank == last:
                optimizer._steps_here += 1  # as if another had left one out
            if step == 1:
                text = f"the step of the optimizer is 2 on rank 0 and 3 on rank {last}"
                self.assertRaisesRegex(hvd.HorovodInternalError, text, optimizer.step)
                optimizer._steps_here = 2
            else:
                optimizer.step()


class Several(Case):
    """Several optimizers, whose parameters have equal names, work at the same time."""

    def test_two_halves_of_a_model(self):
        for options in ({}, {"op": hvd.Adasum}, {"average_by": "samples"}):
            model, alone = network(), network()
            make = OPTIMIZERS["SGD"]
            single = [make(layer.parameters()) for layer in (alone[0], alone[2])]
            both = [hvd.DistributedOptimizer(make(layer.parameters()), **options) for layer in (model[0], model[2])]
            for _ in range(45):  # two comparisons of ranks
                for net, optimizers in ((alone, single), (model, both)):
                    for one in optimizers:
                        one.zero_grad()
                        if "average_by" in options and one in both:
                            one.set_sample_count(2)
                    loss_of(net(torch.ones(2, 6).double()), torch.tensor([0, 1])).backward()
                    for one in optimizers:
                        one.step()
            self.alike(model, alone)
            self.on_all_ranks(model)

    def test_layers_that_both_have_are_refused_by_name(self):
        if self.size == 1:
            self.skipTest("nothing is reduced")
        for op in hvd.Average, hvd.Sum:
            a, b, c, d = (torch.nn.Linear(4, 4) for _ in range(4))
            heads = [
                hvd.DistributedOptimizer(torch.optim.SGD([*a.parameters(), *head.parameters()], 0.1), op=op) for head in (b, c)
            ]
            with self.assertRaisesRegex(cohort.InvalidArgument, r"'allreduce.noname.0.[01]' is a parameter of two Dist"):
                (b(a(torch.ones(2, 4))) + c(a(torch.ones(2, 4)))).sum().backward()
            del heads
            only = hvd.DistributedOptimizer(torch.optim.SGD([*a.parameters(), *d.parameters()], 0.1), op=op)
            only.zero_grad()
            d(a(torch.ones(2, 4))).sum().backward()
            only.step()

    def test_two_networks_of_equal_names(self):
        for named in True, False:
            make, judge = (torch.nn.Sequential(torch.nn.Linear(6, 6)).double() for _ in range(2))
            for net in make, judge:
                hvd.broadcast_parameters(net.state_dict(), 0)
            of_make, of_judge = (
                hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.01), net.named_parameters() if named else None)
                for net in (make, judge)
            )
            for _ in range(5):
                noise = torch.full((4, 6), 1.0 + self.rank).double()
                of_judge.zero_grad()
                judge(make(noise).detach()).mean().backward()
                of_judge.step()
                of_make.zero_grad()
                judge(make(noise)).mean().backward()
                of_make.step()
                of_judge.synchronize()
            self.on_all_ranks(make), self.on_all_ranks(judge)

    def test_names(self):
        from cohort.horovod.claims import claimed

        one, two = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        name = f"claims.{self.id()}"
        got = [claimed(name, owner, hvd.global_process_set) for owner in (one, two, one, two)]
        self.assertEqual(got, [name, f"{name}~2", name, f"{name}~2"])
        del one
        self.assertEqual(claimed(name, torch.nn.Parameter(torch.ones(2)), hvd.global_process_set), f"{name}~3")


class Frozen(Case):
    def test_after_wrapping_it_stays_as_it_is(self):
        for options in ({}, {"groups": 1}):
            model, alone = network(), network()
            make = lambda net: torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)  # noqa: E731
            single = make(alone)
            optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters(), **options)
            for step in range(6):
                for net, one in ((alone, single), (model, optimizer)):
                    if step == 2:
                        net[0].requires_grad_(False)
                    if step == 4:
                        net[0].requires_grad_(True)
                    one.zero_grad()
                    loss_of(net(torch.ones(2, 6).double()), torch.tensor([0, 1])).backward()
                    one.step()
                    self.assertEqual(net[0].weight.grad is None, step in (2, 3))
            self.alike(model, alone)

    def test_after_a_backward_that_one_rank_alone_had(self):
        """All ranks step by the mean, or none does."""
        for options in ({}, {"groups": 1}):
            model = network()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), **options
            )
            for step in range(4):
                optimizer.zero_grad()
                used = model if step != 2 or self.rank == 0 else model[2:]
                loss_of(used(torch.ones(2, next(used.parameters()).shape[1]).double()), torch.tensor([0, 1])).backward()
                begin = model[0].weight.detach().clone()
                model[0].requires_grad_(step < 2)
                optimizer.step()
                self.assertEqual(torch.equal(model[0].weight, begin), step == 3, (options, step))
                everyone = hvd.allgather_object(model[0].weight.tolist())
                self.assertTrue(all(one == everyone[0] for one in everyone), (options, step))

    def test_layers_that_no_rank_uses_stay_as_they_are_in_groups_too(self):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1), model.named_parameters(), groups=1
        )
        begin = model[0].weight.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model[2:](torch.ones(2, next(model[2:].parameters()).shape[1]).double()), torch.tensor([0, 1])).backward()
            optimizer.step()
            self.assertIsNone(model[0].weight.grad)
        self.assertTrue(torch.equal(model[0].weight, begin))
        self.on_all_ranks(model)

    def test_on_one_rank_alone_it_is_found(self):
        if self.size == 1:
            self.skipTest("no ranks to compare")
        model = network()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
        with self.assertRaisesRegex(cohort.Mismatch, "'0.bias' requires a gradient on rank 0 and not on rank 1, in step 20 "):
            for step in range(30):
                if step == 5 and self.rank == 1:
                    model[0].requires_grad_(False)
                optimizer.zero_grad()
                loss_of(model(torch.ones(2, 6).double()), torch.tensor([0, 1])).backward()
                optimizer.step()


class Schedules(Case):
    def test_made_before_wrapping_do_not_warn(self):
        for options in ({}, {"op": hvd.Adasum}):
            model = network()
            plain = torch.optim.SGD(model.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loss_of(model(torch.ones(2, 6).double()), torch.tensor([0, 1])).backward()
                optimizer.step()
                schedule.step()
            self.assertEqual(optimizer.param_groups[0]["lr"], 0.5)
            early = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(network().parameters(), lr=1.0), 1, 0.5)
            with self.assertWarnsRegex(UserWarning, r"before `optimizer.step\(\)`"):
                early.step()

    def test_in_an_elastic_state(self):
        """Schedules stay the same objects, and keep their optimizer."""
        for early in True, False:
            model = network()
            plain = torch.optim.SGD(model.parameters(), lr=1.0)
            make = lambda one: torch.optim.lr_scheduler.StepLR(one, 1, 0.5)  # noqa: E731
            schedule = make(plain) if early else None
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
            schedule = schedule or make(optimizer)
            state = hvd.elastic.TorchState(model=model, optimizer=optimizer, scheduler=schedule, epoch=0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if self.rank == 0:  # new ranks are behind
                    schedule.step(), schedule.step()
                state.sync()
                self.assertIs(state.scheduler, schedule)
                self.assertEqual((schedule.last_epoch, optimizer.param_groups[0]["lr"]), (2, 0.25))
                state.scheduler.step()
                self.assertEqual((schedule.last_epoch, optimizer.param_groups[0]["lr"]), (3, 0.125))
                state.restore()
                self.assertEqual((schedule.last_epoch, optimizer.param_groups[0]["lr"]), (2, 0.25))
                schedule.step()
                state.save()
                schedule.step()
                state.restore()
                self.assertEqual((schedule.last_epoch, schedule.get_last_lr()), (3, [0.125]))

    def test_any_object_with_a_state_dict_in_an_elastic_state(self):
        class Average:
            """Averages weights, and holds what cannot be pickled."""

            def __init__(self, values):
                self.values, self.refers_to = values, lambda: None

            def state_dict(self):
                return {"values": self.values, "more": [self.values[0], (1, "text")]}

            def load_state_dict(self, state):
                self.values, self.more = state["values"], state["more"]

        average = Average([torch.full((2,), float(self.rank)), torch.ones(1)])
        state = hvd.elastic.TorchState(average=average)
        state.sync()
        self.assertIs(state.average, average)
        self.assertEqual(average.values[0].tolist(), [0.0, 0.0])
        average.values[0] += 1
        state.restore()
        self.assertEqual(average.values[0].tolist(), [0.0, 0.0])
        self.assertEqual(average.more[1], (1, "text"))


if __name__ == "__main__":
    unittest.main()
