"""Operations on values: numbers, arrays, lists or tensors; the results are NumPy's."""

from __future__ import annotations

from typing import Any, Optional

from cohort._horovod.process_sets import ProcessSet, engine_of, global_process_set, root_in
from cohort._horovod.reduce_ops import ENGINE_OPS, Average, Sum, resolve
from cohort._horovod.submit import Pending, named, started
from cohort.keras import _flavor
from cohort.keras.compression import Compression


def _array(value: Any) -> Any:
    """A copy, contiguous."""
    import numpy

    try:
        if isinstance(value, (numpy.ndarray, numpy.generic, int, float, bool, complex, list, tuple)):
            return numpy.array(value, order="C")
        return numpy.array(_flavor.value_of(value) if hasattr(value, "path") else _numpy_of(value), order="C")
    except NotImplementedError as error:  # TensorFlow's
        raise TypeError(
            f"{type(value).__name__}: a tensor of a graph has no value yet -- within a tf.function use the operation of the "
            "same name of cohort.tensorflow (horovod.tensorflow)"
        ) from error


def _numpy_of(value: Any) -> Any:
    detach = getattr(value, "detach", None)  # torch
    value = detach() if detach is not None else value
    return value.numpy() if hasattr(value, "numpy") else value


def _result(work: Any, like: Any) -> Any:
    import numpy

    result = work.result
    if result.nbytes == 0:
        return numpy.empty(result.shape, like.dtype)
    return numpy.array(memoryview(result)).view(like.dtype).reshape(result.shape)


def allreduce(value: Any, name: Optional[str] = None, average: Optional[bool] = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, op: Optional[int] = None, compression: Any = Compression.none,
              process_set: ProcessSet = global_process_set) -> Any:  # fmt: skip
    """The reduction of a value over ranks, of its shape. op: hvd.Average (default), Sum, Min, Max, Product; averages of
    integers are truncated. Factors are applied before and after. `compression` means nothing for values."""
    array = _array(value)
    used = array.reshape(-1)
    full = named("allreduce", name, process_set)
    works = started("ALLREDUCE", [full], engine_of(process_set).all_reduce, full, used, op=ENGINE_OPS[resolve(op, average)],
                    prescale=prescale_factor, postscale=postscale_factor)  # fmt: skip
    Pending(works, lambda: None).wait()
    return used.reshape(array.shape)[()]


def allgather(value: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> Any:
    """The values of all ranks, one behind the other along dimension 0, which may differ; a number counts as one row."""
    array = _array(value)
    array = array.reshape(1) if array.ndim == 0 else array
    full = named("allgather", name, process_set)
    pending = Pending(started("ALLGATHER", [full], engine_of(process_set).all_gather, full, array), lambda: None)
    pending.wait()
    return _result(pending.works[0], array)


def broadcast(value: Any, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> Any:
    """The value of `root_rank`; all ranks' have its shape and type."""
    array = _array(value)
    used = array.reshape(-1)
    full = named("broadcast", name, process_set)
    root = root_in(process_set, root_rank)
    works = started("BROADCAST", [full], engine_of(process_set).broadcast, full, used, root)
    Pending(works, lambda: None).wait()
    return used.reshape(array.shape)[()]


def reducescatter(value: Any, name: Optional[str] = None, op: int = Average,
                  process_set: ProcessSet = global_process_set) -> Any:  # fmt: skip
    """This rank's rows of the reduction of a value; where dimension 0 does not divide, the first ranks get one row more.
    op: hvd.Average or hvd.Sum."""
    if op not in (Average, Sum):
        raise ValueError(f"reducescatter: op={op!r} -- hvd.Average and hvd.Sum are possible")
    array = _array(value)
    if array.ndim == 0:
        raise ValueError("reducescatter: a number has no rows")
    full = named("reducescatter", name, process_set)
    works = started("REDUCESCATTER", [full], engine_of(process_set).reduce_scatter, full, array, op=ENGINE_OPS[op])
    pending = Pending(works, lambda: None)
    pending.wait()
    return _result(pending.works[0], array)


def broadcast_global_variables(root_rank: int) -> None:
    """Raises ValueError: it meant the variables of a graph of TensorFlow 1."""
    raise ValueError(
        "broadcast_global_variables: there are no global variables in TensorFlow 2 -- give fit "
        "hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank)"
    )
