"""Python and C++ go on from each other's checkpoints: the same files to the byte, the same training. One process; the
C++ side is the program COHORT_CHECKPOINT_PEER (tests/multiproc/checkpoint_peer.cpp)."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from support import SECONDS, needs_torch, torch
from tiers import slow

if torch is not None:
    from nn_models import Mlp, batch_of, copies, loss_of, with_values

    from cohort import checkpoint
    from cohort._launch import command as _command
    from cohort.data import SamplerState

    OPTIMIZERS = {
        "SGD": lambda p, lr=0.1: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True),
        "Adam": lambda p, lr=1e-2: torch.optim.Adam(p, lr=lr, betas=(0.8, 0.99), amsgrad=True),
        "AdamW": lambda p, lr=1e-2: torch.optim.AdamW(p, lr=lr, weight_decay=0.1),
        "Adagrad": lambda p, lr=0.1: torch.optim.Adagrad(p, lr=lr, initial_accumulator_value=0.5),
        "RMSprop": lambda p, lr=1e-2: torch.optim.RMSprop(p, lr=lr, momentum=0.5, centered=True),
    }
    PROGRESS = checkpoint.TrainingProgress(
        2, 1, SamplerState(2**64 - 1, 1, 24, 50), {"best": 0.1, "count": 3, "done": True, "name": "ü"}
    )

PEER = os.environ.get("COHORT_CHECKPOINT_PEER", "")


def peer(*arguments):
    result = subprocess.run([PEER, *map(str, arguments)], capture_output=True, text=True, timeout=2 * SECONDS)
    if result.returncode != 0:
        raise AssertionError(result.stderr)
    return float.fromhex(result.stdout)


def train(net, optimizer, first):
    for step in range(first, first + 2):
        x, y = batch_of(step, 4)
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        optimizer.step()


def number_of(value):
    if isinstance(value, tuple):
        return tuple(map(number_of, value))
    return float(value) if torch.is_tensor(value) else value


@needs_torch
@unittest.skipUnless(PEER, "COHORT_CHECKPOINT_PEER names no program")
class WithCpp(unittest.TestCase):
    def setUp(self):
        torch.set_num_threads(1)
        folder = tempfile.TemporaryDirectory(prefix="cohort-checkpoint-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def assert_same_files(self, one, other, names=("model.safetensors", "optimizer.safetensors", "random.safetensors")):
        """All but the manifest, which says who wrote it."""
        names = set(names)
        for info in (one, other):
            self.assertEqual(set(os.listdir(info.folder)), names | {"manifest.json"})
        for name in names:
            mine, theirs = (pathlib.Path(info.folder, name).read_bytes() for info in (one, other))
            self.assertEqual(mine, theirs, name)

    def assert_trained_alike(self, net, folder):
        theirs = Mlp()
        checkpoint.load_weights(theirs, folder / "after.safetensors")
        for ours, other in zip(copies(net), copies(theirs)):
            self.assertTrue(torch.allclose(ours, other, 1e-9, 1e-10), (ours - other).abs().max())

    def test_python_goes_on_from_cpp(self):
        for name, make in OPTIMIZERS.items():
            with self.subTest(optimizer=name):
                theirs = self.folder / name
                theirs.mkdir()
                random = peer("train", theirs, name)
                net = with_values(Mlp(), 5)
                optimizer = make(net.parameters(), lr=77.0)
                info = checkpoint.resume(theirs, net, optimizer)
                self.assertEqual(info.progress, PROGRESS)
                self.assertIn("libtorch", info.program)
                again = checkpoint.save(self.folder / f"{name} again", net, optimizer, progress=info.progress)
                self.assert_same_files(info, again)
                self.assertEqual(torch.rand((), dtype=torch.float64).item(), random)
                train(net, optimizer, 2)
                self.assert_trained_alike(net, theirs)

    def test_what_python_adds_to_groups(self):
        net = with_values(Mlp())
        optimizer = OPTIMIZERS["SGD"](net.parameters())
        torch.optim.lr_scheduler.StepLR(optimizer, 3)
        info = checkpoint.save(self.folder / "schedule", net, optimizer)
        peer("resume", self.folder / "schedule", "SGD", self.folder)
        optimizer.param_groups[0].update(lr_scale=0.5, name="all")
        checkpoint.save(self.folder / "scale", net, optimizer)
        with self.assertRaisesRegex(AssertionError, r"values that Python's program added \(lr_scale, name\)"):
            peer("resume", self.folder / "scale", "SGD", self.folder)
        group = self.exported(self.folder / "scale")["optimizer"]["param_groups"][0]
        self.assertEqual((group["initial_lr"], group["lr_scale"], group["name"]), (0.1, 0.5, "all"))
        self.assertEqual(info.progress.step, 0)

    def export(self, *words):
        done = subprocess.run([_command.find(), "export", *map(str, words)], cwd=self.folder, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, f"{words}: {done.stderr}")

    def exported(self, checkpoints):
        """Returns the training as a program of torch alone has it."""
        old = ["--torch", "1.13"] if torch.__version__ < "2" else []
        self.export(checkpoints, "training.pth.tar", "--everything", *old)
        found = torch.load(self.folder / "training.pth.tar", weights_only=True)
        if old:  # as docs/reference/checkpoint-format.md says, for the same bits
            for group in found["optimizer"]["param_groups"]:
                group.update((name, number_of(value)) for name, value in group.items())
        return found

    def test_torch_alone_goes_on_from_cpp(self):
        for name, make in OPTIMIZERS.items():
            with self.subTest(optimizer=name):
                theirs = self.folder / name
                theirs.mkdir()
                peer("train", theirs, name)
                found = self.exported(theirs)
                self.assertEqual((int(found["step"]), int(found["epoch"])), (PROGRESS.step, PROGRESS.epoch))
                net = with_values(Mlp(), 5)
                optimizer = make(net.parameters(), lr=77.0)
                net.load_state_dict(found["model"])
                optimizer.load_state_dict(found["optimizer"])
                train(net, optimizer, 2)
                self.assert_trained_alike(net, theirs)

    def test_torch_alone_goes_on_from_python(self):
        makers = {
            **OPTIMIZERS,
            "groups": lambda p: torch.optim.AdamW([{"params": p[:1]}, {"params": p[1:], "lr": 0.5}], lr=0.1, maximize=True),
            "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"),
        }
        for name, make in makers.items():
            with self.subTest(optimizer=name):
                net = with_values(Mlp())
                optimizer = make(list(net.parameters()))
                other = with_values(Mlp(), 5)
                again = make(list(other.parameters()))

                def step(net, optimizer, number):
                    def closure():
                        optimizer.zero_grad()
                        loss = loss_of(net(batch_of(number, 4)[0]), batch_of(number, 4)[1])
                        loss.backward()
                        return loss

                    optimizer.step(closure)

                step(net, optimizer, 0)
                folder = self.folder / f"{name} of python"
                checkpoint.save(folder, net, optimizer)
                found = self.exported(folder)
                other.load_state_dict(found["model"])
                again.load_state_dict(found["optimizer"])
                names = optimizer.defaults.keys() - {"foreach", "fused", "capturable", "differentiable"}  # not saved
                for mine, theirs in zip(optimizer.param_groups, again.param_groups):
                    self.assertEqual({k: mine[k] for k in names}, {k: theirs[k] for k in names})
                for number in (1, 2):
                    step(net, optimizer, number)
                    step(other, again, number)
                for ours, theirs in zip(copies(net), copies(other)):
                    self.assertTrue(torch.equal(ours, theirs), (ours - theirs).abs().max())

    @slow
    def test_what_was_saved_before_a_loss_is_no_number_stays(self):
        program = """
import torch, cohort.track
from cohort.checkpoint import CheckpointFolder
net = torch.nn.Linear(2, 1)
folder = CheckpointFolder("saved", keep=2)
for step in range(1, 8):
    cohort.track.log(step, loss=float("nan") if step > 3 else 1.0)
    cohort.track.flush()
    folder.save(net, step=step)
"""
        done = subprocess.run([sys.executable, "-c", program], cwd=self.folder, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        steps = sorted(int(name.rsplit("-", 1)[1]) for name in os.listdir(self.folder / "saved"))
        self.assertEqual(steps, [2, 3, 6, 7])

    def test_the_examples_of_the_help(self):
        (self.folder / "checkpoints").mkdir()
        peer("train", self.folder / "checkpoints", "Adam")
        text = subprocess.run([_command.find(), "export", "--help"], capture_output=True, text=True).stdout
        examples = re.findall(r"cohort export (\S.*)", text[text.index("Examples:") :])
        ours = [line.split() for line in examples if "--to" not in line]
        self.assertEqual(len(ours), 3, text)
        for words in ours:
            self.export(*words)
            self.assertTrue((self.folder / words[1]).exists(), words)

    def test_cpp_goes_on_from_python(self):
        for name, make in OPTIMIZERS.items():
            with self.subTest(optimizer=name):
                net = with_values(Mlp())
                optimizer = make(net.parameters())
                torch.manual_seed(3)
                train(net, optimizer, 0)
                ours, theirs = self.folder / name, self.folder / f"{name} theirs"
                info = checkpoint.save(ours, net, optimizer, PROGRESS)
                random = peer("resume", ours, name, theirs)
                self.assert_same_files(info, checkpoint.latest(theirs))
                self.assertEqual(checkpoint.latest(theirs).progress, PROGRESS)
                self.assertEqual(torch.rand((), dtype=torch.float64).item(), random)
                train(net, optimizer, 2)
                self.assert_trained_alike(net, theirs)

    def test_both_hand_on_what_is_a_ranks_own(self):
        state = {
            "counts": torch.arange(6).reshape(2, 3),
            "flag": torch.tensor(True),
            "half": torch.tensor([1.5, -0.25], dtype=torch.bfloat16),
            "none": torch.empty(0, 4),
        }
        names = {"model.safetensors", "optimizer.safetensors", "rank-00000.safetensors"}

        def load(folder):
            folder = checkpoint.CheckpointFolder(folder)
            net = with_values(Mlp())
            optimizer = OPTIMIZERS["Adam"](net.parameters())
            info = folder.load_latest(net, optimizer)
            self.assertEqual(set(folder.rank_state()), set(state))
            for name, tensor in folder.rank_state().items():
                self.assertEqual((tensor.dtype, tensor.shape), (state[name].dtype, state[name].shape), name)
                self.assertTrue(torch.equal(tensor, state[name]), name)
            return info, net, optimizer

        theirs = self.folder / "theirs"
        theirs.mkdir()
        peer("train", theirs, "Adam", "state")
        info, net, optimizer = load(theirs)
        again = checkpoint.save(self.folder / "again", net, optimizer, progress=info.progress, state=state)
        self.assert_same_files(info, again, names)
        peer("resume", self.folder / "again", "Adam", self.folder / "theirs again")
        self.assert_same_files(load(self.folder / "theirs again")[0], again, names)

    def test_cpp_refuses_what_it_does_not_have(self):
        net = with_values(Mlp())
        optimizer = torch.optim.Adam(net.parameters(), maximize=True)
        train(net, optimizer, 0)
        checkpoint.save(self.folder / "a", net, optimizer)
        with self.assertRaisesRegex(AssertionError, "it is of Adam maximize, and this one is Adam"):
            peer("resume", self.folder / "a", "Adam", self.folder / "b")


if __name__ == "__main__":
    unittest.main()
