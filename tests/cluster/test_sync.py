"""`cohort run --sync` to a host of a box that has a folder of its own where this one has its working folder."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

from launch_case import COHORT, Launch

RSYNC = shutil.which("rsync")


@unittest.skipIf(RSYNC is None or shutil.which("git") is None, "no rsync or git: tools/setup --for cluster")
class Sync(Launch):
    wanted = ("sync", "--hosts", "2")

    def setUp(self):
        super().setUp()
        # Files below it are other ones on h2.
        self.top = pathlib.Path(tempfile.mkdtemp(prefix="cohort-sync-"))
        self.addCleanup(shutil.rmtree, self.top)
        self.act("h2", f"mount -t tmpfs -o size=64m tmpfs {self.top}")
        self.addCleanup(self.box.run, "h2", "umount", self.top)
        self.project = self.top / "project"
        self.write({"train.sh": "echo $RANK has $(cat data/a)\n", "data/a": "1\n", "notes.log": "x", "keep.log": "y",
                    ".gitignore": "*.log\n!keep.log\nbuild/\n", "build/train": "#!/bin/sh\n. ./train.sh\n", "build/x.o": "o",
                    "runs/old/log": "z"})
        (self.project / "build/train").chmod(0o755)
        self.shell_reads("h2", f"export PATH={pathlib.Path(RSYNC).parent}:$PATH\n")

    def write(self, files):
        for name, text in files.items():
            path = self.project / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def act(self, host, command):
        done = self.box.run(host, "sh", "-ec", command)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def there(self):
        """The files of h2's folder."""
        return set(self.act("h2", f"cd {self.project} && find . -type f -o -type l").split())

    def sync(self, *words, status=0, program=("./build/train",), cwd=None, **variables):
        done = self.box.run("h1", COHORT, "run", "--sync", "-H", "h1,h2", *words, "--", *program, cwd=cwd or self.project, timeout=60,
                            env={**{name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}, **variables})
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done

    def git(self):
        for words in (("init", "-q"), ("add", ".", ":!runs"), ("-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "x")):
            subprocess.run(["git", *words], cwd=self.project, check=True, timeout=30)

    def test_what_git_does_not_ignore_and_the_program(self):
        self.write({"data/gone": ""})
        self.git()
        self.write({"new.txt": "not added yet"})
        (self.project / "data/gone").unlink()  # tracked, and not there
        done = self.sync()
        for rank in range(2):
            self.assertIn(f"{rank} has 1", done.stdout)
        self.assertEqual(self.there(), {"./train.sh", "./data/a", "./new.txt", "./keep.log", "./.gitignore", "./build/train"})
        self.assertRegex(done.stderr, r"cohort: sync to h2: 6 files, \d+ bytes in \d+\.\d s")

    def test_nothing_is_removed_and_this_host_counts(self):
        self.sync()  # without git: all but build folders and the like
        self.assertEqual(self.there(), {"./train.sh", "./data/a", "./notes.log", "./keep.log", "./.gitignore", "./build/train"})
        self.assertIn("sync to h2: 0 files, 0 bytes in", self.sync().stderr)
        self.act("h2", f"cd {self.project}; echo 3 >data/a; echo foreign >mine")  # newer, and of another size or time
        (self.project / "notes.log").unlink()
        time.sleep(0.01)
        self.assertIn("1 has 1", self.sync().stdout)
        self.assertLess({"./mine", "./notes.log"}, self.there())

    def test_excluded(self):
        self.sync("--sync-exclude", "*.log", "--sync-exclude", ".gitignore")
        self.assertEqual(self.there(), {"./train.sh", "./data/a", "./build/train"})

    def test_the_environment(self):
        environment = self.project / ".venv"
        (environment / "bin").mkdir(parents=True)
        python = os.path.realpath(sys.executable)  # (python3 in PATH may be a script that looks for one)
        (environment / "pyvenv.cfg").write_text(f"home = {os.path.dirname(python)}\n")
        (environment / "bin/python3").symlink_to(python)
        self.write({"train.py": "import sys; print(sys.prefix, sys.argv[1])"})
        done = self.sync(program=("train.py", "x"), VIRTUAL_ENV=str(environment))
        self.assertEqual(done.stdout.count(f"{environment} x"), 2)
        self.assertRegex(done.stderr, rf"files, .* of the folder; 1 file, .* of {environment} in")
        # Made over a Python that is on this host alone.
        self.act("h1", f"cp {python} /dev/shm/python3")
        self.addCleanup(self.box.run, "h1", "rm", "/dev/shm/python3")
        (environment / "bin/python3").unlink()
        (environment / "bin/python3").symlink_to("/dev/shm/python3")
        said = self.sync(program=("train.py", "x"), VIRTUAL_ENV=str(environment), status=127).stderr
        self.assertIn("h2: the environment", said)
        self.assertIn("is made over /dev/shm/python3, which is not there", said)

    def test_repositories_within_and_tracked_runs(self):
        self.write({"runs/__init__.py": ""})
        subprocess.run(["git", "init", "-q"], cwd=self.project, check=True, timeout=30)
        subprocess.run(["git", "add", "-f", "runs/__init__.py"], cwd=self.project, check=True, timeout=30)
        self.write({"sub/code": "", "sub/a.key": "", "sub/.gitignore": "a.key\n", "sub/runs/new": ""})
        subprocess.run(["git", "init", "-q", "sub"], cwd=self.project, check=True, timeout=30)
        self.sync(TMPDIR="/nowhere")  # no file of its own that could stay
        self.assertEqual(self.there(), {"./train.sh", "./data/a", "./keep.log", "./.gitignore", "./build/train", "./runs/__init__.py",
                                        "./sub/code", "./sub/.gitignore"})

    def test_git_fails(self):
        self.git()
        (self.project / ".git/HEAD").write_text("broken")
        self.assertRegex(self.sync(status=127).stderr, f"--sync: git does not say which files of {self.project} it ignores: fatal: ")
        self.assertEqual(self.act("h2", f"ls {self.top}"), "")

    def test_a_folder_that_its_repository_ignores(self):
        self.git()
        said = self.sync(cwd=self.project / "build", program=("./train",), status=127).stderr
        self.assertIn(f"--sync: the git repository around {self.project}/build ignores all that is in it", said)

    def test_a_link_to_a_folder_there_stays(self):
        self.act("h2", f"mkdir -p {self.project} {self.top}/scratch; ln -s ../scratch {self.project}/data")
        done = self.box.run("h1", COHORT, "run", "--sync", "-H", "h1,h2", "./build/train", cwd=self.project, timeout=60)
        self.assertEqual(self.act("h2", f"readlink {self.project}/data"), "../scratch\n")
        if done.returncode == 0:
            self.assertIn("1 has 1", done.stdout)
        else:  # rsync 3.5 writes through no link that leads out of the folder
            self.assertIn("--sync: h2: rsync ended with 23", done.stderr)

    def test_no_name_is_read_by_the_shell_there(self):
        moved = self.top / "my pro;touch x $HOME"
        self.project.rename(moved)
        self.project = moved
        for variables in ({}, {"RSYNC_OLD_ARGS": "1"}):  # as before 3.2.4
            self.sync(**variables)
            self.assertEqual(self.act("h2", f"ls {self.top}; cat '{moved}/data/a'"), f"{moved.name}\n1\n")
            self.act("h2", f"rm -r '{moved}'")

    def test_what_is_not_copied_by_mistake(self):
        (self.top / "link").symlink_to(self.project)
        for home in (f"{self.project}/", self.top / "link", self.project / "data"):
            self.assertIn("is all of yours", self.sync(status=127, HOME=str(home)).stderr)
        self.assertIn("has no pyvenv.cfg", self.sync(status=127, VIRTUAL_ENV="/usr").stderr)
        self.assertEqual(self.act("h2", f"ls {self.top}"), "")

    def test_what_goes_wrong_is_said_with_the_host(self):
        tools = pathlib.Path(self.folder) / "tools"
        tools.mkdir()
        for tool in ("sh", "mkdir"):
            (tools / tool).symlink_to(shutil.which(tool))
        login = self.box.folder / "home_h2/.bashrc"
        found = login.read_text()
        login.write_text(f"export PATH={tools}\n")
        self.assertIn("--sync: h2: there is no rsync there: apt-get install rsync", self.sync(status=127).stderr)
        login.write_text(found)
        self.act("h2", f"mount -o remount,size=16k {self.top}")
        self.write({"large": "x" * 200000})
        self.assertRegex(self.sync(status=127).stderr, "--sync: h2: rsync ended with .*No space left")
        self.assertIn("h9: its name does not resolve here", self.box.run("h1", COHORT, "run", "--sync", "-H", "h1,h9", "true", cwd=self.project).stderr)
        self.assertIn("is all of yours", self.sync(status=127, HOME=str(self.project)).stderr)
        self.assertIn("--sync copies by ssh", self.sync("--starter", "mpirun", status=127).stderr)


if __name__ == "__main__":
    unittest.main()
