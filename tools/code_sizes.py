"""Lines of the product by component, and sizes of its classes, each against its limit. tools/check-layers looks at them.

Counted are all lines of .h, .cpp, .in, .py and .pyi files, without tests, what only they include, and fakes. A class has the lines of its definition and
of its members' definitions outside it; it lies over as many files as define members outside headers.
"""

import collections
import pathlib
import re

# Lines that each part may have. What a change makes superfluous goes with it; a limit is raised with a reason in the commit.
LINES = {
    "src/base": 3_649, "src/comm": 24_941, "src/launch": 20_405, "src/net": 7_097, "src/rendezvous": 5_485, "src/telemetry": 2_485,
    "src/torch": 8_089, "src/c_api": 536, "src/train": 15_077, "include": 4_339, "programs": 4_135, "python": 18_826,
    "extensions/bench": 3_920, "extensions/chainermn": 2_170, "extensions/horovod": 14_204, "extensions/jax": 1_350,
    "extensions/observe": 10_330, "extensions/ps": 10_741, "extensions/ray": 70, "extensions/spark": 690,
}  # fmt: skip
CLASS_LINES = 700
# Larger ones, and those in several files, until they are divided: (lines, files) that they may have.
CLASSES = {
    "src/comm/gpu NcclPlane": (450, 2),
    "src/comm/transport/tcp TcpTransport": (490, 2),
}
SMALL = 150  # lines of a class that may lie over several files

CLASS = re.compile(r"^(?:template <.*> )?(?:class|struct) (?:alignas\(\w+\) )?((?:\w+::)*\w+)(?: final)?(?: :|\s*\{|$)")
MEMBER = re.compile(r"^[\w:<>&*,()\[\] ]*?\b((?:\w+::)+)~?(?:\w+|operator[^(]+)\(")


def product(folder):
    for path in sorted(folder.rglob("*")):
        of_tests = path.stem.endswith("_test") or path.name.startswith("test_") or {"fake", "tests", "testing"} & set(path.parts)
        if path.suffix in (".h", ".cpp", ".in", ".py", ".pyi") and not of_tests:
            yield path


def lines_of(folder):
    return sum(len(path.read_text(errors="replace").splitlines()) for path in product(folder))


def definitions(path):
    """(class, lines, whether it is a member outside the class) of each definition at the beginning of a line."""
    lines = path.read_text(errors="replace").splitlines()
    at = 0
    while at < len(lines):
        line, name, end = lines[at], None, ""
        if (match := CLASS.match(line)) and not line.endswith(";"):
            name, end = match[1], "};"
        elif (match := MEMBER.match(line)) and not line.endswith(";"):
            name, end = match[1].rstrip(":"), "}"
        begin = at
        if name and not line.endswith("}"):
            while at + 1 < len(lines) and lines[at] not in (end, "}", "};"):
                at += 1
        at += 1
        if name:
            if parts := [part for part in name.split("::") if part[0].isupper()]:  # no namespaces
                yield "::".join(parts), at - begin, end == "}"


def classes(root):
    """{(folder, class): (lines, files that define members)}"""
    lines, files = collections.Counter(), collections.defaultdict(set)
    for folder in ("src", "include", "programs", "extensions"):
        for path in product(root / folder):
            for name, count, outside in definitions(path):
                key = (path.parent.relative_to(root).as_posix(), name)
                lines[key] += count
                if outside and path.suffix == ".cpp":
                    files[key].add(path.name)
    return {key: (count, len(files[key])) for key, count in lines.items()}


def problems(root):
    for folder, limit in LINES.items():
        if (root / folder).is_dir() and (count := lines_of(root / folder)) > limit:
            yield f"{folder}: {count} lines, and {limit} are allowed (tools/code_sizes.py)"
    for (folder, name), (lines, files) in classes(root).items():
        most, most_files = CLASSES.get(f"{folder} {name}", (CLASS_LINES, 1 if lines > SMALL else files))
        if lines > most:
            yield f"{folder}: class {name} has {lines} lines, and {most} are allowed (tools/code_sizes.py)"
        if files > most_files:
            yield f"{folder}: class {name} lies over {files} files, and {most_files} are allowed (tools/code_sizes.py)"


def table(root):
    total = collections.Counter()
    for folder, limit in LINES.items():
        count = lines_of(root / folder)
        total["extensions" if folder.startswith("extensions/") else "the core"] += count
        yield f"{count:7} of {limit:7}  {folder}"
    for part, count in total.items():
        yield f"{count:7}             {part}"
    yield f"{total.total():7}             in all"
    for (folder, name), (lines, files) in sorted(classes(root).items(), key=lambda one: -one[1][0])[:20]:
        yield f"{lines:7} in {files} files   {folder} {name}"


if __name__ == "__main__":
    print("\n".join(table(pathlib.Path(__file__).resolve().parents[1])))
