"""cohort.run from programs: functions of `__main__`, without cloudpickle, interrupts, the driver's death."""

import pathlib
import shutil
import signal
import sys
import unittest

import cohort
from cohort._launch import command as _command
from run_support import Folder, needs_cloudpickle

FROM_MAIN = """
import collections, os, sys
import xml.dom.minidom
import cohort
from cohort import role

LIMIT = 3
Pair = collections.namedtuple("Pair", "rank text")

class Mine:
    def __init__(self, value): self.value = value
    def text(self): return xml.dom.minidom.parseString("<a>%d</a>" % self.value).documentElement.toxml()

class Bad(Exception):
    def __init__(self, text, extra): super().__init__(text, extra)

def helper(mine): return mine.text() * LIMIT
def work(mine):
    assert "program" not in sys.modules and __name__ == "__main__"
    assert role() == "worker", role
    return Pair(int(os.environ["RANK"]), helper(mine)), Mine(5)
def bad(): raise Bad("no", 1)

def main():
    factor = 10
    for pair, mine in cohort.run(work, (Mine(2),), np=2, quiet=True):
        assert isinstance(pair, Pair) and isinstance(mine, Mine), (pair, mine)
        print(pair.rank, pair.text, mine.value)
    print(cohort.run(lambda x: x * factor, (4,), np=1, quiet=True))
    try: cohort.run(bad, np=1, quiet=True)
    except Bad as error: print("caught", error.args, error.__cause__.rank)

if __name__ == "__main__":
    main()
"""

WITHOUT_CLOUDPICKLE = """
import sys
sys.modules["cloudpickle"] = None
import json, os, cohort, helpers
print(cohort.run(helpers.double, (4,), np=2, quiet=True))
print(cohort.run(os.getenv, ("WORLD_SIZE",), np=1, quiet=True), cohort.run(cohort.role, np=1, quiet=True))
def mine(): pass
class Own: pass
for fn, args in ((mine, ()), (lambda: 1, ()), (print, (Own(),))):
    try: cohort.run(fn, args, np=1)
    except ValueError as error: print(error)
"""

SLEEPS = """
import os, sys, time, cohort
sys.path.insert(0, os.getcwd())
import helpers
try: cohort.run(helpers.wait, np=2)
except KeyboardInterrupt: print("interrupted", len(os.listdir(os.environ["TMPDIR"])))
"""

HELPERS = """
import os, pathlib, time
def double(x): return 2 * x
def speak_and_wait():
    print("speaks", flush=True)
    time.sleep(1000)
def wait():
    pathlib.Path("up." + os.environ["RANK"]).touch()
    time.sleep(1000)
"""


class Programs(Folder):
    """Tests that need a `__main__`, a terminal's signals or a death of their own."""

    @needs_cloudpickle
    def test_functions_and_classes_of_main(self):
        status, out, err = self.program(FROM_MAIN)
        self.assertEqual(status, 0, err)
        text = "<a>2</a>" * 3
        self.assertEqual(out, f"0 {text} 5\n1 {text} 5\n[40]\ncaught ('no', 1) 0\n")

    def test_without_cloudpickle_modules_do_and_the_rest_is_explained(self):
        self.script(HELPERS, "helpers.py")
        status, out, err = self.program(WITHOUT_CLOUDPICKLE)
        self.assertEqual(status, 0, err)
        lines = out.splitlines()
        self.assertEqual(lines[:2], ["[8, 8]", "['1'] ['worker']"])
        self.assertRegex(lines[2], "the function mine .* cannot be sent .*function mine exists in this program only.*"
                                   "install cloudpickle .*python3-cloudpickle.* or put it into a module")
        self.assertRegex(lines[3], "function <lambda> exists in this program only")
        self.assertRegex(lines[4], "argument 0 of print .* class Own exists in this program only")

    def test_an_installed_package_finds_its_command_and_the_command_its_share(self):
        prefix = self.folder / "prefix"
        packages = prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        command = pathlib.Path(_command.find())
        shutil.copytree(pathlib.Path(cohort.__file__).parent, packages / "cohort", ignore=shutil.ignore_patterns("__pycache__"))
        (prefix / "bin").mkdir()
        shutil.copy2(command, prefix / "bin")
        share = pathlib.Path("share", "cohort", "as-horovod")
        shutil.copytree(command.parent.parent / share, prefix / share, ignore=shutil.ignore_patterns("__pycache__"))
        self.script(HELPERS, "helpers.py")
        text = (
            "import cohort, cohort._launch.command, os, helpers\n"
            "print(cohort._launch.command.find())\n"
            "print(cohort.run(helpers.double, (3,), np=1, quiet=True))\n"
            "print(cohort.run(os.getenv, ('PYTHONPATH',), np=1, quiet=True, options=['--as-horovod'])[0].split(':')[0])\n"
        )
        status, out, err = self.program(text, PYTHONPATH=str(packages), PATH="/usr/bin:/bin")
        self.assertEqual((status, out.splitlines()), (0, [str(prefix / "bin/cohort"), "[6]", str(prefix / share)]), err)

    def sleeping(self):
        self.script(HELPERS, "helpers.py")
        process = self.start(sys.executable, self.script(SLEEPS))
        up = [self.folder / f"up.{rank}" for rank in range(2)]
        self.eventually(lambda: all(path.exists() for path in up) or process.poll() is not None, "both ranks are up")
        if process.poll() is not None:
            self.fail(f"the program has ended: {process.communicate()}")
        self.assertGreaterEqual(len(self.processes()), 4)
        self.assertEqual([left.stat().st_mode & 0o777 for left in self.temporary.iterdir()], [0o700])
        return process

    def test_an_interrupt_ends_all(self):
        process = self.sleeping()
        process.send_signal(signal.SIGINT)
        status, out, err = self.ends(process)
        self.assertEqual((status, out), (0, "interrupted 0\n"), err)
        self.assertNotIn("Traceback", err)
        self.eventually(lambda: not self.processes(), "all processes are gone", 20)

    def test_output_that_cannot_be_shown_ends_all(self):
        text = (
            "import os, sys, cohort\n"
            "sys.path.insert(0, os.getcwd())\n"
            "import helpers\n"
            "class Full:\n"
            "    def write(self, text): raise OSError(28, 'No space left on device')\n"
            "    def flush(self): pass\n"
            "told, sys.stdout = sys.stdout, Full()\n"
            "try: cohort.run(helpers.speak_and_wait, np=2)\n"
            "except OSError as error: print(error.errno, os.listdir(os.environ['TMPDIR']), file=told)\n"
        )
        self.script(HELPERS, "helpers.py")
        status, out, err = self.program(text)
        self.assertEqual((status, out), (0, "28 []\n"), err)
        self.eventually(lambda: not self.processes(), "all processes are gone", 20)

    def test_all_end_with_a_driver_that_is_killed(self):
        process = self.sleeping()
        process.kill()
        process.wait()
        self.eventually(lambda: not self.processes(), "all processes are gone", 20)
        self.assertEqual(list(self.temporary.iterdir()), [])


if __name__ == "__main__":
    unittest.main()
