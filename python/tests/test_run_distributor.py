"""cohort.Distributor: TorchDistributor's calls and results."""

import os
import pathlib
import unittest
import unittest.mock
import warnings

import cohort
from cohort._process import gpus as _gpus
from run_support import Folder, captured


def seen(*args, **kwargs):
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ.get("CUDA_VISIBLE_DEVICES"), args, kwargs


def fail_on_one():
    if os.environ["RANK"] == "1":
        raise LookupError("rank 1 knows why")
    import time

    time.sleep(300)


def only_rank_0_has_a_result():
    return "mine" if os.environ["RANK"] == "0" else open(os.devnull)  # a file cannot be sent


SCRIPT = """
import os, sys
print("arguments", sys.argv[1:], os.environ["CUDA_VISIBLE_DEVICES"])
if "fail" in sys.argv and os.environ["RANK"] == "1":
    print("last words", file=sys.stderr)
    sys.exit(5)
"""


class Functions(Folder):
    def test_what_rank_0_returned(self):
        with captured():
            value = cohort.Distributor(num_processes=2, use_gpu=False).run(seen, 1, key=[2])
        self.assertEqual(value, (0, 2, "", (1,), {"key": [2]}))

    def test_what_others_return_need_not_be_sent(self):
        with captured():
            value = cohort.Distributor(2, use_gpu=False).run(only_rank_0_has_a_result)
        self.assertEqual(value, "mine")

    def test_the_exception_of_a_rank(self):
        with captured(), self.assertRaisesRegex(LookupError, "rank 1 knows why") as raised:
            cohort.Distributor(2, True, False).run(fail_on_one)
        self.assertEqual(raised.exception.__cause__.rank, 1)


class Scripts(Folder):
    def test_arguments_are_made_text(self):
        path = self.script(SCRIPT)
        with captured() as (out, _):
            self.assertIsNone(cohort.Distributor(2, use_gpu=False).run(str(path), "--lr", 0.5))
            self.assertIsNone(cohort.Distributor(1, use_gpu=False).run(path))
        self.assertEqual(out.getvalue().count("arguments ['--lr', '0.5'] \n"), 2)
        self.assertEqual(out.getvalue().count("arguments [] \n"), 1)

    def test_a_failing_script(self):
        with captured(), self.assertRaises(RuntimeError) as raised:
            cohort.Distributor(2, use_gpu=False).run(str(self.script(SCRIPT)), "fail")
        self.assertEqual((raised.exception.rank, raised.exception.status), (1, 5))
        self.assertIn("last words", str(raised.exception))

    def test_what_has_no_meaning(self):
        one = cohort.Distributor(1, use_gpu=False)
        with self.assertRaisesRegex(ValueError, "keyword arguments .epochs. have no meaning for a script"):
            one.run(str(self.script(SCRIPT)), epochs=3)
        with self.assertRaisesRegex(ValueError, "there is no script no/such.py"):
            one.run("no/such.py")
        with self.assertRaisesRegex(ValueError, "neither a function nor the path"):
            one.run(3)


class Processes(Folder):
    """How many, and on what. A stand-in for nvidia-smi says what GPUs there are."""

    def gpus(self, count, visible=None):
        smi = self.folder / "nvidia-smi"
        lines = "".join(f"echo 'GPU {i}: Model (UUID: GPU-{i})'\n" for i in range(count))
        smi.write_text(f"#!/bin/sh\n{lines or 'exit 9'}\n")
        smi.chmod(0o755)
        environment = {"PATH": f"{self.folder}:{os.environ['PATH']}"}
        if visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        patch = unittest.mock.patch.dict(os.environ, environment)
        patch.start()
        self.addCleanup(patch.stop)
        if visible is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)

    def test_wrong_numbers(self):
        for wrong in (0, -1, 1.5, "2"):
            with self.assertRaisesRegex(ValueError, "num_processes is"):
                cohort.Distributor(num_processes=wrong)

    def test_clusters_want_a_session_of_spark(self):
        with self.assertRaisesRegex(cohort.Unavailable, "pyspark|SparkSession"):
            cohort.Distributor(local_mode=False)
        with self.assertRaisesRegex(cohort.InvalidArgument, "hosts"):
            cohort.Distributor(local_mode=False, hosts="a:2")
        with self.assertRaisesRegex(cohort.InvalidArgument, "on is 'dask'"):
            cohort.run(seen, np=2, on="dask")

    def test_no_gpu_is_said(self):
        self.gpus(0)
        with self.assertWarnsRegex(RuntimeWarning, "can use no GPU .* train on the CPU") as warned:
            one = cohort.Distributor(num_processes=2)
        self.assertEqual(pathlib.Path(warned.filename).name, pathlib.Path(__file__).name)
        self.assertEqual(one.num_processes, 2)

    def test_more_processes_than_gpus_is_said(self):
        self.gpus(3, visible="2, 0")
        with self.assertWarnsRegex(RuntimeWarning, "4 processes were asked for, and this process can use 2 GPUs: 2 will run"):
            two = cohort.Distributor(num_processes=4)
        self.assertEqual(two.num_processes, 2)
        with captured():
            self.assertEqual(two.run(seen)[:3], (0, 2, "2,0"))
        self.assertEqual(os.environ["CUDA_VISIBLE_DEVICES"], "2, 0")

    def test_enough_gpus_are_no_word_worth(self):
        self.gpus(3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            two = cohort.Distributor(num_processes=2, local_mode=True, use_gpu=True)
        with captured():
            self.assertEqual(two.run(seen)[:3], (0, 2, "0,1"))

    def test_use_gpu_false_hides_them(self):
        self.gpus(3)
        with captured():
            self.assertEqual(cohort.Distributor(4, use_gpu=False).run(seen)[:3], (0, 4, ""))

    def test_the_nodes_of_an_allocation_have_gpus_of_their_own(self):
        self.gpus(1)
        for environment, elsewhere in (
            ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, True),
            ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}, True),
            ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "COHORT_RUN_NODES": "1"}, False),
            ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}, False),
            ({"SLURM_JOB_NUM_NODES": "2"}, False),
            ({"COHORT_RUN_HOSTS": "a:2,b:2"}, True),
            ({}, False),
        ):
            with self.subTest(environment), unittest.mock.patch.dict(os.environ, environment), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.assertEqual(cohort.Distributor(4).num_processes, 4 if elsewhere else 1)

    def test_what_cuda_visible_devices_means(self):
        self.gpus(2)
        for text, wanted in {"1": ["1"], "": [], "-1": [], "0,7,1": ["0"], "GPU-1,0": ["GPU-1", "0"], "NoDevFiles": [], "none": []}.items():
            self.assertEqual(_gpus.usable({"CUDA_VISIBLE_DEVICES": text}), wanted, text)
        self.assertEqual(_gpus.usable({}), ["0", "1"])


if __name__ == "__main__":
    unittest.main()
