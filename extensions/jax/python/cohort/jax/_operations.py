"""One JAX primitive for all operations by name: eager if the arrays have values, else part of a compiled program.

Compiled programs call the engine through XLA's foreign function interface if its version is supported, else by calling
back into Python, which copies. Operations have no order, because ranks match them by name, wherever XLA places them. JAX drops
a result that nothing uses together with its operation, on all ranks if they run the same program.
"""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from cohort.horovod.arrays import carry_out
from cohort.horovod.operations import Call
from cohort.horovod.process_sets import engine_of
from cohort.jax import _ffi
from cohort.jax._arrays import handed_over, view
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def at_once(call: Call, arrays: Sequence[jax.Array]) -> Tuple[List[jax.Array], List[List[int]]]:
    """Runs the operations on computed arrays and waits for them. Raises the errors of hvd's operations."""
    results, received = carry_out(call, [view(array) for array in arrays])
    return [handed_over(array) for array in results], received


# --- as a part of a program ---

_named = Primitive("cohort_named")
_named.multiple_results = True


def in_program(call: Call, arrays: Sequence[jax.Array]) -> List[jax.Array]:
    """Runs the operations if arrays may be placeholders for values not computed yet."""
    if not arrays:
        return []
    engine_of(call.process_set)  # raises now if this rank has no engine
    results: List[jax.Array] = _named.bind(*arrays, call=call)
    return results


def _result_shape(call: Call, at: int, shape: Tuple[int, ...]) -> Tuple[int, ...]:
    if not call.rows:
        return shape
    rows = call.rows[at]
    own = sum(rows) if call.kind != "reducescatter" else rows[engine_of(call.process_set).rank()]
    return (own, *shape[1:])


@_named.def_impl
def _impl(*arrays: jax.Array, call: Call) -> List[jax.Array]:
    results, received = at_once(call, arrays)
    if call.rows and call.kind != "reducescatter":
        for name, given, wanted in zip(call.names, received, call.rows):
            if tuple(given) != wanted:
                raise ValueError(_ffi.rows_differ(name, given, wanted))
    return results


@_named.def_abstract_eval
def _abstract(*avals: Any, call: Call) -> List[Any]:
    return [jax.core.ShapedArray(_result_shape(call, i, aval.shape), aval.dtype) for i, aval in enumerate(avals)]


def _batch(arrays: Sequence[Any], dims: Sequence[Any], *, call: Call) -> Tuple[Any, Any]:
    # One operation for the whole batch. If rows have a meaning, the batch becomes the dimension after them.
    at = 1 if call.rows else 0
    moved = [one if dim is None else jnp.moveaxis(one, dim, at) for one, dim in zip(arrays, dims)]
    return _named.bind(*moved, call=call), [None if dim is None else at for dim in dims]


batching.primitive_batchers[_named] = _batch


def _lower(ctx: Any, *operands: Any, call: Call) -> Any:
    devices = getattr(ctx.module_context.axis_context, "num_devices", None)
    devices = (
        devices if devices is not None else getattr(getattr(ctx.module_context.axis_context, "mesh", None), "size", 1)
    )
    if devices != 1:
        raise ValueError(
            f"{call.kind} {call.names[0]!r}: it is compiled for {devices} devices of this process -- an operation takes "
            "one array of each process -- start a process for each device, or reduce over the devices first "
            "(jax.lax.psum) and call this outside"
        )
    if _ffi.is_usable():
        return _ffi.lowered(ctx, operands, call)
    return mlir.lower_fun(lambda *arrays: _called_back(call, arrays), multiple_results=True)(ctx, *operands)


mlir.register_lowering(_named, _lower, platform="cpu")


def _called_back(call: Call, arrays: Sequence[Any]) -> List[Any]:
    shapes = [jax.ShapeDtypeStruct(_result_shape(call, i, one.shape), one.dtype) for i, one in enumerate(arrays)]

    def run(*values: Any) -> Tuple[np.ndarray, ...]:
        results = carry_out(call, [view(value) for value in values])[0]
        for name, shape, result in zip(call.names, shapes, results):
            if result.shape != shape.shape:
                raise ValueError(_ffi.rows_differ(name, [len(result)], (shape.shape[0],)))
        return tuple(results)

    return list(io_callback(run, tuple(shapes), *arrays))
