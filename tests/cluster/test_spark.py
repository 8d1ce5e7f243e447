"""A standalone Spark cluster of two hosts of a box, a worker on each: ranks are on both, meet over the network, and nothing
is left on either."""

import ast
import importlib.util
import os
import pathlib
import re
import shutil
import sys
import tempfile
import unittest

import boxes

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = os.environ.get("COHORT_PYTHON_PACKAGE", "")
TESTS = [str(ROOT / "python/tests"), str(ROOT / "extensions/spark/tests")]
sys.path += TESTS

DRIVER = """
import os, runpy, sys, time
import spark_support

session = spark_support.start(sys.argv[1], host="h1", spark_executor_cores="2", spark_cores_max="4")
import cohort
from cohort._launch import pickling as _pickling


def place():
    import cohort

    cohort.init()
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "COHORT_HOST")
    return [os.environ[name] for name in names] + [cohort.cross_size()]


def fail():
    if os.environ["RANK"] == "3":
        raise LookupError("rank 3 knows why")
    time.sleep(300)


if sys.argv[2] == "places":
    print("PLACES", cohort.run(place, np=4, on="spark"))
    try:
        cohort.run(fail, np=4, on="spark")
    except LookupError as error:
        print("RAISED", str(error), error.__cause__.rank, error.__cause__.host)
else:
    sys.argv = sys.argv[2:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
session.stop()
"""


class OnTwoHosts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not list(pathlib.Path(PACKAGE, "cohort").glob("_core.*.so")):
            raise unittest.SkipTest("the Python package is not built")
        import spark_support

        spark_support.find()
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="cohort-spark-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        (cls.folder / "driver.py").write_text(DRIVER)
        spec = importlib.util.spec_from_file_location("edits", ROOT / "python" / "tests" / "articles" / "edits.py")
        edits = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(edits)
        edits.put_into(cls.folder, on_spark=True)
        cls.box = boxes.Box("spark", "--hosts", "2")
        cls.addClassCleanup(cls.box.down)
        cls.path = os.pathsep.join([PACKAGE, str(cls.folder), *TESTS])
        cls.environment = {"PYTHONPATH": cls.path, "OMP_NUM_THREADS": "1"}
        cls.cluster = spark_support.Standalone(
            [(host, cls.box.words(host)) for host in cls.box.hosts], cls.folder, environment=cls.environment,
            master=("h1", cls.box.words("h1")),
        )
        cls.addClassCleanup(cls.cluster.end)

    def drive(self, *words):
        done = self.box.run(
            "h1", "env", *(f"{name}={value}" for name, value in self.environment.items()), sys.executable,
            self.folder / "driver.py", self.cluster.url, *words, timeout=400, cwd=self.folder,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        for host in self.box.hosts:
            self.assertEqual(self.box.processes(host, "cohort (agent|run)|rank_call"), {})
        return done.stdout

    def test_ranks_are_numbered_by_host_and_meet(self):
        said = self.drive("places")
        places = ast.literal_eval(re.search(r"PLACES (.*)", said)[1])
        first, second = places[0][4], places[2][4]
        self.assertNotEqual(first, second)
        self.assertEqual(places, [[str(rank), str(rank % 2), "2", str(rank // 2), (first, second)[rank // 2], 2] for rank in range(4)])
        self.assertRegex(said, f"RAISED rank 3 knows why 3 ({re.escape(first)}|{re.escape(second)})\n")

    def test_mnist_on_two_hosts(self):
        said = self.drive(self.folder / "mnist_distributor_nodes.py", self.folder)
        self.assertIn("output 'finished'", said)
        found = re.findall(r"Running on rank (\d) \(local (\d)\)", said)
        self.assertEqual(sorted(found), [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")])
        self.assertGreater(float(re.search(r"accuracy: ([\d.]+)", said)[1]), 0.6, said)


if __name__ == "__main__":
    unittest.main()
