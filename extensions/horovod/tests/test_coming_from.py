"""`cohort doctor --horovod` and `--torchrun`: a program's uses of these, looked up in Cohort."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest
import unittest.mock

from cohort._launch import coming_from_notes as _coming_from_notes, command as _command
from tiers import slow

ROOT = pathlib.Path(__file__).resolve().parents[3]
HVD = """init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built
add_process_set remove_process_set ProcessSet global_process_set Average Sum Adasum Min Max Product Compression.none
Compression.fp16 DistributedOptimizer broadcast_object allgather_object HorovodInternalError""".split()
OPERATIONS = "allreduce grouped_allreduce allgather grouped_allgather broadcast alltoall reducescatter grouped_reducescatter".split()
# Public names of Horovod 0.28, from its documentation.
NAMES = {
    "horovod.torch": [
        *HVD, "SyncBatchNorm", "sparse_allreduce_async", "join", "barrier", "poll", "synchronize", "broadcast_parameters",
        "broadcast_optimizer_state", *OPERATIONS, *(f"{one}_async" for one in OPERATIONS), "allreduce_", "allreduce_async_",
        "grouped_allreduce_", "grouped_allreduce_async_", "broadcast_", "broadcast_async_", "mpi_ops.is_homogeneous",
        "mpi_ops._check_has_gpu", "elastic.run", "elastic.TorchState", "elastic.ElasticSampler", "elastic.State", "elastic.ObjectState",
        "elastic.state.get_handler_registry", "elastic.state.set_handler_registry", "elastic.state.StateHandler",
        "elastic.state.ModelStateHandler", "elastic.state.OptimizerStateHandler", "elastic.state.SamplerStateHandler",
        "compression.Compressor", "functions.broadcast_object", "optimizer.DistributedOptimizer", "sync_batch_norm.SyncBatchNorm",
    ],
    "horovod.tensorflow": [
        *HVD, *OPERATIONS, "join", "barrier", "broadcast_variables", "broadcast_object_fn", "broadcast_global_variables",
        "DistributedGradientTape", "PartialDistributedGradientTape", "SyncBatchNormalization", "rank_op", "size_op",
        "local_rank_op", "local_size_op", "process_set_included_op", "elastic.run", "elastic.TensorFlowState",
        "elastic.TensorFlowKerasState", "BroadcastGlobalVariablesHook", "data.compute_service", "data.compute_worker",
    ],
    **{
        name: [
            *HVD[:-4], "DistributedOptimizer", "PartialDistributedOptimizer", "allreduce", "allgather", "broadcast",
            "reducescatter", "broadcast_global_variables", "load_model", "callbacks.BroadcastGlobalVariablesCallback",
            "callbacks.MetricAverageCallback", "callbacks.LearningRateScheduleCallback", "callbacks.LearningRateWarmupCallback",
            "callbacks.BestModelCheckpoint", "elastic.run", "elastic.KerasState", "elastic.CommitStateCallback",
            "elastic.UpdateBatchStateCallback", "elastic.UpdateEpochStateCallback",
        ]
        for name in ("horovod.keras", "horovod.tensorflow.keras")
    },
    "horovod.common": [
        "exceptions.HorovodInternalError", "exceptions.HostsUpdatedInterrupt", "exceptions.HorovodVersionMismatchError",
        "util.gpu_available", "util.split_list", "process_sets.ProcessSet", "basics.HorovodBasics", "elastic.State",
    ],
    "horovod.spark": ["run", "run_elastic", "keras.KerasEstimator", "torch.TorchEstimator", "lightning.TorchEstimator",
                      "common.store.Store", "common.backend.SparkBackend"],
    "horovod.ray": ["RayExecutor", "RayExecutor.create_settings", "ElasticRayExecutor"],
    "horovod": ["run", "mxnet", "data"],
}  # fmt: skip
# Names that are not here; each has a note of what to use instead.
NOT_HERE = {
    "horovod.tensorflow.BroadcastGlobalVariablesHook", "horovod.tensorflow.data.compute_service",
    "horovod.tensorflow.data.compute_worker", "horovod.spark.run_elastic", "horovod.spark.keras.KerasEstimator",
    "horovod.spark.torch.TorchEstimator", "horovod.spark.lightning.TorchEstimator", "horovod.spark.common.store.Store",
    "horovod.spark.common.backend.SparkBackend", "horovod.ray.ElasticRayExecutor", "horovod.mxnet", "horovod.data",
    "horovod.tensorflow.broadcast_global_variables", "horovod.keras.broadcast_global_variables",
    "horovod.tensorflow.keras.broadcast_global_variables",
}  # fmt: skip


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def doctor(self, kind, *programs, status=0, python=sys.executable):
        """Returns the uses by name, and the whole report."""
        environment = {**os.environ, "PATH": f"{os.path.dirname(python)}:{os.environ['PATH']}"}
        environment.pop("VIRTUAL_ENV", None)
        command = [_command.find(), "doctor", f"--{kind}", *map(str, programs), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        report = json.loads(done.stdout)
        return {use["what"]: use for use in report["uses"]}, report

    def program(self, text, name="train.py"):
        path = self.folder / name
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        return path

    def states(self, uses, state):
        return sorted(name for name, use in uses.items() if use["state"] == state)


class Horovod(Case):
    def test_every_public_name_has_an_answer(self):
        names = [f"{module}.{name}" for module, own in NAMES.items() for name in own]
        imports = "".join(f"import {module}\n" for module in NAMES)
        uses, _ = self.doctor("horovod", self.program(imports + "\n".join(names)), status=1)
        self.assertEqual(set(names) - set(uses), set())
        self.assertEqual(set(self.states(uses, "missing")), NOT_HERE)
        self.assertEqual([name for name in NOT_HERE if "no such name" in uses[name]["note"] or not uses[name]["note"]], [])

    def test_names_are_those_of_an_import(self):
        """A look-up with made-up frameworks finds the same names as one with the real frameworks."""
        sys.path.insert(0, str(ROOT / "extensions/horovod/package"))
        self.addCleanup(sys.path.remove, str(ROOT / "extensions/horovod/package"))
        for name in NAMES["horovod.torch"]:
            one = importlib.import_module("horovod.torch")
            for part in name.split("."):
                one = getattr(one, part)

    def test_a_program_as_users_write_it(self):
        path = self.program("""
            import argparse, os
            import torch
            import horovod.torch as hvd
            from horovod.torch import Compression as C, elastic
            os.environ["HOROVOD_CYCLE_TIME"] = "5"
            os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "1")

            def train(model, opt):
                opt.zero_grad()
                with opt.skip_synchronize():
                    optimizer.step()
                hvd.allreduce_no_such()

            class Trainer:
                def __init__(self):
                    self.hvd = hvd
                    self.state = hvd.elastic.TorchState(epoch=0)

                def go(self):
                    self.hvd.barrier()
                    self.state.commit()
                    self.state.epoch += 1

            @elastic.run
            def main(state): ...

            hvd.init(comm=[0, 1])
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([], lr=1), compression=C.fp16, op=hvd.Adasum,
                                                 gradient_predivide_factor=2.0, colour="red")
            optimizer.defaults
            train(None, opt=optimizer)
            hvd.allgather(1, 2, 3, 4, 5)
            hvd.init(**vars())
            getattr(hvd, "cross_rank")()
            getattr(hvd, os.environ["X"])
            ps = hvd.ProcessSet([0])
            ps.included(), ps.ranks, ps.colour
            """)  # fmt: skip
        uses, report = self.doctor("horovod", path, status=1)
        self.assertEqual(self.states(uses, "missing"), [
            "horovod.torch.DistributedOptimizer(colour)", "horovod.torch.ProcessSet.colour", "horovod.torch.allgather(...)",
            "horovod.torch.allreduce_no_such"])  # fmt: skip
        self.assertEqual(self.states(uses, "differs"), [
            "HOROVOD_CYCLE_TIME", "horovod.torch.Adasum", "horovod.torch.DistributedOptimizer(gradient_predivide_factor)",
            "horovod.torch.elastic.run", "horovod.torch.init(comm)"])  # fmt: skip
        self.assertEqual(self.states(uses, "unseen"), ["getattr(hvd, os.environ['X'])", "horovod.torch.init(*, **)"])
        for name in ("DistributedOptimizer.skip_synchronize", "DistributedOptimizer.zero_grad", "Compression.fp16", "cross_rank",
                     "barrier", "elastic.TorchState.commit", "ProcessSet.included", "ProcessSet.ranks"):  # fmt: skip
            self.assertEqual(uses[f"horovod.torch.{name}"]["state"], "here", name)
        self.assertEqual(uses["HOROVOD_FUSION_THRESHOLD"], {
            "what": "HOROVOD_FUSION_THRESHOLD", "where": [f"{path}:6"], "state": "here", "note": ""})  # fmt: skip
        self.assertEqual(uses["horovod.torch.barrier"]["where"], [f"{path}:20"])
        self.assertIn("there is no polling cycle", uses["HOROVOD_CYCLE_TIME"]["note"])
        self.assertNotIn("horovod.torch.DistributedOptimizer.defaults", uses)
        self.assertRegex(report["verdict"], r"^\d+ of \d+ names that were seen are here; not here: .*; what differs: .*; to run: cohort run -np 4 "
                         f"--as-horovod {path}$")  # fmt: skip

    def test_names_are_followed_or_said_not_to_be(self):
        """Each file uses a missing name in a different way. The name is reported, or its line is "not seen"."""
        found = {
            "tried": "try:\n    import horovod.torch as hvd\nexcept ImportError:\n    hvd = None\nhvd.bad_1()",
            "branch": "import sys\nif sys.argv:\n    import horovod.torch as hvd\nelse:\n    hvd = None\nhvd and hvd.bad_2()",
            "outer": "def use():\n    hvd.bad_3()\ndef setup():\n    global hvd\n    import horovod.torch as hvd\nsetup()\nhvd.bad_4()",
            "util": "import horovod.torch as hvd",
            "beside": "from util import hvd\nhvd.bad_5()",
            "beside_too": "import util as u\nu.hvd.bad_6()",
            "relative": "import os.path, json\nfrom . import util as u\nfrom .. import nothing\nu.hvd.bad_16()",
            "two": "import horovod.torch as hvd\nhv, x = hvd, 3\nhv.bad_7()",
            "walrus": "import horovod.torch as hvd\nif (h := hvd):\n    h.bad_8()",
            "default": "import horovod.torch as hvd\ndef f(a, h=hvd, *, k=hvd):\n    h.bad_9(), k.bad_10()",
            "klass": "import horovod.torch as hvd\nclass T:\n    hv = hvd\n    def f(self):\n        self.hv.bad_11()\nT.hv.bad_12()",
            "part": "import horovod.torch as hvd, functools\nfunctools.partial(hvd.allreduce, bad_13=1)",
            "either": "import horovod.torch as hvd\nh = hvd if 1 else None\nh.bad_14()",
        }
        unseen = {
            "returned": "import horovod.torch as hvd\ndef get():\n    return hvd\nget().bad()",
            "listed": "import horovod.torch as hvd\n[hvd][0].bad()",
            "given": "import horovod.torch as hvd\nTrainer(hvd)",
            "star": "from horovod.torch import *\nbad()",
            "elsewhere": "from no_such_file import hvd\nhvd.bad()",
        }
        files = {name: self.program(text, f"{name}.py") for name, text in {**found, **unseen}.items()}
        uses, report = self.doctor("horovod", self.folder, status=1)
        for name, text in found.items():
            for bad in [word for word in text.replace("(", " ").replace(".", " ").replace("=", " ").split() if word.startswith("bad")]:
                at = [use for what, use in uses.items() if what.rstrip(")").endswith(bad) and use["state"] == "missing"]
                self.assertEqual([where.rsplit(":", 1)[0] for use in at for where in use["where"]], [str(files[name])], (name, bad))
        self.assertEqual(self.states(uses, "unseen"), [
            "line 1: from horovod.torch import *", "line 1: from no_such_file import hvd", "line 2: hvd", "line 3: hvd"])  # fmt: skip
        self.assertEqual(uses["line 2: hvd"]["where"], [f"{files[name]}:2" for name in ("given", "listed")])
        self.assertIn("names that were seen are here", report["verdict"])

    def test_notebooks_and_marks_of_their_encoding(self):
        cells = [("markdown", ["hvd.nothing()"]), ("code", ["import horovod.torch as hvd\n", "%matplotlib inline\n", "hvd.bad_1()"]),
                 ("code", ["%%bash\n", "horovodrun -np 2 python train.py\n"]), ("code", ["x = !ls\n", "hvd?\n", "hvd.rank()"])]  # fmt: skip
        self.program(json.dumps({"cells": [{"cell_type": kind, "source": source} for kind, source in cells]}), "n.ipynb")
        self.program("[]", "broken.ipynb")
        (self.folder / "bom.py").write_bytes(b"\xef\xbb\xbfimport horovod.torch as hvd\nhvd.bad_2()\n")
        uses, report = self.doctor("horovod", self.folder, status=1)
        self.assertEqual(self.states(uses, "missing"), ["horovod.torch.bad_1", "horovod.torch.bad_2"])
        self.assertEqual(uses["horovod.torch.rank"]["where"], [f"{self.folder / 'n.ipynb'}:8"])
        self.assertEqual(uses["horovodrun"]["where"], [f"{self.folder / 'n.ipynb'}:5"])
        self.assertEqual(report["errors"], [f"{self.folder / 'broken.ipynb'}: it is no notebook of Jupyter's"])

    def test_scripts_of_a_shell_and_commands_in_programs(self):
        self.program("""
            #!/bin/bash
            # horovodrun -np 1 python nothing.py
            export HOROVOD_TIMELINE=/tmp/t.json
            HOROVOD_AUTOTUNE=1 horovodrun -np $NP -H a:4,b:4 --slots 2 \\
               --cycle-time-ms 3 --no-such python train.py --lr 0.1 > log 2>&1 && echo done
            mpirun -np 4 -x HOROVOD_HIERARCHICAL_ALLREDUCE=1 python train.py
            """, "job.sbatch")  # fmt: skip
        self.program('import os\nos.system("horovodrun -np 2 --autotune python other.py")\n')
        self.program("horovodrun\n", "notes.txt")  # not read
        uses, report = self.doctor("horovod", self.folder, status=1)
        self.assertEqual(self.states(uses, "missing"), ["horovodrun --no-such"])
        self.assertEqual(self.states(uses, "differs"), [
            "HOROVOD_AUTOTUNE", "HOROVOD_HIERARCHICAL_ALLREDUCE", "horovodrun --autotune", "horovodrun --cycle-time-ms"])
        self.assertEqual(self.states(uses, "here"), [
            "HOROVOD_TIMELINE", "horovodrun", "horovodrun --slots-per-host", "horovodrun -H", "horovodrun -np", "mpirun"])
        self.assertEqual(uses["horovodrun --cycle-time-ms"]["where"], [f"{self.folder / 'job.sbatch'}:4"])
        self.assertTrue(report["verdict"].endswith(
            "; to run: cohort run -np $NP -H a:4,b:4 --as-horovod train.py --lr 0.1; or: cohort run -np 2 --as-horovod other.py"),
            report["verdict"])  # fmt: skip

    def test_what_cannot_be_read_says_so(self):
        self.program("import horovod.torch as hvd\nprint \"rank\", hvd.rank()\n", "old.py")
        self.program("def f(:\n", "broken.py")
        _, report = self.doctor("horovod", self.folder, self.folder / "none.py", self.folder / "data.bin", status=1)
        text = "\n".join(report["errors"])
        self.assertRegex(text, r"old.py:2: this is Python 2, .*2to3 -w")
        self.assertRegex(text, r"broken.py:1: Python 3\.\d+ cannot read it: ")
        self.assertRegex(text, "none.py: No such file")
        (self.folder / "data.bin").write_bytes(b"\0\1\2\xff")
        (self.folder / "old.py").unlink()
        (self.folder / "broken.py").unlink()
        _, report = self.doctor("horovod", self.folder / "data.bin", status=1)
        self.assertRegex(report["errors"][0], "data.bin: neither Python")

    def test_our_examples_and_pages(self):
        page = (ROOT / "docs/coming-from/horovod.md").read_text()
        begin = page.index("```python file=regression_hvd.py")
        text = page[page.index("\n", begin) : page.index("```", begin + 3)].replace("import cohort.horovod.torch", "import horovod.torch")
        for program in (self.program(text), ROOT / "examples/03-horovod/digits_horovod.py", ROOT / "examples/09-keras"):
            uses, _ = self.doctor("horovod", program)
            self.assertGreater(len(uses), 5, program)
            self.assertEqual(self.states(uses, "missing") + self.states(uses, "unseen"), [], program)

    def test_what_differs_is_in_the_pages(self):
        for kind in ("horovod", "torchrun"):
            page = (ROOT / f"docs/coming-from/{kind}.md").read_text()
            self.assertIn(f"<!-- cohort doctor --{kind} -->\n\n{_coming_from_notes.table(kind)}\n\n<!-- end -->", page)


class Torchrun(Case):
    def test_a_program_as_users_write_it(self):
        path = self.program("""
            import os
            import torch
            import torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel as DDP
            from torch.utils.data.distributed import DistributedSampler
            rank = int(os.environ["LOCAL_RANK"])
            again = os.environ.get("TORCHELASTIC_ERROR_FILE")

            def main():
                dist.init_process_group("nccl")
                model = DDP(torch.nn.Linear(1, 1), device_ids=[rank])
                with model.no_sync():
                    model.module.weight
                dist.all_reduce(torch.ones(1), op=dist.ReduceOp.SUM)
                dist.barrier(group=dist.group.WORLD)
                dist.monitored_barrier()
                dist.no_such_name()
                DistributedSampler(None).set_epoch(1)
                dist.destroy_process_group()
            """)
        script = self.program("""
            torchrun --nnodes=2 --node_rank $RANK --master_addr=a --nproc_per_node 4 --tee 3 --no-such 1 train.py
            python -m torch.distributed.launch --use_env --nproc_per_node=4 train.py --lr 1
            """, "run.sh")  # fmt: skip
        uses, report = self.doctor("torchrun", path, script, status=1)
        self.assertEqual(self.states(uses, "missing"), ["torch.distributed.no_such_name", "torchrun --no-such"])
        self.assertEqual(self.states(uses, "differs"), [
            "TORCHELASTIC_ERROR_FILE", "torch.distributed.init_process_group(backend)", "torch.distributed.monitored_barrier",
            "torchrun --tee", "torchrun --use-env"])  # fmt: skip
        for name in ("LOCAL_RANK", "torch.distributed.all_reduce", "torch.distributed.ReduceOp.SUM",
                     "torch.nn.parallel.DistributedDataParallel.no_sync", "torchrun --nproc-per-node",
                     "torch.utils.data.distributed.DistributedSampler.set_epoch"):  # fmt: skip
            self.assertEqual(uses[name]["state"], "here", name)
        self.assertTrue(report["verdict"].endswith(
            "; to run: cohort run --nnodes 2 --node-rank $RANK --master-addr a --nproc-per-node 4 --secret-file FILE train.py; "
            "or: cohort run --nproc-per-node 4 train.py --lr 1"), report["verdict"])  # fmt: skip

    def test_without_torch_names_are_not_looked_up(self):
        (self.folder / "torch.py").write_text("raise ImportError('no torch')\n")
        path = self.program("import torch.distributed as dist\ndist.init_process_group('nccl')\ndist.split_group()\n")
        with unittest.mock.patch.dict(os.environ, PYTHONPATH=f"{self.folder}:{os.environ.get('PYTHONPATH', '')}"):
            uses, report = self.doctor("torchrun", path, status=1)
        self.assertIn("torch.distributed.init_process_group", self.states(uses, "unseen"))
        self.assertEqual(self.states(uses, "missing"), ["torch.distributed.split_group"])

    @slow
    def test_a_program_that_starts_its_ranks_itself(self):
        path = self.program("""
            import torch.distributed as dist
            import torch.multiprocessing as mp

            def main(rank):
                dist.init_process_group("cohort", rank=rank, world_size=2)

            mp.spawn(main, nprocs=2)
            """)
        uses, report = self.doctor("torchrun", path)
        self.assertEqual(self.states(uses, "differs"), ["torch.multiprocessing.spawn"])
        self.assertTrue(report["verdict"].endswith(f"to run: python3 {path}"), report["verdict"])


if __name__ == "__main__":
    unittest.main()
