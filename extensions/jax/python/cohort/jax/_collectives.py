"""The operations: eagerly, under `jit` and JAX's other transformations, with gradients.

Gradients are those that Horovod computes. If all ranks get the same result (allgather, broadcast), ranks average the
incoming gradients, which is right if the loss is the average of the ranks' losses. Minimum, maximum and product have
true gradients: incoming gradients are summed, and passed to the ranks whose values made the result.

All raise ValueError for arguments that have no meaning (nothing was done then), and HorovodInternalError if there is no
world, if ranks disagree, or if one is lost; failures in a compiled program are JAX's JaxRuntimeError with that text.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterable, List, Optional, Sequence, Tuple, Union

import jax
import jax.numpy as jnp
from cohort.horovod.basics import rank
from cohort.horovod.operations import (Adasum, Average, Call, Max, Min, Product, Sum, group_names, named, reduced_back,
                                   resolve)  # fmt: skip
from cohort.horovod.process_sets import ProcessSet, engine_of, global_process_set, root_in
from cohort.jax._arrays import checked, checked_list, is_traced
from cohort.jax._operations import at_once, in_program

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "grouped_allreduce", "reducescatter"]


def _call(kind: str, name: Optional[str], process_set: ProcessSet, arrays: Sequence[Any], op: int = Average,
          prescale: float = 1.0, postscale: float = 1.0, *, group: bool = False, **how: Any) -> Call:  # fmt: skip
    # Counted apart: unnamed operations of programs are counted when traced, at other times than eager ones run.
    shown = f"jit.{kind}" if is_traced(arrays) else kind
    names = group_names(shown, name, process_set, len(arrays)) if group else [named(shown, name, process_set)]
    return Call(kind, tuple(names), process_set, op, prescale, postscale, **how)


def _run(call: Call, arrays: Sequence[jax.Array]) -> List[jax.Array]:
    return in_program(call, arrays) if is_traced(arrays) else at_once(call, arrays)[0]


def _is_none(cotangent: Any) -> bool:
    """Returns True for integers. They have no gradient, so their gradient is None."""
    return bool(cotangent.dtype == jax.dtypes.float0)


# --- allreduce ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_reduce(call: Call, arrays: Tuple[jax.Array, ...]) -> Tuple[jax.Array, ...]:
    return tuple(_run(call, arrays))


def _all_reduce_forward(call: Call, arrays: Tuple[jax.Array, ...]) -> Any:
    return tuple(_run(call, arrays)), arrays if call.op in (Min, Max, Product) else None


def _all_reduce_backward(call: Call, arrays: Any, cotangents: Tuple[jax.Array, ...]) -> Any:
    at = [i for i, cotangent in enumerate(cotangents) if not _is_none(cotangent)]
    back = call._replace(names=tuple(call.names[i] for i in at)).also("grad")
    values = [] if arrays is None else [arrays[i] for i in at]
    equal = lambda a, b: (a == b).astype(a.dtype)  # noqa: E731
    own = reduced_back(back, [cotangents[i] for i in at], values, _run, equal, _products_of_others) if at else []
    return (tuple(own[at.index(i)] if i in at else None for i in range(len(cotangents))),)


_all_reduce.defvjp(_all_reduce_forward, _all_reduce_backward)


def _products_of_others(back: Call, values: Sequence[jax.Array]) -> List[jax.Array]:
    engine = engine_of(back.process_set)
    rows = ((1,) * engine.size(),) * len(values)
    gather = back.also("values", kind="allgather", op=Average, prescale=1.0, postscale=1.0, rows=rows)
    own = engine.rank()
    every = _run(gather, [value[None] for value in values])
    products = [jnp.prod(jnp.concatenate([one[:own], one[own + 1 :]]) * back.prescale, axis=0) for one in every]
    return [jnp.conj(one) if jnp.iscomplexobj(one) else one for one in products]


def _reduced(call: Call, arrays: List[jax.Array]) -> List[jax.Array]:
    if call.op == Adasum:
        raise ValueError("op=hvd.Adasum is not there for JAX -- use hvd.Average or hvd.Sum")
    if not is_traced(arrays):
        return _run(call, arrays)
    return list(arrays) if _changes_nothing(call, arrays) else list(_all_reduce(call, tuple(arrays)))


def _changes_nothing(call: Call, arrays: Sequence[jax.Array]) -> bool:
    # A program compiled in a world of one is compiled again for a larger one.
    alone = engine_of(call.process_set).size() == 1 and call.prescale == call.postscale == 1
    return alone and all(jnp.issubdtype(array.dtype, jnp.number) for array in arrays)


def allreduce(tensor: Any, average: Optional[bool] = None, name: Optional[str] = None, op: Optional[int] = None,
              prescale_factor: float = 1.0, postscale_factor: float = 1.0,
              process_set: ProcessSet = global_process_set) -> jax.Array:  # fmt: skip
    """Reduces an array over the set's ranks and returns the result, of the same shape.

    op                one of hvd.Average (default), Sum, Min, Max, Product; averages of integers are truncated
    prescale_factor   each rank's values are multiplied by this factor before
    postscale_factor  the result is multiplied by this factor
    """
    array = checked(tensor, "allreduce")
    op = resolve(op, average)
    return _reduced(_call("allreduce", name, process_set, [array], op, prescale_factor, postscale_factor), [array])[0]


def grouped_allreduce(tensors: Sequence[Any], average: Optional[bool] = None, name: Optional[str] = None,
                      op: Optional[int] = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set) -> List[jax.Array]:  # fmt: skip
    """Like `allreduce` for several arrays, which travel together. None is reduced before all ranks have all."""
    arrays = checked_list(tensors, "grouped_allreduce")
    op = resolve(op, average)
    return _reduced(_call("allreduce", name, process_set, arrays, op, prescale_factor, postscale_factor, group=True), arrays)


# --- allgather ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_gather(call: Call, array: jax.Array) -> jax.Array:
    return _all_gather_forward(call, array)[0]


def _all_gather_forward(call: Call, array: jax.Array) -> Any:
    own = engine_of(call.process_set).rank()
    # Keeps the number of this rank's rows as a shape, because a shape remains a number under jit.
    count = jnp.empty((array.shape[0], 0))
    if is_traced([array]):
        return in_program(call, [array])[0], (count, sum(call.rows[0][:own]))
    results, received = at_once(call, [array])
    return results[0], (count, sum(received[0][:own]))


def _all_gather_backward(call: Call, kept: Any, cotangent: jax.Array) -> Any:
    count, start = kept
    if _is_none(cotangent):
        return (None,)
    mean = _run(call.also("grad", kind="allreduce", rows=()), [cotangent])[0]
    return (jax.lax.dynamic_slice_in_dim(mean, start, count.shape[0]),)


_all_gather.defvjp(_all_gather_forward, _all_gather_backward)


def allgather(tensor: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> jax.Array:
    """Concatenates the ranks' arrays along dimension 0, in the order of ranks.

    Dimension 0 may differ, others must not. Under `jit`, where shapes are known in advance, dimension 0 has to be the
    same on all ranks, too; otherwise the program fails on all ranks.
    """
    array = checked(tensor, "allgather")
    if array.ndim == 0:
        raise ValueError("allgather: an array without dimensions cannot be concatenated -- pass x.reshape(1)")
    call = _call("allgather", name, process_set, [array])
    if not is_traced([array]):
        return _run(call, [array])[0]
    return _all_gather(call._replace(rows=((array.shape[0],) * engine_of(process_set).size(),)), array)


# --- broadcast ---


def _with_gradient(backward: Callable[[Call, jax.Array], jax.Array]) -> Callable[[Call, jax.Array], jax.Array]:
    """Returns an operation on one array, whose gradient depends only on the incoming gradient."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def operation(call: Call, array: jax.Array) -> jax.Array:
        return _run(call, [array])[0]

    def forward(call: Call, array: jax.Array) -> Any:
        return operation(call, array), None

    def back(call: Call, _: None, cotangent: jax.Array) -> Any:
        return (None if _is_none(cotangent) else backward(call, cotangent),)

    operation.defvjp(forward, back)
    return operation


@_with_gradient
def _broadcast(call: Call, cotangent: jax.Array) -> jax.Array:
    mean = _run(call.also("grad", kind="allreduce", op=Average), [cotangent])[0]
    # Dropping the value here would skip an operation that the root runs.
    return jnp.where(rank() == call.root, mean, jnp.zeros_like(mean))


def broadcast(tensor: Any, root_rank: int, name: Optional[str] = None,
              process_set: ProcessSet = global_process_set) -> jax.Array:  # fmt: skip
    """Returns rank `root_rank`'s array (a rank of the world, also for process sets) on every rank. The others' have to
    have its shape and type."""
    array = checked(tensor, "broadcast")
    root_in(process_set, root_rank)  # raises now for a wrong root
    call = _call("broadcast", name, process_set, [array], root=root_rank)
    return _broadcast(call, array) if is_traced([array]) else _run(call, [array])[0]


# --- alltoall ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_to_all(call: Call, array: jax.Array) -> Tuple[jax.Array, jax.Array]:
    return _all_to_all_forward(call, array)[0]


def _all_to_all_forward(call: Call, array: jax.Array) -> Any:
    count = jnp.empty((array.shape[0], 0))
    if is_traced([array]):
        result, received = in_program(call, [array])[0], jnp.array(call.rows[0], jnp.int32)
    else:
        results, rows = at_once(call, [array])
        result, received = results[0], jnp.array(rows[0], jnp.int32)
    return (result, received), (count, received)


def _all_to_all_backward(call: Call, kept: Any, cotangents: Any) -> Any:
    count, received = kept
    given = cotangents[0]
    if _is_none(given):
        return (None,)
    back = call.also("grad")
    if not is_traced([given, received]):
        result = at_once(back._replace(splits=tuple(int(rows) for rows in received)), [given])[0][0]
    elif call.rows:
        result = in_program(back, [given])[0]
    else:
        raise ValueError("alltoall: under jit its gradient needs equal parts -- take the gradient outside of jit")
    if result.shape[0] < count.shape[0]:  # rows that were not sent
        rest = jnp.zeros((count.shape[0] - result.shape[0], *result.shape[1:]), result.dtype)
        result = jnp.concatenate([result, rest])
    return (result,)


_all_to_all.defvjp(_all_to_all_forward, _all_to_all_backward)


def alltoall(tensor: Any, splits: Optional[Iterable[int]] = None, name: Optional[str] = None,
             process_set: ProcessSet = global_process_set) -> Union[jax.Array, Tuple[jax.Array, jax.Array]]:  # fmt: skip
    """Sends rows to all ranks, and returns the rows received, in the order of ranks; with `splits` also an array of
    int32 with their numbers by rank.

    splits  rows for each rank; rows beyond their sum are not sent. None: equal parts. Not under `jit`, where the shape
            of the result has to be known in advance
    """
    array = checked(tensor, "alltoall")
    size = engine_of(process_set).size()
    call = _call("alltoall", name, process_set, [array])
    sent = array
    if splits is not None:
        if is_traced([array, splits]):
            raise ValueError(
                "alltoall: with splits it cannot be part of a compiled program, since the number of rows that come is not "
                "known before -- call it outside of jit, or pad to equal parts"
            )
        call = call._replace(splits=tuple(int(count) for count in splits))
        sent = array[: sum(call.splits or ())]
    elif array.ndim == 0 or array.shape[0] % size != 0:
        raise ValueError(f"alltoall: {array.shape} cannot be divided among {size} ranks -- give splits")
    elif is_traced([array]):
        call = call._replace(rows=((array.shape[0] // size,) * size,))
    result, received = _all_to_all(call, sent)
    return result if splits is None else (result, received)


# --- reducescatter ---


@_with_gradient
def _reduce_scatter(call: Call, cotangent: jax.Array) -> jax.Array:
    factor = call.prescale * call.postscale * (engine_of(call.process_set).size() if call.op == Sum else 1)
    given = cotangent if factor == 1 else cotangent * factor
    return _run(call.also("grad", kind="allgather", op=Average, prescale=1.0, postscale=1.0), [given])[0]


def reducescatter(tensor: Any, name: Optional[str] = None, op: int = Average,
                  process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> jax.Array:  # fmt: skip
    """Reduces an array and returns this rank's rows of the result. If dimension 0 does not divide evenly, the first
    ranks get one row more. op: hvd.Average or hvd.Sum; for the factors see `allreduce`."""
    array = checked(tensor, "reducescatter")
    if op not in (Average, Sum):
        raise ValueError(f"reducescatter: op={op!r} -- hvd.Average and hvd.Sum are supported")
    if array.ndim == 0:
        raise ValueError("reducescatter: an array without dimensions cannot be scattered")
    size = engine_of(process_set).size()
    each, more = divmod(array.shape[0], size)
    rows = (tuple(each + (rank < more) for rank in range(size)),)
    call = _call("reducescatter", name, process_set, [array], op, prescale_factor, postscale_factor, rows=rows)
    return _reduce_scatter(call, array) if is_traced([array]) else _run(call, [array])[0]
