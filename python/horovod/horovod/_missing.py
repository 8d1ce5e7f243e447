"""What a part of Horovod says that is not here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


def missing(part: str, instead: str) -> ImportError:
    """The error for `import PART`."""
    return ImportError(_text(part, instead), name=part)


def _text(part: str, instead: str) -> str:
    return f"{part} is not in the package `horovod` of Cohort -- {instead}"


def getattr_of(package: str, not_here: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package some parts of which are not here: an AttributeError that says what there is instead.

    `from PACKAGE import PART` and `import PACKAGE.PART` raise the same as an ImportError.
    """
    sys.meta_path.append(_Finder(package, not_here))  # type: ignore[arg-type]

    def getattr_of_package(name: str) -> Any:
        if name in not_here:
            raise AttributeError(_text(f"{package}.{name}", not_here[name]))
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattr_of_package


class _Finder:
    """Asked for modules that nobody else has found."""

    def __init__(self, package: str, not_here: Mapping[str, str]) -> None:
        self._instead = {f"{package}.{name}": instead for name, instead in not_here.items()}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in self._instead:
            raise missing(name, self._instead[name])
