"""The names of cohort.horovod.torch, and a world of one."""

import inspect
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import cohort
from support import SECONDS, torch

if torch is not None:
    import cohort.horovod.torch as hvd
    from cohort._launch import command as _command


def setUpModule():
    if torch is None:
        raise unittest.SkipTest("torch is not installed")


# Names, order of arguments and defaults on which programs rely.
_SET = "process_set=GLOBAL"
_REDUCE = "average=None, name=None, {}op=None, prescale_factor=1.0, postscale_factor=1.0, " + _SET
_SCATTER = "op=0, " + _SET + ", prescale_factor=1.0, postscale_factor=1.0"
SIGNATURES = {
    "init": "comm=None, process_sets=None",
    "shutdown": "",
    "is_initialized": "",
    "start_timeline": "file_path, mark_cycles=False, all_ranks=False",
    "stop_timeline": "",
    **dict.fromkeys(("size", "local_size", "cross_size", "rank", "local_rank", "cross_rank"), ""),
    **dict.fromkeys(("mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built"), ""),
    **dict.fromkeys(("nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"), ""),
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "allreduce": "tensor, " + _REDUCE.format("compression=NONE, "),
    "grouped_allreduce": "tensors, " + _REDUCE.format("compression=NONE, "),
    **dict.fromkeys(("allreduce_async", "allreduce_", "allreduce_async_"), "tensor, " + _REDUCE.format("")),
    **dict.fromkeys(
        ("grouped_allreduce_async", "grouped_allreduce_", "grouped_allreduce_async_"), "tensors, " + _REDUCE.format("")
    ),
    "sparse_allreduce_async": "tensor, name, op, " + _SET,
    **dict.fromkeys(("allgather", "allgather_async"), "tensor, name=None, " + _SET),
    **dict.fromkeys(("grouped_allgather", "grouped_allgather_async"), "tensors, name=None, " + _SET),
    **dict.fromkeys(
        ("broadcast", "broadcast_async", "broadcast_", "broadcast_async_"), "tensor, root_rank, name=None, " + _SET
    ),
    **dict.fromkeys(("alltoall", "alltoall_async"), "tensor, splits=None, name=None, " + _SET),
    "reducescatter": "tensor, name=None, compression=NONE, " + _SCATTER,
    "grouped_reducescatter": "tensors, name=None, compression=NONE, " + _SCATTER,
    "reducescatter_async": "tensor, name=None, " + _SCATTER,
    "grouped_reducescatter_async": "tensors, name=None, " + _SCATTER,
    "join": "device=-1",
    "barrier": _SET,
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj, root_rank=0, name=None, " + _SET,
    "allgather_object": "obj, name=None",
    "DistributedOptimizer": "optimizer, named_parameters=None, compression=NONE, backward_passes_per_step=1, op=0, "
    "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, " + _SET,
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
    "ProcessSet": "ranks_or_comm",
}
VALUES = {"Average": 0, "Sum": 1, "Adasum": 2, "Min": 3, "Max": 4, "Product": 5}
OTHERS = {"elastic", "Compression", "HorovodInternalError", "global_process_set"}


class Surface(unittest.TestCase):
    def test_the_names(self):
        wanted = {*SIGNATURES, *VALUES, *OTHERS}
        self.assertEqual(len(wanted), 67)
        self.assertLessEqual(wanted, set(hvd.__all__))
        for name in hvd.__all__:
            self.assertTrue(hasattr(hvd, name), name)
        from cohort.horovod.torch import mpi_ops

        for name in mpi_ops.__all__:
            self.assertTrue(hasattr(mpi_ops, name), name)
        self.assertIs(mpi_ops._check_has_gpu(), torch.cuda.is_available())

    def test_signatures(self):
        def text(parameter):
            default = parameter.default
            if default is inspect.Parameter.empty:
                return parameter.name
            known = {id(hvd.global_process_set): "GLOBAL", id(hvd.Compression.none): "NONE"}
            return f"{parameter.name}={known.get(id(default), repr(default))}"

        for name, expected in SIGNATURES.items():
            parameters = list(inspect.signature(getattr(hvd, name)).parameters.values())
            got = [text(parameter) for parameter in parameters]
            wanted = expected.split(", ") if expected else []
            self.assertEqual(got[: len(wanted)], wanted, name)
            self.assertTrue(all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[: len(wanted)]), name)
            # Arguments that Horovod lacks come after Horovod's.
            more = {"process_set=GLOBAL", "non_finite='ignore'", "average_by='ranks'", "compare_ranks=True",
                    "wire_format=None"}
            self.assertLessEqual(set(got[len(wanted) :]), more, name)

    def test_values(self):
        for name, value in VALUES.items():
            self.assertEqual(getattr(hvd, name), value)

    def test_what_is_built(self):
        answers = [hvd.mpi_enabled(), hvd.mpi_built(), hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built()]
        self.assertEqual(answers, [False] * 5)
        self.assertIs(hvd.cuda_built(), cohort._core.gpu_count() > 0)
        self.assertEqual(hvd.nccl_built(), cohort._core.nccl_version())
        self.assertTrue(hvd.gloo_built() and hvd.gloo_enabled())

    def test_errors(self):
        from cohort.horovod.exceptions import HorovodVersionMismatchError, HostsUpdatedInterrupt

        self.assertTrue(issubclass(hvd.HorovodInternalError, RuntimeError))
        self.assertTrue(HostsUpdatedInterrupt(True).skip_sync)
        self.assertTrue(issubclass(HorovodVersionMismatchError, ImportError))

    def test_compressors_of_others(self):
        from cohort.horovod.torch.compression import Compressor

        with self.assertRaises(NotImplementedError):
            Compressor.compress(torch.ones(1))


class Alone(unittest.TestCase):
    """A world of one, without a launcher."""

    def setUp(self):
        kept = {k: os.environ.pop(k) for k in list(os.environ) if k.startswith(("COHORT_", "RANK", "WORLD_SIZE"))}
        self.addCleanup(os.environ.update, kept)
        self.addCleanup(hvd.shutdown)

    def test_before_init(self):
        self.assertFalse(hvd.is_initialized())
        for question in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size):
            self.assertRaises(ValueError, question)
        self.assertRaises(ValueError, hvd.is_homogeneous)
        self.assertRaises(ValueError, hvd.mpi_threads_supported)
        self.assertRaises(ValueError, hvd.add_process_set, [0])
        self.assertRaises(ValueError, hvd.start_timeline, "/nowhere")
        vector = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([vector], lr=0.1)
        # Calls for which Horovod's Python needs the world's size, and then others, whose core reports that there is
        # none.
        self.assertRaises(ValueError, hvd.DistributedOptimizer, optimizer)
        self.assertRaises(ValueError, hvd.alltoall, vector)
        self.assertRaises(ValueError, hvd.allreduce, vector, op=hvd.Adasum)
        for call in (
            lambda: hvd.allreduce(vector),
            lambda: hvd.allgather(vector),
            lambda: hvd.broadcast(vector, 0),
            lambda: hvd.reducescatter(vector),
            hvd.barrier,
            hvd.join,
        ):
            self.assertRaises(hvd.HorovodInternalError, call)
        self.assertFalse(hvd.remove_process_set(hvd.global_process_set))
        self.assertFalse(hvd.remove_process_set(hvd.ProcessSet([0])))
        self.assertIsNone(hvd.ProcessSet([0]).size())
        hvd.shutdown()

    def test_init_and_shutdown(self):
        for _ in range(3):
            hvd.init()
            hvd.init()
            self.assertTrue(hvd.is_initialized() and cohort.is_initialized())
            self.assertEqual((hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()), (0, 1, 0, 1))
            self.assertEqual((hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()), (0, 1, True))
            self.assertRaises(ValueError, hvd.mpi_threads_supported)
            self.assertEqual(hvd.global_process_set.ranks, [0])
            self.assertEqual(hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist(), [1.0, 1.0])
            self.assertEqual(hvd.allgather_object("x"), ["x"])
            hvd.shutdown()
            hvd.shutdown()
            self.assertFalse(hvd.is_initialized() or cohort.is_initialized())
            self.assertIsNone(hvd.global_process_set.process_set_id)

    def test_a_world_of_others_stays(self):
        cohort.init()
        self.addCleanup(cohort.shutdown)
        hvd.init()
        hvd.shutdown()
        self.assertEqual(cohort.size(), 1)

    def test_wrong_arguments(self):
        for options in (
            {"comm": [3]},
            {"comm": [0, 0]},
            {"comm": ["a"]},
            {"comm": 0},
            {"process_sets": "static"},
            {"process_sets": [hvd.ProcessSet([0])]},
            {"process_sets": [hvd.ProcessSet([1])]},
        ):
            with self.subTest(options=str(options)):
                self.assertRaises(ValueError, hvd.init, **options)
                self.assertFalse(hvd.is_initialized() or cohort.is_initialized())
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "much"
        self.addCleanup(os.environ.pop, "HOROVOD_FUSION_THRESHOLD")
        self.assertRaises(ValueError, hvd.init)
        hvd_comm = type("Comm", (), {"Get_rank": lambda self: 0})()
        self.assertRaises(ValueError, hvd.ProcessSet, hvd_comm)

    def test_variables(self):
        given = {
            "HOROVOD_FUSION_THRESHOLD": "0",
            "HOROVOD_CACHE_CAPACITY": "0",
            "HOROVOD_STALL_CHECK_DISABLE": "1",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20",
        }
        os.environ.update(given)
        self.addCleanup(lambda: [os.environ.pop(name) for name in given])
        hvd.init(process_sets="dynamic")
        for _ in range(3):
            self.assertEqual(hvd.allreduce(torch.ones(2), name="x").tolist(), [1.0, 1.0])
        hvd.shutdown()

    def test_sampler(self):
        hvd.init()
        sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
        self.assertEqual((list(sampler), len(sampler)), (list(range(10)), 10))
        sampler.record_batch(0, 4)
        self.assertEqual(sampler.state_dict(), {"epoch": 0, "processed_num": 4})
        other = hvd.elastic.ElasticSampler(range(10), shuffle=False)
        other.load_state_dict(sampler.state_dict())
        self.assertEqual(list(other), list(range(4, 10)))
        other.num_replicas, other.rank = 4, 3  # takes effect only with reset()
        other.reset()
        self.assertEqual(other.num_replicas, 1)
        shuffled = hvd.elastic.ElasticSampler(range(10), seed=3)
        first = list(shuffled)
        self.assertNotEqual(first, list(range(10)))
        self.assertEqual(sorted(first), list(range(10)))
        shuffled.set_epoch(1)
        self.assertNotEqual(list(shuffled), first)
        sampler.record_batch(1, 20)
        sampler.reset()
        self.assertEqual((list(sampler), len(sampler)), ([], 0))


class Stuck(unittest.TestCase):
    def test_ranks_that_wait_for_different_names_end_the_job(self):
        script = (
            "import torch, cohort.horovod.torch as hvd\n"
            "hvd.init()\n"
            "hvd.allreduce(torch.ones(4), name='same')\n"
            "hvd.allreduce(torch.ones(4), name=f'only {hvd.rank()}')\n"
        )
        env = {k: v for k, v in os.environ.items() if not k.startswith(("COHORT_", "RANK", "WORLD_", "LOCAL_", "MASTER_"))}
        with tempfile.TemporaryDirectory(prefix="cohort-hvd-") as folder:
            done = subprocess.run(
                [_command.find(), "run", "-np", "2", "--deadlock-timeout", "2", "--run-dir", f"{folder}/run"]
                + ["--no-python", "--", sys.executable, "-c", script],
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
        self.assertEqual(done.returncode, 124, done.stderr)
        self.assertRegex(
            done.stderr,
            r"nothing can go on: rank 0 .* waits for 'allreduce.only 0' \(by name\); rank 1 .* waits for 'allreduce.only 1'",
        )


class Imports(unittest.TestCase):
    def test_cohort_alone_imports_no_torch(self):
        code = "import sys, cohort; assert not {'torch', 'numpy'} & set(sys.modules), sys.modules.keys()"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=2 * SECONDS)

    def test_what_cannot_be_imported_is_an_attribute_that_is_not_there(self):
        code = (
            "import sys, pydoc; sys.modules['keras'] = sys.modules['torch'] = None\n"
            "import cohort, horovod.spark\n"
            "assert not hasattr(cohort, 'keras') and not hasattr(cohort, 'nn') and hasattr(cohort, 'run')\n"
            "assert 'cohort' in pydoc.render_doc(cohort)\n"
            "try: cohort.keras\n"
            "except AttributeError as error: assert 'cohort.keras cannot be used here -- ' in str(error), error\n"
        )
        horovod = pathlib.Path(__file__).resolve().parents[1] / "package"
        environment = {**os.environ, "PYTHONPATH": f"{horovod}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        subprocess.run([sys.executable, "-c", code], check=True, timeout=2 * SECONDS, env=environment)


if __name__ == "__main__":
    unittest.main()
