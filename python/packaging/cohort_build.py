"""Builds Cohort's wheel: the PEP 517 backend that pyproject.toml names. Needs nothing but the standard library.

    pip install .                      CMake, Ninja, a C++20 compiler and the packages of tools/packages.txt
    pip install --editable .           the package of the build folder, wherever it is edited

Without a network it needs Debian's pybind11-dev; where that is not, pip fetches pybind11 (and CMake, Ninja). The build
folder is build/wheel-PYTHON; a second build takes seconds. The wheel holds the package, the command `cohort` with the
programs beside it, and the shared libraries that they need beyond those of the C and C++ run-time (OpenSSL and zlib are
linked statically). Its tag names the glibc that it needs at least: that of the machine it was built on, mostly.
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
# The tag of a wheel speaks of glibc only. By the last number of a GLIBCXX_3.4 that is needed: the glibc of the first
# distributions with that libstdc++ (GCC 11: RHEL 9; 12: Ubuntu 22.04; 13: Fedora 38; 14: Ubuntu 24.04).
GLIBC_BESIDE = {29: (2, 34), 30: (2, 35), 31: (2, 37), 32: (2, 37), 33: (2, 39)}
# What every system that runs CPython has.
RUNTIME = ("libc.so.", "libm.so.", "libdl.so.", "librt.so.", "libpthread.so.", "libgcc_s.so.", "libstdc++.so.")
# torch 2.5 and later loads the first with itself, the next ones the second with the first process group.
ENTRY_POINTS = """\
[torch.backends]
cohort = cohort._torch_backend:autoload

[torch.distributed.backends]
cohort = cohort._torch_backend:autoload
"""
BUILD = ROOT / "build" / f"wheel-{sys.implementation.cache_tag}"


def _version():
    return re.search(r"project\(cohort VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]


def _tag(glibc):
    python = "cp{}{}".format(*sys.version_info[:2])
    machine = sysconfig.get_platform().rsplit("-", 1)[1]
    return f"{python}-{python}-manylinux_{glibc[0]}_{glibc[1]}_{machine}"


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


def _tell(text):
    """To whoever waits: pip keeps what a backend prints to itself, unless it fails."""
    print(text, flush=True)
    try:
        with open("/dev/tty", "w") as terminal:
            terminal.write(f"\n{text}\n")
    except OSError:
        pass  # nobody sits there


def _rpath():
    """Where the module and the command find the wheel's libraries, once installed."""
    libraries = [f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/{name}-packages" for name in ("site", "dist")]
    return ";".join(["$ORIGIN/../cohort.libs", *(f"$ORIGIN/../{folder}/cohort.libs" for folder in libraries)])


def _needed(program):
    """The shared libraries that `program` needs and that a system with Python may lack: (name, file)."""
    listed = subprocess.run(["ldd", str(program)], check=True, capture_output=True, text=True).stdout
    for name, file in re.findall(r"^\s*(\S+) => (\S+)", listed, re.MULTILINE):
        if not name.startswith(RUNTIME):
            yield name, pathlib.Path(file).resolve(strict=True)


def _glibc(files):
    """The least version of glibc on systems that all of `files` can be loaded on."""
    versions = [(2, 17)]
    for file in files:
        symbols = subprocess.run(["readelf", "-V", str(file)], check=True, capture_output=True, text=True).stdout
        versions += [(int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols)]
        versions += [GLIBC_BESIDE[at] for at in map(int, re.findall(r"GLIBCXX_3\.4\.(\d+)", symbols)) if at in GLIBC_BESIDE]
    return max(versions)


def _build():
    """Builds the module and the command; returns the folder with package, libraries and command in it."""
    options = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DCMAKE_UNITY_BUILD=ON",
        "-DCOHORT_TORCH=off",
        "-DCOHORT_BUILD_TESTS=OFF",
        "-DCOHORT_BUILD_PYTHON=on",
        f"-DCOHORT_PYTHON={sys.executable}",
        "-DOPENSSL_USE_STATIC_LIBS=ON",
        "-DZLIB_USE_STATIC_LIBS=ON",
        f"-DCMAKE_INSTALL_RPATH={_rpath()}",
        # DT_RPATH, which the libraries' own libraries are looked for in as well.
        "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags",
        "-DCMAKE_MODULE_LINKER_FLAGS=-Wl,--disable-new-dtags",
    ]
    if _pybind11():
        options.append(f"-Dpybind11_DIR={_pybind11()}")
    _run("cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", *options)
    if not list((BUILD / "python/cohort").glob("_core*.so")):
        _tell(f"cohort: compiling, some minutes ({os.cpu_count()} cores); the next time it takes seconds")
    _run("cmake", "--build", str(BUILD), "--target", "cohort_python", "programs")
    installed = BUILD / "installed"
    shutil.rmtree(installed, ignore_errors=True)
    _run("cmake", "--install", str(BUILD), "--component", "python", "--strip", "--prefix", str(installed))
    programs = [*(installed / "command").iterdir(), *(installed / "cohort").glob("*.so")]
    needed = dict(found for program in programs for found in _needed(program))  # before there is a place to find them in
    libraries = installed / "cohort.libs"
    libraries.mkdir()
    for name, file in needed.items():
        shutil.copyfile(file, libraries / name)
    return installed


class _Wheel:
    def __init__(self, folder, tag):
        self.tag = tag
        self.info = f"cohort-{_version()}.dist-info"
        self.name = f"cohort-{_version()}-{tag}.whl"
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
        self.add(f"{self.info}/entry_points.txt", ENTRY_POINTS.encode())
        self.add(f"{self.info}/LICENSE", (ROOT / "LICENSE").read_bytes())
        record = "\n".join([*self.record, f"{self.info}/RECORD,,", ""])
        self.zip.writestr(f"{self.info}/RECORD", record)
        self.zip.close()
        return self.name

    def _wheel(self):
        return f"Wheel-Version: 1.0\nGenerator: cohort_build\nRoot-Is-Purelib: false\nTag: {self.tag}\n"


def _make(folder, package):
    installed = _build()
    programs = [file for file in sorted(installed.rglob("*")) if file.is_file() and "so" in file.name.split(".")]
    commands = sorted((installed / "command").iterdir())
    wheel = _Wheel(folder, _tag(_glibc([*commands, *programs])))
    for part in ("cohort", "cohort.libs") if package else ("cohort.libs",):
        for file in sorted(path for path in (installed / part).rglob("*") if path.is_file()):
            wheel.add(file.relative_to(installed).as_posix(), file.read_bytes(), 0o755 if file in programs else 0o644)
    if not package:
        wheel.add("cohort.pth", f"{BUILD / 'python'}\n".encode())
    # The command finds this in the environment's share/.
    for file in sorted((installed / "as-horovod").rglob("*.py")):
        wheel.add(f"cohort-{_version()}.data/data/share/cohort/{file.relative_to(installed)}", file.read_bytes())
    # Installers put these into the environment's bin/ as they are.
    for command in commands:
        wheel.add(f"cohort-{_version()}.data/scripts/{command.name}", command.read_bytes(), 0o755)
    return wheel.close()


def get_requires_for_build_wheel(config_settings=None):
    return _requirements()


def get_requires_for_build_editable(config_settings=None):
    return _requirements()


def get_requires_for_build_sdist(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """Without it pip would compile while it says that it prepares metadata."""
    info = pathlib.Path(metadata_directory, f"cohort-{_version()}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(_metadata())
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return info.name


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


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
