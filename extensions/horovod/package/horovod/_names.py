"""Finds the modules of Horovod that are Cohort's under another name, and names an alternative to those that are missing."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

_MODULES = {
    "horovod.common.elastic": "cohort.horovod.torch.elastic",
    "horovod.common.exceptions": "cohort.horovod.exceptions",
    "horovod.common.process_sets": "cohort.horovod.process_sets",
    "horovod.keras.callbacks": "cohort.keras.callbacks",
    "horovod.keras.elastic": "cohort.keras.elastic",
    "horovod.tensorflow.compression": "cohort.tensorflow",
    "horovod.tensorflow.elastic": "cohort.tensorflow.elastic",
    "horovod.tensorflow.functions": "cohort.tensorflow",
    "horovod.tensorflow.keras.callbacks": "cohort.keras.callbacks",
    "horovod.tensorflow.keras.elastic": "cohort.keras.elastic",
    "horovod.tensorflow.mpi_ops": "cohort.tensorflow.mpi_ops",
    "horovod.tensorflow.sync_batch_norm": "cohort.tensorflow.sync_batch_norm",
    "horovod.torch.compression": "cohort.horovod.torch",
    "horovod.torch.elastic": "cohort.horovod.torch.elastic",
    "horovod.torch.elastic.sampler": "cohort.horovod.torch.elastic",
    "horovod.torch.elastic.state": "cohort.horovod.torch.elastic",
    "horovod.torch.functions": "cohort.horovod.torch",
    "horovod.torch.mpi_ops": "cohort.horovod.torch.mpi_ops",
    "horovod.torch.optimizer": "cohort.horovod.torch",
    "horovod.torch.sync_batch_norm": "cohort.horovod.torch",
}
_NOT_HERE = {
    "horovod.data": "torch.utils.data.DataLoader loads in the background with num_workers=N",
    "horovod.mxnet": "MXNet has been retired by its makers, and is left out; horovod.torch is there",
}


class _Finder:
    """Finds and loads modules that no other finder has found."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in _NOT_HERE:
            raise ImportError(_text(name), name=name)
        return importlib.machinery.ModuleSpec(name, _Finder(), is_package=True) if name in _MODULES else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> None:
        pass

    def exec_module(self, module: ModuleType) -> None:
        target = importlib.import_module(_MODULES[module.__name__])
        names = getattr(target, "__all__", [name for name in vars(target) if not name.startswith("_")])
        vars(module).update({name: getattr(target, name) for name in names}, __doc__=target.__doc__, __all__=names,
                            __getattr__=functools.partial(getattr, target))  # fmt: skip


sys.meta_path.append(_Finder)  # type: ignore[arg-type]


def _text(name: str) -> str:
    return f"{name} is not in the package `horovod` of Cohort -- {_NOT_HERE[name]}"


def getattr_of(package: str, not_here: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a `__getattr__` for a package that lacks some parts. It raises an AttributeError that says what to use instead.

    `from PACKAGE import PART` and `import PACKAGE.PART` raise the same as an ImportError.
    """
    _NOT_HERE.update({f"{package}.{name}": instead for name, instead in not_here.items()})

    def getattr_of_package(name: str) -> Any:
        if name in not_here:
            raise AttributeError(_text(f"{package}.{name}"))
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattr_of_package


@contextlib.contextmanager
def needs_cohort(package: str) -> Iterator[None]:
    """While the context lasts, an ImportError of Cohort's modules says what to do."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").split(".")[0] != "cohort":
            raise
        raise ImportError(
            f"{package} is here in Cohort's version, and the package it needs, cohort, is not -- `pip install .` in a clone of "
            f"Cohort installs it for this Python -- {error}",
            name=error.name,
        ) from error


def passed_on(module: ModuleType, own: Mapping[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a package that has its `own` names and passes on those of `module`."""
    return functools.partial(getattr, module), lambda: sorted({*own, *dir(module)})
