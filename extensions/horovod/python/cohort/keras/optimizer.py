"""`DistributedOptimizer`: any of Keras's optimizers, with gradients reduced over all ranks."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Union

from cohort.horovod.process_sets import ProcessSet, global_process_set, require_world
from cohort.horovod.operations import Average, Sum, check_groups, check_options
from cohort.keras import _flavor, _hooks, _reduction, _training
from cohort.keras._reduction import Reduction, Settings
from cohort.keras.compression import Compression

Groups = Union[None, int, Sequence[Sequence[Any]]]


def DistributedOptimizer(optimizer: Any, name: Optional[str] = None, device_dense: str = "", device_sparse: str = "",
                         compression: Any = Compression.none, sparse_as_dense: bool = False,
                         gradient_predivide_factor: float = 1.0, op: int = Average, backward_passes_per_step: int = 1,
                         average_aggregated_gradients: bool = False, num_groups: int = 0, groups: Groups = None,
                         process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True,
                         average_by: str = "samples", compare_ranks: bool = True) -> Any:  # fmt: skip
    """Returns an optimizer that steps with the gradients of all ranks. It has the class name, the settings and the
    state of `optimizer`, which should not be used any more; files saved with it load without Cohort.

    name                          its name; default: that of `optimizer`
    device_dense, device_sparse   have no effect
    compression                   the format in which gradients travel: hvd.Compression.none, fp16, bf16
    sparse_as_dense               reduce gradients of embeddings as dense ones
    gradient_predivide_factor     f: with hvd.Average, gradients are divided by f before the sum, and by size / f after
    op                            hvd.Average or hvd.Sum
    backward_passes_per_step      number of batches whose gradients are summed on each rank before a reduction; the same
                                  as Keras 3's gradient_accumulation_steps
    average_aggregated_gradients  use the mean of these gradients instead of their sum
    num_groups                    deprecated; use groups
    groups                        a number of groups, each reduced together; or lists of variables
    process_set                   the ranks that reduce; others step with their own gradients
    scale_local_gradients         gradients of `register_local_var` are divided by the number of ranks
    average_by                    not Horovod's. "samples": within `fit`, hvd.Average is over all ranks' samples, even
                                  if batches differ in size. "ranks": every rank counts equally, as in Horovod
    compare_ranks                 not Horovod's. If set, `fit` raises ValueError, on all ranks, if numbers of the
                                  optimizer (such as its learning rate) differ by rank after an epoch, or weights after
                                  epochs 2, 4, 8, ... and at the end. After the first epoch weights are always compared

    The optimizer has `register_local_var(variable)`: that variable's gradients stay this rank's own.
    Raises ValueError for arguments that have no meaning, and before `init`; RuntimeError if this Keras does not call
    the optimizer's method that reduces, since ranks would train separately.
    """
    groups = check_groups(groups, num_groups, "variables")
    if op not in (Average, Sum):
        raise ValueError(f"DistributedOptimizer: op={op!r} -- hvd.Average and hvd.Sum are possible")
    check_options(op, gradient_predivide_factor, backward_passes_per_step)
    if average_by not in ("samples", "ranks"):
        raise ValueError(f"average_by={average_by!r}: 'samples' and 'ranks' are possible")
    package = _flavor.package_of(optimizer)
    if not package:
        raise ValueError(f"DistributedOptimizer: {type(optimizer).__name__} is no optimizer of Keras")
    if process_set is global_process_set or process_set.process_set_id is None:
        require_world("DistributedOptimizer")
    settings = Settings(op, gradient_predivide_factor, compression, sparse_as_dense, backward_passes_per_step,
                        average_aggregated_gradients, groups, process_set, scale_local_gradients, average_by,
                        compare_ranks)  # fmt: skip
    inner = _reduction.inner_of(optimizer)
    if inner is not None:
        # The outer optimizer scales the loss; the inner one reduces.
        _replace_inner(optimizer, _wrapped(inner, Reduction(settings, package), None))
        _training.install(package)
        return _hooks.agreeing(optimizer)
    made = _wrapped(optimizer, Reduction(settings, package), name)
    _training.install(package)
    return made


def PartialDistributedOptimizer(optimizer: Any, name: Optional[str] = None, device_dense: str = "",
                                device_sparse: str = "", compression: Any = Compression.none,
                                sparse_as_dense: bool = False, gradient_predivide_factor: float = 1.0,
                                op: int = Average, backward_passes_per_step: int = 1,
                                average_aggregated_gradients: bool = False, groups: Groups = None,
                                process_set: ProcessSet = global_process_set, local_layers: Any = None,
                                scale_local_gradients: bool = True) -> Any:  # fmt: skip
    """Like `DistributedOptimizer`, but the gradients of some layers stay each rank's own.

    local_layers  a layer or a list of layers; they need not be built yet
    """
    made = DistributedOptimizer(optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
                                gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients,
                                0, groups, process_set, scale_local_gradients)  # fmt: skip
    layers = [] if local_layers is None else local_layers if isinstance(local_layers, (list, tuple)) else [local_layers]
    reduction = _reduction.of(made)
    assert reduction is not None
    reduction.local_layers.extend(layers)
    return made


def _wrapped(optimizer: Any, reduction: Reduction, name: Optional[str]) -> Any:
    if getattr(type(optimizer), "_cohort_reduction", None) is not None:
        raise ValueError("DistributedOptimizer: this optimizer is a distributed one already")
    made = _hooks.derived(optimizer, reduction)
    _hooks.prove(optimizer, reduction)
    passes = reduction.settings.passes
    if passes > 1 and not _flavor.is_keras_2(reduction.package):
        if made.gradient_accumulation_steps not in (None, 1):
            raise ValueError("DistributedOptimizer: give backward_passes_per_step or gradient_accumulation_steps, not both")
        if made.built:
            raise ValueError("DistributedOptimizer: backward_passes_per_step needs an optimizer that is not built yet")
        made.gradient_accumulation_steps = passes
    if name is not None and not _flavor.is_keras_2(reduction.package):
        made.name = name
    return made


def _replace_inner(outer: Any, inner: Any) -> None:
    for attribute in ("inner_optimizer", "_optimizer"):
        if attribute in vars(outer):
            setattr(outer, attribute, inner)
            return
    raise ValueError(f"DistributedOptimizer: {type(outer).__name__} is not known -- wrap the optimizer within it")
