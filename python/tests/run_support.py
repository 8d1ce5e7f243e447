"""For tests of `cohort.run` and what is over it: programs as users write them, run as processes of their own."""

import contextlib
import io
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

# A loaded machine takes long to start interpreters.
PATIENCE = 100.0

try:
    import cloudpickle
except ImportError:
    cloudpickle = None

# A program that carries out the cells of a notebook, each in its turn.
CELLS = """
import json, linecache, sys
import __main__
cells = [cell for cell in json.load(open(sys.argv[1]))["cells"] if cell["cell_type"] == "code"]
for number, cell in enumerate(cells):
    source, name = "".join(cell["source"]), f"<cell {number}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), __main__.__dict__)
"""

needs_cloudpickle = unittest.skipUnless(cloudpickle, "cloudpickle is not installed")


class Folder(unittest.TestCase):
    """A test with a folder of its own, which is also where temporary files go: they can be counted."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="cohort-run-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(self.temporary)
        tempfile.tempdir = None
        self.addCleanup(self._put_back, before)
        self.addCleanup(self._expect_nothing_left)

    def _expect_nothing_left(self):
        # After a kill of the driver the command removes them, in a moment.
        self.eventually(lambda: not list(self.temporary.glob("cohort-*")), "temporary files are gone", 20)

    @staticmethod
    def _put_back(before):
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        tempfile.tempdir = None

    def script(self, text, name="program.py"):
        path = self.folder / name
        path.write_text(text)
        return path

    def start(self, *command, **environment):
        """Its processes can be found by a variable; whatever is left of them is killed at the end."""
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=self.folder,
            env=dict(os.environ, COHORT_TEST_MARK=str(self.folder), **environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.addCleanup(self._end, process)
        return process

    def program(self, text, *arguments, **environment):
        """Runs a script as `python3 program.py`; its exit status, stdout and stderr."""
        return self.ends(self.start(sys.executable, self.script(text), *arguments, **environment))

    def command(self, *words, **environment):
        return self.ends(self.start(*words, **environment))

    @staticmethod
    def ends(process):
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err

    def processes(self):
        """Living processes that were started by `start`, and what they have started."""
        mark = f"COHORT_TEST_MARK={self.folder}".encode()
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            with contextlib.suppress(OSError):
                if mark in pathlib.Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
        return found

    def eventually(self, condition, what, seconds=PATIENCE):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                self.fail(f"not within {seconds} s: {what}")
            time.sleep(0.02)

    def _end(self, process):
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait(PATIENCE)
        process.stdout.close()
        process.stderr.close()


@contextlib.contextmanager
def captured():
    """Captures what the block writes to sys.stdout and sys.stderr, as a notebook's cell does."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err
