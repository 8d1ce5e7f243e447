"""The package `horovod`: names that it passes on, and its messages about those that it lacks."""

import importlib
import importlib.util
import os
import pathlib
import sys
import unittest
import zipfile

from cohort._launch import command as _command
from run_support import Folder, captured

AS_HOROVOD = pathlib.Path(_command.find()).parent.parent / "share" / "cohort" / "as-horovod"
sys.path.insert(0, str(AS_HOROVOD))

import horovod  # noqa: E402
from horovod.common import util  # noqa: E402

needs_api = unittest.skipUnless(
    importlib.util.find_spec("torch") and importlib.util.find_spec("cohort.horovod.torch"), "torch or cohort.horovod.torch is not here"
)

NAMES = """elastic Compression DistributedOptimizer SyncBatchNorm ProcessSet HorovodInternalError global_process_set Average
    Sum Adasum Min Max Product init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank
    local_rank cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
    cuda_built rocm_built add_process_set remove_process_set allreduce allreduce_async allreduce_ allreduce_async_
    grouped_allreduce grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async allgather
    allgather_async grouped_allgather grouped_allgather_async broadcast broadcast_async broadcast_ broadcast_async_ alltoall
    alltoall_async reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async join barrier poll
    synchronize broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object""".split()

TRAINING = """
import torch
import horovod.torch as hvd
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
every = hvd.allgather(model.weight.detach())
assert every.shape == (hvd.size(), 3) and every[0].equal(every[-1]), every
print("trained", hvd.rank(), hvd.size())
"""


def place(*args, **kwargs):
    names = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_FUSION_THRESHOLD")
    return [os.environ.get(name) for name in names], args, kwargs, importlib.import_module("horovod").__version__


def on_a_host():
    return tuple(os.environ[f"HOROVOD_{name}"] for name in ("HOSTNAME", "LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE"))


class Package(Folder):
    def test_what_is_missing_says_what_there_is(self):
        for part, words in {
            "mxnet": "retired",
            "data": "DataLoader",
        }.items():
            with self.assertRaisesRegex(ImportError, words):
                importlib.import_module(f"horovod.{part}")
        for module, part, words in (
            ("spark", "run_elastic", "max-restarts"),
            ("spark", "keras", "run_on_dataframe"),
            ("ray", "ElasticRayExecutor", "fixed number"),
        ):
            package = importlib.import_module(f"horovod.{module}")
            self.assertFalse(hasattr(package, part))
            with self.assertRaisesRegex(AttributeError, words):
                getattr(package, part)
            with self.assertRaisesRegex(ImportError, words):
                exec(f"from horovod.{module} import {part}")

    def test_run(self):
        with captured() as (_, err):
            results = horovod.run(place, (1,), {"k": 2}, num_proc=2, use_mpi=True)
        self.assertEqual(
            results, [([str(rank), "2", None], (1,), {"k": 2}, horovod.__version__) for rank in range(2)]
        )
        self.assertIn("horovod.run: mpi has no meaning here", err.getvalue())
        with captured():
            self.assertEqual(horovod.run(place, np=1)[0][0][:2], ["0", "1"])

    def test_run_refuses_what_would_be_another_job(self):
        with self.assertRaisesRegex(ValueError, "elastic"):
            horovod.run(place, min_num_proc=1)
        for words, given in {
            "hosts and hostfile were both given": {"hosts": "a:1", "hostfile": "b"},
            "hosts is empty": {"hosts": ""},
            "-H localhost:x": {"hosts": "localhost:x"},
            "--hostfile: cannot open /no/such -- No such file": {"hostfile": "/no/such"},
            "ssh_port: 'x' -- the port": {"hosts": "a:1", "ssh_port": "x"},
            "ssh_identity_file: '/no/such': No such file": {"hosts": "a:1", "ssh_identity_file": "/no/such"},
            "start_timeout: 'soon'": {"start_timeout": "soon"},
            "--network nowhere0": {"network_interfaces": ["nowhere0"]},
        }.items():
            with captured(), self.assertRaisesRegex(ValueError, words):
                horovod.run(place, num_proc=1, **given)

    def test_run_over_hosts(self):
        """All of the hosts are this machine; tests/cluster has several machines."""
        hostfile = self.folder / "hosts"
        hostfile.write_text("a slots=1\nb slots=2\n")
        os.environ["COHORT_RUN_STARTER"] = "local"
        self.addCleanup(os.environ.pop, "COHORT_RUN_STARTER")
        for where in ({"hosts": "a:1,b:2"}, {"hostfile": str(hostfile)}):
            with captured():
                results = horovod.run(on_a_host, num_proc=3, network_interface="lo", start_timeout=60, **where)
            self.assertEqual(results, [("a", "0", "0", "2"), ("b", "0", "1", "2"), ("b", "1", "0", "1")])

    def test_utilities(self):
        self.assertEqual([n for n in range(-1, 9) if util.num_rank_is_power_2(n)], [1, 2, 4, 8])
        self.assertEqual(util.split_list([1, 2, 3, 4, 5], 2), [[1, 2, 3], [4, 5]])
        self.assertEqual(util.split_list([1], 3), [[1]])
        self.assertTrue(util.is_iterable("a") and not util.is_iterable(3))
        self.assertTrue(util.is_version_greater_equal_than("2.13.0+cpu", "2.1.0"))
        self.assertFalse(util.is_version_greater_equal_than("1.9", "1.10.0"))
        with self.assertRaises(ValueError):
            util.is_version_greater_equal_than("1.9.0", "1.9")
        with util.env(COHORT_TEST_ONE="1", HOME=None):
            self.assertEqual((os.environ.get("COHORT_TEST_ONE"), os.environ.get("HOME")), ("1", None))
        self.assertNotIn("COHORT_TEST_ONE", os.environ)

        from horovod.runner.common.util import env as runner_env

        unset = {name: None for pair in runner_env._RANK_AND_SIZE for name in pair}
        with util.env(**unset):
            self.assertEqual(runner_env.get_env_rank_and_size(), (0, 1))
        with util.env(**{**unset, "PMI_RANK": "2", "PMI_SIZE": "4"}):
            self.assertEqual(runner_env.get_env_rank_and_size(), (2, 4))
        self.assertTrue(runner_env.is_exportable("PATH") and not runner_env.is_exportable("BASH_FUNC_module%%"))

        class Ops:
            Average, Sum = "average", "sum"

        handle = util.get_average_backwards_compatibility_fun(Ops)
        self.assertEqual((handle(None, None), handle("sum", None)), ("average", "sum"))
        with self.assertWarns(DeprecationWarning):
            self.assertEqual(handle(None, False), "sum")
        with self.assertRaises(ValueError):
            handle("sum", True)

    def test_wheel(self):
        source = (AS_HOROVOD / "horovod").resolve().parent / "compat_build.py"
        if not source.exists():
            self.skipTest("not a build folder")
        spec = importlib.util.spec_from_file_location("compat_build", source)
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        name = build.build_wheel(str(self.folder))
        with zipfile.ZipFile(self.folder / name) as wheel:
            inside = wheel.namelist()
            self.assertIn("horovod/torch/__init__.py", inside)
            self.assertIn("cohort_horovod-0.28.1.dist-info/entry_points.txt", inside)
            record = wheel.read("cohort_horovod-0.28.1.dist-info/RECORD").decode().splitlines()
            self.assertEqual([line.split(",")[0] for line in record], inside)
        status, out, err = self.command(
            sys.executable, "-c", "import horovod; print(horovod.__file__, horovod.__version__)",
            PYTHONPATH=str(self.folder / name),
        )
        self.assertEqual((status, out.split()[1:]), (0, [horovod.__version__]), err)


class Torch(Folder):
    @needs_api
    def test_every_name_is_there(self):
        import cohort.horovod.torch
        import horovod.torch as hvd

        self.assertEqual([name for name in NAMES if not hasattr(hvd, name)], [])
        self.assertIs(hvd.allreduce, cohort.horovod.torch.allreduce)
        for module, name in {
            "horovod.torch.mpi_ops": "is_homogeneous",
            "horovod.torch.functions": "broadcast_parameters",
            "horovod.torch.optimizer": "DistributedOptimizer",
            "horovod.torch.compression": "Compression",
            "horovod.torch.sync_batch_norm": "SyncBatchNorm",
            "horovod.torch.elastic": "TorchState",
            "horovod.torch.elastic.state": "TorchState",
            "horovod.torch.elastic.sampler": "ElasticSampler",
            "horovod.common.exceptions": "HostsUpdatedInterrupt",
            "horovod.common.process_sets": "ProcessSet",
            "horovod.common.elastic": "ObjectState",
        }.items():
            self.assertTrue(hasattr(importlib.import_module(module), name), f"{module}.{name}")

    @needs_api
    def test_a_program_that_knows_nothing_of_cohort(self):
        status, out, err = self.command(
            _command.find(), "run", "-q", "--no-logs", "--as-horovod", "-np", "2", "--", sys.executable, self.script(TRAINING)
        )
        self.assertEqual(status, 0, err)
        for rank in range(2):
            self.assertIn(f"trained {rank} 2", out)

    def test_without_cohort_it_says_what_is_missing(self):
        text = "import sys; sys.modules['cohort'] = None\nimport horovod.torch\n"
        status, _, err = self.program(text, PYTHONPATH=str(AS_HOROVOD))
        self.assertEqual(status, 1)
        self.assertRegex(err, "ImportError: horovod.torch is here in Cohort's version, and the package it needs, cohort")


if __name__ == "__main__":
    unittest.main()
