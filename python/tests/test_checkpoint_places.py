"""Saves each rank's own state, in every place, and in the background, on the ranks of `cohort run -np N`."""

import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest

from support import SECONDS, needs_torch, torch
from support_nn import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort

if torch is not None:
    from nn_models import Mlp, copies, with_values

    from cohort import checkpoint
    from cohort._collective import broadcast_bytes

DATA = pathlib.Path(__file__).resolve().parents[2] / "data" / "checkpoints"


@needs_torch
class Places(unittest.TestCase):
    def setUp(self):
        self.rank, self.size = cohort.rank(), cohort.size()
        own = tempfile.mkdtemp(prefix="cohort-checkpoint-") if self.rank == 0 else ""
        self.folder = broadcast_bytes(cohort.world(), own.encode()).decode()
        self.addCleanup(lambda: self.rank == 0 and shutil.rmtree(self.folder))
        self.addCleanup(cohort.world().barrier)

    def test_each_rank_has_its_own_state(self):
        bytes_of = {}
        for place in ("rank0", "shared", "local"):
            with self.subTest(place=place):
                folder = os.path.join(self.folder, place)
                net = with_values(Mlp())
                checkpoints = checkpoint.CheckpointFolder(folder, place=place)
                with self.assertRaisesRegex(cohort.InvalidArgument, "no checkpoint has been loaded"):
                    checkpoints.rank_state()
                torch.manual_seed(self.rank)
                state = {"held": torch.full((2, self.rank + 1), self.rank), "count": torch.tensor(self.rank)}
                info = checkpoints.save(net, step=4, state=state)
                random = torch.rand(3)
                self.assertEqual(checkpoint.CheckpointFolder(folder, place=place).load_latest(with_values(Mlp(), 5)), info)
                self.assertTrue(torch.equal(torch.rand(3), random))
                checkpoints.load_latest(net)
                self.assertTrue(torch.equal(checkpoints.rank_state()["held"], state["held"]))
                parts = checkpoints.parts()
                self.assertEqual(sorted(parts), list(range(self.size)))
                self.assertEqual([int(parts[rank]["count"]) for rank in sorted(parts)], list(range(self.size)))
                only = checkpoints.parts([self.size - 1, 99] if self.rank == 0 else [])
                self.assertEqual(sorted(only), [self.size - 1] if self.rank == 0 else [])
                part = pathlib.Path(info.folder, f"rank-{self.rank:05}.safetensors").read_bytes()
                self.assertEqual(bytes_of.setdefault("part", part), part)  # the same, whoever wrote it
        with self.assertRaisesRegex(cohort.InvalidArgument, "'rank0', 'shared', 'local'"):
            checkpoint.CheckpointFolder(self.folder, place="everywhere")
        with self.assertRaisesRegex(cohort.InvalidArgument, "at least 1 copy of each file, not 0"):
            checkpoint.CheckpointFolder(self.folder, place="local", copies=0)

    def test_the_best_stays_and_training_ends_early_on_all_ranks(self):
        losses = [4.0, 2.0, float("nan"), 3.0, 3.0, 1.0, 5.0]
        early = cohort.EarlyStopping(patience=3)
        for step, loss in enumerate(losses, 1):
            # As after a restart each time.
            checkpoints = checkpoint.CheckpointFolder(self.folder, keep=1, place="shared", best_by="loss")
            if step > 1:
                info = checkpoints.load_latest(with_values(Mlp()))
                early = cohort.EarlyStopping(patience=3)
                early.load_state(info.progress.values["early"])
            stop = early.should_stop(loss if self.rank == 0 else step)  # rank 0's counts
            checkpoints.save(with_values(Mlp(), step), step=step, values={"loss": loss, "early": early.state()})
            if stop:
                break
        self.assertEqual((step, early.best, early.waited, early.improved), (5, 2.0, 3, False))
        self.assertEqual([info.progress.step for info in checkpoints.list()], [2, 5])
        net = with_values(Mlp())
        self.assertEqual(checkpoints.load_best(net).progress.step, 2)
        self.assertTrue(torch.equal(net.last.bias, with_values(Mlp(), 2).last.bias))
        highest = checkpoint.CheckpointFolder(self.folder, place="shared", best_by="loss", best_mode="max")
        self.assertEqual(highest.load_best(net).progress.step, 5)
        for wrong, text in (({"keep_best": 1}, "needs best_by"), ({"best_by": "a", "best_mode": "least"}, "'min' or 'max'")):
            with self.assertRaisesRegex(cohort.InvalidArgument, text):
                checkpoint.CheckpointFolder(self.folder, **wrong)
        with self.assertRaisesRegex(cohort.InvalidArgument, "of another mode"):
            cohort.EarlyStopping(mode="max").load_state(early.state())
        for wrong, text in (({"patience": 0}, "patience is 0"), ({"mode": "least"}, "'min' or 'max'")):
            with self.assertRaisesRegex(cohort.InvalidArgument, text):
                cohort.EarlyStopping(**wrong)

    def test_a_folder_that_is_not_shared_is_named(self):
        folder = self.folder if self.rank == 0 else os.path.join(self.folder, "elsewhere")
        with self.assertRaisesRegex(cohort.InvalidArgument, f"is not seen by .*{self.size - 1}"):
            checkpoint.save(folder, with_values(Mlp()), place="shared")
        cohort.world().barrier()
        if self.rank == 0:
            self.assertEqual(os.listdir(self.folder), [])

    def test_one_ranks_full_disk_is_everybodys_error(self):
        net = with_values(Mlp())
        checkpoints = checkpoint.CheckpointFolder(self.folder, place="shared")
        state = {"much": torch.zeros(1000)}
        checkpoints.save_async(net, step=1, state=state).wait()  # has its communicator, which a limit on files would refuse
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        for save in (checkpoints.save, lambda *a, **k: checkpoints.save_async(*a, **k).wait()):
            if self.rank == self.size - 1:  # it alone has much to write
                state = {"much": torch.zeros(100_000)}
                resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
            try:
                with self.assertRaisesRegex(cohort.Io, "File too large"):
                    save(net, step=2, state=state)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            cohort.world().barrier()
            if self.rank == 0:
                self.assertEqual(os.listdir(self.folder), ["checkpoint-000001-step-1"])
        self.assertEqual(checkpoints.save(net, step=3).generation, 2)

    def test_background_saves_are_of_the_moment_of_the_call(self):
        net = with_values(Mlp())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        checkpoints = checkpoint.CheckpointFolder(self.folder, keep=2)
        for step in range(1, 5):
            with torch.no_grad():
                net.last.bias.fill_(step)
            pending = checkpoints.save_async(net, optimizer, step=step, state={"own": torch.tensor(self.rank)})
            with torch.no_grad():
                net.last.bias.fill_(-1)
            # The program's collectives go on meanwhile.
            self.assertEqual(broadcast_bytes(cohort.world(), b"%d" % step), b"%d" % step)
        self.assertEqual(pending.wait().progress.step, 4)
        self.assertTrue(pending.done())
        checkpoints.close()
        checkpoints.load_latest(net, optimizer)
        self.assertEqual(net.last.bias.tolist(), [4.0] * 3)
        self.assertEqual(int(checkpoints.rank_state()["own"]), self.rank)
        if self.rank == 0:
            self.assertEqual([info.progress.step for info in checkpoints.list()], [3, 4])

    def test_a_background_saves_error_comes_with_the_next(self):
        if self.rank == 0:
            pathlib.Path(self.folder, "run").write_text("in the way")
        checkpoints = checkpoint.CheckpointFolder(os.path.join(self.folder, "run"))
        net = with_values(Mlp())
        checkpoints.save_async(net)
        with self.assertRaisesRegex(cohort.Unavailable, "run"):
            checkpoints.save(net)
        pending = checkpoints.save_async(net)
        with self.assertRaises(cohort.Unavailable):
            pending.wait()
        checkpoints.close()  # it has been told
        if self.rank == 0:
            os.unlink(checkpoints.folder)
        cohort.world().barrier()
        self.assertEqual(checkpoints.save_async(net).wait().generation, 1)

    def test_parts_of_tensors_come_back_in_any_cut(self):
        whole = {f"model/{name}": tensor for name, tensor in Mlp().state_dict().items()}
        whole = {name: torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape) for name, tensor in whole.items()}

        def part(tensor, dimension):
            if tensor.dim() == 1:  # a range
                count = tensor.numel()
                begin, end = count * self.rank // self.size, count * (self.rank + 1) // self.size
                return tensor[begin:end], checkpoint.Shard([count], [0], [count], begin, end - begin)
            along = tensor.shape[dimension]
            begin, end = along * self.rank // self.size, along * (self.rank + 1) // self.size
            start, extent = [0, 0], list(tensor.shape)
            start[dimension], extent[dimension] = begin, end - begin
            return tensor.narrow(dimension, begin, end - begin), checkpoint.Shard(list(tensor.shape), start, extent)

        for place in ("rank0", "shared", "local"):
            with self.subTest(place=place):
                checkpoints = checkpoint.CheckpointFolder(os.path.join(self.folder, place), place=place)
                self.assertIsNone(checkpoints.load_shards({}))
                shards = {name: part(tensor, 0) for name, tensor in whole.items()}
                checkpoints.save_async(Mlp(), step=5, state={"own": torch.tensor(self.rank)}, shards=shards).wait()
                wanted = {name: part(tensor, 1) for name, tensor in whole.items()}
                info, found = checkpoints.load_shards({name: shard for name, (_, shard) in wanted.items()})
                self.assertEqual(info.progress.step, 5)
                self.assertEqual(int(checkpoints.rank_state()["own"]), self.rank)
                self.assertEqual(int(checkpoints.parts([0])[0]["own"]), 0)
                for name, (tensor, _) in wanted.items():
                    self.assertTrue(torch.equal(found[name], tensor), name)
                net = Mlp()
                checkpoints.load_latest(net)  # a program without shards
                for name, tensor in net.state_dict().items():
                    self.assertTrue(torch.equal(tensor, whole[f"model/{name}"]), name)
                with self.assertRaisesRegex(cohort.InvalidArgument, "tensor 'model/nothing' -- it was not saved"):
                    checkpoints.load_shards({"model/nothing": checkpoint.Shard([1], [0], [1])})
                if self.size > 1:
                    name = next(iter(shards))
                    if self.rank == 1:
                        del shards[name]
                    with self.assertRaisesRegex(cohort.InvalidArgument, f"elements of tensor '{name}' .* are there"):
                        checkpoints.save(Mlp(), step=6, shards=shards)

    def test_versions(self):
        net = torch.nn.Linear(3, 2)
        folder = os.path.join(self.folder, "run")
        if self.rank == 0:
            shutil.copytree(DATA / "version-1", folder)
        checkpoints = checkpoint.CheckpointFolder(folder)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
        info = checkpoints.load_latest(net, optimizer)
        self.assertEqual((info.progress.step, info.progress.sampler.cursor), (7, 24))
        self.assertTrue(torch.allclose(net.bias, torch.tensor([0.4, -1.1])))
        self.assertEqual((checkpoints.rank_state(), checkpoints.parts()), ({}, {}))
        newer = checkpoints.save(net, optimizer, step=8)
        if self.rank == 0:
            path = pathlib.Path(newer.folder, "manifest.json")
            body = json.loads(path.read_text())["manifest"]
            self.assertEqual(body["version"], 2)
            body["version"] = 4
            path.write_text(finished(body))
        cohort.world().barrier()
        before = copies(net)
        with self.assertRaisesRegex(cohort.InvalidArgument, "a newer Cohort saved this checkpoint: its format is of version 4"):
            checkpoints.load_latest(net, optimizer)
        for one, other in zip(before, copies(net)):
            self.assertTrue(torch.equal(one, other))


def finished(body):
    """A manifest's text, as docs/reference/checkpoint-format.md has it."""
    import hashlib

    compact = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    whole = {"manifest": body, "sha256": hashlib.sha256(compact.encode()).hexdigest()}
    return json.dumps(whole, sort_keys=True, indent=2, ensure_ascii=False) + "\n"


@needs_torch
class Ends(unittest.TestCase):
    def test_a_process_waits_for_its_save(self):
        # On every rank, so that none waits for another's process.
        program = """
            import sys, torch
            from cohort import checkpoint
            net = torch.nn.Linear(300, 300)
            folder = checkpoint.CheckpointFolder(sys.argv[1])
            folder.save_async(net, step=1)
            folder.me = folder  # not even its destructor runs
            """
        environment = {**os.environ, "COHORT_ALONE": "1"}
        environment.pop("COHORT_INIT", None)
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [sys.executable, "-c", textwrap.dedent(program), folder], check=True, timeout=2 * SECONDS, env=environment
            )
            self.assertEqual(os.listdir(folder), ["checkpoint-000001-step-1"])


if __name__ == "__main__":
    unittest.main()
