"""Cohort under Ray Train, and Horovod's RayExecutor, on a Ray that this test starts. Skipped if Ray is neither installed nor
in build/ray (tools/setup --for all) or in COHORT_TEST_RAY."""

import json
import os
import pathlib
import secrets
import sys
import tempfile
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[3]
RAY = os.environ.get("COHORT_TEST_RAY", str(ROOT / "build" / "ray"))
if os.path.isdir(RAY):
    sys.path.append(RAY)
sys.path.append(str(ROOT / "extensions" / "horovod" / "package"))

try:
    import ray
    import torch  # noqa: F401
except ImportError:
    ray = None


def learn(config):
    import json
    import os

    import cohort
    import ray.train
    import torch
    import torch.distributed as dist

    ones = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(ones)
    cohort.init()
    again = torch.full((3,), float(cohort.rank() + 1))
    cohort.world().all_reduce(again)
    path = os.environ.get("COHORT_SECRET_FILE")
    seen = {
        "backend": dist.get_backend(),
        "sums": [ones[0].item(), again[0].item()],
        "local": [int(os.environ["LOCAL_RANK"]), cohort.local_rank(), cohort.local_size()],
        "mode": None if path is None else os.stat(path).st_mode & 0o777,
        "file": path,
    }
    if cohort.rank() == 0:
        with open(config["seen"], "w") as file:
            json.dump(seen, file)
    ray.train.report({})
    cohort.shutdown()


def squares(base, scale=1):
    import array

    import cohort
    import cohort.horovod.torch as hvd

    hvd.init()
    values = array.array("d", [float(hvd.rank() + 1)])
    cohort.world().all_reduce(values)
    return hvd.rank(), hvd.size(), hvd.local_rank(), values[0], base * scale


def fail():
    import os

    if os.environ["RANK"] == "1":
        raise LookupError("rank 1 knows why")


@unittest.skipIf(ray is None, "needs ray and torch: tools/setup --for all")
class Ray(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # Sent by value, because workers cannot import this file.
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        folder = tempfile.TemporaryDirectory(prefix="cr-", dir="/tmp")  # a short path, because its sockets' names are long
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        # The entry point of an installed package, by which torch finds the backend.
        entry = pathlib.Path(folder.name, "modules", "cohort_backend-1.dist-info")
        entry.mkdir(parents=True)
        (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: cohort-backend\nVersion: 1\n")
        (entry / "entry_points.txt").write_text("[torch.backends]\ncohort = cohort._torch_backend:autoload\n")
        environment = {
            "PYTHONPATH": os.pathsep.join([str(entry.parent), *filter(None, sys.path)]),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_TOKEN_PATH": f"{folder.name}/token",  # else Ray leaves one in the home
        }
        pathlib.Path(folder.name, "token").write_text(secrets.token_hex(32))
        patch = unittest.mock.patch.dict(os.environ, environment)
        patch.start()
        cls.addClassCleanup(patch.stop)
        ray.init(
            num_cpus=4, include_dashboard=False, _temp_dir=folder.name, object_store_memory=100 << 20, log_to_driver=False,
        )
        cls.addClassCleanup(ray.shutdown)

    def trained(self, config):
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        seen = pathlib.Path(self.folder, f"{type(config).__name__}.json")
        trainer = TorchTrainer(
            learn,
            train_loop_config={"seen": str(seen)},
            torch_config=config,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=self.folder, name=type(config).__name__),
        )
        trainer.fit()
        metrics = json.loads(seen.read_text())
        self.assertEqual((metrics["backend"], metrics["sums"], metrics["local"]), ("cohort", [3.0, 3.0], [0, 0, 2]))
        return metrics

    def test_cohort_config(self):
        import cohort.ray

        metrics = self.trained(cohort.ray.CohortConfig())
        self.assertEqual(metrics["mode"], 0o600)
        self.assertFalse(os.path.exists(metrics["file"]))

    def test_torch_config_with_our_backend(self):
        from ray.train.torch import TorchConfig

        self.trained(TorchConfig(backend="cohort"))

    def test_horovods_executor(self):
        from horovod.ray import RayExecutor

        executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=2)
        with self.assertRaisesRegex(ValueError, "start"):
            executor.run(squares, (3,))
        executor.start()
        try:
            self.assertEqual(executor.run(squares, (3,), {"scale": 2}), [(0, 2, 0, 3.0, 6), (1, 2, 1, 3.0, 6)])
            self.assertEqual(executor.run(squares, (1,))[1][0], 1)
            with self.assertRaisesRegex(LookupError, "rank 1 knows why"):
                executor.run(fail)
        finally:
            executor.shutdown()


if __name__ == "__main__":
    unittest.main()
