"""A box of two hosts or more with Slurm and MPI, on which a user without any rights there runs Python with torch."""

import atexit
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")
PACKAGE = os.environ.get("COHORT_PYTHON_PACKAGE", "")
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


class PythonCase(unittest.TestCase):
    """`folder` is on all hosts; after each test nothing is left running on any."""

    files: dict = {}  # name: text, put into `folder`
    hosts = 2
    by_user = True  # False: as root, who can run the Python of this test, which other users may not reach

    @classmethod
    def setUpClass(cls):
        if not COHORT or not list(pathlib.Path(PACKAGE, "cohort").glob("_core.*.so")):
            raise unittest.SkipTest("the Python package is not built")
        boxes.require("--slurm")
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="cohort-py-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        # The box's hosts see what is mounted in here later.
        subprocess.run(["mount", "--bind", cls.folder, cls.folder], check=True)
        atexit.register(cls.unmount)
        cls.addClassCleanup(cls.unmount)
        subprocess.run(["mount", "--make-shared", cls.folder], check=True)
        cls.box = boxes.Box("py", "--slurm", "--hosts", str(cls.hosts), *(["--user", "trainee"] if cls.by_user else []))
        cls.addClassCleanup(cls.box.down)
        cls.python = next((p for p in (shutil.which("python3"), "/usr/bin/python3") if cls.can_train(p)), None)
        if cls.python is None:
            raise unittest.SkipTest("nobody can run a Python with torch here")
        os.chmod(cls.folder, 0o777)
        for name, text in cls.files.items():
            (cls.folder / name).write_text(text)

    @classmethod
    def can_train(cls, python):
        tried = cls.box.run("h1", "env", f"PYTHONPATH={PACKAGE}", python, "-c", "import numpy, cohort, torch; print(torch.__file__)",
                            as_user=cls.by_user, timeout=60, cwd=cls.folder)
        cls.torch = tried.stdout
        return tried.returncode == 0

    @classmethod
    def unmount(cls):
        atexit.unregister(cls.unmount)
        subprocess.run(["umount", "-R", "-l", cls.folder], check=True)

    def tearDown(self):
        self.box.expect_nothing_new()

    def as_user(self, *words, timeout=120):
        done = self.box.run("h1", "env", f"PYTHONPATH={PACKAGE}", "PYTHONDONTWRITEBYTECODE=1", *words, as_user=self.by_user,
                            timeout=timeout, cwd=self.folder)
        self.assertEqual(done.returncode, 0, f"{words}: {done.stdout}{done.stderr}")
        return done.stdout
