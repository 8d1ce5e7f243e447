"""The small utilities of `horovod.common.util` that programs import, with its names and meanings."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_Item = TypeVar("_Item")

# Horovod's extensions, by the name of the framework's folder, with the package that each needs.
_FRAMEWORKS = {"tensorflow": "tensorflow", "torch": "torch"}


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns True if this process's framework ("torch" or "tensorflow") can use a GPU."""
    if ext_base_name not in _FRAMEWORKS:
        raise ValueError(f"gpu_available({ext_base_name!r}): of Horovod's frameworks Cohort has {sorted(_FRAMEWORKS)}")
    framework = importlib.import_module(_FRAMEWORKS[ext_base_name])
    if ext_base_name == "tensorflow":
        available = bool(framework.config.list_physical_devices("GPU"))
    else:
        available = bool(framework.cuda.is_available())
    if verbose:
        print(f"{ext_base_name} {framework.__version__}: {'a' if available else 'no'} GPU can be used")
    return available


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns True if `horovod.EXT_BASE_NAME` can be used here: its framework and cohort are installed."""
    needed = _FRAMEWORKS.get(ext_base_name)
    available = needed is not None and all(importlib.util.find_spec(name) for name in (needed, "cohort"))
    if verbose:
        print(f"horovod.{ext_base_name}: {'here' if available else 'not here'}")
    return available


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises ImportError where the extension cannot be used. `ext_env_var`, a variable of Horovod's build, means nothing."""
    name = os.path.basename(os.path.dirname(pkg_path)) if pkg_path else ext_name
    if not extension_available(name):
        needed = _FRAMEWORKS.get(name, name)
        raise ImportError(f"horovod.{name} cannot be used here -- it needs the packages {needed} and cohort")


def _query(name: str) -> Callable[..., bool]:
    def ask(verbose: bool = False) -> bool:
        from cohort import _core
        from cohort.horovod import basics

        if name == "nccl_built":  # like --check-build; `basics` answers for frameworks with tensors on the CPU
            answer = _core.nccl_version() > 0
        else:
            answer = bool(getattr(basics, name)())
        if verbose:
            print(f"{name}: {answer}")
        return answer

    ask.__name__ = name
    ask.__doc__ = f"What `{name}` of each framework's module says."
    return ask


mpi_built = _query("mpi_built")
gloo_built = _query("gloo_built")
nccl_built = _query("nccl_built")
ddl_built = _query("ddl_built")
ccl_built = _query("ccl_built")


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables, or removes those given as None, and puts them back afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        for name, value in variables.items():
            _set(name, value)
        yield
    finally:
        for name, value in before.items():
            _set(name, value)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """Returns a function of (op, average) that returns the reduction meant; `average` is the old way to say it.

    It raises ValueError where both are given.
    """

    def handle(op: Any, average: bool | None) -> Any:
        if op is not None:
            if average is not None:
                raise ValueError("op and average were both given -- op alone says which reduction")
            return op
        if average is None:
            return reduce_ops.Average
        warnings.warn("average=... is deprecated: use op=...", DeprecationWarning, stacklevel=3)
        return reduce_ops.Average if average else reduce_ops.Sum

    return handle


def num_rank_is_power_2(num_rank: int) -> bool:
    """Returns True if it is 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: list[_Item], num_parts: int) -> list[list[_Item]]:
    """Returns at most `num_parts` lists that together are `items`, in order. Their lengths differ by one at most, and
    the first ones are the longer ones."""
    each, more = divmod(len(items), num_parts)
    parts = []
    begin = 0
    for part in range(num_parts):
        end = begin + each + (part < more)
        if end > begin:
            parts.append(items[begin:end])
        begin = end
    return parts


def is_iterable(value: object) -> bool:
    """Returns True if `iter(value)` works."""
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(version: str, target: str) -> bool:
    """Compares versions of the form "major.minor.patch"; a suffix (rc1, +cpu, .dev0) is left out.

    Raises ValueError if `target` has another form.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", target):
        raise ValueError(f"is_version_greater_equal_than: {target!r} is not of the form major.minor.patch")
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    if not numbers:
        raise ValueError(f"is_version_greater_equal_than: {version!r} does not begin with a number")
    given = [int(part) for part in numbers[0].split(".")]
    return (given + [0, 0, 0])[:3] >= [int(part) for part in target.split(".")]


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Raises HorovodVersionMismatchError if another version of the package NAME is installed than `version`."""
    from horovod.common.exceptions import HorovodVersionMismatchError

    installed = importlib.metadata.version(name)
    if installed != version:
        raise HorovodVersionMismatchError(name, installed, version) from exception
