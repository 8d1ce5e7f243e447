"""A distributed optimizer's reduction of gradients, for all backends. It is kept outside the optimizer, whose
attributes Keras tracks, copies and saves."""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set

from cohort.horovod import basics
from cohort.horovod.claims import claimed
from cohort.horovod.process_sets import ProcessSet
from cohort.horovod.operations import Average, parts_of
from cohort.keras import _flavor, _step


_BUCKET_BYTES = 4 << 20


class Settings(NamedTuple):
    """The arguments of `DistributedOptimizer`."""

    op: int
    predivide: float
    compression: Any
    sparse_as_dense: bool
    passes: int
    average_passes: bool
    groups: Any
    process_set: ProcessSet
    scale_local: bool
    average_by: str
    compare_ranks: bool


class Reduction:
    """The gradients of one optimizer."""

    def __init__(self, settings: Settings, package: str) -> None:
        self.settings = settings
        self.package = package
        self.backend: Any = importlib.import_module(f"cohort.keras._backend_{_flavor.backend_name(package)}")
        self.compression = settings.compression
        if isinstance(self.compression, str):
            name, self.compression = self.compression, getattr(self.backend.Compression, self.compression, None)
            if self.compression is None and name != "none":
                raise ValueError(f"hvd.Compression.{name} is for Keras with torch, not with {_flavor.backend_name(package)}")
        self.local_layers: List[Any] = []
        self.hook = ""  # the hook's name, for errors
        self.reached = 0  # number of the hook's calls
        self.bytes = 0  # bytes passed to the hook for reduction
        self.sparse: Dict[str, Any] = {}  # type of the indices, by variable with sparse gradients
        # For Keras 2, which does not accumulate: sums of gradients by variable, and the number of passes in them.
        self.accumulated: Dict[int, Any] = {}
        self.passes_done: Any = None
        self._local: Set[int] = set()
        self._now = threading.local()  # the variables that an optimizer is currently updating

    # --- which ranks take part ---

    def is_shared(self) -> bool:
        """Returns True if there are or may later be other ranks. Programs compiled in a world of one outlive it."""
        process_set = self.settings.process_set
        if process_set.process_set_id is not None and not process_set.included():
            return False
        return (process_set.size() or 1) > 1 or basics.may_grow()

    def ranks(self) -> int:
        return self.settings.process_set.size() or 1

    def add_local(self, variable: Any) -> None:
        """Leaves the variable's gradient unreduced on this rank."""
        self._local.update(self._keys(variable))

    def _keys(self, variable: Any) -> Set[int]:
        # A keras.Variable may be passed itself or as its value; with JAX the value is a new object after each step.
        held = getattr(variable, "_value", None)
        return {id(variable)} if held is None or self.backend.__name__.endswith("jax") else {id(variable), id(held)}

    def _owner(self, variable: Any) -> Any:
        held = getattr(variable, "_value", None)
        return variable if held is None or self.backend.__name__.endswith("jax") else held

    def is_local(self, variable: Any) -> bool:
        for layer in self.local_layers:
            for one in layer.trainable_variables:
                self.add_local(one)
        return bool(self._local) and not self._local.isdisjoint(self._keys(variable))

    # --- a step ---

    @contextlib.contextmanager
    def applying(self, optimizer: Any, variables: Sequence[Any]) -> Iterator[None]:
        """Marks, while the context lasts, that an optimizer applies gradients of these variables."""
        step = _step.current()
        if step is not None:
            step.applied.append((optimizer, list(variables)))
        before = getattr(self._now, "variables", None)
        self._now.variables = list(variables)
        try:
            yield
        finally:
            self._now.variables = before

    def filled(self, gradients: Sequence[Any], variables: Sequence[Any]) -> List[Any]:
        """Returns the gradients, with zeros for missing ones, which other ranks may have."""
        special = [_flavor.path_of(v) for v in variables if getattr(v, "overwrite_with_gradient", False)]
        if special and self.is_shared():
            raise ValueError(
                f"DistributedOptimizer: variables that are overwritten with their gradients (float8 scales) cannot be "
                f"averaged -- {', '.join(special)}"
            )
        if not self.is_shared() or all(one is not None for one in gradients) or all(one is None for one in gradients):
            return list(gradients)
        missing = [_flavor.path_of(v) for g, v in zip(gradients, variables) if g is None and not self.is_local(v)]
        warnings.warn(f"no gradients on this rank, so zeros: {', '.join(missing)}", stacklevel=3)
        nothing = self.nothing(variables)
        return [
            nothing[i] if gradient is None and not self.is_local(variables[i]) else gradient
            for i, gradient in enumerate(gradients)
        ]

    def weighted(self, loss: Any) -> Any:
        """Returns the loss scaled by this rank's fraction of samples, so that gradients averaged over ranks are weighted by
        samples."""
        step = _step.current()
        if step is None or step.factor is None or step.process_set is not self.settings.process_set:
            return loss
        step.weighted.add(id(self))
        return self.backend.times(loss, step.factor)

    def reduce(self, gradients: Sequence[Any], variables: Optional[Sequence[Any]] = None) -> List[Any]:
        """Returns the gradients reduced over all ranks. The hooks call it."""
        self.reached += 1
        if variables is None:
            variables = getattr(self._now, "variables", None) or []
        gradients = list(gradients)
        if len(variables) != len(gradients):
            raise RuntimeError(
                f"DistributedOptimizer: {self.hook} was given {len(gradients)} gradients of {len(variables)} variables"
            )
        passes = 1.0
        if self.settings.passes > 1 and not self.settings.average_passes:
            passes = float(self.settings.passes)  # Keras has averaged the gradients
        if not self.is_shared():
            return [one if one is None or passes == 1 else one * passes for one in gradients]
        step = _step.current()
        if step is not None and step.factor is not None and id(self) not in step.weighted:
            gradients = [None if one is None else self.backend.times(one, step.factor) for one in gradients]
        names = _flavor.unique_paths(variables)
        shared: List[int] = []
        local_factor = 1.0 / self.ranks() if self.settings.scale_local else 1.0
        for i, (gradient, variable) in enumerate(zip(gradients, variables)):
            if gradient is None:
                continue
            if self.is_local(variable):
                gradients[i] = gradient * (local_factor * passes)
                continue
            self.sparse[names[i]] = self.backend.type_of_indices(gradient)
            shared.append(i)
            self.bytes += max(1, _bytes_of(variable))
        if step is not None:
            step.before_reducing()
        # Claimed, because another optimizer may be updating variables of the same paths.
        meet = {i: claimed(names[i], self._owner(variables[i]), self.settings.process_set) for i in shared}
        alike = getattr(self.backend, "alike", None)  # backends without `alike` have no sparse gradients
        if alike is not None:
            made = alike([gradients[i] for i in shared], [meet[i] for i in shared], [variables[i] for i in shared],
                         self.settings.process_set, self.settings.sparse_as_dense)  # fmt: skip
            for i, one in zip(shared, made):
                gradients[i] = one
        predivide = self.settings.predivide
        scales = (passes / predivide, predivide) if self.settings.op == Average else (passes, 1.0)
        for group in self._groups(shared, variables):
            reduced = self.backend.reduce_gradients(
                [gradients[i] for i in group],
                [meet[i] for i in group],
                op=self.settings.op,
                prescale=scales[0],
                postscale=scales[1],
                process_set=self.settings.process_set,
                compression=self.compression,
                sparse_as_dense=self.settings.sparse_as_dense,
            )
            for i, one in zip(group, reduced):
                gradients[i] = one
        return gradients

    def _groups(self, wanted: List[int], variables: Sequence[Any]) -> List[List[int]]:
        """Returns lists of positions of gradients that are reduced together."""
        groups = self.settings.groups
        if not wanted:
            return []
        if not groups:
            return self._buckets(wanted, variables) if self.backend.OVERLAPS else [wanted]
        if isinstance(groups, int):
            return parts_of(wanted, groups)
        keys = [set().union(*(self._keys(one) for one in group)) for group in groups]
        found: Dict[int, List[int]] = {}
        for i in wanted:
            mine = self._keys(variables[i])
            number = next((n for n, group in enumerate(keys) if not group.isdisjoint(mine)), len(groups))
            found.setdefault(number, []).append(i)
        return [found[number] for number in sorted(found)]

    @staticmethod
    def _buckets(wanted: List[int], variables: Sequence[Any]) -> List[List[int]]:
        """Returns buckets of _BUCKET_BYTES and more, in the order in which backward makes the gradients, so that each is
        sent while the rest is computed."""
        buckets: List[List[int]] = [[]]
        filled = 0
        for i in reversed(wanted):
            if filled >= _BUCKET_BYTES:
                buckets.append([])
                filled = 0
            buckets[-1].append(i)
            filled += _bytes_of(variables[i])
        return buckets

    def nothing(self, variables: Sequence[Any]) -> List[Any]:
        """Returns the contribution of a rank without data for these variables."""
        names = _flavor.unique_paths(variables)
        sparse = self.sparse if not self.settings.sparse_as_dense else {}
        return [self.backend.zeros(one, sparse.get(name)) for one, name in zip(variables, names)]


def _bytes_of(variable: Any) -> int:
    """Returns the approximate size; elements count as 4 bytes if their type is only a name."""
    count = 1
    for size in variable.shape:
        count *= int(size)
    return count * int(getattr(variable.dtype, "size", 0) or 4)


def of(optimizer: Any) -> Optional[Reduction]:
    """Returns the reduction of an optimizer, or of its inner one (LossScaleOptimizer); None if not distributed."""
    found: Optional[Reduction] = getattr(type(optimizer), "_cohort_reduction", None)
    if found is None:
        inner = inner_of(optimizer)
        found = None if inner is None else getattr(type(inner), "_cohort_reduction", None)
    return found


def inner_of(optimizer: Any) -> Any:
    """Returns the inner optimizer of a LossScaleOptimizer; None for others."""
    if not any(base.__name__.startswith("LossScaleOptimizer") for base in type(optimizer).__mro__):
        return None
    return getattr(optimizer, "inner_optimizer", None)
