"""Common parts of the frameworks' operations: reductions, names, and calls of an engine."""

from __future__ import annotations

import struct
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from cohort._core import NamedWork, ReduceOp
from cohort.errors import Error, Mismatch
from cohort.horovod import timeline
from cohort.horovod.exceptions import HorovodInternalError, translated
from cohort.horovod.process_sets import ProcessSet, engine_of, global_process_set, root_in

__all__ = ["Average", "Max", "Min", "Product", "Sum", "barrier"]

# The reductions, by the numbers that Horovod's programs use.
Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

ENGINE_OPS = {
    Average: ReduceOp.Average,
    Sum: ReduceOp.Sum,
    Min: ReduceOp.Min,
    Max: ReduceOp.Max,
    Product: ReduceOp.Product,
}


def resolve(op: Optional[int], average: Optional[bool]) -> int:
    """Returns the reduction given by `op` or, as in old programs, by `average`; Average if neither is given."""
    if op is None and average is None:
        return Average
    if average is not None:
        if op is not None:
            raise ValueError("op and average were both given -- average is deprecated: give op alone")
        warnings.warn("average is deprecated -- give op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    if op not in ENGINE_OPS and op != Adasum:
        raise ValueError(f"op={op!r} is none of hvd.Average, Sum, Adasum, Min, Max, Product")
    return op


def check_options(op: int, predivide: float, passes: int) -> None:
    """Raises ValueError for arguments of a DistributedOptimizer that have no meaning."""
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor goes with op=hvd.Average alone")
    if predivide <= 0:
        raise ValueError(f"gradient_predivide_factor={predivide}: it has to be positive")
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes}: at least 1 is needed")


def check_groups(groups: Any, num_groups: int, what: str, least: int = 0) -> Any:
    """Returns the groups: their number, or lists of tensors; num_groups is the older name. Raises ValueError for values
    that have no meaning."""
    if num_groups:
        warnings.warn("num_groups is deprecated -- give groups=N", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if isinstance(groups, int) and groups >= least:
        return groups or None
    if groups is None or (isinstance(groups, (list, tuple)) and all(isinstance(one, (list, tuple)) for one in groups)):
        return groups
    raise ValueError(f"groups={groups!r}: a number of groups, or a list of lists of {what}")


def parts_of(items: List[Any], count: int) -> List[List[Any]]:
    """Splits the list into `count` parts of about equal length; fewer if it has fewer items."""
    count = min(count, len(items))
    bounds = [len(items) * i // count for i in range(count + 1)] if count else [0]
    return [items[begin:end] for begin, end in zip(bounds, bounds[1:])]


class NotSupported(HorovodInternalError, NotImplementedError):
    """Raised for what Horovod's core (HorovodInternalError) or its frameworks (NotImplementedError) refuse."""


def require_scattering(op: int) -> None:
    """Raises NotSupported for a reduction that `reducescatter` does not have."""
    if op not in (Average, Sum):
        raise NotSupported(f"reducescatter: op={op!r} -- hvd.Average and hvd.Sum are supported")


def named(kind: str, name: Optional[str], process_set: ProcessSet) -> str:
    """Returns the operation's name on all ranks. Unnamed operations are counted, since all ranks call in the same order."""
    return f"{kind}.{name}" if name is not None else f"{kind}.noname.{process_set._number(kind)}"


def group_names(kind: str, name: Optional[str], process_set: ProcessSet, count: int) -> List[str]:
    """Returns the names of the tensors of a group."""
    base = named(kind, name, process_set)
    return [f"{base}_{i + 1}of{count}" for i in range(count)]


def started(kind: str, names: List[str], start: Callable[..., Any], *args: Any, **kwargs: Any) -> List[NamedWork]:
    """Starts operations by `start`, and adds them to the timeline."""
    recorder = timeline.current
    began = 0.0 if recorder is None else timeline.now()
    try:
        works = start(*args, **kwargs)
    except Error as error:
        raise translated(error) from error
    works = works if isinstance(works, list) else [works]
    if recorder is not None:
        recorder.watch(kind, names, works, began)
    return works


def wait_for(works: List[NamedWork]) -> None:
    """Waits until all are done. Raises the error of the first operation that failed."""
    failed: Optional[Error] = None
    for work in works:
        try:
            work.wait()
        except Error as error:
            failed = failed or error
    if failed is not None:
        raise translated(failed)


def finished(kind: str, names: List[str], start: Callable[..., Any], *args: Any, **kwargs: Any) -> List[NamedWork]:
    """Like `started`, but also waits for the operations."""
    works = started(kind, names, start, *args, **kwargs)
    wait_for(works)
    return works


class Call(NamedTuple):
    """An operation on some tensors, each under its own name, called by all ranks of the set."""

    kind: str  # allreduce (also Adasum), broadcast, allgather, reducescatter or alltoall
    names: Sequence[str]
    process_set: ProcessSet
    op: int = Average
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0  # a rank of the world
    needs_all_ranks: bool = True  # broadcast and allgather: fails while some ranks have joined
    splits: Optional[Tuple[int, ...]] = None  # alltoall, which takes one tensor: rows for each rank
    wire_format: Optional[str] = None  # allreduce and reducescatter, Sum and Average of float32
    step: int = 0  # an optimizer's Adasum: the number of the step, the same on all ranks

    # In a compiled program of JAX: the rows of each rank. All ranks have to contribute.
    rows: Tuple[Tuple[int, ...], ...] = ()
    # In a graph of TensorFlow: True if no name can be used twice at a time, however functions are called.
    once: bool = False

    def also(self, suffix: str, **changes: Any) -> "Call":
        """Returns a further call that this call needs, under names derived from this call's."""
        return self._replace(names=tuple(f"{name}.{suffix}" for name in self.names), **changes)

    def numbers(self) -> Dict[str, int]:
        """Returns the numbers for compiled programs, as in python::NamedCall. Not for Adasum, which Python computes."""
        root = root_in(self.process_set, self.root) if self.kind == "broadcast" else 0
        kind = ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall").index(self.kind)
        return {"engine": self.process_set._key, "kind": kind, "op": ENGINE_OPS[self.op].value, "root": root}

    def start(self, tensors: Sequence[Any], outputs: Optional[Sequence[Any]] = None) -> List[NamedWork]:
        """Starts the operation on the engine. Tensors of a broadcast are written, and so are those of an allreduce
        without `outputs`."""
        engine, names = engine_of(self.process_set), list(self.names)
        if not names:
            return []
        if self.kind == "broadcast":
            root = root_in(self.process_set, self.root)
            return started("BROADCAST", names, engine.broadcast_group, names, tensors, root, needs_all_ranks=self.needs_all_ranks)
        if self.op == Adasum:
            rows = [one.reshape(1, -1) for one in tensors]
            return started("ADASUM", names, engine.all_gather_group, names, rows, needs_all_ranks=False)
        if self.kind == "allgather":
            return started("ALLGATHER", names, engine.all_gather_group, names, tensors, needs_all_ranks=self.needs_all_ranks)
        if self.kind == "alltoall":
            return started("ALLTOALL", names, engine.all_to_all, names[0], tensors[0], self.splits)
        how = {"op": ENGINE_OPS[self.op], "prescale": self.prescale, "postscale": self.postscale,
               "wire_format": self.wire_format}  # fmt: skip
        if self.kind == "reducescatter":
            return started("REDUCESCATTER", names, engine.reduce_scatter_group, names, tensors, **how)
        return started("ALLREDUCE", names, engine.all_reduce_group, names, tensors, outputs, **how)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks of the set have called it. Not in graphs and compiled programs, which have no order."""
    name = named("barrier", None, process_set)
    finished("BARRIER", [name], engine_of(process_set).barrier, name)


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Declares that this rank has no more data, and waits until all ranks of the set have called `join`.

    Until then this rank takes part in the others' reductions without changing them. It adds nothing to sums (averages
    are still divided by the number of all ranks) and has no effect on minima, maxima and products. Meanwhile allgather,
    broadcast, reducescatter and alltoall fail on the others. `device` has no effect, since a rank that has joined needs no
    GPU. Returns the rank of the world that joined last, the same on all ranks.
    """
    work = finished("JOIN", ["join"], engine_of(process_set).join)[0]
    process_set._renumber()  # ranks have had different numbers of unnamed operations
    return (process_set.ranks or [])[work.last_joined]


# --- gradients and Adasum, for any kind of tensors ---

def reduced_back(back: Call, grads: Sequence[Any], values: Sequence[Any], run: Callable[[Call, Sequence[Any]], List[Any]],
                 equal: Callable[[Any, Any], Any],
                 products_of_others: Callable[[Call, Sequence[Any]], List[Any]]) -> List[Any]:  # fmt: skip
    """Returns the gradients of an allreduce's inputs, computed from the gradients of its results.

    back    the allreduce of gradients, under its own names
    values  the inputs, for Min, Max and Product
    run     runs a call and returns its results
    equal   for two values: 1 where they are equal, else 0
    products_of_others  returns products of the other ranks' (scaled) values, also where this rank's own value is 0
    """
    if back.op not in (Min, Max, Product):
        return run(back, grads)
    plain = back._replace(op=Sum, prescale=1.0, postscale=1.0)
    totals = run(plain, grads)
    if back.op == Product:
        shares = products_of_others(back, values)
    else:
        # If this rank's value is the minimum or maximum: 1 divided by the number of ranks that have it; else 0.
        op = back.op if back.prescale >= 0 else Max if back.op == Min else Min
        best = run(plain.also("best", op=op), values)
        wins = [equal(value, one) for value, one in zip(values, best)]
        shares = [won / count for won, count in zip(wins, run(plain.also("winners"), wins))]
    return [total * (back.prescale * back.postscale) * share for total, share in zip(totals, shares)]


_NOTE = struct.Struct("=ddq")


def note_of(call: Call) -> bytes:
    """Returns the note sent with each tensor of an Adasum, by which ranks check that all combine in the same way: 24 bytes, a
    multiple of the size of any element type."""
    return _NOTE.pack(call.prescale, call.postscale, call.step)


def require_same_notes(call: Call, notes: Sequence[bytes], rows: Sequence[int]) -> None:
    """Raises HorovodInternalError, on all ranks, if their notes differ. rows: number of rows by rank, 0 if it has joined."""
    ranks = [rank for rank, count in zip(call.process_set.ranks or [], rows) if count]
    first = _NOTE.unpack(notes[0]) if notes else ()
    for rank, note in zip(ranks, notes):
        for what, own, other in zip(("prescale_factor", "postscale_factor", "the step of the optimizer"), first, _NOTE.unpack(note)):
            if own != other:
                advice = "give the same on all ranks" if what[0] == "p" else "a rank has left out a step: let all do so, or none"
                raise translated(
                    Mismatch(f"adasum of '{call.names[0]}': {what} is {own} on rank {ranks[0]} and {other} on rank {rank} -- {advice}")
                )


def adasum(level: List[Any], dot: Callable[[Any, Any], float]) -> Any:
    """Returns the Adasum: for two vectors (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b, their sum if they are orthogonal
    and their average if they are parallel. Neighbouring ranks are combined, then neighbouring results, and so on; a
    result without a neighbour is passed on unchanged, so any number of ranks works. Every rank gathers all vectors and
    combines them itself, so all have the same bits if their devices are of one kind.

    dot  the dot product, in double, because in float long vectors lose the digits that matter here
    """
    while len(level) > 1:
        pairs = []
        for a, b in zip(level[::2], level[1::2]):
            ab, aa, bb = dot(a, b), dot(a, a), dot(b, b)
            pairs.append(a * (1.0 - ab / (2.0 * aa) if aa > 0 else 1.0) + b * (1.0 - ab / (2.0 * bb) if bb > 0 else 1.0))
        level = pairs + level[2 * len(pairs) :]
    return level[0]
