"""`cohort doctor --horovod PROGRAM` and `--torchrun`: lists what a program uses of these, and whether Cohort has it.

    python -m cohort._launch.coming_from horovod|torchrun --cohort COMMAND [--json] [FILE or FOLDER...]

Programs are read, not run. Names are looked up in Cohort's modules (and torch's own), with fake frameworks for
Horovod's; variables and options are those of the command. coming_from_notes.py has the differences.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator, Sequence
from typing import Any, Optional

from cohort._launch.coming_from_notes import note_on, table

_SHELL = (".sh", ".bash", ".sbatch", ".slurm", ".pbs", ".lsf", ".job")
_STARTERS = ("mpirun", "mpiexec", "mpiexec.hydra", "srun", "jsrun")
_FRAMEWORKS = ("torch", "tensorflow", "keras", "tf_keras", "jax", "numpy", "ray", "pyspark")
_IMPORTS = ("importlib.import_module", "import_module", "__import__")


@dataclasses.dataclass(frozen=True)
class _Kind:
    roots: tuple[str, ...]
    command: str
    modules: tuple[str, ...]
    variables: str
    option: str


_KINDS = {
    "horovod": _Kind(("horovod", "cohort.horovod.torch", "cohort.tensorflow", "cohort.keras"), "horovodrun",
                     ("horovod.runner.launch",), r"HOROVOD_[A-Z_0-9]+", " --as-horovod"),
    "torchrun": _Kind(("torch.distributed", "torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed",
                       "torch.utils.data.distributed", "torch.utils.data.DistributedSampler", "torch.multiprocessing.spawn"),
                      "torchrun", ("torch.distributed.run", "torch.distributed.launch"),
                      r"(PET|TORCHELASTIC)_[A-Z_]+|(GROUP_|ROLE_|LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)", ""),
}  # fmt: skip


# --- frameworks, which need not be installed ---


class _OfMadeUp(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _MadeUp

    def __call__(cls, *args: Any, **named: Any) -> Any:
        if cls is not _MadeUp:
            return super().__call__(*args, **named)
        return args[0] if len(args) == 1 and isinstance(args[0], (types.FunctionType, type)) else _MadeUp  # a decorator

    def __getitem__(cls, key: Any) -> Any:
        return _MadeUp

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    __or__ = __ror__ = __getitem__


class _MadeUp(metaclass=_OfMadeUp):
    """Stands for any object of a framework."""

    def compile(self) -> None: ...
    def fit(self) -> None: ...


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in _FRAMEWORKS else None

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(__version__="99.0", __getattr__=lambda name: getattr(_MadeUp, name))


# --- the object of a name ---


class Missing(Exception):
    """Raised if there is no such name."""


class Untold(Exception):
    """Raised if the name may be a framework's, or a member of an object passed in."""


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception:  # includes errors of a framework
        return None


def _source(one: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(one)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def _made_by(one: Any) -> list[type]:
    """Returns the classes of the object's call result, as far as its source tells."""
    if inspect.isclass(one):
        return [one]
    calls = [part.value.func for part in ast.walk(_source(one)) if isinstance(part, ast.Return) and isinstance(part.value, ast.Call)]
    names = [call.value if isinstance(call, ast.Attribute) else call for call in calls]
    values = [getattr(one, "__globals__", {}).get(name.id) for name in names if isinstance(name, ast.Name)]
    return [value for value in values if inspect.isclass(value)]


def _member(makers: Sequence[type], name: str, surely: bool) -> Any:
    """Returns a member of an object of one of these classes; `surely`: the object is of no class derived from it."""
    bases = [base for maker in makers for base in maker.__mro__ if base is not object]
    own = [base for base in bases if base.__module__.split(".")[0] in ("cohort", "horovod", "torch")]
    for base in own:
        if name in vars(base):
            return vars(base)[name]
    sources = "".join(map(inspect.getsource, own))
    if not surely or own != bases or re.search(rf"self\.{name}\b|\*\*|def __getattr__", sources):
        raise Untold
    raise Missing


def find(path: str) -> Any:
    """Returns the object of a dotted name; "()" after a part means its call's result. Raises Missing or Untold."""
    parts = path.split(".")
    one = _module(parts[0])
    made: Optional[tuple[list[type], bool]] = None  # result of the previous part, if it is a call: its classes, surely
    for index, part in enumerate(parts[1:], 1):
        name = part.replace("()", "")
        if made is not None:
            one = _member(*made[:1], name, made[1])
        else:
            outer, one = one, getattr(one, name, Missing)
            if one is Missing and isinstance(outer, types.ModuleType):
                one = _module(".".join(parts[: index + 1])) or Missing
            if one is Missing:
                raise Missing
        if one is _MadeUp and index + 1 < len(parts):
            raise Untold
        made = (_made_by(one), inspect.isclass(one)) if part.endswith("()") else None
        if made is not None and not made[0]:
            raise Untold
    return one


# --- uses in a program ---


@dataclasses.dataclass
class Use:
    what: str
    where: list[str]
    state: str = "here"  # or "differs", "missing", "unseen"
    note: str = ""


class Program:
    """The uses in a program's files, by name, and the command that starts it with Cohort."""

    def __init__(self, name: str, cohort: str) -> None:
        self.name_of_kind, self.kind, self.cohort = name, _KINDS[name], cohort
        self.uses: dict[str, Use] = {}
        self.errors: list[str] = []
        self.commands: list[str] = []
        self.modules: dict[pathlib.Path, dict[str, Optional[str]]] = {}  # the names in each Python file that was read
        self.variables = set(re.findall(r"^  (\w+)=", self.ask("help", "environment"), re.MULTILINE))
        listed = re.findall(r"^  (-\S+)( [A-Z]\S*)?", self.ask("run", "--help-all"), re.MULTILINE)
        self.options = {one: value for names, value in listed for one in names.split(",")}
        if name == "horovod":
            names, _, _ = (importlib.import_module(f"horovod.{part}") for part in ("_names", "ray", "spark"))  # they list gaps
            options = importlib.import_module("horovod.runner._options")
            self.not_here, self.no_meaning = names._NOT_HERE, options.NO_MEANING
            self.horovodrun = options.make_parser()._option_string_actions

    def ask(self, *words: str) -> str:
        done = subprocess.run([self.cohort, *words], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        return done.stdout + done.stderr

    def wanted(self, path: Optional[str]) -> bool:
        return path is not None and any((path + ".").startswith((root + ".", root + "(")) for root in self.kind.roots)

    def add(self, what: str, where: str, state: str = "here", note: str = "") -> None:
        """Adds a use, once for each name; a note on the name takes precedence over the finding."""
        use = self.uses.setdefault(what, Use(what, []))
        if where not in use.where:
            use.where.append(where)
        noted = note_on(self.name_of_kind, what)
        if use.state == "here":
            use.state, use.note = noted or (state, note)

    def name(self, path: str, where: str, call: Optional[ast.Call] = None) -> None:
        shown = path.replace("()", "")
        try:
            one = find(path)
        except Untold:
            return
        except Missing:
            if self.name_of_kind == "torchrun":
                no_torch = _module("torch") is None
                return self.add(shown, where, "unseen" if no_torch else "missing",
                                "this Python has no torch, in which it would be looked up" if no_torch else "the torch here has no such name")
            inner = [name for name in self.not_here if (shown + ".").startswith(name + ".")]
            return self.add(shown, where, "missing", self.not_here[max(inner, key=len)] if inner else "no such name, here or in Horovod 0.28")
        self.add(shown, where)
        if call is not None:
            self.arguments(shown, one, call, where)

    def arguments(self, shown: str, one: Any, call: ast.Call, where: str) -> None:
        given = [each.arg for each in call.keywords if each.arg]
        if len(given) < len(call.keywords) or any(isinstance(each, ast.Starred) for each in call.args):
            self.add(f"{shown}(*, **)", where, "unseen", "arguments that are made while it runs")
        try:
            parameters = list(inspect.signature(one).parameters.values())
        except (TypeError, ValueError):
            return
        kinds, names = {each.kind for each in parameters}, [each.name for each in parameters if each.name != "self"]
        for name, value in [*zip(names, call.args), *((each.arg, each.value) for each in call.keywords if each.arg)]:
            if note_on(self.name_of_kind, f"{shown}({name})") and "cohort" not in ast.unparse(value):
                self.add(f"{shown}({name})", where)
        for name in given if inspect.Parameter.VAR_KEYWORD not in kinds else []:
            if name not in names:
                self.add(f"{shown}({name})", where, "missing", f"no such argument; there are {', '.join(names) or 'none'}")
        if inspect.Parameter.VAR_POSITIONAL not in kinds and len(call.args) > len(names):
            self.add(f"{shown}(...)", where, "missing", f"{len(call.args)} arguments, and it takes {len(names)}")

    def word(self, text: str, where: str) -> None:
        """Adds a variable, if the text is a variable's name."""
        if not re.fullmatch(self.kind.variables, text):
            return
        if text in self.variables:
            self.add(text, where)
        elif self.name_of_kind == "torchrun":
            self.add(text, where, "differs", "`cohort run` does not set or read it")
        else:
            plain = text.replace("HOROVOD_", "").lower()
            why = [why for name, why in self.no_meaning.items() if name.startswith(plain) or plain.startswith(name)]
            self.add(text, where, "differs", "ignored: " + (why + ["it means nothing here"])[0])

    # --- launchers' command lines ---

    def shell(self, text: str, file: str, number: int) -> None:
        for line in text.replace("\\\n", "\0").split("\n"):
            lexer = shlex.shlex(line.replace("\0", " "), posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            try:
                words = list(lexer)
            except ValueError:  # a quotation that continues in the next line
                words = line.split("#")[0].split()
            for word in words:
                for name in re.findall(r"(?<![\w$])[A-Z][A-Z_0-9]+(?==|$)", word):
                    self.word(name, f"{file}:{number}")
            while words:
                end = next((i for i, word in enumerate(words) if re.fullmatch("[;&|]+|\\d*[<>].*", word)), len(words))
                self.line(words[:end], f"{file}:{number}")
                words = words[end + 1 :]
            number += 1 + line.count("\0")

    def line(self, words: Sequence[str], where: str) -> None:
        for i, word in enumerate(words):
            if word.rsplit("/", 1)[-1] == self.kind.command or (word in self.kind.modules and i and words[i - 1] == "-m"):
                return self.launch(self.kind.command, list(words[i + 1 :]), where)
        if words and words[0].rsplit("/", 1)[-1] in _STARTERS and any(word.endswith(".py") for word in words):
            self.add(words[0].rsplit("/", 1)[-1], where)

    def launch(self, command: str, words: list[str], where: str) -> None:
        """Checks a launcher's options, and keeps the equivalent command."""
        self.add(command, where)
        kept = [] if command == "torchrun" else ["-np", "N"]
        while words and words[0].startswith("-") and words[0] not in ("-", "--"):
            word, _, value = words.pop(0).partition("=")
            takes, state, note, name = self.option(word, words[0] if words else "")
            self.add(f"{command} {name}", where, state, note)
            values = [value] if value else [words.pop(0) for _ in range(min(takes, len(words)))]
            if name in ("-np", "--num-proc"):
                kept[1:2] = values
            elif name in ("-H", "--hosts", "--hostfile", "-hostfile") or (command == "torchrun" and state == "here"):
                kept += [name.replace("-hostfile", "--hostfile").replace("---", "--"), *values]
        if "--nnodes" in kept and "--nnodes 1" not in " ".join(kept) + " ":
            kept += ["--secret-file", "FILE"]
        program = [word for word in words if not re.fullmatch(r"(.*/)?python[\d.]*|--|-u", word)]
        if program:
            self.commands.append(f"cohort run {' '.join(kept)}{self.kind.option} {' '.join(program)}")

    def option(self, word: str, after: str) -> tuple[int, str, str, str]:
        """Returns (words that follow, state, note, the option's full name)."""
        if self.name_of_kind == "horovod":
            near = [one for one in self.horovodrun if one == word or (word.startswith("--") and one.startswith(word))]
            if not near:
                return 0, "missing", "horovodrun has no such option", word
            action = self.horovodrun[near[0] if word not in near else word]
            why = self.no_meaning.get(action.dest)
            follow = action.nargs if isinstance(action.nargs, int) else 1
            return follow, "differs" if why else "here", f"has no meaning: {why}" if why else "", word if word in near else near[0]
        name = word.replace("_", "-") if word.startswith("--") else word
        if name in self.options:
            return int(bool(self.options[name])), "here", "", name
        said = re.search(r"it is torchrun's; here: (.*)", self.ask("run", "--show-config", f"{name}=1"))
        follow = int(not after.startswith("-") and not after.endswith(".py"))
        return follow, "differs" if said else "missing", said[1] if said else "`cohort run` has no such option", name

    # --- files ---

    def read(self, path: pathlib.Path) -> None:
        try:
            text = path.read_text(encoding="utf-8-sig", errors="replace")
        except OSError as error:
            return self.errors.append(f"{path}: {error.strerror}")
        if path.suffix == ".ipynb":
            try:
                text = self.cells(json.loads(text), path)
            except (ValueError, KeyError, TypeError, AttributeError):
                return self.errors.append(f"{path}: it is no notebook of Jupyter's")
        if path.suffix in (".py", ".ipynb") or re.match("#!.*python", text):
            self.python(path, text)
        elif path.suffix in _SHELL or path.name in ("Makefile", "Dockerfile") or re.match("#!.*sh", text):
            self.shell(text, str(path), 1)
        else:
            self.errors.append(f"{path}: neither Python (.py, .ipynb) nor a script of a shell's ({' '.join(_SHELL)}, or #!)")

    def python(self, path: pathlib.Path, text: str) -> None:
        if path.resolve() in self.modules:
            return
        names = self.modules[path.resolve()] = {}
        try:
            reader = _Reader(self, path, ast.parse(text))
        except (SyntaxError, ValueError) as error:
            return self.errors.append(_why(path, text, error))
        reader.go()
        reader.go()  # again, with the arguments that functions of the file are called with
        names.update((name, one) for name, one in reader.scopes[0].items() if self.wanted(one))

    def cells(self, notebook: Any, path: pathlib.Path) -> str:
        """Returns a notebook's code, without Jupyter's own syntax; lines are counted over all cells of code."""
        lines: list[str] = []
        for cell in notebook["cells"]:
            own = "".join(cell["source"]).splitlines() if cell["cell_type"] == "code" else []
            magic = own[0] if own and own[0].startswith("%%") else ""
            if re.match("%%(ba)?sh|%%script", magic):
                self.shell("\n".join(own[1:]), str(path), len(lines) + 2)
            foreign = magic and not re.match("%%(time|timeit|capture|prun)", magic)
            for line in own:
                at = re.match(r"(\s*)(?:[\w, ]+=\s*)?([!%])(.*)|\?|.*\?$", line)
                if at and at[2] == "!" and not foreign:
                    self.shell(at[3], str(path), len(lines) + 1)
                lines.append("#" if foreign else f"{at[1] or ''}pass" if at else line)
        return "\n".join(lines)

    def verdict(self) -> str:
        if not self.uses:
            return f"nothing of {self.name_of_kind.replace('horovod', 'Horovod')}'s is used in what was read"
        by = {state: [use.what for use in self.uses.values() if use.state == state] for state in ("missing", "differs", "unseen")}
        seen = len(self.uses) - len(by["unseen"])
        line = f"{seen - len(by['missing'])} of {seen} names {'that were seen ' if by['unseen'] else ''}are here"
        for state, text in (("missing", "not here"), ("differs", "what differs"), ("unseen", "not seen")):
            if by[state]:
                line += f"; {text}: {', '.join(by[state][:5])}{f', and {len(by[state]) - 5} more' if len(by[state]) > 5 else ''}"
        script = next((file for use in self.uses.values() for file in (use.where[0].rsplit(":", 1)[0],) if file.endswith(".py")), "")
        option = self.kind.option if any(what.startswith("horovod") for what in self.uses) else ""
        start = "python3" if "torch.multiprocessing.spawn" in self.uses else "cohort run -np 4"
        commands = list(dict.fromkeys(self.commands)) or ([f"{start}{option} {script}"] if script else [])
        return line + "".join(f"; {'or' if i else 'to run'}: {command}" for i, command in enumerate(commands))


def _why(path: pathlib.Path, text: str, error: Exception) -> str:
    old = r"^\s*print\s+[^(=\s]|^\s*except\s+[\w.]+\s*,\s*\w+\s*:|^\s*exec\s+[\"']|^\s*raise\s+\w+\s*,"
    if re.search(old, text, re.MULTILINE):
        why = f"this is Python 2, for which there is neither Horovod 0.28 nor Cohort -- `2to3 -w {path}` rewrites it"
    else:
        why = f"Python {sys.version_info[0]}.{sys.version_info[1]} cannot read it: {getattr(error, 'msg', error)}"
    return f"{path}:{getattr(error, 'lineno', None) or 1}: {why}"


class _Reader(ast.NodeVisitor):
    """Follows names through a file: imports, assignments to other names, and arguments of the file's functions.

    Any other use of a module, except `module.name`, is reported as not seen."""

    def __init__(self, program: Program, path: pathlib.Path, tree: ast.Module) -> None:
        self.program, self.path, self.tree = program, path, tree
        self.given: dict[tuple[str, str], str] = {}  # (function, parameter): the argument's name
        self.functions = {part.name: part for part in ast.walk(tree) if isinstance(part, ast.FunctionDef)}
        self.outer = {name for part in ast.walk(tree) if isinstance(part, (ast.Global, ast.Nonlocal)) for name in part.names}
        self.parents = {inner: part for part in ast.walk(tree) for inner in ast.iter_child_nodes(part)}
        self.scopes: list[dict[str, Optional[str]]] = [{}]

    def go(self) -> None:
        self.later: list[tuple[Any, list[dict[str, Optional[str]]]]] = []
        module = {name: path for name, path in self.scopes[0].items() if name in self.outer}  # names that functions assign
        self.scopes = [module]
        self.visit(self.tree)
        while self.later:  # functions are read after the module, as they run after it
            function, self.scopes = self.later.pop(0)
            for one in function.body:
                self.visit(one)
        self.scopes = [module]

    def scope(self, name: str) -> dict[str, Optional[str]]:
        return self.scopes[0 if name in self.outer else -1]

    def where(self, node: Any) -> str:
        return f"{self.path}:{node.lineno}"

    def path_of(self, node: Any) -> Optional[str]:
        """Returns the dotted name of an expression."""
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self.scopes) if node.id in scope), None)
        if isinstance(node, ast.Attribute):
            base = self.path_of(node.value)
            return self.scopes[0].get(ast.unparse(node)) or (base and f"{base}.{node.attr}")
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            several = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            return next(filter(self.program.wanted, map(self.path_of, several)), None)
        if isinstance(node, ast.NamedExpr):
            return self.path_of(node.value)
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            text = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            if function in _IMPORTS and text:
                return text[0] if function != "__import__" else text[0].split(".")[0]
            base = self.path_of(node.args[0] if function == "getattr" and node.args else node.func)
            if function == "getattr":
                return f"{base}.{text[0]}" if base and text else None
            return f"{base}()" if self.program.wanted(base) else None
        return None

    def bind(self, target: Any, value: Any) -> None:
        path = self.path_of(value)
        if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
            for one, other in zip(target.elts, value.elts):
                self.bind(one, other)
            return
        if not (self.program.wanted(path) or isinstance(value, (ast.Name, ast.Attribute))):
            path = None
        if isinstance(target, ast.Name):
            scope = self.scope(target.id)
            old = scope.get(target.id)
            if path is not None or (old or "").endswith("()") or not self.program.wanted(old):  # ignores `hvd = None` for a missing package
                scope[target.id] = path
        elif isinstance(target, ast.Attribute) and path is not None:
            self.scopes[0][ast.unparse(target)] = path  # self.x

    def followed(self, node: Any) -> bool:
        """Returns whether uses of a module are visible here."""
        outer = self.parents[node]
        if isinstance(outer, (ast.Attribute, ast.Compare, ast.UnaryOp, ast.Expr, ast.If, ast.While, ast.Assert, ast.Delete)):
            return True
        if isinstance(outer, (ast.IfExp, ast.BoolOp)):
            return node is getattr(outer, "test", None) or self.followed(outer)
        if isinstance(outer, ast.NamedExpr):
            return True
        if isinstance(outer, (ast.Tuple, ast.List)):
            assign = self.parents[outer]
            return isinstance(assign, ast.Assign) and all(
                isinstance(target, (ast.Tuple, ast.List)) and len(target.elts) == len(outer.elts)
                and all(isinstance(one, (ast.Name, ast.Attribute)) for one in target.elts) for target in assign.targets
            )  # fmt: skip
        if isinstance(outer, (ast.Assign, ast.AnnAssign)):
            targets = outer.targets if isinstance(outer, ast.Assign) else [outer.target]
            return all(isinstance(target, (ast.Name, ast.Attribute)) for target in targets)
        if isinstance(outer, ast.arguments):
            return not isinstance(self.parents[outer], ast.Lambda)
        call = self.parents[outer] if isinstance(outer, ast.keyword) else outer
        if not isinstance(call, ast.Call):
            return False
        function = ast.unparse(call.func)
        if function in ("getattr", "hasattr"):
            return True
        called = self.functions.get(function)
        names = [one.arg for one in called.args.args] if called else []
        return outer.arg in names if isinstance(outer, ast.keyword) else node in call.args[: len(names)]

    def given_on(self, node: Any, path: str) -> None:
        try:
            module = isinstance(find(path), types.ModuleType)
        except (Missing, Untold):
            return
        if module and isinstance(getattr(node, "ctx", ast.Load()), ast.Load) and not self.followed(node):
            self.program.add(f"line {node.lineno}: {ast.unparse(node)}", self.where(node), "unseen",
                             "it is given on here, and what is done with it there is not followed")  # fmt: skip

    def sibling(self, module: Optional[str], level: int) -> Optional[dict[str, Optional[str]]]:
        """Returns the names of a file beside this one, after reading it."""
        folder = self.path.parents[level - 1] if 0 < level <= len(self.path.parents) else self.path.parent
        *outer, last = (module or "").split(".")
        places = folder.joinpath(*outer, f"{last}.py"), folder.joinpath(*outer, last, "__init__.py")
        path = next(filter(pathlib.Path.is_file, places), None)
        if path is None:
            return None
        self.program.read(path)
        return self.program.modules.get(path.resolve(), {})

    def module(self, name: str, module: str, level: int) -> None:
        """Records that a file beside this one was imported as `name`."""
        names = self.sibling(module, level) or {}
        self.scopes[0].update((f"{name}.{one}", path) for one, path in names.items())

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            self.scope(name)[name] = alias.name if alias.asname else name
            if self.program.wanted(alias.name):
                self.program.name(alias.name, self.where(node))
            else:
                self.module(alias.asname or alias.name, alias.name, 0)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module, where, wanted = (None if node.level else node.module), self.where(node), self.program.wanted
        names = None if wanted(module) else self.sibling(node.module, node.level)
        for alias in node.names:
            name = alias.asname or alias.name
            path = (names or {}).get(alias.name) or (f"{module}.{alias.name}" if module and alias.name != "*" else module)
            if alias.name == "*" and names:
                self.scopes[-1].update(names)
            elif alias.name == "*" and wanted(module):
                found = _module(str(module))
                listed = getattr(found, "__all__", None) or [name for name in dir(found) if name[0] != "_"]
                self.scopes[-1].update((name, f"{module}.{name}") for name in listed)
                self.program.add(f"line {node.lineno}: {ast.unparse(node)}", where, "unseen",
                                 "names that are not here look like others of the program's: import those that are used")  # fmt: skip
            elif alias.name == "hvd" and not wanted(path):
                self.program.add(f"line {node.lineno}: {ast.unparse(node)}", where, "unseen", "the file that has it was not found")
            self.scope(name)[name] = path
            if wanted(path):
                self.program.name(str(path), where)
            elif alias.name != "*" and alias.name not in (names or {}):
                self.module(name, f"{node.module}.{alias.name}" if node.module else alias.name, node.level)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scopes.append({})
        self.generic_visit(node)
        own = self.scopes.pop()
        for outer in ("self", "cls", node.name):
            self.scopes[0].update((f"{outer}.{name}", path) for name, path in own.items() if self.program.wanted(path))

    def visit_FunctionDef(self, node: Any) -> None:
        arguments = node.args
        for one in filter(None, [*node.decorator_list, *arguments.defaults, *arguments.kw_defaults]):
            self.visit(one)
        places = [one.arg for one in [*arguments.posonlyargs, *arguments.args]]
        names = [*places, *(one.arg for one in arguments.kwonlyargs)]
        values = dict(zip(places[::-1], arguments.defaults[::-1]))
        values.update(zip((one.arg for one in arguments.kwonlyargs), arguments.kw_defaults))
        self.later.append((node, [*self.scopes, {name: self.given.get((node.name, name)) or self.path_of(values.get(name)) for name in names}]))

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: Any) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is not None:
            self.visit(node.value)
            for target in targets:
                self.bind(target, node.value)
        for target in targets:
            if not isinstance(target, (ast.Name, ast.Attribute)):
                self.visit(target)  # os.environ["..."]

    visit_AnnAssign = visit_Assign

    def visit_NamedExpr(self, node: Any) -> None:
        self.visit(node.value)
        self.bind(node.target, node.value)

    def visit_Name(self, node: Any) -> None:
        path = self.path_of(node)
        if not self.program.wanted(path):
            return self.generic_visit(node)
        if path and not path.endswith("()"):
            self.program.name(path, self.where(node))
            self.given_on(node, path)
        while isinstance(node, ast.Attribute):
            node = node.value
        if isinstance(node, ast.Call):
            self.visit(node)

    visit_Attribute = visit_Name

    def visit_Call(self, node: ast.Call) -> None:
        program, function, path = self.program, ast.unparse(node.func), self.path_of(node.func)
        if function == "getattr" or function in _IMPORTS:
            path, text = self.path_of(node), ast.unparse(node)
            if path and program.wanted(path):
                program.name(path, self.where(node))
                self.given_on(node, path)
            elif path is None and node.args and (self.program.wanted(self.path_of(node.args[0])) or any(f"{root}." in text for root in program.kind.roots)):
                program.add(text, self.where(node), "unseen", "a name that is made while it runs")
        elif path and program.wanted(path):
            program.name(path, self.where(node), node)
            inner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if isinstance(inner, ast.Call):
                self.visit(inner)
        else:
            self.visit(node.func)
            if function.split(".")[-1] == "partial" and node.args and program.wanted(partly := self.path_of(node.args[0])):
                program.name(str(partly), self.where(node), ast.Call(node.args[0], node.args[1:], node.keywords))
            called = self.functions.get(function)
            pairs = [*zip((one.arg for one in called.args.args), node.args)] if called else []
            for name, value in [*pairs, *((each.arg or "", each.value) for each in node.keywords)]:
                if program.wanted(self.path_of(value)):
                    self.given[function, name] = str(self.path_of(value))
        for one in [*node.args, *node.keywords]:
            self.visit(one)

    def visit_keyword(self, node: ast.keyword) -> None:
        self.program.word(node.arg or "", self.where(node.value))
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.program.word(node.value, self.where(node))
            if any(f"{name} -" in node.value for name in (self.program.kind.command, *self.program.kind.modules)):
                self.program.shell(node.value, str(self.path), node.lineno)

    def visit_List(self, node: ast.List) -> None:
        self.program.line([str(one.value) if isinstance(one, ast.Constant) else "..." for one in node.elts], self.where(node))
        self.generic_visit(node)


def _files(words: Sequence[str]) -> Iterator[pathlib.Path]:
    for path in map(pathlib.Path, words):
        yield from [path] if not path.is_dir() else [
            one for one in sorted(path.rglob("*"))
            if one.is_file() and (one.suffix in (".py", ".ipynb", *_SHELL) or one.name in ("Makefile", "Dockerfile"))
            and not any(part.startswith(".") for part in one.relative_to(path).parts)
        ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="cohort doctor")
    parser.add_argument("kind", choices=sorted(_KINDS))
    parser.add_argument("--cohort", required=True)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("program", nargs="*")
    given = parser.parse_intermixed_args()
    if not given.program:
        print(table(given.kind))
        return 0
    if given.kind == "horovod":
        sys.meta_path.insert(0, _Finder())
    sys.path.insert(0, str(pathlib.Path(given.cohort).resolve().parents[1] / "share/cohort/as-horovod"))
    program = Program(given.kind, given.cohort)
    for path in _files(given.program):
        program.read(path)
    uses = sorted(program.uses.values(), key=lambda use: (use.where[0].rsplit(":", 1)[0], int(use.where[0].rsplit(":", 1)[1])))
    if given.json:
        found = {"kind": given.kind, "uses": [dataclasses.asdict(use) for use in uses], "errors": program.errors}
        print(json.dumps({**found, "verdict": program.verdict()}, indent=1))
    else:
        for use in uses:
            more = f" and {len(use.where) - 3} more" if len(use.where) > 3 else ""
            print(f"{use.state.replace('missing', 'NOT HERE').replace('unseen', 'not seen'):9} {use.what}  {' '.join(use.where[:3])}{more}")
            if use.note:
                print(textwrap.indent(textwrap.fill(use.note, 100), " " * 12))
        for error in program.errors:
            print(f"not read  {error}")
        print(program.verdict())
    return int(bool(program.errors) or any(use.state == "missing" for use in uses))


if __name__ == "__main__":
    sys.exit(main())
