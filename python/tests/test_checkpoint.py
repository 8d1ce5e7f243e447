"""Checkpoints on the ranks of `cohort run -np N`: what is saved is what is loaded, damage is passed over, misfits change
nothing. Exchange with C++ is in test_checkpoint_cpp.py."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from support import SECONDS, needs_torch, stderr_of_process, torch
from support_nn import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort

if torch is not None:
    from nn_models import Mlp, batch_of, copies, loss_of, with_values

    from cohort import checkpoint
    from cohort._checkpoint import tensors as _checkpoint_tensors
    from cohort.data import DistributedSampler, SamplerState
    from cohort.nn import DistributedDataParallel

    OPTIMIZERS = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "SGD without momentum": lambda p: torch.optim.SGD(p, lr=0.3),
        "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.8, 0.99), amsgrad=True),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        "AdamW maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, maximize=True),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
        "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"),
    }


def train(model, optimizer, first, steps):
    for number in range(first, first + steps):
        x, y = batch_of(number + cohort.rank(), 4)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(model(x + 0.01 * torch.rand_like(x)), y)
            loss.backward()
            return loss

        optimizer.step(closure)


@needs_torch
class Checkpoints(unittest.TestCase):
    def setUp(self):
        self.rank = cohort.rank()
        self.folder = tempfile.mkdtemp(prefix="cohort-checkpoint-") if self.rank == 0 else "/nobody/else/looks"
        self.addCleanup(lambda: self.rank == 0 and shutil.rmtree(self.folder))

    def assert_equal(self, one, other):
        for a, b in zip(one, other):
            self.assertTrue(torch.equal(a, b))

    def test_training_goes_on_to_the_bit_with_every_optimizer(self):
        for name, make in OPTIMIZERS.items():
            with self.subTest(optimizer=name):
                folder = os.path.join(self.folder, name)
                torch.manual_seed(self.rank)
                # The number of LBFGS's closures depends on the data: each rank by itself.
                wrap = DistributedDataParallel if name != "LBFGS" else torch.nn.Sequential
                whole = wrap(with_values(Mlp()))
                optimizer = make(whole.parameters())
                train(whole, optimizer, 0, 2)
                info = checkpoint.save(folder, whole, optimizer, step=2, epoch=1)
                self.assertEqual((info.generation, info.world_size, info.progress.step), (1, cohort.size(), 2))
                train(whole, optimizer, 2, 2)
                expected, random = copies(whole), torch.rand(3)

                torch.manual_seed(99)
                parts = wrap(with_values(Mlp(), 5))
                optimizer = make(parts.parameters())
                for group in optimizer.param_groups:
                    group["lr"] = 123.0
                train(parts, optimizer, 7, 1)
                resumed = checkpoint.resume(folder, parts, optimizer)
                self.assertEqual(resumed, info)
                if name == "LBFGS" and self.rank:
                    continue  # rank 0's model is everybody's now
                train(parts, optimizer, 2, 2)
                self.assert_equal(copies(parts), expected)
                self.assertTrue(torch.equal(torch.rand(3), random))

    def test_who_holds_groups_and_states_goes_on_to_see_them(self):
        net = with_values(Mlp())
        optimizer = OPTIMIZERS["Adam"](net.parameters())
        train(net, optimizer, 0, 1)
        checkpoint.save(self.folder, net, optimizer, step=1)
        group, state = optimizer.param_groups[0], optimizer.state
        parameter = group["params"][0]
        mine, average = state[parameter], state[parameter]["exp_avg"]
        train(net, optimizer, 1, 1)
        group["lr"] = 7.0
        checkpoint.resume(self.folder, net, optimizer)
        self.assertIs(optimizer.param_groups[0], group)
        self.assertIs(optimizer.state, state)
        self.assertIs(state[parameter], mine)
        self.assertIs(mine["exp_avg"], average)
        self.assertEqual((group["lr"], float(mine["step"])), (1e-2, 1))

    def test_an_optimizer_that_keeps_more_than_torch_s_is_refused(self):
        net = with_values(Mlp())
        optimizer = type("Counting", (torch.optim.Adam,), {})(net.parameters())
        train(net, optimizer, 0, 1)
        for state in optimizer.state.values():
            state["seen"] = 1
        with self.assertRaisesRegex(cohort.InvalidArgument, "Counting keeps seen for '.*', which torch's Adam has not"):
            checkpoint.save(self.folder, net, optimizer, step=1)

    def test_progress_and_values(self):
        net = with_values(Mlp())
        checkpoints = checkpoint.CheckpointFolder(self.folder, keep=2)
        self.assertIsNone(checkpoints.load_latest(net))
        sampler = DistributedSampler(50, batch_size=3, seed=2**64 - 1)
        sampler.next_batch()
        sampler.step()
        values = {"best": 0.1, "count": -(2**63), "name": "ü", "done": True, "nan": float("nan"), "huge": float("inf")}
        for step in range(3):
            info = checkpoints.save(net, step=step, epoch=7, sampler=sampler, values=values)
            self.assertEqual(info.generation, step + 1)
        progress = info.progress
        self.assertEqual((progress.step, progress.epoch), (2, 7))
        self.assertEqual(progress.sampler, SamplerState(2**64 - 1, 0, 3 * cohort.size(), 50))
        self.assertTrue(progress.values["nan"] != progress.values["nan"])
        self.assertEqual({**progress.values, "nan": 0}, {**values, "nan": 0})
        self.assertIs(progress.values["done"], True)
        self.assertEqual(info.program, f"cohort, torch {torch.__version__}")
        if self.rank == 0:
            self.assertEqual([one.progress.step for one in checkpoints.list()], [1, 2])
            self.assertEqual(checkpoint.latest(self.folder).folder, info.folder)
        other = DistributedSampler(50)
        self.assertEqual(checkpoint.resume(self.folder, net, sampler=other).folder, info.folder)
        self.assertEqual(other.state(), sampler.state())
        for wrong in ({"a": 2**63}, {"a": None}, {"a": [1]}, {"\ud800": 1}):
            with self.assertRaises((cohort.InvalidArgument, cohort.Internal)):
                checkpoints.save(net, values=wrong)
        with self.assertRaisesRegex(cohort.InvalidArgument, "negative"):
            checkpoints.save(net, step=-1)
        if self.rank == 0:
            self.assertEqual(len(checkpoints.list()), 2)

    def test_damage_is_passed_over_and_said(self):
        net = with_values(Mlp())
        folders = []
        for step in range(2):
            with torch.no_grad():
                net.last.bias.fill_(step)
            folders.append(checkpoint.save(self.folder, net, step=step).folder)

        def damage(folder):
            if self.rank == 0:
                path = pathlib.Path(folder) / "model.safetensors"
                data = bytearray(path.read_bytes())
                data[-3] ^= 1
                path.write_bytes(data)

        damage(folders[1])
        says = self.assertLogs("cohort.checkpoint", "WARNING") if self.rank == 0 else contextlib.nullcontext()
        with says as said:
            self.assertEqual(checkpoint.resume(self.folder, net).progress.step, 0)
        if said:
            self.assertIn("model.safetensors", said.output[0])
        self.assertEqual(net.last.bias.tolist(), [0.0] * 3)
        damage(folders[0])
        with self.assertRaisesRegex(cohort.Corrupt, "all of them are damaged"):
            checkpoint.resume(self.folder, net)

    def test_another_job_in_the_folder_is_told_and_keeps_its_checkpoint(self):
        net = torch.nn.Linear(2, 2)
        folder = checkpoint.CheckpointFolder(self.folder, keep=1)
        folder.save(net, step=10)
        folder.save(net, step=20)
        if self.rank == 0:
            other = (
                "import sys, torch\nfrom cohort.checkpoint import CheckpointFolder\n"
                "CheckpointFolder(sys.argv[1], keep=3).save(torch.nn.Linear(2, 2), step=1)\n"
            )
            alone = {name: value for name, value in os.environ.items() if not name.startswith("COHORT_")}
            alone["COHORT_ALONE"] = "1"
            subprocess.run([sys.executable, "-c", other, self.folder], env=alone, check=True, timeout=2 * SECONDS)
        with stderr_of_process() as said:
            for step in (30, 40):
                folder.save(net, step=step)
        if self.rank == 0:
            self.assertEqual("".join(said).count("another job has saved checkpoint 3 here"), 1, said)
            steps = sorted(int(name.rsplit("-", 1)[1]) for name in os.listdir(self.folder))
            self.assertEqual(steps, [1, 40])

    def test_moments_have_the_type_of_a_module_that_was_cast_since_the_last_step(self):
        net = with_values(Mlp(torch.float32))
        optimizer = torch.optim.Adam(net.parameters())
        sum(one.square().sum() for one in net.parameters()).backward()
        optimizer.step()
        checkpoint.save(self.folder, net.double(), optimizer)
        again, as_torch = Mlp(), Mlp()
        loaded, known = torch.optim.Adam(again.parameters()), torch.optim.Adam(as_torch.parameters())
        checkpoint.resume(self.folder, again, loaded)
        as_torch.load_state_dict(net.state_dict())
        known.load_state_dict(optimizer.state_dict())
        for module, one in ((again, loaded), (as_torch, known)):
            sum(parameter.square().sum() for parameter in module.parameters()).backward()
            one.step()
        self.assert_equal(copies(again), copies(as_torch))

    def test_misfits_change_nothing_on_any_rank(self):
        net = with_values(Mlp())
        optimizer = torch.optim.Adam(net.parameters())
        train(net, optimizer, 0, 1)
        checkpoint.save(self.folder, net, optimizer)

        def refused(word, module, optimizer=None):
            before, random = copies(module), torch.get_rng_state()
            state = optimizer.state_dict() if optimizer else None
            with self.assertRaisesRegex(cohort.InvalidArgument, word):
                checkpoint.resume(self.folder, module, optimizer)
            self.assert_equal(copies(module), before)
            self.assertTrue(torch.equal(torch.get_rng_state(), random))
            if optimizer:
                self.assertEqual(optimizer.state_dict(), state)

        refused(r"'first.bias' has shape \[17\] there and \[9\] here", Mlp(hidden=9))
        refused("missing in the file: '0.weight'.*not in the module: .*'first.weight'", torch.nn.Sequential(torch.nn.Linear(5, 17)))
        refused("float64 there and float32 here", Mlp(torch.float32))
        refused("it is of Adam, and this one is SGD", net, torch.optim.SGD(net.parameters(), lr=1.0))
        refused("Adam maximize", net, torch.optim.Adam(net.parameters(), maximize=True))
        refused("its parameters are", net, torch.optim.Adam(list(net.parameters())[:2]))
        refused("not the module's", net, torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]))
        refused("none of SGD", net, torch.optim.Rprop(net.parameters()))
        if self.rank == cohort.size() - 1:  # one rank's misfit is everybody's error
            with self.assertRaisesRegex(cohort.InvalidArgument, "has shape"):
                checkpoint.resume(self.folder, Mlp(hidden=9))
        else:
            refused(f"rank {cohort.size() - 1}: .*has shape", net)
        checkpoint.save(self.folder, net)
        refused("saved without it", net, optimizer)
        self.assertIsNotNone(checkpoint.resume(self.folder, net))

    def test_only_rank_zero_s_disk_counts_and_its_errors_reach_all(self):
        net = with_values(Mlp())
        if self.rank == 0:
            pathlib.Path(self.folder, "file").write_text("")
        path = os.path.join(self.folder, "file")
        with self.assertRaises((cohort.Io, cohort.Unavailable)) as caught:
            checkpoint.save(path, net)
        self.assertIn("file", str(caught.exception))
        for wrong in ({"folder": ""}, {"folder": "a", "keep": 0}):
            with self.assertRaises(cohort.InvalidArgument):
                checkpoint.CheckpointFolder(**wrong)

    def test_a_buffer_that_could_not_be_loaded_is_refused_and_nothing_is_changed(self):
        class Net(torch.nn.Module):
            def __init__(self, expanded):
                super().__init__()
                self.first = torch.nn.Linear(2, 2)
                positions = torch.tensor([3.0]).expand(5)
                self.register_buffer("positions", positions if expanded else positions.clone())
                self.last = torch.nn.Linear(2, 2)

        expanded, dense = Net(True), Net(False)
        folder = checkpoint.CheckpointFolder(self.folder)
        with self.assertRaisesRegex(cohort.errors.Error, "'positions'"):
            folder.save(expanded, step=1)
        self.assertIsNone(folder.load_latest(dense))
        folder.save(dense, step=1)
        before = copies(expanded)
        with self.assertRaisesRegex(cohort.errors.InvalidArgument, "'positions' has several elements in one place"):
            folder.load_latest(expanded)
        self.assert_equal(expanded.state_dict().values(), before)
        if self.rank == 0:
            checkpoint.save_weights(dense, f"{self.folder}/weights")
            with self.assertRaisesRegex(cohort.errors.InvalidArgument, "'positions'"):
                checkpoint.load_weights(expanded, f"{self.folder}/weights")
            self.assert_equal(expanded.state_dict().values(), before)

    def test_what_programs_and_schedules_add_to_groups_comes_back(self):
        def made(**more):
            net = torch.nn.Linear(2, 1)
            groups = [{"params": [net.weight], **more}, {"params": [net.bias]}]
            return net, torch.optim.AdamW(groups, 0.2, weight_decay=0)

        net, optimizer = made(lr=0.1, lr_scale=0.25, name="w", warm=True, layer=3, odd=object())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        for _ in range(4):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            schedule.step()
        folder = checkpoint.CheckpointFolder(self.folder)
        folder.save(net, optimizer, step=4)
        other_net, other = made()
        folder.load_latest(other_net, other)
        group = other.param_groups[0]
        self.assertEqual((group["lr_scale"], group["name"], group["warm"], group["layer"]), (0.25, "w", True, 3))
        self.assertIs(type(group["layer"]), int)
        self.assertIs(type(group["weight_decay"]), int)
        self.assertNotIn("odd", group)
        self.assertEqual([one["initial_lr"] for one in other.param_groups], [0.1, 0.2])
        resumed = torch.optim.lr_scheduler.StepLR(other, 3, 0.5, last_epoch=schedule.last_epoch - 1)
        for _ in range(3):
            for one in (schedule, resumed):
                one.step()
            self.assertEqual([one["lr"] for one in other.param_groups], [one["lr"] for one in optimizer.param_groups])

    def test_what_is_in_a_module(self):
        class Kinds(torch.nn.Module):
            def __init__(self, value):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.full((2, 3), value, dtype=torch.bfloat16))
                self.channels = torch.nn.Parameter(torch.full((1, 2, 3, 4), value).to(memory_format=torch.channels_last))
                self.register_buffer("flags", torch.tensor([value > 0, False]))
                self.register_buffer("empty", torch.empty(0, 3))
                self.register_buffer("count", torch.tensor(int(value)))
                self.register_buffer("waves", torch.full((2,), complex(value, 1)))
                self.register_buffer("passing", torch.full((2,), value), persistent=False)

        one, other = Kinds(3.0), Kinds(0.0)
        checkpoint.save(self.folder, one)
        checkpoint.resume(self.folder, other)
        self.assert_equal(copies(one), copies(other))
        self.assertEqual(other.channels.stride(), one.channels.stride())
        self.assertEqual(other.passing.tolist(), [0.0, 0.0])


@needs_torch
class Wrapped(unittest.TestCase):
    """Names are those of the module without wrappers, whichever saved and whichever loads."""

    if torch is not None:
        setUp, assert_equal = Checkpoints.setUp, Checkpoints.assert_equal

    def modules(self):
        if not hasattr(torch, "compile"):
            self.skipTest("this torch compiles no modules")
        whole = torch.compile(Mlp(), backend="eager")
        within = Mlp()
        name, child = next(iter(within.named_children()))
        setattr(within, name, torch.compile(child, backend="eager"))
        inside = DistributedDataParallel(torch.compile(Mlp(), backend="eager"))
        outside = torch.compile(DistributedDataParallel(Mlp()), backend="eager")
        return [Mlp(), whole, within, inside, outside]

    def test_a_checkpoint_of_any_loads_into_all_with_the_optimizer(self):
        modules = self.modules()
        for number, saved in enumerate(modules):
            folder = checkpoint.CheckpointFolder(f"{self.folder}/{number}")
            with_values(saved, number)
            optimizer = torch.optim.SGD(saved.parameters(), lr=0.1, momentum=0.9)
            for parameter in saved.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            folder.save(saved, optimizer, step=1)
            expected = copies(saved)
            for loaded in modules:
                with_values(loaded, number + 7)
                other = torch.optim.SGD(loaded.parameters(), lr=0.2, momentum=0.9)
                folder.load_latest(loaded, other)
                self.assert_equal(loaded.parameters(), expected)
                self.assertTrue(all("momentum_buffer" in other.state[one] for one in loaded.parameters()))

    def test_weights_and_files_that_have_wrappers_names(self):
        compiled, path = self.modules()[1], f"{self.folder}/weights.pt"
        if self.rank == 0:
            torch.save(compiled.state_dict(), path)
            loaded = Mlp()
            checkpoint.load_weights(loaded, path)
            self.assert_equal(loaded.parameters(), compiled.parameters())
        self.assertEqual(_checkpoint_tensors.plain_name("a._orig_mod.b._checkpoint_wrapped_module.c"), "a.b.c")
        self.assertEqual(_checkpoint_tensors.plain_name("a.my_orig_mod.c"), "a.my_orig_mod.c")


@needs_torch
class Weights(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="cohort-weights-")
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def test_both_formats(self):
        for kind in ("safetensors", "pt"):
            one, other = with_values(Mlp()), with_values(Mlp(), 9)
            checkpoint.save_weights(one, self.path(kind), kind)
            loaded = checkpoint.load_weights(other, self.path(kind))
            self.assertEqual((loaded.missing, loaded.unexpected), ([], []))
            for a, b in zip(copies(one), copies(other)):
                self.assertTrue(torch.equal(a, b))
        state = torch.load(self.path("pt"), weights_only=True)
        self.assertTrue(torch.equal(state["last.bias"], one.last.bias))

    def test_what_torch_saves(self):
        one = with_values(Mlp(torch.bfloat16))
        state = {f"module.{name}": value for name, value in one.state_dict().items()}
        torch.save({"model": state, "epoch": 3}, self.path("theirs.pt"))
        other = Mlp(torch.float32)
        checkpoint.load_weights(other, self.path("theirs.pt"), key="model")
        self.assertTrue(torch.equal(other.last.bias, one.last.bias.float()))
        half = with_values(Mlp(torch.float16), 4)
        before = copies(half)
        with self.assertRaisesRegex(cohort.InvalidArgument, "bfloat16 there and float16 here"):
            checkpoint.load_weights(half, self.path("theirs.pt"), key="model")
        for a, b in zip(before, copies(half)):
            self.assertTrue(torch.equal(a, b))
        checkpoint.load_weights(half, self.path("theirs.pt"), key="model", convert="any")
        self.assertTrue(torch.equal(half.last.bias, one.last.bias.half()))

    def test_subsets_and_errors(self):
        checkpoint.save_weights(torch.nn.Sequential(torch.nn.Linear(2, 2)), self.path("a"))
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        loaded = checkpoint.load_weights(model, self.path("a"), match="subset")
        self.assertEqual(loaded.missing, ["1.weight", "1.bias"])
        with self.assertRaisesRegex(cohort.InvalidArgument, "missing in the file: '1.weight', '1.bias'"):
            checkpoint.load_weights(model, self.path("a"))
        with self.assertRaises(cohort.Unavailable):
            checkpoint.load_weights(model, self.path("nothing"))
        pathlib.Path(self.path("bad")).write_bytes(b"nonsense, and no weights")
        with self.assertRaises(cohort.Corrupt):
            checkpoint.load_weights(model, self.path("bad"))
        with self.assertRaises(cohort.InvalidArgument):
            checkpoint.load_weights(model, self.path("a"), match="most")


if __name__ == "__main__":
    unittest.main()
