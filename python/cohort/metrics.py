"""Averages over ranks, right for uneven parts: sums and counts are added, then divided. Needs no torch."""

from __future__ import annotations

import array
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, overload

from cohort import Communicator
from cohort._collective import all_gather_bytes
from cohort._process.world import world
from cohort.errors import InvalidArgument, Mismatch

__all__ = ["Averages", "Mean", "average"]


class Mean(NamedTuple):
    """One mean over this rank's samples or, with `reduce`, over those of all ranks."""

    value: float  # 0.0 if there were no samples
    count: float  # type: ignore[assignment]  # tuples have a method of that name


class Averages:
    """Named means, all reduced in one collective.

        averages = cohort.metrics.Averages(["loss", "accuracy"])
        averages.add("loss", loss.item(), len(batch))      # the batch's mean and its number of samples
        result = averages.reduce()                         # the same on all ranks
        result["loss"].value
    """

    def __init__(self, names: Iterable[str]) -> None:
        """All ranks give the same names in the same order. Raises InvalidArgument if a name occurs twice."""
        self._names = list(names)
        if len(set(self._names)) != len(self._names):
            raise InvalidArgument("metrics.Averages: a name stands there twice")
        self._index = {name: index for index, name in enumerate(self._names)}
        self.clear()

    def add(self, name: str, mean: float, samples: int = 1) -> None:
        """Adds a `mean` over `samples` samples. With 0 samples the value is ignored, NaN too.

        Raises InvalidArgument for an unknown name or a negative number.
        """
        index = self._index.get(name)
        if index is None:
            raise InvalidArgument(f"metrics.Averages has no '{name}' -- name it in the constructor, on all ranks")
        if samples < 0:
            raise InvalidArgument(f"metrics.Averages: {samples} samples for '{name}'")
        if samples == 0:
            return
        self._sums[index] += float(mean) * samples
        self._sums[len(self._names) + index] += samples

    def local(self) -> dict[str, Mean]:
        """Returns the means of this rank's values."""
        return self._means(self._sums)

    def reduce(self, comm: Communicator | None = None) -> dict[str, Mean]:
        """Returns means over all ranks of `comm` (None: the default world); collective, waits. Keeps this rank's sums.

        Raises Mismatch on every rank if the ranks gave different names, or a different order.
        """
        sums = self._sums[:]
        (comm if comm is not None else world()).all_reduce(sums, tag=zlib.crc32(repr(self._names).encode()))
        return self._means(sums)

    def clear(self) -> None:
        self._sums = array.array("d", bytes(16 * len(self._names)))  # sums of mean * samples, then of samples

    def _means(self, sums: array.array) -> dict[str, Mean]:
        counts = sums[len(self._names) :]
        return {
            name: Mean(total / count if count > 0 else 0.0, count)
            for name, total, count in zip(self._names, sums, counts)
        }


@overload
def average(mean: float, samples: int = 1, comm: Communicator | None = None) -> Mean: ...
@overload
def average(mean: Mapping[str, Any], *, comm: Communicator | None = None) -> dict[str, Any]: ...
def average(mean: float | Mapping[str, Any], samples: int = 1, comm: Communicator | None = None) -> Any:
    """Returns a number's mean over all ranks of `comm` (None: the default world), weighted by `samples`; collective.

    For a dict, such as each rank's results of an evaluation, returns the dict of the means over all ranks. Plain
    numbers count equally for every rank; values of class Mean (as Averages.local() gives) are weighted by their counts
    and so exact for uneven parts. Raises Mismatch on every rank if the ranks' dicts have different names.
    """
    if isinstance(mean, Mapping):
        return _average_of(mean, comm if comm is not None else world())
    one = Averages(["value"])
    one.add("value", mean, samples)
    return one.reduce(comm)["value"]


def _average_of(local: Mapping[str, Any], comm: Communicator) -> dict[str, Any]:
    mine = str(sorted(f"{name} (Mean)" if isinstance(value, Mean) else name for name, value in local.items()))
    everybody = [str(theirs, "utf-8") for theirs in all_gather_bytes(comm, mine.encode())]
    for rank, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            raise Mismatch(
                f"metrics.average: the ranks' results differ -- rank 0 has {everybody[0]}, rank {rank} {theirs} "
                "-- report the same names on all ranks, and of the same kind"
            )
    averages = Averages(sorted(local))
    for name, value in local.items():
        averages.add(name, *(value if isinstance(value, Mean) else (float(value), 1)))
    means = averages.reduce(comm)
    return {name: means[name] if isinstance(value, Mean) else means[name].value for name, value in local.items()}
