"""The wheel's backend, as far as it does not compile: what it tells pip before, and a user who waits. And the installed
files that `python -m cohort` finds."""

import contextlib
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import types
import unittest
import zipfile
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python/packaging"))
import cohort_build

from cohort import __main__
from cohort._launch import command as _command
from cohort.errors import Unavailable


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

    def test_who_lacks_what_it_is_built_with_is_told_all_of_it(self):
        for lack in (FileNotFoundError("No such file or directory: 'cmake'"), subprocess.CalledProcessError(1, ["cmake"])):
            with (
                self.subTest(lack),
                mock.patch.object(cohort_build, "_run", mock.Mock(side_effect=lack)),
                self.assertRaisesRegex(SystemExit, r"cmake(.|\n)*apt-get install g\+\+ cmake .*libfmt-dev .*pybind11-dev"),
            ):
                cohort_build.build_wheel(str(self.folder))

    def test_the_programs_look_where_installers_put_libraries(self):
        for folder in ("lib/python3.9/site-packages", "lib64/python3.12/site-packages", "lib/python3/dist-packages", "."):
            self.assertIn(f"$ORIGIN/../{folder}/cohort/lib", cohort_build._rpath().split(";"))


    def test_licences_of_others_are_in_wheels(self):
        wheel = cohort_build._Wheel(self.folder, "py3-none-any")
        with zipfile.ZipFile(self.folder / wheel.close()) as opened:
            text = opened.read(f"{wheel.info}/THIRD_PARTY_LICENSES.txt").decode()
        for part in ("spdlog", "CLI11", "toml++", "cpp-httplib", "pybind11", "zlib", "OpenSSL", "Highway"):
            self.assertRegex(text, rf"(?m)^{re.escape(part)} \(\S+\)  http")


@unittest.skipIf(shutil.which("git") is None, "no git")
class Release(unittest.TestCase):
    """tools/release/release in a clone whose make-wheels makes no wheels."""

    mirror = ""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.clone = pathlib.Path(folder.name) / "cohort"
        source = pathlib.Path(__file__).resolve().parents[2]
        (self.clone / "tools/release").mkdir(parents=True)
        for name in ("CMakeLists.txt", "CHANGELOG.md", "cmake/third_party_licenses.txt", "tools/release/release",
                     *map(str, (*(source / "packaging").rglob("*"), *(source / "tests/install/consumer").rglob("*")))):
            path = source / name
            if path.is_file():
                to = self.clone / path.relative_to(source)
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(path.read_bytes())
                to.chmod(path.stat().st_mode)
        (self.clone / ".gitignore").write_text("/dist/\n/build/\n")
        self.git("init", "-q", "-b", "main")
        self.commit()

    def git(self, *words):
        who = ("-c", "user.name=Tester", "-c", "user.email=tester@localhost")
        subprocess.run(["git", *who, *words], cwd=self.clone, check=True, capture_output=True, timeout=60)

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "Changes")

    def release(self, *words, status=0):
        done = subprocess.run([sys.executable, "tools/release/release", *words], cwd=self.clone, capture_output=True, text=True, timeout=200,
                              env={**os.environ, "UBUNTU_MIRROR": self.mirror})  # fmt: skip
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def edit(self, name, before, after):
        path = self.clone / name
        self.assertIn(before, path.read_text())
        path.write_text(path.read_text().replace(before, after))

    def test_what_is_no_release_is_refused_with_the_way_out(self):
        self.assertIn("tools/release/release --set-version", self.release("--dry-run", status=1))  # no entry of this version
        self.assertIn("three numbers", self.release("--set-version", "2", status=1))
        self.assertIn("0.0.9 is below", self.release("--set-version", "0.0.9", status=1))
        self.assertIn("-> 9.8.7", self.release("--set-version", "9.8.7"))
        for file in ("CMakeLists.txt", "part/CMakeLists.txt"):
            text = (self.clone / "tests/install/consumer" / file).read_text()
            self.assertEqual(set(re.findall(r"find_package\(cohort ([\d.]+)", text)), {"9.8.7"})
        self.assertIn("commit or stash", self.release("--dry-run", status=1))
        self.commit()
        self.assertRegex(self.release("--dry-run"), r"9\.8\.7 of .*dist/9\.8\.7: wheels(.|\n)*cohort doctor")
        self.assertFalse((self.clone / "dist").exists())
        self.assertIn("nothing under \"Unreleased\"", self.release("--set-version", "9.8.8", status=1))
        self.edit("packaging/kubernetes/job.yaml", "cohort:9.8.7", "cohort:9.8.6")
        self.commit()
        self.assertIn("packaging/kubernetes/job.yaml: of another version", self.release("--dry-run", status=1))
        self.edit("packaging/kubernetes/job.yaml", "cohort:9.8.6", "cohort:9.8.7")
        self.commit()
        self.git("tag", "v9.8.7")
        self.assertIn("v9.8.7 is tagged already", self.release("--dry-run", status=1))

    def test_what_it_makes(self):
        self.release("--set-version", "9.8.7")
        tools = self.clone / "tools/release"
        (tools / "make-wheels").write_text("""#!/bin/sh
touch "$2/cohort-9.8.7-cp39-none-manylinux_2_28_x86_64.whl" "$2/cohort-9.8.7-cp39-none-manylinux_2_28_aarch64.whl"
echo sources >"$2/cohort-9.8.7.tar.gz"
""")
        (tools / "make-wheels").chmod(0o755)
        self.commit()
        checked = self.clone / "build/release-tools/bin"  # instead of those that pip would bring
        checked.mkdir(parents=True)
        (checked / "twine").write_text("#!/bin/sh\nexit 0\n")
        (checked / "twine").chmod(0o755)
        (self.clone / "build/wheels/tools/lib/python3.11/site-packages/pybind11-3.0.1.dist-info").mkdir(parents=True)
        if subprocess.run(["dpkg-query", "-W", "libhwy-dev"], capture_output=True).returncode != 0:
            self.skipTest("this is no Debian with what Cohort is built with")
        self.mirror = ""
        self.assertIn("set UBUNTU_MIRROR", self.release("--quick", status=1))
        self.mirror = "http://mirror.invalid"
        said = self.release("--quick")
        folder = self.clone / "dist/9.8.7"
        sums = dict(line.split("  ")[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines())
        self.assertEqual(set(sums), {path.name for path in folder.iterdir()} - {"SHA256SUMS"})
        self.assertEqual(sums["cohort-9.8.7.tar.gz"], hashlib.sha256(b"sources\n").hexdigest())
        parts = json.loads((folder / "sbom.json").read_text())["components"]
        self.assertEqual([part["name"] for part in parts if not part["version"][0].isdigit()], [])
        versions = {part["name"]: part["version"] for part in parts}
        self.assertEqual(versions["pybind11"], "3.0.1")
        self.assertEqual(set(versions), set(
            "OpenSSL zlib fmt spdlog tl::expected nlohmann-json toml++ CLI11 Asio cpp-httplib Highway pybind11".split()))
        self.assertIn("Permission is hereby granted", (folder / "THIRD_PARTY_LICENSES.txt").read_text())
        self.assertIn("published nowhere", said)
        (tools / "make-wheels").write_text("#!/bin/sh\nexit 3\n")
        self.commit()
        self.assertIn("make-wheels --dist", self.release("--quick", status=1))


class Wheels(unittest.TestCase):
    """Results of an interrupted run that tools/release/make-wheels keeps."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)
        file = pathlib.Path(cohort_build.__file__).resolve().parents[2] / "tools/release/make-wheels"
        self.wheels = types.ModuleType("make_wheels")
        self.wheels.__file__ = str(file)
        with mock.patch.object(sys, "path", list(sys.path)):
            exec(compile(file.read_text(), file, "exec"), vars(self.wheels))
        self.wheels.WORK = self.work

    def test_half_a_file_is_fetched_again(self):
        source = self.work / "source.deb"
        source.write_bytes(b"all of it")
        half = self.work / "fetched/source.deb"
        half.parent.mkdir()
        half.write_bytes(b"all")
        self.wheels.fetched(source.as_uri(), hashlib.sha256(b"all of it").hexdigest())
        self.assertEqual(half.read_bytes(), b"all of it")

    def test_half_of_the_headers_are_unpacked_again(self):
        def run(tool, *words):
            include = pathlib.Path(words[-2]) / "usr/include/x86_64-linux-gnu"
            include.mkdir(parents=True)
            if interrupted:
                raise KeyboardInterrupt
            (include / "pyconfig.h").touch()

        with mock.patch.object(self.wheels, "run", run), contextlib.redirect_stdout(io.StringIO()):
            interrupted = True
            with self.assertRaises(KeyboardInterrupt):
                self.wheels.headers_of("3.11")
            interrupted = False
            self.assertTrue((self.wheels.headers_of("3.11") / "aarch64-linux-gnu/pyconfig.h").exists())


class Module(unittest.TestCase):
    def test_is_the_command(self):
        wanted = subprocess.run([_command.find(), "--version"], check=True, capture_output=True)
        found = subprocess.run([sys.executable, "-m", "cohort", "--version"], check=True, capture_output=True)
        self.assertEqual(found.stdout, wanted.stdout)

    def test_is_that_of_the_package(self):
        with tempfile.TemporaryDirectory() as folder:
            package, target, path = (pathlib.Path(folder, name).resolve() for name in ("D/cohort", "D/bin/cohort", "p/cohort"))
            for file in (target, path):
                file.parent.mkdir(parents=True)
                file.write_text("#!/bin/sh\necho cohort 0.0.9\n")
                file.chmod(0o755)
            with contextlib.ExitStack() as stack:
                for module, file in (_command, "_launch/module"), (_command._core, "module"):
                    stack.enter_context(mock.patch.object(module, "__file__", str(package / file)))
                for name in ("sysconfig.get_path", "shutil.which"):
                    stack.enter_context(mock.patch(name, lambda *which: str(path)))
                stack.enter_context(mock.patch.object(sys, "executable", folder))
                self.assertEqual(_command.find(), str(target))  # the package's own, from `pip install --target`
                target.unlink()
                with self.assertRaisesRegex(Unavailable, rf"{path} \(that is of version 0.0.9\)"):
                    _command.find()
                path.write_text(f"#!/bin/sh\necho cohort {_command._core.__version__}\n")
                self.assertEqual(_command.find(), str(path))

    def test_folders(self):
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder, "lib/x86_64-linux-gnu/cmake/cohort")
            place.mkdir(parents=True)
            (place / "cohortConfig.cmake").touch()
            command = pathlib.Path(folder, "cohort")
            command.write_text(f"#!/bin/sh\n[ $1 = --prefix ] && echo {folder}\n")
            command.chmod(0o755)
            text = io.StringIO()
            with mock.patch.object(_command, "find", lambda: str(command)), contextlib.redirect_stdout(text):
                __main__.main(["--cmake-dir"])
            self.assertEqual(text.getvalue(), f"{place}\n")

    def test_a_build_folder_is_none(self):
        asked = subprocess.run([sys.executable, "-m", "cohort", "--cmake-dir"], capture_output=True, text=True)
        self.assertEqual(asked.returncode, 1)
        self.assertIn("is not installed with headers", asked.stderr)


WAITS = r"""
#include <atomic>
#include <condition_variable>
#include <thread>
using namespace std::chrono_literals;
int main() {
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<int> seen = 0;
  int count = 0;
  std::thread other([&] {
    while (seen < 20) {
      std::this_thread::sleep_for(1ms);
      const std::lock_guard lock(mutex);
      if (count > seen) continue;
      std::this_thread::sleep_for(3ms);  // in which a piece ends, whose waiter then waits for the mutex
      ++count;
      changed.notify_one();
    }
  });
  const auto began = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex);
  while (seen < 20) {
    changed.wait_for(lock, 60s, [&] { return count > seen; });
    seen = count;
  }
  const bool late = std::chrono::steady_clock::now() - began > 50s;
  lock.unlock();
  other.join();
  lock.lock();
  const auto start = std::chrono::steady_clock::now();
  const bool early = changed.wait_for(lock, 100ms, [] { return false; }) || std::chrono::steady_clock::now() - start < 100ms;
  return late || early;
}
"""


class OldGlibc(unittest.TestCase):
    """A wheel's functions for a glibc before 2.30 (tools/release/old_glibc_compat.c), as if this one had them not either."""

    def test_timed_waits(self):
        text = (pathlib.Path(cohort_build.ROOT) / "tools/release/old_glibc_compat.c").read_text()
        for real, instead in (('dlsym(RTLD_NEXT, "pthread_cond_clockwait")', "NULL"), ("kPieceNs = 1000000000L", "kPieceNs = 1000000L")):
            self.assertEqual(text.count(real), 1, real)
            text = text.replace(real, instead)
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "compat.c").write_text(text)
            (folder / "waits.cpp").write_text(WAITS)
            subprocess.run(["cc", "-O1", "-c", "compat.c"], cwd=folder, check=True)
            subprocess.run(["c++", "-std=c++20", "-O1", "waits.cpp", "compat.o", "-pthread", "-o", "waits"], cwd=folder, check=True)
            self.assertEqual(subprocess.run([folder / "waits"], timeout=90).returncode, 0)


if __name__ == "__main__":
    unittest.main()
