"""The library through which XLA calls operations. If it is unusable, the reason is reported once."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import warnings
from typing import Any, Dict, List, Sequence, Tuple

import jax
import numpy as np
from cohort import _core

_TARGET = "cohort_named"
_LIBRARY = pathlib.Path(_core.__file__).with_name("_jax_ffi.so")


@functools.lru_cache(maxsize=None)
def is_usable() -> bool:
    """Returns True if programs may be compiled with the library. Registers it the first time."""
    try:
        _register()
    except Exception as error:
        warnings.warn(
            f"cohort.jax: compiled programs call back into Python for their operations, which copies and takes longer -- {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _register() -> None:
    library = ctypes.CDLL(str(_LIBRARY))
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    library.cohort_jax_use.restype, library.cohort_jax_use.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    problem = library.cohort_jax_use(pointer_of(_core.named_calls(), b"cohort.named_calls"))
    if problem:
        raise RuntimeError(problem.decode())
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(library.cohort_jax_call), platform="cpu")


def lowered(ctx: Any, operands: Sequence[Any], call: Any) -> Any:
    """Returns the custom call, which extensions/jax/ffi/handler.cpp reads."""
    in_place = call.kind in ("allreduce", "broadcast")
    rule = jax.ffi.ffi_lowering(
        _TARGET,
        has_side_effect=True,
        operand_output_aliases={i: i for i in range(len(operands))} if in_place else {},
    )
    attributes: Dict[str, Any] = {
        **{name: np.int64(number) for name, number in call.numbers().items()},
        "names": "".join(f"{len(name.encode())}:{name}" for name in call.names),
        "postscale": np.float64(call.postscale),
        "prescale": np.float64(call.prescale),
        "rows": np.array([count for rows in call.rows for count in rows], np.int64),
    }
    return rule(ctx, *operands, **attributes)


def rows_differ(name: str, given: List[int], wanted: Tuple[int, ...]) -> str:
    """Returns the message for ranks whose numbers of rows are not those for which the program was compiled."""
    return (
        f"{name}: the ranks brought {list(given)} rows, and this program was compiled for {list(wanted)} -- results have "
        "one shape under jit -- bring equal rows on all ranks, or call it outside of jit"
    )
