"""What each rank saves alone, in every place, and saves in the background, on the ranks of `cohort run -np N`."""

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
                self.assertEqual(bytes_of.setdefault("part", part), part)  # whoever wrote it
        with self.assertRaisesRegex(cohort.InvalidArgument, "'rank0', 'shared', 'local'"):
            checkpoint.CheckpointFolder(self.folder, place="everywhere")
        with self.assertRaisesRegex(cohort.InvalidArgument, "at least 1 copy of each file, not 0"):
            checkpoint.CheckpointFolder(self.folder, place="local", copies=0)

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
            body["version"] = 3
            path.write_text(finished(body))
        cohort.world().barrier()
        before = copies(net)
        with self.assertRaisesRegex(cohort.InvalidArgument, "a newer Cohort saved this checkpoint: its format is of version 3"):
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
