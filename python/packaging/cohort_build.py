"""Builds Cohort's wheel: the PEP 517 backend that pyproject.toml names. Needs nothing but the standard library.

    pip install .                      CMake, Ninja, a C++20 compiler and the packages of tools/packages.txt
    pip install --editable .           the package of the build folder, wherever it is edited

Without a network it needs Debian's pybind11-dev; where that is not, pip fetches pybind11 (and CMake, Ninja). The build
folder is build/wheel-PYTHON; a second build takes seconds. The wheel holds the package and the command `cohort`, for one
CPython. It is linked with the system's libraries (OpenSSL, fmt, spdlog, hwloc), as its tag linux_* says: it runs on
this distribution, not on every one.
"""

import base64
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / f"wheel-{sys.implementation.cache_tag}"


def _version():
    return re.search(r"project\(cohort VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]


def _tag():
    python = "cp{}{}".format(*sys.version_info[:2])
    return f"{python}-{python}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _metadata():
    return "\n".join([
        "Metadata-Version: 2.1",
        "Name: cohort",
        f"Version: {_version()}",
        "Summary: Distributed training for C++ and Python",
        "License: Apache-2.0",
        "Requires-Python: >=3.9",
        "Classifier: Operating System :: POSIX :: Linux",
        "Classifier: Programming Language :: C++",
        "Classifier: Programming Language :: Python :: 3",
        "Description-Content-Type: text/markdown",
        "",
        (ROOT / "python/README.md").read_text(),
    ])


def _pybind11():
    """The folder of pybind11's CMake files in this environment; None if there is none."""
    try:
        import pybind11
    except ImportError:
        return None
    return pybind11.get_cmake_dir()


def _requirements():
    wanted = [f"{name}{version}" for name, version in (("cmake", ">=3.25"), ("ninja", "")) if not shutil.which(name)]
    installed = any(
        pathlib.Path(prefix, folder, "pybind11/pybind11Config.cmake").is_file()
        for prefix in ("/usr", "/usr/local", *os.environ.get("CMAKE_PREFIX_PATH", "").split(":"))
        for folder in ("lib/cmake", "share/cmake")
    )
    if not installed and _pybind11() is None:
        wanted.append("pybind11>=2.10")
    return wanted


def _run(*command):
    print("+", *command, flush=True)
    subprocess.run(command, check=True)


def _build():
    """Builds the module and the command; returns the folder with the package in it."""
    options = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DCOHORT_TORCH=off",
        "-DCOHORT_BUILD_TESTS=OFF",
        "-DCOHORT_BUILD_PYTHON=on",
        f"-DCOHORT_PYTHON={sys.executable}",
    ]
    if _pybind11():
        options.append(f"-Dpybind11_DIR={_pybind11()}")
    _run("cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", *options)
    _run("cmake", "--build", str(BUILD), "--target", "cohort_python", "cohort")
    installed = BUILD / "installed"
    shutil.rmtree(installed, ignore_errors=True)
    _run("cmake", "--install", str(BUILD), "--component", "python", "--strip", "--prefix", str(installed))
    command = installed / "command" / "cohort"
    command.parent.mkdir()
    shutil.copy2(BUILD / "bin/cohort", command)
    if shutil.which("strip"):
        _run("strip", str(command))
    return installed


class _Wheel:
    def __init__(self, folder):
        self.info = f"cohort-{_version()}.dist-info"
        self.name = f"cohort-{_version()}-{_tag()}.whl"
        self.zip = zipfile.ZipFile(os.path.join(folder, self.name), "w", zipfile.ZIP_DEFLATED)
        self.record = []

    def add(self, name, content, mode=0o644):
        entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))  # the same bytes from the same sources
        entry.compress_type = zipfile.ZIP_DEFLATED
        entry.external_attr = (0o100000 | mode) << 16
        self.zip.writestr(entry, content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        self.record.append(f"{name},sha256={digest},{len(content)}")

    def close(self):
        self.add(f"{self.info}/METADATA", _metadata().encode())
        self.add(f"{self.info}/WHEEL", self._wheel().encode())
        self.add(f"{self.info}/LICENSE", (ROOT / "LICENSE").read_bytes())
        record = "\n".join([*self.record, f"{self.info}/RECORD,,", ""])
        self.zip.writestr(f"{self.info}/RECORD", record)
        self.zip.close()
        return self.name

    @staticmethod
    def _wheel():
        return f"Wheel-Version: 1.0\nGenerator: cohort_build\nRoot-Is-Purelib: false\nTag: {_tag()}\n"


def _make(folder, package):
    installed = _build()
    wheel = _Wheel(folder)
    if package:
        for file in sorted(path for path in (installed / "cohort").rglob("*") if path.is_file()):
            mode = 0o755 if file.suffix == ".so" else 0o644
            wheel.add(str(file.relative_to(installed)), file.read_bytes(), mode)
    else:
        wheel.add("cohort.pth", f"{BUILD / 'python'}\n".encode())
    # The command finds this in the environment's share/.
    for file in sorted((installed / "as-horovod").rglob("*.py")):
        wheel.add(f"cohort-{_version()}.data/data/share/cohort/{file.relative_to(installed)}", file.read_bytes())
    # Installers put this into the environment's bin/ as it is.
    wheel.add(f"cohort-{_version()}.data/scripts/cohort", (installed / "command/cohort").read_bytes(), 0o755)
    return wheel.close()


def get_requires_for_build_wheel(config_settings=None):
    return _requirements()


def get_requires_for_build_editable(config_settings=None):
    return _requirements()


def get_requires_for_build_sdist(config_settings=None):
    return []


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return _make(wheel_directory, package=True)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return _make(wheel_directory, package=False)


def build_sdist(sdist_directory, config_settings=None):
    """What git knows."""
    name = f"cohort-{_version()}"
    files = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True).stdout
    with tarfile.open(os.path.join(sdist_directory, f"{name}.tar.gz"), "w:gz") as archive:
        for file in sorted(filter(None, files.decode().split("\0"))):
            archive.add(ROOT / file, f"{name}/{file}", recursive=False)
        metadata = BUILD.parent / "PKG-INFO"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(_metadata())
        archive.add(metadata, f"{name}/PKG-INFO")
    return f"{name}.tar.gz"
