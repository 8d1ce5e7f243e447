"""Keras and TensorFlow over two hosts of a box, started over ssh: the first article's program by horovodrun, and
MultiWorkerMirroredStrategy by `cohort run --tf-config`."""

import os
import pathlib
import re
import sys
import unittest

from python_case import COHORT, PACKAGE, PythonCase

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python/tests"))
sys.path.insert(0, str(ROOT / "extensions/horovod/tests"))
from articles import edits  # noqa: E402
from keras_support import MISSING, STRATEGY, place_of  # noqa: E402

BUILD = pathlib.Path(PACKAGE).parent

WEIGHTS = """
import hashlib, os
digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in mnist_model.weights)).hexdigest()
print("WEIGHTS", hvd.rank(), os.uname().nodename, digest, mnist_model.history.history["accuracy"][-1], flush=True)
"""


class Keras(PythonCase):
    by_user = False  # with the Python of this test, which other users may not reach

    def on_h1(self, backend, *words):
        place = place_of(backend)
        if place is None:
            self.skipTest(MISSING.format(backend))
        python, folders = place
        path = os.pathsep.join([*folders, PACKAGE, f"{BUILD}/share/cohort/as-horovod"])
        done = self.box.run("h1", "env", f"PYTHONPATH={path}", "PYTHONDONTWRITEBYTECODE=1", "TF_CPP_MIN_LOG_LEVEL=3",
                            "CUDA_VISIBLE_DEVICES=-1", "KERAS_BACKEND=tensorflow", *words, timeout=400, cwd=self.folder)
        self.assertEqual(done.returncode, 0, f"{words}: {done.stdout[-6000:]}{done.stderr[-6000:]}")
        return done.stdout + done.stderr

    def test_the_first_article(self):
        edits.put_into(self.folder)
        program = self.folder / "keras_mnist.py"
        program.write_text(program.read_text() + WEIGHTS)
        said = self.on_h1("tensorflow", self.python, "-B", f"{BUILD}/bin/horovodrun", "-np", "2", "-H", "h1:1,h2:1",
                          self.python, "keras_mnist.py")  # fmt: skip
        weights = re.findall(r"WEIGHTS (\d) (\w+) (\w+) ([\d.]+)", said)
        self.assertEqual(sorted(found[:2] for found in weights), [("0", "h1"), ("1", "h2")], said[-6000:])
        self.assertEqual(len({digest for _, _, digest, _ in weights}), 1, weights)
        self.assertGreater(min(float(accuracy) for *_, accuracy in weights), 0.9)
        self.assertEqual(len(list(self.folder.glob("checkpoint-*.h5"))), 24)

    def test_the_strategy_of_tensorflow(self):
        (self.folder / "strategy.py").write_text(STRATEGY)
        said = self.on_h1("tf_keras", "TF_USE_LEGACY_KERAS=1", COHORT, "run", "-q", "--prefix", "none", "-H", "h1:1,h2:1",
                          "--tf-config", "--timeout", "300", "--", self.python, "strategy.py")  # fmt: skip
        found = sorted(re.findall(r"TRAINED (\d) (\d) (\d) (\w+) ([\d.]+)", said))
        self.assertEqual([line[:4] for line in found], [("0", "2", "2", "True"), ("1", "2", "2", "True")], said[-6000:])
        self.assertEqual(found[0][4], found[1][4])


if __name__ == "__main__":
    unittest.main()
