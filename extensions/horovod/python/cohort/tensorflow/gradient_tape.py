"""The gradient tape whose gradients are reduced over all ranks."""

from __future__ import annotations

import weakref
from typing import Any, Dict, Iterable, List, Sequence, Tuple, Union

import tensorflow as tf

from cohort.horovod.process_sets import ProcessSet, global_process_set
from cohort.horovod.operations import Average, check_groups, check_options, parts_of
from cohort.tensorflow._collectives import size_of
from cohort.tensorflow._execution import as_it_is, outermost_graph
from cohort.tensorflow._gradients import alike, reduce_gradients
from cohort.tensorflow.compression import Compression

Groups = Union[None, int, Sequence[Sequence[Any]]]

# Counts calls of `gradient` in a graph, because two tapes of one graph may reduce at the same time.
_asked: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


class _Distributed(tf.GradientTape):
    """Placed before the class of the wrapped tape."""

    _options: Dict[str, Any]
    _groups: Groups
    _scales_local: bool
    _local: set

    @as_it_is
    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False,
                 **kwargs: Any) -> Any:  # fmt: skip
        """Like tf.GradientTape's, reduced over the ranks. All ranks call it with the same sources, in the same order.

        use_generic_names  match sources only by their positions, whatever their names
        """
        gradients = super().gradient(target, sources, output_gradients, **kwargs)
        flat, flat_sources = tf.nest.flatten(gradients), tf.nest.flatten(sources)
        is_local = [_key(source) in self._local for source in flat_sources]
        reduced = iter(self._reduced([g for g, local in zip(flat, is_local) if not local],
                                     [s for s, local in zip(flat_sources, is_local) if not local], use_generic_names))  # fmt: skip
        results = [self._scaled(g) if local else next(reduced) for g, local in zip(flat, is_local)]
        return tf.nest.pack_sequence_as(sources, results)

    def register_local_source(self, source: Any) -> None:
        """Leaves the gradients of this source unreduced on this rank, divided by the number of ranks unless
        scale_local_gradients=False."""
        self._local.add(_key(source))

    def get_local_and_global_gradients(
        self, gradients: Sequence[Any], sources: Sequence[Any]
    ) -> Tuple[List[Any], List[Any]]:
        """Returns (gradient, source) pairs of the sources registered as local, and of the others."""
        local: List[Any] = []
        others: List[Any] = []
        for gradient, source in zip(gradients, sources):
            (local if _key(source) in self._local else others).append((gradient, source))
        return local, others

    def _reduced(self, gradients: List[Any], sources: List[Any], generic: bool) -> List[Any]:
        prefix = "" if generic else f"tape{_count_in_graph()}."
        names = [f"grad_{i}" if generic else f"{prefix}{i}.{_name(source)}" for i, source in enumerate(sources)]
        results = alike(gradients, names, sources, self._options["process_set"], self._options["sparse_as_dense"])
        gradients = results[:]
        for group in _grouped(self._groups, sources):
            part = reduce_gradients([gradients[i] for i in group], [names[i] for i in group], **self._options)
            for i, one in zip(group, part):
                results[i] = one
        return results

    def _scaled(self, gradient: Any) -> Any:
        if gradient is None or not self._scales_local:
            return gradient
        factor = tf.cast(size_of(self._options["process_set"]), gradient.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / factor, gradient.indices, gradient.dense_shape)
        return gradient / factor


def _key(source: Any) -> Any:
    """Returns the same key for a Keras variable and the TensorFlow variable in it."""
    kept = getattr(source, "value", None)
    if kept is not None and not callable(kept) and hasattr(kept, "ref"):
        source = kept
    return source.ref() if hasattr(source, "ref") else id(source)


def _name(source: Any) -> str:
    return str(getattr(source, "path", None) or getattr(source, "name", None) or "")


def _count_in_graph() -> int:
    if tf.executing_eagerly():
        return 0
    graph = outermost_graph()
    number = _asked.get(graph, 0)
    _asked[graph] = number + 1
    return number


def _grouped(groups: Groups, sources: List[Any]) -> List[List[int]]:
    """Returns positions of the gradients that are reduced together."""
    everything = list(range(len(sources)))
    if groups is None or not everything:
        return [everything]
    if isinstance(groups, int):
        return parts_of(everything, groups)
    of = {_key(source): i for i, group in enumerate(groups) for source in group}
    parts: Dict[Any, List[int]] = {}
    for i, source in enumerate(sources):
        parts.setdefault(of.get(_key(source), ("alone", i)), []).append(i)
    return list(parts.values())


def DistributedGradientTape(gradtape: Any, device_dense: str = "", device_sparse: str = "",
                            compression: Any = Compression.none, sparse_as_dense: bool = False, op: int = Average,
                            gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Groups = None,
                            process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True) -> Any:  # fmt: skip
    """Returns a tape of a class derived from the given tape's class, with its recording. `gradient` then reduces.

    compression                the format in which gradients travel
    sparse_as_dense            tf.IndexedSlices are made dense first; otherwise their entries are gathered
    op                         hvd.Average, Sum, Min, Max, Product or Adasum
    gradient_predivide_factor  f: an average's gradients are divided by f before the sum, and by size / f after it
    groups                     the number of reductions, or lists of variables whose gradients are reduced together.
                               None: as many as let reductions begin while other gradients are still computed
    scale_local_gradients      see `register_local_source`

    `device_dense` and `device_sparse` have no effect. Raises ValueError for arguments that have no meaning.
    """
    check_options(op, gradient_predivide_factor, 1)
    base = type(gradtape)
    bases: Any = (_Distributed, base) if base is not tf.GradientTape else (_Distributed,)
    make: Any = type
    tape: Any = make(base.__name__, bases, {"__module__": base.__module__, "__doc__": base.__doc__})
    made = tape.__new__(tape)
    made.__dict__.update(vars(gradtape))
    made._recording = False  # if the given tape records, it ends that itself
    made._options = {
        "op": op,
        "prescale": 1.0 / gradient_predivide_factor,
        "postscale": gradient_predivide_factor,
        "process_set": process_set,
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
    }
    made._groups = check_groups(groups, num_groups, "variables", least=1)
    made._scales_local = scale_local_gradients
    made._local = set()
    return made


def PartialDistributedGradientTape(gradtape: Any, device_dense: str = "", device_sparse: str = "",
                                   compression: Any = Compression.none, sparse_as_dense: bool = False, op: int = Average,
                                   gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Groups = None,
                                   process_set: ProcessSet = global_process_set, local_layers: Any = None,
                                   scale_local_gradients: bool = True) -> Any:  # fmt: skip
    """Like DistributedGradientTape; weights of `local_layers`, one or several, keep this rank's own gradients."""
    made = DistributedGradientTape(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op,
                                   gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients)  # fmt: skip
    layers: Iterable[Any] = (
        [] if local_layers is None else local_layers if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            made.register_local_source(variable)
    return made
