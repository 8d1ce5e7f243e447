"""Whether every epoch's samples were used exactly once: what the ledger of a job says."""

from __future__ import annotations

import bisect
import json
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, Union

from cohort.errors import Corrupt, InvalidArgument


@dataclass(frozen=True)
class Audit:
    """What `audit` found. True if there is no problem.

    epochs    by (sampler, epoch of the data set): how many samples were used
    problems  what is missing or repeated, a line each with its place in the ledger
    """

    epochs: dict[tuple[str, int], int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.problems


class _Line(NamedTuple):
    begin: int  # of the samples
    end: int
    first: int  # of the steps
    last: int
    world: int
    place: str


def audit(folder: Union[str, "os.PathLike[str]"], sizes: Optional[Mapping[str, int]] = None) -> Audit:
    """Reads the ledger in a run's folder, samples-*.jsonl, or one file of it: have steps used each sample of each epoch
    once, from the first on?

    sizes  of the data sets, by sampler: then each epoch but a sampler's last one has to be whole, too

    Samples are counted by their place in the epoch's permutation. Raises InvalidArgument where there is no ledger, Corrupt
    for a line that is none (a file's last one, if it is cut off, is passed over: its process was killed in writing it).
    """
    path = pathlib.Path(folder)
    files = sorted(path.glob("samples-*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.exists() for file in files):
        raise InvalidArgument(f"audit: there is no ledger samples-*.jsonl in {path}")
    begins: dict[int, dict[str, tuple[int, int]]] = {}  # by world: where samplers stood
    lines: dict[tuple[str, int], list[_Line]] = {}
    for file in files:
        _read(file, begins, lines)
    worlds = sorted(begins)
    found = Audit()
    last: dict[str, int] = {}
    for sampler, epoch in sorted(lines):
        if epoch > last.setdefault(sampler, epoch) + 1:
            found.problems.append(f"sampler '{sampler}': nothing of epoch {epoch - 1} is used, and epoch {epoch} is")
        last[sampler] = epoch
        counted: list[_Line] = []
        for line in sorted(lines[sampler, epoch]):
            # What the next world takes up again counts there.
            after = bisect.bisect_right(worlds, line.world)
            if after < len(worlds):
                limit = begins[worlds[after]].get(sampler, (epoch + 1, 0))
                if (epoch, line.begin) >= limit:
                    continue
                line = line._replace(end=min(line.end, limit[1])) if epoch == limit[0] else line
            counted.append(line)
        found.epochs[sampler, epoch] = _check(f"sampler '{sampler}', epoch {epoch}", counted, found.problems)
    for (sampler, epoch), used in found.epochs.items():
        size = (sizes or {}).get(sampler, used)
        if used > size or (used < size and epoch < last[sampler]):
            found.problems.append(f"sampler '{sampler}', epoch {epoch}: {used} of {size} samples are used")
    return found


def _check(what: str, lines: list[_Line], problems: list[str]) -> int:
    """Of one epoch, ascending. Returns where they end."""
    at = 0
    before: Optional[_Line] = None
    for line in lines:
        if line.begin > at:
            problems.append(f"{line.place}: {what}: samples {at} to {line.begin - 1} are in no line before")
        elif line.begin < at and before is not None:
            # Of one world several ranks may say the same.
            if line.world != before.world or line.first > before.last:
                again = f"samples {line.begin} to {min(at, line.end) - 1}"
                problems.append(f"{line.place}: {what}: {again} are used once more, after {before.place}")
        if line.end >= at:
            at, before = line.end, line
    return at


def _read(file: pathlib.Path, begins: dict[int, dict[str, tuple[int, int]]],
          lines: dict[tuple[str, int], list[_Line]]) -> None:  # fmt: skip
    texts = file.read_bytes().split(b"\n")
    for number, text in enumerate(texts[:-1], 1):  # what no newline ends was cut off
        try:
            line: dict[str, Any] = json.loads(text)
            world = int(line["world"])
            if "size" in line:
                begins[world] = {name: (int(epoch), int(cursor)) for name, (epoch, cursor) in line["samplers"].items()}
                continue
            (begin, end), (first, last) = line["samples"], line["steps"]
            key = str(line["sampler"]), int(line["epoch"])
            lines.setdefault(key, []).append(_Line(int(begin), int(end), int(first), int(last), world, f"{file}:{number}"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Corrupt(f"{file}:{number}: no line of a ledger -- {type(error).__name__}: {error}") from error
