"""Pickles functions, arguments, results and exceptions between a driver and the ranks it starts: by cloudpickle if
installed, else by pickle, which finds functions and classes only by their importable module. Also pickles objects
between ranks, which run one program: by pickle if possible, since named objects of the program exist on all ranks."""

from __future__ import annotations

import collections
import importlib.util
import io
import pickle
import sys
import types

from cohort.errors import InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_GET_CLOUDPICKLE = "install cloudpickle (`pip install cloudpickle`; Debian: python3-cloudpickle)"


class NotImportable(pickle.PicklingError):
    """A function or class that exists only in the running program."""


def _reduce_builtin(function: Any) -> Any:
    """Sends functions of compiled modules by name: pybind11 makes them methods of a capsule that cannot be pickled."""
    return function.__name__ if type(function.__self__).__name__ == "PyCapsule" else function.__reduce__()


class _ByReference(pickle.Pickler):
    """Refuses names in `__main__`: pickle would silently write `__main__.train`, and a rank's `__main__` has no `train`."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, types.BuiltinFunctionType):
            return _reduce_builtin(obj)
        if isinstance(obj, (types.FunctionType, type)):
            module = getattr(obj, "__module__", None)
            name = getattr(obj, "__qualname__", "")
            if module == "__main__" or "<" in name:
                kind = "class" if isinstance(obj, type) else "function"
                raise NotImportable(f"{kind} {name} exists in this program only: no module has it for the ranks to import")
        return NotImplemented


def _by_value(cloudpickle: Any, value: object) -> bytes:
    """Like cloudpickle.dumps, but code keeps its file's name (3.1.3 drops it), so that tracebacks show its lines."""
    table = cloudpickle.CloudPickler.dispatch_table
    reduce_code = table[types.CodeType]

    def reduce_with_file(code: types.CodeType) -> Any:
        make, args = reduce_code(code)
        return make, tuple(code.co_filename if isinstance(arg, str) and arg == "<dynamic-code>" else arg for arg in args)

    class WithFiles(cloudpickle.CloudPickler):
        dispatch_table = collections.ChainMap(
            {types.CodeType: reduce_with_file, types.BuiltinFunctionType: _reduce_builtin}, table
        )

    buffer = io.BytesIO()
    WithFiles(buffer).dump(value)
    return buffer.getvalue()


def find_cloudpickle() -> Any:
    """Returns cloudpickle: the installed one, or Spark's copy without the rest of Spark. None if there is neither."""
    try:
        import cloudpickle
    except ImportError:
        spark = importlib.util.find_spec("pyspark")
        if spark is None or not spark.submodule_search_locations:
            return None
        sys.path.append(spark.submodule_search_locations[0])
        try:
            import cloudpickle
        except ImportError:
            return None
        finally:
            del sys.path[-1]
    return cloudpickle


def dumps(value: object) -> bytes:
    """Returns the value as bytes for another process. Raises any error of pickling; NotImportable if only cloudpickle,
    which is not installed, could pickle it."""
    cloudpickle = find_cloudpickle()
    if cloudpickle is None:
        buffer = io.BytesIO()
        _ByReference(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return buffer.getvalue()
    return _by_value(cloudpickle, value)


def dumps_for_ranks(value: object) -> bytes:
    """Returns the value as bytes for a rank of the same job, which runs the same program. The program's own objects are
    sent by name, so that classes stay the same classes. Objects without a name are sent by cloudpickle, if
    installed."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        try:
            import cloudpickle
        except ImportError:
            if isinstance(error, TypeError):
                raise error from None
            raise pickle.PicklingError(f"{error} -- {_GET_CLOUDPICKLE}, or send what a module has a name for") from error
        return _by_value(cloudpickle, value)


def loads_of_ranks(data: bytes | bytearray | memoryview) -> Any:
    """Loads bytes from `dumps_for_ranks`. Only bytes from this job's ranks may get here. Each rank has proved that it
    has the job's secret, and messages of uint8 are authenticated."""
    return pickle.loads(data)


def dump_call(function: object, args: Iterable[object], kwargs: dict[str, object]) -> bytes:
    """Returns (function, args, kwargs) as bytes. Raises InvalidArgument, naming a part that cannot be sent and why."""
    args = tuple(args)
    try:
        return dumps((function, args, kwargs))
    except Exception as error:
        part, reason = _culprit(function, args, kwargs) or ("the call", error)
        advice = "give what can be sent (numbers, arrays, names of files), and open or make the rest inside the function"
        if isinstance(reason, NotImportable):
            advice = f"{_GET_CLOUDPICKLE}, or put it into a module and import it from there"
        raise InvalidArgument(
            f"{part} cannot be sent to the ranks -- {type(reason).__name__}: {reason} -- {advice}"
        ) from error


def load_call(data: bytes) -> Any:
    """Loads the result of `dump_call`, made by this job's driver."""
    find_cloudpickle()  # the bytes refer to it
    return pickle.loads(data)


def _culprit(function: object, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[str, Exception] | None:
    name = getattr(function, "__name__", type(function).__name__)
    parts = [(f"the function {name} or something that it refers to", function)]
    parts += [(f"argument {i} of {name}", value) for i, value in enumerate(args)]
    parts += [(f"argument {key!r} of {name}", value) for key, value in kwargs.items()]
    for label, value in parts:
        try:
            dumps(value)
        except Exception as error:
            return label, error
    return None
