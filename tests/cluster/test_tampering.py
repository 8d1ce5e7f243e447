"""Somebody sits on the cable between two hosts of a box and changes one byte: of an object, which nobody then loads, and of
a sum, which nobody then gets."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")
PACKAGE = os.environ.get("COHORT_PYTHON_PACKAGE", "")
PYTHON = os.environ.get("COHORT_PACKAGE_PYTHON", sys.executable)  # for which the package is built
TAMPER = pathlib.Path(__file__).resolve().parent / "tamper.py"
MARK = b"here lies the mark:"

# The object prints a line when it is loaded. The mark is far from the pickle's ends and the frame's.
OBJECT = f"""
import torch
import cohort.horovod.torch as hvd

class Loaded:
    def __init__(self, text):
        self.text = text
    def __setstate__(self, state):
        print("loaded", state["text"], flush=True)
        self.__dict__ = state

hvd.init()
hvd.broadcast_object(Loaded("{MARK.decode()}A"), root_rank=0)
print("got the object", flush=True)
"""

# The mark is rank 0's part of a sum to which rank 1 brings zeros.
SUM = f"""
import array
import cohort

cohort.init()
world = cohort.world()
mark = {MARK!r} + b"A"
values = array.array("f", bytes(mark) * 50000 if world.rank() == 0 else bytes(len(mark) * 50000))
world.all_reduce(values)
print("the sum is", "right" if values.tobytes() == mark * 50000 else "wrong", flush=True)
"""


class Tampering(boxes.InBox):
    needs = ("COHORT_COMMAND", "COHORT_PYTHON_PACKAGE")
    wanted = ("tampering", "--hosts", "2")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="cohort-tampering-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        (cls.folder / "object.py").write_text(OBJECT)
        (cls.folder / "sum.py").write_text(SUM)
        cls.switch = f"cb-{cls.box.name}"
        for host in ("h1", "h2"):
            done = cls.box.run(host, sys.executable, TAMPER, "--no-offloads", "eth0")
            if done.returncode != 0:
                raise unittest.SkipTest(f"offloads of a veth cannot be turned off: {done.stderr}")
        cls.in_switch("ip", "link", "add", "inner", "type", "veth", "peer", "name", "outer")
        cls.in_switch("ip", "link", "set", "inner", "up")
        cls.in_switch("ip", "link", "set", "outer", "master", "br0", "up")
        cls.in_switch("ip", "link", "set", "p2", "nomaster")

    @classmethod
    def in_switch(cls, *command):
        subprocess.run(["ip", "netns", "exec", cls.switch, *command], check=True, timeout=30)

    def spoil(self, program, **environment):
        """Runs the program on two hosts, one byte behind the first mark changed. Its output, and whether that was done."""
        tamperer = subprocess.Popen(["ip", "netns", "exec", self.switch, sys.executable, str(TAMPER), "p2", "inner", MARK.hex()],
                                    stdout=subprocess.PIPE, text=True)
        try:
            self.assertEqual(tamperer.stdout.readline(), "ready\n")
            words = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
            done = self.box.run("h1", "env", f"PYTHONPATH={PACKAGE}", COHORT, "run", "-q", "--no-logs", "-H", "h1:1,h2:1", *words,
                                "--env", "PYTHONPATH", "--env", "COHORT_TIMEOUT=20", PYTHON, self.folder / program,
                                cwd=self.folder, timeout=100)
        finally:
            tamperer.kill()
            changed = "changed" in tamperer.communicate()[0]
        self.assertTrue(changed, done.stdout + done.stderr)
        return done

    def refused(self, done):
        said = done.stdout + done.stderr
        self.assertNotEqual(done.returncode, 0, said)
        self.assertIn("what it sent was changed on the way", said)
        self.assertRegex(said, r"rank \d \(h\d\)")
        return said

    def test_an_object_is_refused_and_never_loaded(self):
        tried = subprocess.run([PYTHON, "-c", "import torch"], capture_output=True, text=True, timeout=100)
        if tried.returncode != 0:
            self.skipTest(f"{PYTHON} has no torch: {tried.stderr}")
        for integrity in ("1", "0"):
            with self.subTest(integrity):
                said = self.refused(self.spoil("object.py", COHORT_INTEGRITY=integrity))
                self.assertNotIn("loaded", said)
                self.assertEqual(said.count("got the object"), 1, said)  # by rank 0, whose own it is

    def test_a_sum_is_refused_and_passes_only_where_that_is_wanted(self):
        self.assertNotIn("the sum is", self.refused(self.spoil("sum.py")))
        done = self.spoil("sum.py", COHORT_INTEGRITY="0")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("the sum is wrong", done.stdout)


if __name__ == "__main__":
    unittest.main()
