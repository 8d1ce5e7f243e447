"""Checkpoints of modules and optimizers on "cuda": what is saved from either device is loaded on both, bit for bit. 2
ranks, which share a fake GPU."""

import copy
import os
import shutil
import tempfile
import unittest

import cuda_support  # before torch
import torch
from nn_models import Mlp, copies, with_values
from support_nn import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them
from test_checkpoint import OPTIMIZERS

import cohort
from cohort import checkpoint
from cohort._collective import broadcast_bytes
from tiers import slow

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def train(model, optimizer, steps):
    device = next(model.parameters()).device

    def closure():
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5).to(device)).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def tensors_of(value):
    """Returns the tensors anywhere in a state, by name."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = [value[key] for key in sorted(value, key=str)] if isinstance(value, dict) else value
    return [tensor for item in items for tensor in tensors_of(item)] if isinstance(items, (list, tuple)) else []


class Checkpoints(unittest.TestCase):
    def setUp(self):
        self.rank = cohort.rank()
        self.folder = tempfile.mkdtemp(prefix="cohort-checkpoint-") if self.rank == 0 else "/nobody/else/looks"
        self.shared = broadcast_bytes(cohort.world(), self.folder.encode()).decode()
        self.addCleanup(lambda: self.rank == 0 and shutil.rmtree(self.folder))

    def assert_equal(self, found, expected, within=0.0):
        self.assertEqual(len(found), len(expected))
        for one, other in zip(found, expected):
            torch.testing.assert_close(one.cpu(), other.cpu(), rtol=within, atol=within)

    @slow
    def test_every_optimizer_goes_on_to_the_bit_on_either_device(self):
        for name, make in OPTIMIZERS.items():
            for saved_on, loaded_on in ((GPU, GPU), (GPU, CPU), (CPU, GPU)):
                with self.subTest(optimizer=name, saved_on=saved_on, loaded_on=loaded_on):
                    folder = os.path.join(self.folder, f"{name} {saved_on} {loaded_on}")
                    model = with_values(Mlp()).to(saved_on)
                    optimizer = make(model.parameters())
                    train(model, optimizer, 2)
                    checkpoint.save(folder, model, optimizer, step=2)
                    train(model, optimizer, 1)

                    other = with_values(Mlp(), 5).to(loaded_on)
                    other_optimizer = make(other.parameters())
                    train(other, other_optimizer, 1)
                    places = [tensor.device for tensor in tensors_of(other_optimizer.state_dict())]
                    checkpoint.resume(folder, other, other_optimizer)
                    self.assertEqual({p.device for p in other.parameters()}, {loaded_on})
                    devices = [tensor.device for tensor in tensors_of(other_optimizer.state_dict())]
                    if name == "LBFGS":  # its lists are as long as its history
                        self.assertEqual(set(devices), {loaded_on})
                    else:
                        self.assertEqual(devices, places)
                    train(other, other_optimizer, 1)
                    same_bits = cuda_support.FAKE or saved_on == loaded_on
                    self.assert_equal(copies(other), copies(model), within=0.0 if same_bits else 1e-12)

    def test_counts_come_to_be_where_kernels_read_them(self):
        model = with_values(Mlp(torch.float32)).to(GPU)
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        checkpoint.save(self.folder, model, optimizer)
        capturable = torch.optim.Adam(model.parameters(), capturable=True)
        checkpoint.resume(self.folder, model, capturable)
        for state in capturable.state.values():
            self.assertEqual((state["step"].device, state["step"].item()), (GPU, 1))

    def test_a_save_in_the_background_has_what_was_there_when_it_was_called(self):
        model = with_values(Mlp()).to(GPU)
        before = copies(model)
        checkpoints = checkpoint.CheckpointFolder(self.folder)
        save = checkpoints.save_async(model, step=1, state={"mine": torch.full((3,), float(self.rank), device=GPU)})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        save.wait()
        checkpoints.load_latest(model)
        self.assert_equal(copies(model), before)
        mine = checkpoints.rank_state()["mine"]
        self.assertEqual((mine.device, mine.tolist()), (CPU, [self.rank] * 3))
        self.assertEqual(checkpoints.parts()[1]["mine"].tolist(), [1] * 3)
        checkpoints.close()

    def test_random_states_of_gpus(self):
        generator = torch.cuda.default_generators[0]
        for place, state in (("rank0", None), ("rank0", {"any": torch.ones(1)}), ("shared", None)):
            with self.subTest(place=place, state=state):
                folder = os.path.join(self.shared, f"{place} {state is None}")
                model = with_values(Mlp()).to(GPU)
                torch.manual_seed(5 + self.rank)
                generator.manual_seed(11 + self.rank)
                checkpoint.save(folder, model, place=place, state=state)
                drawn = torch.rand(3), torch.rand(3, generator=generator, device=generator.device)
                checkpoint.resume(folder, model, place=place)
                self.assert_equal([torch.rand(3), torch.rand(3, generator=generator, device=generator.device)], drawn)
                # On the CPU nobody draws from it.
                here = generator.get_state()
                checkpoint.resume(folder, copy.deepcopy(model).to(CPU), place=place)
                self.assert_equal([torch.rand(3), generator.get_state()], [drawn[0], here])

    def test_a_random_state_that_is_none_changes_nothing(self):
        model = with_values(Mlp()).to(GPU)
        checkpoint.save(self.folder, model)
        other = with_values(Mlp(), 3).to(GPU)
        values, before = copies(other), torch.get_rng_state()
        generator = torch.cuda.default_generators[0]

        class Newer:
            def get_state(self):
                return generator.get_state()[1:]

        torch.cuda.default_generators = (Newer(),)
        try:
            with self.assertRaisesRegex(cohort.InvalidArgument, "the random state for cuda:0 has .* bytes"):
                checkpoint.resume(self.folder, other)
        finally:
            torch.cuda.default_generators = (generator,)
        self.assert_equal([*copies(other), torch.get_rng_state()], [*values, before])


class Weights(unittest.TestCase):
    def test_both_formats(self):
        with tempfile.TemporaryDirectory(prefix="cohort-weights-") as folder:
            for kind in ("safetensors", "pt"):
                model, path = with_values(Mlp()).to(GPU), os.path.join(folder, kind)
                checkpoint.save_weights(model, path, kind)
                for device in (CPU, GPU):
                    other = with_values(Mlp(), 9).to(device)
                    checkpoint.load_weights(other, path)
                    for one, expected in zip(copies(other), copies(model)):
                        self.assertEqual(one.device, device)
                        self.assertTrue(torch.equal(one.cpu(), expected.cpu()))


if __name__ == "__main__":
    unittest.main()
