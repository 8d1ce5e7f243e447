"""Libraries that a wheel's programs are linked against: a glibc and a libstdc++ that old systems have (manylinux_2_28).

The compiler is this machine's; `make(target, folder)` makes a folder for its options -B and -L, in which the linker finds
  libc.so.6, ...      stubs of an old glibc with its start-up files, which come with the Python package ziglang
  libstdc++.so        a stub with those symbols that GCC 8's has; what is newer is taken from the compiler's libstdc++.a,
                      as Red Hat's toolsets do it
  libcompat.a         what the headers of a newer glibc and libstdc++ refer to (old_glibc_compat.c)
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

GLIBC = "2.27"  # Ubuntu 18.04 has it, on which a wheel can be tried
# The newest that manylinux_2_28 allows (PEP 600; auditwheel's policies).
NEWEST = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
LIBRARIES = ("c.so.6", "m.so.6", "pthread.so.0", "dl.so.2", "rt.so.1", "util.so.1", "resolv.so.2", "ld.so.2")


def _output(*command):
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)


def _glibc(zig, arch, folder):
    with tempfile.TemporaryDirectory() as scratch:
        source = pathlib.Path(scratch, "a.c")
        source.write_text("int main(void) { return 0; }\n")
        said = _output(*zig, "cc", "-target", f"{arch}-linux-gnu.{GLIBC}", "-pie", "-fPIE", source, "-o", f"{scratch}/a",
                       "-v").stderr
    files = {pathlib.Path(word).name: pathlib.Path(word) for word in said.split() if word.startswith("/")}
    for name in ("Scrt1.o", "libc_nonshared.a", *(f"lib{library}" for library in LIBRARIES)):
        shutil.copyfile(files[name], folder / name)
    for library in LIBRARIES[1:-1]:
        name = library.split(".")[0]
        (folder / f"lib{name}.so").write_text(f"INPUT ( lib{library} )\n")
    # Since 2.34 a program that uses threads or dlopen names no library for it. The loader has a few symbols, too.
    (folder / "libc.so").write_text("GROUP ( libc.so.6 libc_nonshared.a libcompat.a"
                                    " AS_NEEDED ( libpthread.so.0 libdl.so.2 librt.so.1 libld.so.2 ) )\n")


def _is_old(version):
    name, _, number = version.partition("_")
    if not re.fullmatch(r"[\d.]+", number):
        return True  # CXXABI_FLOAT128 and the like, of long ago
    return tuple(map(int, number.split("."))) <= NEWEST[name]


def _libstdcxx(compiler, folder):
    shared = _output(compiler, "-print-file-name=libstdc++.so.6").stdout.strip()
    static = _output(compiler, "-print-file-name=libstdc++.a").stdout.strip()
    symbols = {}
    for line in _output("readelf", "--dyn-syms", "--wide", shared).stdout.splitlines():
        found = re.match(r"\s*\d+: [0-9a-f]+\s+(\w+) (\w+)\s+(\w+)\s+DEFAULT\s+\d+ (\S+?)(@@?)(\S+)$", line)
        if found and _is_old(found[6]) and (found[4] not in symbols or found[5] == "@@"):
            symbols[found[4]] = found
    kinds = {"FUNC": "function", "IFUNC": "function", "OBJECT": "object", "TLS": "tls_object"}
    assembly, names = [], {}
    for name, found in symbols.items():
        size, kind, binding, version = int(found[1], 0), found[2], found[3], found[6]
        names.setdefault(version, []).append(name)
        section = {"TLS": '.section .tbss,"awT",%nobits', "OBJECT": ".bss"}.get(kind, ".text")
        kind = "gnu_unique_object" if binding == "UNIQUE" else kinds[kind]
        # A program may copy an object, so its size and alignment have to be those of the real one.
        assembly += [section, ".balign 32", ".weak " + name if binding == "WEAK" else ".globl " + name,
                     f".type {name}, %{kind}", f"{name}: .skip {size}", f".size {name}, {size}"]
    assembly += ['.section .note.GNU-stack,"",%progbits', ""]
    source, versions, stub = folder / "libstdc++.s", folder / "libstdc++.map", folder / "libstdc++.so.6"
    source.write_text("\n".join(assembly))
    versions.write_text("".join(f"{version} {{ {'; '.join(listed)}; }};\n" for version, listed in names.items()))
    _output(compiler, "-nostdlib", "-shared", f"-Wl,-soname,{stub.name}", f"-Wl,--version-script,{versions}", source,
            "-o", stub)
    # Objects that must exist once in a process come from the real library only.
    apart = folder / "libstdc++.a"
    shutil.copyfile(static, apart)
    members = _output("ar", "t", apart).stdout.split()
    _output("ar", "d", apart, *(name for name in members if re.match(r"eh_|ios_init|globals_io|locale", name)))
    (folder / "libstdc++.so").write_text(f"GROUP ( {stub.name} libcompat.a {apart.name} )\n")


SOURCES = (pathlib.Path(__file__), pathlib.Path(__file__).with_name("old_glibc_compat.c"))


def is_made(folder):
    """True if `make` has made it from the present sources."""
    made = folder / ".complete"
    return made.exists() and made.stat().st_mtime > max(source.stat().st_mtime for source in SOURCES)


def make(arch, folder, zig, compiler):
    """Makes `folder` for `compiler` (a g++ for `arch`); `zig` is the command of the package ziglang, a list."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _glibc(zig, arch, folder)
    _libstdcxx(compiler, folder)
    _output(compiler, "-xc", "-O2", "-fPIC", "-c", SOURCES[1], "-o", folder / "compat.o")
    _output("ar", "rc", folder / "libcompat.a", folder / "compat.o")
    (folder / ".complete").touch()


if __name__ == "__main__":
    make(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3].split(), sys.argv[4])
