"""Files that the command writes for others: completion for zsh, as it carries it out, and manual pages.

Tests whose shell is not installed are left out, and say so.
"""

import os
import pathlib
import pty
import select
import shutil
import subprocess
import tempfile
import time
import unittest

COMMAND = os.environ.get("COHORT_COMMAND") or shutil.which("cohort")
SECONDS = 60


class Completion(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="command-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.environment = {**os.environ, "HOME": folder.name, "PATH": f"{os.path.dirname(COMMAND)}:{os.environ['PATH']}"}

    def script(self, shell):
        file = self.folder / shell
        made = subprocess.run([COMMAND, "completion", shell], capture_output=True, text=True, check=True, timeout=SECONDS)
        file.write_text(made.stdout)
        return file

    @unittest.skipUnless(shutil.which("zsh"), "zsh is not installed (tools/setup --for all)")
    def test_zsh(self):
        file = self.script("zsh")
        (self.folder / "program.py").write_text("")
        master, slave = pty.openpty()
        zsh = subprocess.Popen(
            ["zsh", "-f", "-i"], cwd=self.folder, env={**self.environment, "TERM": "dumb", "PS1": ""},
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.addCleanup(os.close, master)
        self.addCleanup(zsh.wait)
        self.addCleanup(zsh.kill)
        done, said = self.folder / "done", b""

        def typed(text):
            """Types a line. Returns the contents of `done` once the line has been carried out."""
            nonlocal said
            os.write(master, text.encode())
            deadline = time.monotonic() + SECONDS
            while not done.exists():
                if select.select([master], [], [], 0.05)[0]:
                    said += os.read(master, 4096)
                self.assertLess(time.monotonic(), deadline, said)
            told = done.read_text()
            done.unlink()
            return told.strip()

        typed(f"autoload -Uz compinit && compinit -u -D && source {file}; print -r > done\n")
        # The typed line is run, by a function that prints its words.
        typed('cohort() { print -r -- "$*" > told; mv told done }; print -r > done\n')
        for text, words in (
            ("cohort watc", "watch"),
            ("cohort run --pref", "run --prefix"),
            ("cohort run --prefix fu", "run --prefix full"),
            ("cohort runs --js", "runs --json"),
            ("cohort run -np 2 prog", "run -np 2 program.py"),
        ):
            self.assertEqual(typed(text + "\t\n"), words)


class Manual(unittest.TestCase):
    def test_there_is_a_page_of_each_command(self):
        with tempfile.TemporaryDirectory(prefix="manual-") as folder:
            pages = pathlib.Path(folder, "man1")
            subprocess.run([COMMAND, "help", "--manual", str(pages)], check=True, timeout=SECONDS)
            names = {page.name for page in pages.iterdir()}
            for name in ("", "-run", "-watch", "-runs", "-export", "-plot", "-doctor", "-trace", "-bench", "-completion"):
                self.assertIn(f"cohort{name}.1", names)
            self.assertFalse([name for name in names if "agent" in name or "doctor-" in name])
            run = (pages / "cohort-run.1").read_text()
            self.assertTrue(run.startswith(".TH COHORT-RUN 1 "))
            self.assertRegex(run, r"(?m)^\\fB.*\\-np.*\\fR N$")
            self.assertIn("\\-\\-older\\-than", (pages / "cohort-runs.1").read_text())
            everything = (pages / "cohort.1").read_text()
            for name in names - {"cohort.1"}:
                self.assertIn(".BR " + name[:-2].replace("-", "\\-") + " (1)", everything)
            for page in pages.iterdir():
                if shutil.which("groff"):
                    checked = subprocess.run(
                        ["groff", "-man", "-Tutf8", "-ww", "-z", str(page)], capture_output=True, text=True, timeout=SECONDS
                    )
                    self.assertEqual((checked.returncode, checked.stderr), (0, ""), page.name)

    def test_a_program_that_is_not_beside_it_is_named(self):
        with tempfile.TemporaryDirectory(prefix="manual-") as folder:
            alone = pathlib.Path(folder, "cohort")
            shutil.copy2(COMMAND, alone)
            for words in (["help", "--manual", folder], ["completion", "bash"]):
                done = subprocess.run([alone, *words], capture_output=True, text=True, timeout=SECONDS)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn("cohort-export", done.stderr)


if __name__ == "__main__":
    unittest.main()
