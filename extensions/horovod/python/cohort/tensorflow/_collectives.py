"""The operations, with gradients if needed; in eager mode and in graphs.

Operations without a name are matched in eager mode by a counter, so all ranks have to call in the same order, and in a
graph by the node's name. Gradients are those of `cohort.horovod.torch`: if all ranks get one result (allgather, broadcast),
ranks average the incoming gradients. All raise ValueError for arguments that have no meaning, and HorovodInternalError
if there is no world; a failure within a `tf.function` is a tf.errors.OpError with that text (`as_internal_error`).
While a rank has joined, allgather, broadcast, reducescatter and alltoall fail on ranks that have not.
"""

from __future__ import annotations

import re
from typing import Any, Callable, List, Optional, Sequence, Tuple

import tensorflow as tf

from cohort.horovod import basics, operations
from cohort.horovod.compression import compressed
from cohort.horovod.operations import Adasum, Average, Call, Sum, named, reduced_back, require_scattering, resolve
from cohort.horovod.process_sets import (
    ProcessSet,
    engine_of,
    get_process_set_ids_and_ranks,
    global_process_set,
    require_world,
)
from cohort.tensorflow._execution import Tensor, as_it_is, outermost_graph, run
from cohort.tensorflow._gradients import gather_slices
from cohort.tensorflow.compression import Compression

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "broadcast_", "grouped_allgather", "grouped_allreduce",
           "grouped_reducescatter", "join", "local_rank_op", "local_size_op", "process_set_included_op", "rank_op",
           "reducescatter", "size_op"]  # fmt: skip

try:
    from tensorflow.python.eager.record import could_possibly_record as _could_record
except ImportError:  # not a public name

    def _could_record() -> bool:
        return True


# --- names ---


def _names(
    kind: str, name: Optional[str], ignore_name_scope: bool, process_set: ProcessSet, count: int = 0
) -> List[str]:
    """Returns the operations' names on all ranks; `count` names for a group."""
    if tf.executing_eagerly():
        full = named(kind, name, process_set)
    elif name is not None and ignore_name_scope:
        full = f"{kind}.{name}"
    else:
        # Names the future node, so the name is the same on ranks that build the same graph, any number of times.
        part = re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", name or "noname")
        full = f"{kind}.{outermost_graph().unique_name(part)}"
    return [full] if count == 0 else [f"{full}_{i + 1}of{count}" for i in range(count)]


def _tensor(value: Any) -> Tensor:
    if isinstance(value, tf.IndexedSlices):
        raise ValueError("a dense tensor is needed, not tf.IndexedSlices -- tf.convert_to_tensor makes it dense")
    return tf.convert_to_tensor(value)


def _tensors(values: Any, what: str) -> List[Tensor]:
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{what}: a list of tensors is needed, not {type(values).__name__}")
    return [_tensor(value) for value in values]


# --- ranks and sizes ---


@as_it_is
def rank_op(name: Optional[str] = None) -> Tensor:
    """Returns `rank()`, evaluated when the graph runs. A scalar of int32, like those below."""
    return _asked(basics.rank, name)


@as_it_is
def size_op(process_set_id: int = 0, name: Optional[str] = None) -> Tensor:
    """Returns the number of ranks of a process set, evaluated when the graph runs."""
    return _asked(lambda: len(_ranks_of(process_set_id, "size_op")), name)


@as_it_is
def local_rank_op(name: Optional[str] = None) -> Tensor:
    """Returns `local_rank()`, evaluated when the graph runs."""
    return _asked(basics.local_rank, name)


@as_it_is
def local_size_op(name: Optional[str] = None) -> Tensor:
    """Returns `local_size()`, evaluated when the graph runs."""
    return _asked(basics.local_size, name)


@as_it_is
def process_set_included_op(process_set_id: int = 0, name: Optional[str] = None) -> Tensor:
    """Returns 1 if this rank is in a process set, else 0; evaluated when the graph runs."""
    return _asked(lambda: int(basics.rank() in _ranks_of(process_set_id, "process_set_included_op")), name)


def _ranks_of(process_set_id: int, what: str) -> List[int]:
    require_world(what)
    sets = get_process_set_ids_and_ranks()
    if process_set_id not in sets:
        raise ValueError(f"{what}: there is no process set of the number {process_set_id} -- there are {sorted(sets)}")
    return sets[process_set_id]


def _asked(question: Callable[[], int], name: Optional[str]) -> Tensor:
    if tf.executing_eagerly():
        return tf.constant(question(), tf.int32)
    answer = tf.py_function(lambda: tf.constant(question(), tf.int32), [], tf.int32, name=name)
    answer.set_shape([])
    return answer


def _own_rank(process_set: ProcessSet) -> Tensor:
    """Returns this rank's number in the set, evaluated when the graph runs, because a graph may outlive a world."""
    return _asked(lambda: engine_of(process_set).rank(), None)


@as_it_is
def size_of(process_set: ProcessSet) -> Tensor:
    """Returns the number of the set's ranks, evaluated when the graph runs."""
    return _asked(lambda: engine_of(process_set).size(), None)


# --- gradients ---


def _differentiable(call: Call, tensors: Sequence[Tensor], back: Callable[..., List[Tensor]],
                    splits: Optional[Tensor] = None) -> List[Tensor]:  # fmt: skip
    """Runs a call. Returns the results and, for alltoall, the numbers of rows by rank.

    back  computes the inputs' gradients from the results' gradients, the inputs and the numbers of rows
    """

    def forward(*given: Tensor) -> Any:
        results, received = run(call, given, splits)

        def dense(*grads: Any) -> List[Tensor]:  # None: for integers
            return back([None if one is None else tf.convert_to_tensor(one) for one in grads], given, received)

        return [*results, *received] if call.kind == "alltoall" else results, dense

    if not any(one.dtype.is_floating or one.dtype.is_complex for one in tensors):
        return list(forward(*tensors)[0])
    if tf.executing_eagerly() and not _could_record():
        return list(forward(*tensors)[0])  # custom_gradient takes longer than the operation
    return list(tf.custom_gradient(forward)(*tensors))


def _grad_name(names: Sequence[str]) -> List[str]:
    """Returns names for the gradient's operation. A graph may have several for one operation."""
    names = [f"{name}.grad" for name in names]
    return names if tf.executing_eagerly() else [outermost_graph().unique_name(name) for name in names]


# --- allreduce ---


@as_it_is
def allreduce(tensor: Any, average: Optional[bool] = None, device_dense: str = "", device_sparse: str = "",
              compression: Any = Compression.none, op: Optional[int] = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, name: Optional[str] = None, process_set: ProcessSet = global_process_set,
              ignore_name_scope: bool = False) -> Any:  # fmt: skip
    """Reduces a tensor, or tf.IndexedSlices, over the set's ranks and returns a new one.

    compression        the format in which the tensor is sent: hvd.Compression.none, fp16 or bf16
    op                 one of hvd.Average (default), Sum, Min, Max, Product, Adasum; averages of integers are truncated
    prescale_factor    each rank's values are multiplied by this factor before
    postscale_factor   the result is multiplied by this factor
    ignore_name_scope  in a graph: use `name` without its scope

    IndexedSlices are gathered, for Average and Sum. `device_dense` and `device_sparse` have no effect.
    """
    op = resolve(op, average)
    names = _names("allreduce", name, ignore_name_scope, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        return gather_slices([tensor], names, op, prescale_factor, postscale_factor, process_set)[0]
    return _allreduce([_tensor(tensor)], names, compression, op, prescale_factor, postscale_factor, process_set)[0]


@as_it_is
def grouped_allreduce(tensors: Sequence[Any], average: Optional[bool] = None, device_dense: str = "",
                      device_sparse: str = "", compression: Any = Compression.none, op: Optional[int] = None,
                      prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
                      name: Optional[str] = None) -> List[Any]:  # fmt: skip
    """Like `allreduce` for several tensors, none of which is reduced before all ranks have called for all. IndexedSlices
    are gathered, in a second group."""
    op = resolve(op, average)
    given = list(tensors) if isinstance(tensors, (list, tuple)) else _tensors(tensors, "grouped_allreduce")
    names = _names("allreduce", name, ignore_name_scope, process_set, len(given))
    is_sparse = [isinstance(one, tf.IndexedSlices) for one in given]
    sparse = [pair for pair, slices in zip(zip(given, names), is_sparse) if slices]
    dense = [(_tensor(one), full) for (one, full), slices in zip(zip(given, names), is_sparse) if not slices]
    scales = (op, prescale_factor, postscale_factor, process_set)
    gathered = iter(gather_slices([one for one, _ in sparse], [full for _, full in sparse], *scales))
    reduced = iter(_allreduce([one for one, _ in dense], [full for _, full in dense], compression, *scales))
    return [next(gathered if slices else reduced) for slices in is_sparse]


def _allreduce(tensors: List[Tensor], names: List[str], compression: Any, op: int, prescale: float, postscale: float,
               process_set: ProcessSet) -> List[Tensor]:  # fmt: skip
    if op == Adasum and not all(tensor.dtype.is_floating for tensor in tensors):
        raise ValueError(f"op=hvd.Adasum needs floating-point tensors, not {[one.dtype.name for one in tensors]}")
    sent = compressed(tensors, compression)
    call = Call("allreduce", names, process_set, op, prescale, postscale)
    results = _reduced(call, [one for one, _ in sent])
    return [compression.decompress(result, context) for result, (_, context) in zip(results, sent)]


def _reduced(call: Call, tensors: Sequence[Tensor]) -> List[Tensor]:
    def back(grads: List[Tensor], values: Sequence[Tensor], _: List[Tensor]) -> List[Tensor]:
        equal = lambda a, b: tf.cast(tf.equal(a, b), a.dtype)  # noqa: E731
        again = call._replace(names=_grad_name(call.names))
        return reduced_back(again, grads, values, _reduced, equal, _products_of_others)

    return _differentiable(call, tensors, back)


def _products_of_others(back: Call, values: Sequence[Tensor]) -> List[Tensor]:
    ask = Call("allgather", back.also("others").names, back.process_set, needs_all_ranks=False)
    products = []
    for rows, received, value in zip(*run(ask, [value[tf.newaxis] for value in values]), values):
        own = tf.reduce_sum(received[: _own_rank(back.process_set)])
        others = tf.concat([rows[:own], rows[own + 1 :]], 0) * tf.cast(back.prescale, rows.dtype)
        product = tf.reshape(tf.reduce_prod(others, 0), tf.shape(value))
        products.append(tf.math.conj(product) if product.dtype.is_complex else product)
    return products


# --- allgather ---


@as_it_is
def allgather(tensor: Any, name: Optional[str] = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> Tensor:  # fmt: skip
    """Concatenates the ranks' tensors along dimension 0, which may differ. Returns a new tensor."""
    names = _names("allgather", name, ignore_name_scope, process_set)
    return _gathered([_tensor(tensor)], Call("allgather", names, process_set))[0]


@as_it_is
def grouped_allgather(tensors: Sequence[Any], name: Optional[str] = None, ignore_name_scope: bool = False,
                      process_set: ProcessSet = global_process_set) -> List[Tensor]:  # fmt: skip
    """Like `allgather` for several tensors, none of which is gathered before all ranks have called for all."""
    given = _tensors(tensors, "grouped_allgather")
    names = _names("allgather", name, ignore_name_scope, process_set, len(given))
    return _gathered(given, Call("allgather", names, process_set))


def _gathered(tensors: List[Tensor], call: Call) -> List[Tensor]:
    _need_dimensions(tensors, "allgather")
    return _differentiable(call, tensors, lambda grads, _, received: _gather_back(grads, received, call))


def _need_dimensions(tensors: List[Tensor], what: str) -> None:
    if any(tensor.shape.rank == 0 for tensor in tensors):
        raise ValueError(f"{what}: a tensor without dimensions has no rows -- pass tf.reshape(tensor, [1])")


def _gather_back(grads: List[Tensor], received: List[Tensor], call: Call) -> List[Tensor]:
    means = _reduced(Call("allreduce", _grad_name(call.names), call.process_set), grads)
    rank = _own_rank(call.process_set)
    return [mean[tf.reduce_sum(rows[:rank]) : tf.reduce_sum(rows[: rank + 1])] for mean, rows in zip(means, received)]


# --- broadcast ---


@as_it_is
def broadcast(tensor: Any, root_rank: int, name: Optional[str] = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> Tensor:  # fmt: skip
    """Returns a copy of the tensor of `root_rank` (a rank of the world, also for process sets) on every rank."""
    names = _names("broadcast", name, ignore_name_scope, process_set)
    call = Call("broadcast", names, process_set, root=root_rank)
    return _differentiable(call, [_tensor(tensor)], lambda grads, *_: _broadcast_back(grads, call))[0]


def _broadcast_back(grads: List[Tensor], call: Call) -> List[Tensor]:
    means = _reduced(Call("allreduce", _grad_name(call.names), call.process_set), grads)
    is_root = tf.equal(rank_op(), call.root)
    return [tf.where(is_root, mean, tf.zeros_like(mean)) for mean in means]


@as_it_is
def broadcast_(variables: Sequence[Any], root_rank: int, name: Optional[str] = None,
               process_set: ProcessSet = global_process_set) -> List[Any]:  # fmt: skip
    """Sets each variable of a list to its value on rank `root_rank`; returns the variables, in a graph with their new
    values. Variables are matched by their positions in the list."""
    assigned = assign_broadcast(
        variables, root_rank, _names("broadcast", name, False, process_set, len(variables)), process_set
    )
    return list(variables) if tf.executing_eagerly() else assigned


@as_it_is
def assign_broadcast(variables: Sequence[Any], root_rank: int, names: List[str], process_set: ProcessSet) -> List[Any]:
    """Assigns the root's values to variables of TensorFlow or Keras; returns the results of the assignments."""
    values = [tf.convert_to_tensor(_value_of(variable)) for variable in variables]
    results, _ = run(Call("broadcast", names, process_set, root=root_rank), values)
    return [variable.assign(result) for variable, result in zip(variables, results)]


def _value_of(variable: Any) -> Any:
    """Returns an object convertible to a tensor, since Keras 3 keeps the TensorFlow variable in `value`."""
    if not hasattr(variable, "assign"):
        raise ValueError(f"broadcast: a variable is needed, not {type(variable).__name__}")
    return variable if isinstance(variable, tf.Variable) or callable(variable.value) else variable.value


# --- alltoall ---


@as_it_is
def alltoall(tensor: Any, splits: Any = None, name: Optional[str] = None, ignore_name_scope: bool = False,
             process_set: ProcessSet = global_process_set) -> Any:  # fmt: skip
    """Sends rows to all ranks, and returns the rows received, in the order of ranks; with `splits` also a tensor of
    int32 with their numbers by rank.

    splits  rows for each rank, integers; rows beyond their sum are not sent. None: equal parts
    """
    given = _tensor(tensor)
    _need_dimensions([given], "alltoall")
    if splits is None:
        counts = None
    else:
        counts = tf.convert_to_tensor(splits)
        if not counts.dtype.is_integer or counts.shape.rank not in (None, 1):
            raise ValueError("alltoall: splits have to be integers, one for each rank")
    names = _names("alltoall", name, ignore_name_scope, process_set)
    result, received = _exchanged(given, counts, Call("alltoall", names, process_set))
    return result if splits is None else (result, tf.cast(received, tf.int32))


def _exchanged(tensor: Tensor, splits: Optional[Tensor], call: Call) -> Tuple[Tensor, Tensor]:
    def back(grads: List[Tensor], given: Sequence[Tensor], received: List[Tensor]) -> List[Tensor]:
        result, _ = _exchanged(grads[0], received[0], call._replace(names=_grad_name(call.names)))
        missing = tf.shape(given[0])[0] - tf.shape(result)[0]  # rows that were not sent
        return [tf.concat([result, tf.zeros(tf.concat([[missing], tf.shape(result)[1:]], 0), result.dtype)], 0)]

    result, rows = _differentiable(call, [tensor], back, splits)
    return result, rows


# --- reducescatter ---


@as_it_is
def reducescatter(tensor: Any, device_dense: str = "", compression: Any = Compression.none, op: int = Average,
                  name: Optional[str] = None, process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0, ignore_name_scope: bool = False) -> Tensor:  # fmt: skip
    """Reduces a tensor and returns this rank's rows of the result. If dimension 0 does not divide evenly, the first
    ranks get one row more. op: hvd.Average or hvd.Sum; others raise a NotImplementedError that is also a
    HorovodInternalError."""
    if isinstance(tensor, tf.IndexedSlices):
        raise NotImplementedError("reducescatter: tf.IndexedSlices -- tf.convert_to_tensor makes them dense")
    names = _names("reducescatter", name, ignore_name_scope, process_set)
    call = Call("reducescatter", names, process_set, op, prescale_factor, postscale_factor)
    return _reducescatter([_tensor(tensor)], compression, call)[0]


@as_it_is
def grouped_reducescatter(tensors: Sequence[Any], device_dense: str = "", compression: Any = Compression.none,
                          op: int = Average, name: Optional[str] = None, process_set: ProcessSet = global_process_set,
                          prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                          ignore_name_scope: bool = False) -> List[Tensor]:  # fmt: skip
    """Like `reducescatter` for several tensors, none of which is reduced before all ranks have called for all."""
    given = _tensors(tensors, "grouped_reducescatter")
    names = _names("reducescatter", name, ignore_name_scope, process_set, len(given))
    call = Call("reducescatter", names, process_set, op, prescale_factor, postscale_factor)
    return _reducescatter(given, compression, call)


def _reducescatter(tensors: List[Tensor], compression: Any, call: Call) -> List[Tensor]:
    require_scattering(call.op)
    _need_dimensions(tensors, "reducescatter")
    sent = compressed(tensors, compression)
    results = _differentiable(call, [one for one, _ in sent], lambda grads, *_: _scatter_back(grads, call))
    return [compression.decompress(result, context) for result, (_, context) in zip(results, sent)]


def _scatter_back(grads: List[Tensor], call: Call) -> List[Tensor]:
    factor = tf.constant(call.prescale * call.postscale, tf.float64)
    if call.op == Sum:
        factor *= tf.cast(size_of(call.process_set), tf.float64)
    gather = Call("allgather", _grad_name(call.names), call.process_set)
    return _gathered([grad * tf.cast(factor, grad.dtype) for grad in grads], gather)


# --- control ---


@as_it_is
def join(process_set: ProcessSet = global_process_set) -> Tensor:
    """Like `join` of all frameworks, run when the graph runs. Declares that this rank has no more data, and waits until
    all ranks of the set have joined. Meanwhile it takes part in the others' reductions without changing them;
    allgather, broadcast, reducescatter and alltoall fail on the others. Returns the rank of the world that joined last,
    the same on all ranks, a scalar of int32.
    """
    return _asked(lambda: operations.join(process_set=process_set), None)
