"""A rank's rows of a Spark DataFrame: those of its task's partition, which the task has written to a file."""

from __future__ import annotations

import os
import pickle

from cohort import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_SECONDS_TO_MEET = 600.0


class Rows:
    """A rank's rows of a DataFrame, as Arrow record batches in mapped memory. Each iteration starts from the beginning.

    counts   the number of rows of each rank, which all ranks know before the first step
    schema   the batches' schema, even if there are no batches
    """

    def __init__(self, batches: list[Any], schema: Any, counts: tuple[int, ...], rank: int) -> None:
        self._batches = batches
        self.schema = schema
        self.counts = counts
        self._rank = rank

    def __len__(self) -> int:
        return self.counts[self._rank]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    @property
    def total(self) -> int:
        """Returns the number of rows of all ranks."""
        return sum(self.counts)

    def table(self) -> Any:
        """Returns all rows as a pyarrow.Table over the same memory."""
        import pyarrow

        return pyarrow.Table.from_batches(self._batches, schema=self.schema)

    def steps(self, batch_size: int) -> Iterator[Any]:
        """Yields tables of at most `batch_size` rows, the same number of tables on every rank. A rank without further
        rows gets empty ones, so that collectives match. An average over all rows is the sum over ranks divided by the
        sum of counts."""
        table = self.table()
        for step in range(-(-max(self.counts) // batch_size)):
            yield table.slice(step * batch_size, batch_size)


def call_with_rows(function: Callable[..., Any], schema: bytes, *args: Any, **kwargs: Any) -> Any:
    """Called on a rank; calls the function with the rank's Rows before the arguments."""
    return function(_own_rows(schema), *args, **kwargs)


def _own_rows(usual_schema: bytes) -> Rows:
    """Returns this rank's rows. `usual_schema`: the schema for a DataFrame without any row."""
    import pyarrow

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path = os.environ["COHORT_SPARK_BATCHES"]
    batches = _read(path)
    partition = int(os.path.basename(path).partition(".")[0])  # the task has named the file by it
    mine = (partition, sum(batch.num_rows for batch in batches), batches[0].schema.serialize().to_pybytes() if batches else None)
    everybody = _exchange(rank, size, mine)
    peers = [other for other, (its, _, _) in enumerate(everybody) if its == partition]  # ranks of one task
    counts = []
    for other, (its, rows, _) in enumerate(everybody):
        begin, end = _share(rows, other, [one for one, entry in enumerate(everybody) if entry[0] == its])
        counts.append(end - begin)
    schema = next((entry[2] for entry in everybody if entry[2] is not None), usual_schema)
    begin, end = _share(mine[1], rank, peers)
    return Rows(_cut(batches, begin, end), pyarrow.ipc.read_schema(pyarrow.py_buffer(schema)), tuple(counts), rank)


def _share(rows: int, rank: int, peers: list[int]) -> tuple[int, int]:
    at = peers.index(rank)
    return rows * at // len(peers), rows * (at + 1) // len(peers)


def _read(path: str) -> list[Any]:
    import pyarrow

    if os.path.getsize(path) == 0:
        return []
    file = pyarrow.ipc.open_file(pyarrow.memory_map(path))
    return [batch for i in range(file.num_record_batches) if (batch := file.get_batch(i)).num_rows > 0]


def _cut(batches: list[Any], begin: int, end: int) -> list[Any]:
    cut, at = [], 0
    for batch in batches:
        first, last = max(begin - at, 0), min(end - at, batch.num_rows)
        if first < last:
            cut.append(batch.slice(first, last - first))
        at += batch.num_rows
    return cut


def _exchange(rank: int, size: int, mine: Any) -> list[Any]:
    """Exchanges values through the job's store, before a world exists. Rank 0 collects them, with two accesses per rank."""
    place = f"rows/{os.environ.get('COHORT_RESTART', '0')}"
    store = _core.JobStore(_SECONDS_TO_MEET)
    if rank != 0:
        store.put(f"{place}/{rank}", pickle.dumps(mine))
        everybody: list[Any] = pickle.loads(store.wait(f"{place}/all", _SECONDS_TO_MEET))
        return everybody
    others = [pickle.loads(store.wait(f"{place}/{other}", _SECONDS_TO_MEET)) for other in range(1, size)]
    store.put(f"{place}/all", pickle.dumps([mine, *others]))
    return [mine, *others]
