"""Common parts of the frameworks' operations: reductions, names, how an engine is asked and waited for."""

from __future__ import annotations

import struct
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from cohort._core import NamedWork, ReduceOp
from cohort.errors import Error, Mismatch
from cohort.hvd import timeline
from cohort.hvd.exceptions import HorovodInternalError, translated
from cohort.hvd.process_sets import ProcessSet, engine_of, global_process_set, root_in

__all__ = ["Average", "Max", "Min", "Product", "Sum", "barrier"]

# The reductions, as the numbers that Horovod's programs pass around.
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
    """The reduction that is asked for by `op` or, as programs did long ago, by `average`. Neither: Average."""
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
    """Raises ValueError for arguments of a DistributedOptimizer's that have no meaning."""
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor goes with op=hvd.Average alone")
    if predivide <= 0:
        raise ValueError(f"gradient_predivide_factor={predivide}: it has to be positive")
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes}: at least 1 is needed")


def check_groups(groups: Any, num_groups: int, what: str, least: int = 0) -> Any:
    """The groups that are asked for: a number, or lists of these; num_groups is the older name. Raises ValueError for what
    has no meaning."""
    if num_groups:
        warnings.warn("num_groups is deprecated -- give groups=N", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if isinstance(groups, int) and groups >= least:
        return groups or None
    if groups is None or (isinstance(groups, (list, tuple)) and all(isinstance(one, (list, tuple)) for one in groups)):
        return groups
    raise ValueError(f"groups={groups!r}: a number of groups, or a list of lists of {what}")


def parts_of(items: List[Any], count: int) -> List[List[Any]]:
    """The list in so many parts, or as many as it has items, of about the same length."""
    count = min(count, len(items))
    bounds = [len(items) * i // count for i in range(count + 1)] if count else [0]
    return [items[begin:end] for begin, end in zip(bounds, bounds[1:])]


class NotSupported(HorovodInternalError, NotImplementedError):
    """Horovod's core refuses it; its frameworks, where they know, are not implemented."""


def require_scattering(op: int) -> None:
    """Raises NotSupported for a reduction that `reducescatter` has not."""
    if op not in (Average, Sum):
        raise NotSupported(f"reducescatter: op={op!r} -- hvd.Average and hvd.Sum are supported")


def named(kind: str, name: Optional[str], process_set: ProcessSet) -> str:
    """The name that ranks meet under. Without one it counts: then all ranks have to call in the same order."""
    return f"{kind}.{name}" if name is not None else f"{kind}.noname.{process_set._number(kind)}"


def group_names(kind: str, name: Optional[str], process_set: ProcessSet, count: int) -> List[str]:
    """The names of the tensors of a group."""
    base = named(kind, name, process_set)
    return [f"{base}_{i + 1}of{count}" for i in range(count)]


def started(kind: str, names: List[str], start: Callable[..., Any], *args: Any, **kwargs: Any) -> List[NamedWork]:
    """The operations that `start` asks the engine for, seen by the timeline."""
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
    """Waits until all are done. Raises what the first one that failed did."""
    failed: Optional[Error] = None
    for work in works:
        try:
            work.wait()
        except Error as error:
            failed = failed or error
    if failed is not None:
        raise translated(failed)


def finished(kind: str, names: List[str], start: Callable[..., Any], *args: Any, **kwargs: Any) -> List[NamedWork]:
    """As `started`, and waits for them."""
    works = started(kind, names, start, *args, **kwargs)
    wait_for(works)
    return works


class Call(NamedTuple):
    """An operation on some tensors, each under a name of its own, which all ranks of the set ask for."""

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

    # In a compiled program of JAX's: the rows of each rank, which all have to have contributed.
    rows: Tuple[Tuple[int, ...], ...] = ()
    # In a graph of TensorFlow's each name is asked for once at a time, however functions call each other.
    once: bool = False

    def also(self, suffix: str, **changes: Any) -> "Call":
        """Another one that this one leads to, under names that follow from this one's."""
        return self._replace(names=tuple(f"{name}.{suffix}" for name in self.names), **changes)

    def numbers(self) -> Dict[str, int]:
        """Returns its numbers for compiled programs, as in python::NamedCall. Not for Adasum, which Python combines."""
        root = root_in(self.process_set, self.root) if self.kind == "broadcast" else 0
        kind = ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall").index(self.kind)
        return {"engine": self.process_set._key, "kind": kind, "op": ENGINE_OPS[self.op].value, "root": root}

    def start(self, tensors: Sequence[Any], outputs: Optional[Sequence[Any]] = None) -> List[NamedWork]:
        """Asks the engine for it. Tensors are what it takes: those of a broadcast are written, and of an allreduce if there
        are no outputs."""
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
    """Waits until all ranks of the set have called it. Not a part of graphs and compiled programs, which have no order."""
    name = named("barrier", None, process_set)
    finished("BARRIER", [name], engine_of(process_set).barrier, name)


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Says that this rank has no more data, and waits until all ranks of the set have said so.

    Until then this rank takes part in the others' reductions without changing them: it adds nothing to sums (averages
    are still divided by all ranks), nothing to minima, maxima and products. Allgather, broadcast, reducescatter and
    alltoall fail on the others meanwhile. `device` means nothing here: a rank that has joined needs no GPU. Returns the
    rank of the world that joined last, the same on all ranks.
    """
    work = finished("JOIN", ["join"], engine_of(process_set).join)[0]
    process_set._renumber()  # ranks have had different numbers of unnamed operations
    return (process_set.ranks or [])[work.last_joined]


# --- gradients and Adasum, for any kind of tensors ---

def reduced_back(back: Call, grads: Sequence[Any], values: Sequence[Any], run: Callable[[Call, Sequence[Any]], List[Any]],
                 equal: Callable[[Any, Any], Any],
                 products_of_others: Callable[[Call, Sequence[Any]], List[Any]]) -> List[Any]:  # fmt: skip
    """The gradients of an allreduce's inputs, from those of its results.

    back    as the allreduce, under names of its own
    values  what was given, of Min, Max and Product
    run     carries out a call and gives its results
    equal   of two values: 1 where they are, else 0
    products_of_others  of the other ranks' (scaled) values: dividing the result by one's own would fail at zeros
    """
    if back.op not in (Min, Max, Product):
        return run(back, grads)
    plain = back._replace(op=Sum, prescale=1.0, postscale=1.0)
    totals = run(plain, grads)
    if back.op == Product:
        shares = products_of_others(back, values)
    else:
        # 1 where this rank's value is the minimum or maximum, shared among the ranks that have it; else 0.
        op = back.op if back.prescale >= 0 else Max if back.op == Min else Min
        best = run(plain.also("best", op=op), values)
        wins = [equal(value, one) for value, one in zip(values, best)]
        shares = [won / count for won, count in zip(wins, run(plain.also("winners"), wins))]
    return [total * (back.prescale * back.postscale) * share for total, share in zip(totals, shares)]


_NOTE = struct.Struct("=ddq")


def note_of(call: Call) -> bytes:
    """Returns the note sent with each tensor of an Adasum, to check that all ranks combine alike: 24 bytes, which any
    element type divides."""
    return _NOTE.pack(call.prescale, call.postscale, call.step)


def require_same_notes(call: Call, notes: Sequence[bytes], rows: Sequence[int]) -> None:
    """Raises HorovodInternalError, on all ranks, where their notes differ. rows: from each rank; none where it has joined."""
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
    """Adasum: of two vectors (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b, their sum where they are orthogonal and their average
    where they are parallel. Ranks are combined as neighbours, then neighbours of those, and so on; one without a
    neighbour goes up alone, so any number of ranks will do. Every rank gathers all vectors and combines them itself, so
    all have the same bits where their devices are alike.

    dot  the product, in double: those of long vectors would lose what decides here
    """
    while len(level) > 1:
        pairs = []
        for a, b in zip(level[::2], level[1::2]):
            ab, aa, bb = dot(a, b), dot(a, a), dot(b, b)
            pairs.append(a * (1.0 - ab / (2.0 * aa) if aa > 0 else 1.0) + b * (1.0 - ab / (2.0 * bb) if bb > 0 else 1.0))
        level = pairs + level[2 * len(pairs) :]
    return level[0]
