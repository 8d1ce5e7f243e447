"""_core.pyi says what the compiled module has: the same names, and for each function the same arguments."""

import ast
import inspect
import pathlib
import re
import unittest

import cohort
from cohort import _core

STUB = pathlib.Path(cohort.__file__).parent / "_core.pyi"
# Attributes that Python gives each class, or pybind11 each module, by itself.
GIVEN = set(dir(type("Empty", (), {"__slots__": ()}))) | {"__module__", "__getstate__", "__setstate__", "__weakref__"}
GIVEN_TO_ENUMS = {"__entries", "__members__", "__int__", "__index__"}


def stubs(body):
    """By name: the functions of that name (several if overloaded), a class, or, of a value, whether it is a property, which
    the stub calls Final."""
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = ast.unparse(node.annotation).startswith("Final[")
    return found


def fields_of(name, options):
    """Returns the fields of a TypedDict, and of those that it derives from."""
    node = options[name]
    inherited = [one for base in node.bases if base.id in options for one in fields_of(base.id, options)]
    return [*inherited, *(one.target.id for one in node.body)]


def arguments_of(node, options):
    """The names of arguments in order, and those that have no order: `**how: Unpack[X]` stands for X's."""
    ordered = [one.arg for one in node.args.posonlyargs + node.args.args if one.arg not in ("self", "cls")]
    named = [one.arg for one in node.args.kwonlyargs]
    if node.args.kwarg is not None and isinstance(node.args.kwarg.annotation, ast.Subscript):
        named += fields_of(node.args.kwarg.annotation.slice.id, options)
    return ordered, sorted(named)


def arguments_said(function):
    """The same of a compiled function's docstring, for each overload; nothing where it has no such line."""
    name = re.escape(function.__name__)
    lines = re.findall(rf"^(?:\d+\. )?{name}\((.*)\) -> ", function.__doc__ or "", re.MULTILINE)
    lists = []
    for line in lines:
        words, depth, word = [], 0, ""
        for letter in line + ",":
            depth += (letter in "[(") - (letter in "])")
            if letter == "," and depth == 0:
                words.append(word.split(":")[0].split("=")[0].strip())
                word = ""
            else:
                word += letter
        star = words.index("*") if "*" in words else len(words)
        ordered = [one for one in words[:star] if one not in ("", "self", "/", "*args", "**kwargs")]
        lists.append((ordered, sorted(words[star + 1 :])))
    return lists


class Stub(unittest.TestCase):
    def setUp(self):
        self.stubs = stubs(ast.parse(STUB.read_text()).body)
        self.options = {name: self.stubs.pop(name) for name in list(self.stubs) if name.startswith("_") and name[1].isupper()}

    def test_the_module_has_what_the_stub_says(self):
        for name, node in self.stubs.items():
            with self.subTest(name):
                self.assertTrue(hasattr(_core, name), f"the module has no {name}")
                if isinstance(node, ast.ClassDef):
                    self.compare_class(node, getattr(_core, name))
                elif node:
                    self.compare_function(name, node, getattr(_core, name))

    def test_the_stub_says_what_the_module_has(self):
        names = {name for name in vars(_core) if not name.startswith("__")}
        self.assertEqual(names - set(self.stubs), set())
        for name, node in self.stubs.items():
            if not isinstance(node, ast.ClassDef):
                continue
            has = set(vars(getattr(_core, name))) - GIVEN - GIVEN_TO_ENUMS - {"__doc__"}
            said = set(stubs(node.body))
            with self.subTest(name):
                self.assertEqual({one for one in has - said if not one.startswith("_")}, set())

    def compare_class(self, node, found):
        for name, member in stubs(node.body).items():
            with self.subTest(f"{node.name}.{name}"):
                if name == "__buffer__":  # the buffer protocol of C; a method from Python 3.12 on
                    memoryview_of = "__buffer__" in dir(found) or not hasattr(bytes, "__buffer__")
                    self.assertTrue(memoryview_of)
                    continue
                if member is False:  # a value: the module's, or one that Python adds to its objects
                    self.assertTrue(hasattr(found, name) or "__dict__" in vars(found), f"{node.name} has no {name}")
                    continue
                self.assertTrue(hasattr(found, name), f"{node.name} has no {name}")
                compiled = inspect.getattr_static(found, name)
                self.assertEqual(member is True, isinstance(compiled, property), f"{node.name}.{name}: property?")
                if member is not True:
                    self.compare_function(name, member, getattr(found, name))

    def compare_function(self, name, nodes, compiled):
        said = arguments_said(compiled)
        if not said:  # Python's own, or a signature of arguments that are looked at by hand
            return
        expected = [arguments_of(node, self.options) for node in nodes]
        for ordered, named in said:
            if all(re.fullmatch(r"arg\d+", one) for one in ordered + named):  # without names: only how many
                self.assertIn(len(ordered + named), [len(sum(one, [])) for one in expected], name)
            else:
                self.assertIn((ordered, named), expected, name)


if __name__ == "__main__":
    unittest.main()
