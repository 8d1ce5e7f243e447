"""Meeting points of process groups of the backend "cohort", and how torch finds it. Starts its processes itself."""

import os
import pathlib
import subprocess
import sys
import time
import unittest

from support import SECONDS
from support_distributed import GOOD, SMALLEST, TORCH_2, Case, environment, free_port


class Addresses(Case):
    def test_tcp(self):
        script = f"""
dist.init_process_group("cohort", init_method="tcp://127.0.0.1:{free_port()}", rank=rank, world_size=2, timeout=PATIENCE)
"""
        self.all_good(script + GOOD)

    def test_file_and_the_stale_one(self):
        path = self.folder / "meeting"
        start = f"""
dist.init_process_group("cohort", init_method="file://{path}", rank=rank, world_size=2, timeout=PATIENCE)
check()
"""
        # Ends without destroying its group, in the middle of things: the file stays.
        for status, output in self.world(start + 'print("good", flush=True)\nos._exit(0)\n'):
            self.assertEqual(status, 0, output)
            self.assertIn("good", output)
        self.assertTrue(path.exists())
        began = time.monotonic()
        for status, output in self.world(start):
            self.assertNotEqual(status, 0, output)
            self.assertRegex(output, rf"is taken: host .*, pid \d+, which has ended,.*rm {path}|Aborted")
        self.assertLess(time.monotonic() - began, 3 * SECONDS)

    def test_destroy_and_init_again(self):
        # The file goes with its group, which takes the slowest rank's leave.
        script = f"""
for i in range(3):
    dist.init_process_group("cohort", init_method="file://{self.folder}/meeting%d" % i, rank=rank, world_size=2, timeout=PATIENCE)
    check()
    dist.destroy_process_group()
    assert not dist.is_initialized()
dist.init_process_group("cohort", init_method="file://{self.folder}/last", rank=rank, world_size=2, timeout=PATIENCE)
"""
        self.all_good(script + GOOD)

    def test_the_backend_is_known_whenever_torch_comes(self):
        for first, second in (("torch.distributed", "cohort"), ("cohort", "torch.distributed")):
            done = subprocess.run(
                [sys.executable, "-c", f"import {first}, {second}, sys; import torch.distributed as dist; "
                 "print(dist.Backend('cohort'), [f.module for f in sys.meta_path if 'cohort' in repr(f)])"],
                capture_output=True, text=True, timeout=2 * SECONDS, env=environment(),
            )
            # The module that is left waits for torch.compile.
            self.assertEqual(done.stdout.split("\n")[0], "cohort ['torch._dynamo.trace_rules']", done.stderr)

    @unittest.skipUnless(TORCH_2, "torch 1.13 has no entry points")
    def test_the_entry_point(self):
        # As an installed wheel has it; nothing here imports cohort.
        sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "packaging"))
        self.addCleanup(sys.path.pop, 0)
        import cohort_build

        found = self.folder / "cohort-0.dist-info"
        found.mkdir()
        (found / "METADATA").write_text("Metadata-Version: 2.1\nName: cohort\nVersion: 0\n")
        (found / "entry_points.txt").write_text(cohort_build.ENTRY_POINTS)
        script = SMALLEST.replace("import cohort\n", "") + "assert 'cohort.distributed' not in sys.modules\n"
        script += "dist.init_process_group('cohort', rank=0, world_size=1, store=dist.HashStore())\ncheck(1)\nprint('good')\n"
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        status, output = self.run_it(sys.executable, self.script(script), PYTHONPATH=path)
        self.assertEqual((status, "good" in output), (0, True), output)

    @unittest.skipUnless(TORCH_2, "torch 1.13 has one backend in a group")
    def test_beside_another_backend(self):
        for backends in ("cpu:cohort,cuda:gloo", "cuda:gloo,cpu:cohort"):
            script = f"""
dist.init_process_group("{backends}", init_method="file://{self.folder}/{backends[:4]}", rank=rank, world_size=2, timeout=PATIENCE)
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor.tolist() == [2] * 3
world = dist.group.WORLD
assert world._get_backend(torch.device("cpu")) is world, world
assert "Gloo" in type(world._get_backend(torch.device("cuda"))).__name__, world._get_backend(torch.device("cuda"))
assert {{device.type for device in world._device_types}} == {{"cpu", "cuda"}}
group = dist.new_group([0, 1])
found = [None, None]
dist.all_gather_object(found, rank, group=group)
assert found == [0, 1]
dist.destroy_process_group()
print("good")
"""
            self.all_good(script)


if __name__ == "__main__":
    unittest.main()
