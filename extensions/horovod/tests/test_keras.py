"""`cohort.keras` on two ranks, with each backend that is found (keras_support.py): runs keras_program.py with a real Keras,
scenario by scenario."""

import atexit
import functools
import json
import pathlib
import shutil
import subprocess
import tempfile
import unittest

from keras_support import BACKENDS, MISSING, environment, finish, place_of, ranks

PROGRAM = pathlib.Path(__file__).with_name("keras_program.py")
SECONDS = 400

LOAD = """
import sys
import numpy as np
if sys.argv[1] == "tf_keras":
    import tf_keras as keras
else:
    import keras
assert "cohort" not in sys.modules
try:
    import cohort
    raise SystemExit("Cohort is here")
except ImportError:
    pass
want = np.load("weights.npy")
for name in ("model.keras", "model.h5"):
    model = keras.models.load_model(name)
    have = np.concatenate([np.asarray(one.numpy()).reshape(-1) for one in model.weights])
    assert (have == want).all(), name
    assert type(model.optimizer).__name__ == "Adam", type(model.optimizer)
    if name == "model.h5" and sys.argv[1] != "tf_keras":
        continue  # Keras 3 builds the optimizer of a Sequential in HDF5 for no variables
    assert int(model.optimizer.iterations.numpy()) == 8
    model.fit(np.ones((8, 6), "float32"), np.ones((8, 1), "float32"), verbose=0)
print("LOADED")
"""


@functools.lru_cache(maxsize=None)
def run_of(name):
    """Runs all scenarios on two ranks, once. Returns ({scenario: {rank: (state, result)}}, all output, the folder)."""
    folder = tempfile.mkdtemp(prefix="cohort-keras-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    words = ranks(name, folder, PROGRAM, seconds=SECONDS - 20)
    status, text = finish(words, folder, environment(name, KERAS_TEST_FOLDER=folder), SECONDS)
    found = {}
    for line in text.splitlines():
        if line.startswith("SCENARIO "):
            scenario, rank, state, result = json.loads(line[9:])
            found.setdefault(scenario, {})[rank] = (state, result)
    return found, text, folder, status


SCENARIOS = [line.split("(")[0][4:] for before, line in
             zip(PROGRAM.read_text().splitlines(), PROGRAM.read_text().splitlines()[1:]) if before == "@scenario"]  # fmt: skip


class Ranks:
    """A test for each scenario."""

    backend = ""

    @classmethod
    def setUpClass(cls):
        if place_of(cls.backend) is None:
            raise unittest.SkipTest(MISSING.format(cls.backend))

    def check(self, scenario):
        found, _, _, _ = run_of(self.backend)
        ends = found.get(scenario, {})
        for state, result in ends.values():
            self.assertEqual(state, "done", result)
        self.assertEqual(sorted(ends), [0, 1], "it did not come to that: see test_it_ends_well")
        return [ends[rank][1] for rank in (0, 1)]

    def test_files_load_without_cohort(self):
        self.check("files")
        folder = run_of(self.backend)[2]
        done = subprocess.run([place_of(self.backend)[0], "-c", LOAD, self.backend], cwd=folder, text=True, timeout=SECONDS,
                              env=environment(self.backend, with_cohort=False), stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)  # fmt: skip
        self.assertIn("LOADED", done.stdout)

    def test_it_ends_well(self):
        _, text, _, status = run_of(self.backend)
        self.assertEqual(status, 0, text[-6000:])


for _scenario in SCENARIOS:
    setattr(Ranks, f"test_{_scenario}", lambda self, name=_scenario: self.check(name))
for _backend in BACKENDS:
    _name = "".join(word.capitalize() for word in _backend.split("_"))
    globals()[_name] = type(_name, (Ranks, unittest.TestCase), {"backend": _backend})
del _backend, _scenario


if __name__ == "__main__":
    unittest.main()
