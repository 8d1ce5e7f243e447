"""The second article's program on executors of a Spark cluster: one import changed, and its GPUs."""

import importlib.util
import os
import pathlib
import re
import runpy
import sys
import unittest
import unittest.mock

import spark_support
from run_support import Folder, captured

EDITS = pathlib.Path(__file__).resolve().parent / "articles" / "edits.py"


class Article(Folder):
    def test_mnist_on_executors(self):
        spark_support.find()
        spec = importlib.util.spec_from_file_location("edits", EDITS)
        edits = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(edits)
        edits.put_into(self.folder, on_spark=True)
        # The program's modules are where executors find them, as in a folder of the workspace.
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


if __name__ == "__main__":
    unittest.main()
