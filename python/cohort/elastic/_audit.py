"""Whether every epoch's samples were used exactly once: what the ledger of a job says."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Optional, Union

from cohort.errors import Corrupt, InvalidArgument


@dataclass(frozen=True)
class Audit:
    """What `audit` found.

    epochs    by sampler and epoch of the data set: samples used, from the first to the last
    problems  what is missing or repeated, a line each with its place in the ledger; empty if nothing is
    """

    epochs: dict[tuple[str, int], int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class _Line:
    world: int
    sampler: str
    epoch: int
    samples: tuple[int, int]
    steps: tuple[int, int]
    place: str


def audit(folder: Union[str, "os.PathLike[str]"], sizes: Optional[Mapping[str, int]] = None) -> Audit:
    """Reads the ledger in a run's folder, samples-*.jsonl, or one file of it. True if steps have used each sample of each
    epoch once, from the first to where training stands.

    sizes  of the data sets, by sampler: then an epoch also has to be whole, but for each sampler's last one

    Samples are counted by their place in the epoch's permutation. Raises InvalidArgument where there is no ledger, Corrupt
    for a line that is none (a file's last one, if it is cut off, is passed over: its process was killed in writing it).
    """
    path = pathlib.Path(folder)
    files = sorted(path.glob("samples-*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.exists() for file in files):
        raise InvalidArgument(f"audit: there is no ledger samples-*.jsonl in {path}")
    lines: list[_Line] = []
    begins: dict[int, dict[str, tuple[int, int]]] = {}  # by world: where its samplers stand, (epoch, cursor)
    for file in files:
        _read(file, lines, begins)
    by_epoch: dict[tuple[str, int], list[_Line]] = {}
    for line in lines:
        if (counted := _counted(line, begins)) is not None:
            by_epoch.setdefault((line.sampler, line.epoch), []).append(counted)
    found = Audit()
    for (sampler, epoch), said in sorted(by_epoch.items()):
        at = 0
        # A line, or the beginning of one, stands in two files where another process has become rank 0.
        distinct: dict[tuple[int, int], _Line] = {}
        for line in said:
            place = (line.world, line.samples[0])
            if place not in distinct or distinct[place].samples[1] < line.samples[1]:
                distinct[place] = line
        ordered = sorted(distinct.values(), key=lambda line: (line.samples, line.steps))
        step = None
        for line in ordered:
            begin, end = line.samples
            what = f"{line.place}: sampler '{sampler}', epoch {epoch}: "
            if begin > at:
                found.problems.append(f"{what}samples {at} to {begin - 1} are missing before it")
            elif begin < at:
                found.problems.append(f"{what}samples {begin} to {min(at, end) - 1} are used once more")
            if step is not None and line.steps[0] <= step:
                found.problems.append(f"{what}steps {line.steps[0]} to {step} stand in a line before it, too")
            at, step = max(at, end), line.steps[1]
        is_last = epoch == max(number for name, number in by_epoch if name == sampler)
        size = (sizes or {}).get(sampler)
        if size is not None and (at > size or (at < size and not is_last)):
            found.problems.append(f"sampler '{sampler}', epoch {epoch}: {at} of {size} samples are used")
        found.epochs[sampler, epoch] = at
    for (sampler, epoch), _ in sorted(by_epoch.items()):
        if epoch > 0 and (sampler, epoch - 1) not in by_epoch and (sampler, epoch) != min(
            key for key in by_epoch if key[0] == sampler
        ):
            found.problems.append(f"sampler '{sampler}': nothing of epoch {epoch - 1} is used, and epoch {epoch} is")
    return found


def _counted(line: _Line, begins: Mapping[int, Mapping[str, tuple[int, int]]]) -> Optional[_Line]:
    """What of it is not done again: the next world begins where a step had ended on a rank that was left."""
    later = [world for world in begins if world > line.world and line.sampler in begins[world]]
    if not later:
        return line
    epoch, cursor = begins[min(later)][line.sampler]
    begin, end = line.samples
    if line.epoch > epoch or (line.epoch == epoch and begin >= cursor):
        return None
    return replace(line, samples=(begin, min(end, cursor))) if line.epoch == epoch else line


def _read(file: pathlib.Path, lines: list[_Line], begins: dict[int, dict[str, tuple[int, int]]]) -> None:
    texts = file.read_bytes().split(b"\n")
    for number, text in enumerate(texts, 1):
        if not text or number == len(texts):  # what no newline ends was cut off
            continue
        try:
            line = json.loads(text)
            if "size" in line:
                samplers = {str(name): (int(epoch), int(at)) for name, (epoch, at) in line["samplers"].items()}
                begins.setdefault(int(line["world"]), samplers)
                continue
            (begin, end), (first, last) = line["samples"], line["steps"]
            lines.append(_Line(int(line["world"]), str(line["sampler"]), int(line["epoch"]), (int(begin), int(end)),
                               (int(first), int(last)), f"{file}:{number}"))  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Corrupt(f"{file}:{number}: no line of a ledger -- {error}") from error
