"""The wheel's backend, as far as it does not compile: what pip is told before, and what who waits is told."""

import contextlib
import io
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python/packaging"))
import cohort_build


class Compiles(Exception):
    pass


class Packaging(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

        def run(*command):
            if "--build" in command:
                raise Compiles

        for name, value in (("BUILD", self.folder / "build"), ("_run", run)):
            patch = mock.patch.object(cohort_build, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def test_metadata_is_there_without_compiling(self):
        info = self.folder / cohort_build.prepare_metadata_for_build_wheel(str(self.folder))
        self.assertRegex(info.name, r"^cohort-[\d.]+\.dist-info$")
        self.assertIn("\nName: cohort\n", (info / "METADATA").read_text())
        self.assertIn("[torch.distributed.backends]", (info / "entry_points.txt").read_text())

    def test_who_waits_is_told_why(self):
        def said():
            text = io.StringIO()
            with contextlib.redirect_stdout(text), self.assertRaises(Compiles):
                cohort_build.build_wheel(str(self.folder))
            return text.getvalue()

        self.assertIn("cohort: compiling, some minutes", said())
        module = self.folder / "build/python/cohort/_core.so"
        module.parent.mkdir(parents=True)
        module.touch()
        self.assertNotIn("compiling", said())


if __name__ == "__main__":
    unittest.main()
