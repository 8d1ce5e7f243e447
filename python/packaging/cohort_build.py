"""Builds Cohort's wheel: the PEP 517 backend that pyproject.toml names. Needs nothing but the standard library.

    pip install .                      CMake, Ninja, a C++20 compiler and the packages of tools/packages.txt
    pip install --editable .           the package of the build folder, wherever it is edited

Without a network it needs Debian's pybind11-dev; if that is missing, pip fetches pybind11 (and CMake, Ninja). The build
folder is build/wheel-PYTHON; a second build takes seconds. The wheel is for Python and C++. In site-packages/cohort/:
  *.py, _core.*.so    the package, with a module for each Python
  lib/                libcohort-VERSION.so, which the modules, the programs and users' C++ programs link; the shared
                      libraries that it needs beyond those of the C and C++ run-time (OpenSSL and zlib are in it)
  include/, lib/cmake/cohort/, share/    C++ headers, the CMake package, what belongs to them
The programs lie in the environment's bin/. A wheel's tag names the oldest glibc that it runs with, usually that of the
machine it was built on; tools/release/make-wheels makes wheels for older ones.
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
# A wheel's tag names no libstdc++, only a glibc. So, by the last number of a GLIBCXX_3.4.N that is needed: the glibc
# of the first distributions with that libstdc++ (GCC 11: RHEL 9; 12: Ubuntu 22.04; 13: Fedora 38; 14: Ubuntu 24.04).
GLIBC_BESIDE = {29: (2, 34), 30: (2, 35), 31: (2, 37), 32: (2, 37), 33: (2, 39)}
# Libraries that every system that runs CPython has.
RUNTIME = ("ld-linux", "libc.so.", "libm.so.", "libdl.so.", "librt.so.", "libpthread.so.", "libgcc_s.so.", "libstdc++.so.")
# torch 2.5 and later loads the first with itself, the next ones the second with the first process group.
ENTRY_POINTS = """\
[torch.backends]
cohort = cohort._torch_backend:autoload

[torch.distributed.backends]
cohort = cohort._torch_backend:autoload
"""
BUILD = ROOT / "build" / f"wheel-{sys.implementation.cache_tag}"


def version():
    return re.search(r"project\(cohort VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]


def _tag(glibc):
    python = "cp{}{}".format(*sys.version_info[:2])
    machine = sysconfig.get_platform().rsplit("-", 1)[1]
    return f"{python}-{python}-manylinux_{glibc[0]}_{glibc[1]}_{machine}"


def _metadata():
    return "\n".join([
        "Metadata-Version: 2.1",
        "Name: cohort",
        f"Version: {version()}",
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


def _what_it_needs():
    """A hint for users to whom CMake has named a missing dependency: one of several, by a name of CMake's own."""
    rows = [line.split() for line in (ROOT / "tools/packages.txt").read_text().splitlines()]
    packages = " ".join(row[1] for row in rows if row[:1] == ["build"])
    return f"cohort: something that it is built with is not here (see above). Of Debian 12 it takes: apt-get install {packages}"


def _tell(text):
    """Prints for the waiting user: pip hides a backend's output, unless it fails."""
    print(text, flush=True)
    try:
        with open("/dev/tty", "w") as terminal:
            terminal.write(f"\n{text}\n")
    except OSError:
        pass  # there is no terminal


def _rpath():
    """The folders in which the programs find the wheel's libraries, once installed."""
    places = ("lib/python3.{}/site", "lib64/python3.{}/site", "lib/python3.{}/dist")  # lib64: of Fedora's and its kin
    folders = [f"{place.format(minor)}-packages" for minor in range(9, 16) for place in places]
    return ";".join(f"$ORIGIN/../{folder}/cohort/lib" for folder in (*folders, "lib/python3/dist-packages", "."))


def is_elf(file):
    with open(file, "rb") as opened:
        return opened.read(4) == b"\x7fELF"


def _needed(files, compiler):
    """The shared libraries that `files` need and that a system with Python may lack: {name: file}."""
    found, waiting = {}, list(files)
    while waiting:
        listed = subprocess.run(["readelf", "-d", str(waiting.pop())], check=True, capture_output=True, text=True).stdout
        for name in re.findall(r"\(NEEDED\).*\[(.*)\]", listed):
            if name in found or name.startswith((*RUNTIME, "libcohort-")):
                continue
            # A path if the compiler's linker would find it.
            said = subprocess.run([*compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout
            found[name] = pathlib.Path(said.strip()).resolve(strict=True)
            waiting.append(found[name])
    return found


def _glibc(files):
    """The oldest version of glibc with which all of `files` can be loaded."""
    versions = [(2, 17)]
    for file in files:
        symbols = subprocess.run(["readelf", "-V", str(file)], check=True, capture_output=True, text=True).stdout
        versions += [(int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols)]
        versions += [GLIBC_BESIDE[at] for at in map(int, re.findall(r"GLIBCXX_3\.4\.(\d+)", symbols)) if at in GLIBC_BESIDE]
    return max(versions)


def build(folder, *options, compiler=("c++",)):
    """Builds in `folder`, with `options` for CMake; returns the folder with site-packages' cohort/ and bin/ in it."""
    configure = (
        "cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja",
        "-DCMAKE_BUILD_TYPE=Release",
        "-DCMAKE_UNITY_BUILD=ON",
        "-DCMAKE_INSTALL_LIBDIR=lib",
        "-DCOHORT_SHARED=ON",
        "-DCOHORT_TORCH=off",
        "-DCOHORT_BUILD_TESTS=OFF",
        "-DCOHORT_BUILD_PYTHON=on",
        "-DOPENSSL_USE_STATIC_LIBS=ON",
        "-DZLIB_USE_STATIC_LIBS=ON",
        f"-DCMAKE_INSTALL_RPATH={_rpath()}",
        *options,
    )  # fmt: skip
    try:
        _run(*configure)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        sys.exit(f"{error}\n{_what_it_needs()}")
    if not list((folder / "python/cohort").glob("_core*.so")):
        _tell(f"cohort: compiling, some minutes ({os.cpu_count()} cores); the next time it takes seconds")
    _run("cmake", "--build", str(folder), "--target", "cohort_python", "to_install")
    installed = folder / "installed"
    shutil.rmtree(installed, ignore_errors=True)
    _run("cmake", "--install", str(folder), "--prefix", str(installed / "cohort"))
    _run("cmake", "--install", str(folder), "--component", "python", "--prefix", str(installed))
    (installed / "cohort/bin").rename(installed / "bin")
    programs = [file for file in installed.rglob("*") if file.is_file() and is_elf(file)]
    for name, file in _needed(programs, compiler).items():
        shutil.copyfile(file, installed / "cohort/lib" / name)
    return installed


class _Wheel:
    def __init__(self, folder, tag):
        self.tag = tag
        self.info = f"cohort-{version()}.dist-info"
        self.name = f"cohort-{version()}-{tag}.whl"
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
        self.add(f"{self.info}/THIRD_PARTY_LICENSES.txt", (ROOT / "cmake/third_party_licenses.txt").read_bytes())
        record = "\n".join([*self.record, f"{self.info}/RECORD,,", ""])
        self.zip.writestr(f"{self.info}/RECORD", record)
        self.zip.close()
        return self.name

    def _wheel(self):
        return f"Wheel-Version: 1.0\nGenerator: cohort_build\nRoot-Is-Purelib: false\nTag: {self.tag}\n"


def make_wheel(folder, installed, tag, editable=None):
    """Makes a wheel in `folder` of what `build` returned; returns its name. `editable`: the package's folder elsewhere."""
    wheel = _Wheel(folder, tag)
    for file in sorted(path for path in (installed / "cohort").rglob("*") if path.is_file()):
        if not editable or file.parent == installed / "cohort/lib":
            wheel.add(file.relative_to(installed).as_posix(), file.read_bytes(), 0o755 if is_elf(file) else 0o644)
    if editable:
        wheel.add("cohort.pth", f"{editable}\n".encode())
    # The command finds this in the environment's share/.
    for file in sorted((installed / "as-horovod").rglob("*.py")):
        wheel.add(f"cohort-{version()}.data/data/share/cohort/{file.relative_to(installed)}", file.read_bytes())
    # Installers put these into the environment's bin/ as they are.
    for command in sorted((installed / "bin").iterdir()):
        wheel.add(f"cohort-{version()}.data/scripts/{command.name}", command.read_bytes(), 0o755)
    return wheel.close()


def _make(folder, editable=None):
    options = [f"-DCOHORT_PYTHON={sys.executable}"]
    if _pybind11():
        options.append(f"-Dpybind11_DIR={_pybind11()}")
    installed = build(BUILD, *options)
    programs = [file for file in installed.rglob("*") if file.is_file() and is_elf(file)]
    for program in programs:
        _run("strip", "--strip-unneeded", str(program))
    return make_wheel(folder, installed, _tag(_glibc(programs)), editable)


def get_requires_for_build_wheel(config_settings=None):
    return _requirements()


def get_requires_for_build_editable(config_settings=None):
    return _requirements()


def get_requires_for_build_sdist(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """Without it pip would compile while it says that it prepares metadata."""
    info = pathlib.Path(metadata_directory, f"cohort-{version()}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(_metadata())
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return info.name


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return _make(wheel_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return _make(wheel_directory, editable=BUILD / "python")


def build_sdist(sdist_directory, config_settings=None):
    """Packs the files that git knows."""
    name = f"cohort-{version()}"
    files = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True).stdout
    with tarfile.open(os.path.join(sdist_directory, f"{name}.tar.gz"), "w:gz") as archive:
        for file in sorted(filter(None, files.decode().split("\0"))):
            archive.add(ROOT / file, f"{name}/{file}", recursive=False)
        metadata = BUILD.parent / "PKG-INFO"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(_metadata())
        archive.add(metadata, f"{name}/PKG-INFO")
    return f"{name}.tar.gz"
