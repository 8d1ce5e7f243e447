"""Reduces a step's gradients, for tapes and optimizers."""

from __future__ import annotations

from typing import Any, List, Sequence

import numpy as np
import tensorflow as tf

from cohort.horovod import basics
from cohort.horovod.compression import compressed
from cohort.horovod.process_sets import ProcessSet, global_process_set
from cohort.horovod.operations import Adasum, Average, Call, Max, Sum
from cohort.tensorflow._errors import MARK
from cohort.tensorflow._execution import as_it_is, run
from cohort.tensorflow.compression import Compression

_BUCKET_BYTES = 1 << 20

Gradient = Any  # a tf.Tensor, tf.IndexedSlices or None


@as_it_is
def reduce_gradients(gradients: Sequence[Gradient], names: Sequence[str], *, op: int = Average, prescale: float = 1.0,
                     postscale: float = 1.0, process_set: ProcessSet = global_process_set,
                     compression: Any = Compression.none, sparse_as_dense: bool = False) -> List[Gradient]:  # fmt: skip
    """Reduces gradients over the set's ranks. Waits in eager mode; in a graph, ops that need the results wait.

    gradients        tensors and tf.IndexedSlices; None stays None
    names            one for each gradient, by which ranks match them; the same on all ranks, whatever names their graphs use
    op               for all gradients: hvd.Average, Sum, Min, Max, Product or Adasum
    sparse_as_dense  IndexedSlices are made dense first. Otherwise their entries are gathered, only for Average and Sum

    The results are not differentiable. Raises ValueError unless there is a different name for each gradient, and
    NotImplementedError for a reduction that IndexedSlices do not support.
    """
    if len(names) != len(gradients) or len(set(names)) != len(names):
        raise ValueError(
            f"reduce_gradients: {len(gradients)} gradients need as many different names, not {list(names)}"
        )
    results: List[Gradient] = list(gradients)
    if sparse_as_dense:
        results = [tf.convert_to_tensor(one) if isinstance(one, tf.IndexedSlices) else one for one in results]
    sparse = [i for i, one in enumerate(results) if isinstance(one, tf.IndexedSlices)]
    dense = [i for i, one in enumerate(results) if one is not None and i not in set(sparse)]
    sent = compressed([tf.convert_to_tensor(results[i]) for i in dense], compression)
    kind = "adasum" if op == Adasum else "allreduce"
    for bucket in _buckets([one for one, _ in sent]):
        call = Call("allreduce", [f"{kind}.{names[dense[j]]}" for j in bucket], process_set, op, prescale, postscale,
                    once=True)  # fmt: skip
        for j, reduced in zip(bucket, run(call, [sent[j][0] for j in bucket])[0]):
            results[dense[j]] = compression.decompress(reduced, sent[j][1])
    slices = gather_slices(
        [results[i] for i in sparse], [names[i] for i in sparse], op, prescale, postscale, process_set, once=True
    )
    for i, gathered in zip(sparse, slices):
        results[i] = gathered
    return results


@as_it_is
def alike(gradients: Sequence[Gradient], names: Sequence[str], sources: Sequence[Any], process_set: ProcessSet,
          sparse_as_dense: bool) -> List[Gradient]:  # fmt: skip
    """Returns the gradients in kinds that are the same on all ranks, as `reduce_gradients` needs. One small reduction.

    In eager mode, a gradient that is None here but not on all ranks becomes zeros, and one that is sparse here and
    dense elsewhere is made dense. A graph cannot be changed when it runs, so it fails on all ranks with the names of such
    gradients.
    """
    if sparse_as_dense:
        gradients = [tf.convert_to_tensor(one) if isinstance(one, tf.IndexedSlices) else one for one in gradients]
    count, eager = len(gradients), tf.executing_eagerly()
    # A graph built in a world of one also runs in larger worlds, in which others have this reduction.
    if count == 0 or ((process_set.size() or 1) == 1 and (eager or not basics.may_grow())):
        return list(gradients)
    index_types = [one.indices.dtype if isinstance(one, tf.IndexedSlices) else None for one in gradients]
    own = np.zeros((3, count), np.uint8)  # rows: dense, sparse (2: with int64 indices), none
    own[0] = [one is not None and kind is None for one, kind in zip(gradients, index_types)]
    own[1] = [0 if kind is None else 2 if kind == tf.int64 else 1 for kind in index_types]
    own[2] = [one is None for one in gradients]
    # Runs after the gradients, so that it does not run in a step that ends for lack of data.
    last = next((one for one in reversed(gradients) if one is not None), None)
    after = [] if eager or last is None else [last.values if isinstance(last, tf.IndexedSlices) else last]
    with tf.control_dependencies(after):
        kinds = tf.identity(tf.constant(own))
    ((any_of,), _) = run(Call("allreduce", [f"allreduce.kinds.{names[0]}"], process_set, Max, once=True), [kinds])
    if eager:
        dense, sparse, _ = any_of.numpy()
        return [_as_others(*one) for one in zip(gradients, dense, sparse, sources)]
    has = any_of > 0
    differ = (has[0] & has[1]) | ((has[0] | has[1]) & has[2])
    text = MARK + "gradients are dense on some ranks, and sparse or missing on others, in a graph, which cannot be changed:"
    same = tf.debugging.Assert(~tf.reduce_any(differ), [text, tf.boolean_mask(tf.constant(list(names)), differ)], 20)
    with tf.control_dependencies([same]):
        return [None if one is None else tf.nest.map_structure(tf.identity, one, expand_composites=True) for one in gradients]


def _as_others(gradient: Gradient, dense: int, sparse: int, source: Any) -> Gradient:
    if gradient is not None:
        return tf.convert_to_tensor(gradient) if dense else gradient
    return zeros(source, None if dense else tf.int64 if sparse == 2 else tf.int32) if dense or sparse else None


def zeros(variable: Any, type_of_indices: Any) -> Gradient:
    """Returns the contribution of a rank without a gradient of the variable."""
    shape, kind = tuple(variable.shape), tf.as_dtype(variable.dtype)
    if type_of_indices is not None:
        return tf.IndexedSlices(tf.zeros((0, *shape[1:]), kind), tf.zeros((0,), type_of_indices), tf.constant(shape, type_of_indices))
    return tf.zeros(shape, kind)


def _buckets(tensors: List[Any]) -> List[List[int]]:
    """Returns lists of positions of tensors that one op reduces. In a graph an op begins when it has all inputs, so there
    are several ops, each for neighbours in the list, which are computed one after another."""
    if tf.executing_eagerly():
        return [list(range(len(tensors)))]
    buckets: List[List[int]] = []
    room = 0
    for i, tensor in enumerate(tensors):
        elements = tensor.shape.num_elements()
        size = _BUCKET_BYTES if elements is None else elements * tensor.dtype.size
        if size > room:
            buckets.append([])
            room = max(_BUCKET_BYTES, size)
        buckets[-1].append(i)
        room -= size
    return buckets


def gather_slices(slices: List[Any], names: List[str], op: int, prescale: float, postscale: float,
                  process_set: ProcessSet, once: bool = False) -> List[Any]:  # fmt: skip
    """Returns the entries of all ranks' tf.IndexedSlices, whose sum is the reduction."""
    if slices and op not in (Average, Sum):
        raise NotImplementedError("tf.IndexedSlices are reduced by hvd.Average and hvd.Sum only -- sparse_as_dense=True, or "
                                  "tf.convert_to_tensor, makes them dense")  # fmt: skip
    parts: List[Any] = []
    full: List[str] = []
    for one, name in zip(slices, names):
        parts += [one.values, one.indices]
        full += [f"allgather.{name}.values", f"allgather.{name}.indices"]
    # Ranks that have joined contribute no entries.
    gathered, received = run(Call("allgather", full, process_set, needs_all_ranks=False, once=once), parts)
    results = []
    for i, one in enumerate(slices):
        values = gathered[2 * i]
        if op == Average:
            values = divided(values, tf.shape(received[2 * i])[0])
        if prescale * postscale != 1.0:
            values *= tf.cast(prescale * postscale, values.dtype)
        results.append(tf.IndexedSlices(values, gathered[2 * i + 1], one.dense_shape))
    return results


def divided(values: Any, ranks: Any) -> Any:
    """Returns the average, given the sum; integers are rounded toward zero."""
    ranks = tf.cast(ranks, values.dtype)
    return values / ranks if values.dtype.is_floating or values.dtype.is_complex else tf.truncatediv(values, ranks)
