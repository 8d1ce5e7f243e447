"""Comments and docstrings begin with their subject or verb: none with "Of", "What", "Where", "Who" or "Whose", behind which a
reader has to look for the noun. tools/check-layers looks for them.
"""

import pathlib
import re

FOLDERS = ("src", "include", "programs", "extensions", "python", "bench", "examples", "fuzz", "tests", "tools", "cmake")
HEAD = re.compile(r"(?:Of|What|Where|Who|Whose|Whom|Whoever|Whatever)\b")
CPP = {".h", ".cpp", ".cu"}
HASHES = {".py", ".pyi", ".cmake", ".sh", ".txt", ""}


def comments(path):
    """(line number, text) of the beginning of each comment and docstring."""
    mark = r"//[/!]?<?" if path.suffix in CPP else "#"
    whole, behind = re.compile(rf"^\s*{mark}\s*(.*)$"), re.compile(rf"(?:^|[^:\"'])\s{mark}\s+(.*)$")
    inside = False
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        match = whole.match(line)
        if match:
            if not inside:
                yield number, match[1]
            inside = match[1] != ""  # an empty line begins a paragraph
            continue
        inside = False
        match = behind.search(line) or (re.match(r'^\s*r?"""(.*)', line) if path.suffix not in CPP else None)
        if match:
            yield number, match[1]


def sources(root):
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            known = path.suffix in CPP | HASHES and (path.suffix != ".txt" or path.name == "CMakeLists.txt")
            if known and path.is_file() and not {"build", "runs", "node_modules"} & set(path.relative_to(root).parts):
                yield path


def problems(root):
    for path in sources(root):
        for number, text in comments(path):
            if HEAD.match(text):
                yield f"{path.relative_to(root)}:{number}: a comment begins with its subject, not with {text.split()[0]!r}"


if __name__ == "__main__":
    print("\n".join(problems(pathlib.Path(__file__).resolve().parents[1])))
