"""Operations on values: numbers, arrays, lists or tensors. The results are NumPy arrays."""

from __future__ import annotations

from typing import Any, Optional

from cohort.horovod.arrays import carry_out
from cohort.horovod.operations import Average, Call, Sum, named, resolve
from cohort.horovod.process_sets import ProcessSet, global_process_set
from cohort.keras import _flavor
from cohort.keras.compression import Compression

__all__ = ["allgather", "allreduce", "broadcast", "broadcast_global_variables", "reducescatter"]


def _array(value: Any) -> Any:
    """Returns a contiguous copy."""
    import numpy

    try:
        if isinstance(value, (numpy.ndarray, numpy.generic, int, float, bool, complex, list, tuple)):
            return numpy.array(value, order="C")
        return numpy.array(_flavor.value_of(value) if hasattr(value, "path") else _numpy_of(value), order="C")
    except NotImplementedError as error:  # raised by TensorFlow
        raise TypeError(
            f"{type(value).__name__}: a tensor of a graph has no value yet -- within a tf.function use the operation of the "
            "same name of cohort.tensorflow (horovod.tensorflow)"
        ) from error


def _numpy_of(value: Any) -> Any:
    detach = getattr(value, "detach", None)  # torch
    value = detach() if detach is not None else value
    return value.numpy() if hasattr(value, "numpy") else value


def _result(kind: str, array: Any, name: Optional[str], process_set: ProcessSet, **how: Any) -> Any:
    call = Call(kind, [named(kind, name, process_set)], process_set, needs_all_ranks=False, **how)
    if kind in ("allreduce", "broadcast"):
        return carry_out(call, [array.reshape(-1)])[0][0].reshape(array.shape)[()]
    return carry_out(call, [array])[0][0].copy()


def allreduce(value: Any, name: Optional[str] = None, average: Optional[bool] = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, op: Optional[int] = None, compression: Any = Compression.none,
              process_set: ProcessSet = global_process_set) -> Any:  # fmt: skip
    """Returns the reduction of a value over ranks, in its shape. op: hvd.Average (default), Sum, Min, Max, Product;
    averages of integers are truncated. Factors are applied before and after. `compression` has no effect on values."""
    return _result("allreduce", _array(value), name, process_set, op=resolve(op, average), prescale=prescale_factor,
                   postscale=postscale_factor)  # fmt: skip


def allgather(value: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns the values of all ranks, concatenated along dimension 0, which may differ; a number counts as one row."""
    array = _array(value)
    return _result("allgather", array.reshape(1) if array.ndim == 0 else array, name, process_set)


def broadcast(value: Any, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns the value of `root_rank`; all ranks' values have its shape and type."""
    return _result("broadcast", _array(value), name, process_set, root=root_rank)


def reducescatter(value: Any, name: Optional[str] = None, op: int = Average,
                  process_set: ProcessSet = global_process_set) -> Any:  # fmt: skip
    """Returns this rank's rows of the reduction of a value; if dimension 0 does not divide evenly, the first ranks get
    one row more. op: hvd.Average or hvd.Sum."""
    if op not in (Average, Sum):
        raise ValueError(f"reducescatter: op={op!r} -- hvd.Average and hvd.Sum are possible")
    array = _array(value)
    if array.ndim == 0:
        raise ValueError("reducescatter: a number has no rows")
    return _result("reducescatter", array, name, process_set, op=op)


def broadcast_global_variables(root_rank: int) -> None:
    """Raises ValueError, because it is for the variables of a TensorFlow 1 graph."""
    raise ValueError(
        "broadcast_global_variables: there are no global variables in TensorFlow 2 -- give fit "
        "hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank)"
    )
