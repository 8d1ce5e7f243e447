"""The second article's program on executors of a Spark cluster, one import changed; and the notebook of the examples."""

import importlib.util
import os
import pathlib
import re
import runpy
import shutil
import sys
import unittest
import unittest.mock

import spark_support
from run_support import CELLS, Folder, captured

EDITS = pathlib.Path(__file__).resolve().parents[3] / "python/tests/articles/edits.py"


class Article(Folder):
    def test_mnist_on_executors(self):
        spark_support.find()
        spec = importlib.util.spec_from_file_location("edits", EDITS)
        edits = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(edits)
        edits.put_into(self.folder, on_spark=True)
        # Executors find the program's modules, as in a folder of the workspace.
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        with unittest.mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
            session = spark_support.start("local-cluster[2,2,1024]")
            self.addCleanup(spark_support.stop, session)
            with unittest.mock.patch.object(sys, "path", [str(self.folder), *sys.path]):
                with unittest.mock.patch.object(sys, "argv", ["program", str(self.folder)]), captured() as (out, _):
                    runpy.run_path(str(self.folder / "mnist_distributor_nodes.py"), run_name="__main__")
        said = out.getvalue()
        self.assertIn("output 'finished'", said)
        self.assertEqual(
            sorted(re.findall(r"Running on rank (\d) \(local (\d)\)", said)), [(str(rank), str(rank)) for rank in range(4)]
        )
        self.assertGreater(float(re.search(r"accuracy: ([\d.]+)", said)[1]), 0.6, said)
        self.assertEqual(len(list(self.folder.glob("checkpoint-*.pth.tar"))), 3)


class Notebook(Folder):
    def test_cell_by_cell(self):
        there = spark_support.find()
        here = self.folder / "examples" / "08-spark"
        here.mkdir(parents=True)
        (self.folder / "data").symlink_to(spark_support.ROOT / "data")
        notebook = shutil.copy(spark_support.ROOT / "examples" / "08-spark" / "digits.ipynb", here)
        path = os.pathsep.join([*filter(None, [str(there or "")]), os.environ.get("PYTHONPATH", "")])
        process = self.start(
            "sh", "-c", 'cd "$1" && exec "$2" "$3" "$4"', "sh", here, sys.executable, self.script(CELLS), notebook,
            PYTHONPATH=path, PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1", OMP_NUM_THREADS="1",
        )
        out, err = process.communicate(timeout=400)  # a JVM, two executors, and torch in seven processes
        self.assertEqual(process.returncode, 0, err)
        self.assertRegex(out, r"(?m)^one process: 9\d\.\d% of the test images$")
        self.assertRegex(out, r"(?m)^2 processes: 9\d\.\d% of the test images$")
        self.assertIn("['rank 0 of 2', 'rank 1 of 2']\n", out)
        self.assertIn("rank 1: no more digits\n", out)
        self.assertRegex(out, r"(?m)^\(\(\d+, \d+\), 650\.5\)$")
        self.assertEqual(len(list((here / "checkpoints").glob("checkpoint-*.pth.tar"))), 8)


if __name__ == "__main__":
    unittest.main()
