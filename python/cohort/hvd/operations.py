"""What the frameworks' operations have in common: reductions, names, how an engine is asked and waited for."""

from __future__ import annotations

import warnings
from typing import Any, Callable, List, Optional, TypeVar

from cohort._core import NamedWork, ReduceOp
from cohort.errors import Error
from cohort.hvd import timeline
from cohort.hvd.exceptions import HorovodInternalError, translated
from cohort.hvd.process_sets import ProcessSet, engine_of, global_process_set

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


# --- what gradients and Adasum are computed by, whatever tensors are ---

T = TypeVar("T")


def shares_of_winners(values: List[T], op: int, prescale: float, reduce: Callable[[List[T], int, str], List[T]],
                      equal: Callable[[T, T], T]) -> List[Any]:  # fmt: skip
    """1 where this rank's value is the minimum or maximum, shared among the ranks that have it; else 0.

    reduce  (values, op, what for): the reductions
    equal   of two values: 1 where they are, else 0
    """
    if prescale < 0:
        op = Max if op == Min else Min
    best = reduce(values, op, "best")
    wins = [equal(value, one) for value, one in zip(values, best)]
    return [won / count for won, count in zip(wins, reduce(wins, Sum, "winners"))]  # type: ignore[operator]


def adasum(level: List[Any], dot: Callable[[Any, Any], float]) -> Any:
    """Adasum: of two vectors (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b, their sum where they are orthogonal and their average
    where they are parallel. Ranks are combined as neighbours, then neighbours of those, and so on; who has no neighbour goes
    up alone, so any number of ranks will do. Every rank gathers all vectors and combines them itself, so all have the same
    bits where their devices are alike.

    dot  the product, in double: those of long vectors would lose what decides here
    """
    while len(level) > 1:
        pairs = []
        for a, b in zip(level[::2], level[1::2]):
            ab, aa, bb = dot(a, b), dot(a, a), dot(b, b)
            pairs.append(a * (1.0 - ab / (2.0 * aa) if aa > 0 else 1.0) + b * (1.0 - ab / (2.0 * bb) if bb > 0 else 1.0))
        level = pairs + level[2 * len(pairs) :]
    return level[0]
