"""Checks, from a training's ledgers, that every epoch's samples were used exactly once, and no step was repeated."""

from __future__ import annotations

import bisect
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, Union

from cohort.errors import Corrupt, InvalidArgument


@dataclass(frozen=True)
class Audit:
    """Result of `audit`. True if there is no problem.

    epochs    by (sampler, epoch of the data set): the number of samples used
    problems  what is missing, repeated or trained again, one line for each, with its place in the ledger
    begins    by sampler: (epoch, place) at which the ledger begins; (0, 0) unless the training continues from a
              checkpoint of a run that is not among the folders
    """

    epochs: dict[tuple[str, int], int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    begins: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return not self.problems


_World = tuple[int, int]  # (folder, number in it): ascending in time


class _Begin(NamedTuple):
    step: int
    samplers: dict[str, tuple[int, int]]  # the samplers' positions
    restart: int  # the job's restart number: a restart goes back to a checkpoint
    place: str


class _Line(NamedTuple):
    begin: int  # begin and end in samples
    end: int
    first: int  # first and last in steps
    last: int
    world: _World
    place: str


_Lines = dict[tuple[str, int], list[_Line]]  # by sampler and epoch
_Folder = Union[str, "os.PathLike[str]"]


def audit(folder: Union[_Folder, Sequence[_Folder]], sizes: Optional[Mapping[str, int]] = None) -> Audit:
    """Reads the ledger in a run's folder, samples-*.jsonl, or one file of it. Checks that steps have used each sample
    of each epoch once, from the first on, and that no world begins before a step that another had ended. (One step may
    be done again, and a restart of the job goes back to its checkpoint.)

    folder  one or several folders, in order, of a training that continued in another run: samples that a run used
            beyond the point at which the next one begins do not count
    sizes   the data sets' sizes, by sampler. With them, each epoch but a sampler's last one has to be complete, too

    Samples are counted by their place in the epoch's permutation. Raises InvalidArgument if there is no ledger, Corrupt
    for a line that is not a ledger's (a file's last line, if cut off, is ignored: its process was killed).
    """
    folders = [folder] if isinstance(folder, (str, os.PathLike)) else list(folder)
    begins: dict[_World, _Begin] = {}
    lines: _Lines = {}
    for number, path in enumerate(map(pathlib.Path, folders)):
        files = sorted(path.glob("samples-*.jsonl")) if path.is_dir() else [path]
        if not files or not all(file.exists() for file in files):
            raise InvalidArgument(f"audit: there is no ledger samples-*.jsonl in {path}")
        for file in files:
            _read(file, number, begins, lines)
    if not folders:
        raise InvalidArgument("audit: no folder is given")
    worlds = sorted(begins)
    found = Audit(begins=dict(begins[worlds[0]].samplers) if worlds else {})
    last: dict[str, int] = {}
    ends: dict[tuple[str, int], int] = {}
    for sampler, epoch in sorted(lines):
        if epoch > last.setdefault(sampler, epoch) + 1:
            found.problems.append(f"sampler '{sampler}': nothing of epoch {epoch - 1} is used, and epoch {epoch} is")
        last[sampler] = epoch
        counted: list[_Line] = []
        for line in sorted(lines[sampler, epoch]):
            # Samples that the next world repeats count there.
            after = bisect.bisect_right(worlds, line.world)
            if after < len(worlds):
                limit = begins[worlds[after]].samplers.get(sampler, (epoch + 1, 0))
                if (epoch, line.begin) >= limit:
                    continue
                line = line._replace(end=min(line.end, limit[1])) if epoch == limit[0] else line
            counted.append(line)
        first = found.begins.get(sampler, (0, 0))
        start = first[1] if epoch == first[0] else 0
        ends[sampler, epoch] = end = _check(f"sampler '{sampler}', epoch {epoch}", counted, start, found.problems)
        found.epochs[sampler, epoch] = end - start
    for (sampler, epoch), used in ends.items():
        size = (sizes or {}).get(sampler, used)
        if used > size or (used < size and epoch < last[sampler]):
            found.problems.append(f"sampler '{sampler}', epoch {epoch}: {used} of {size} samples are used")
    _check_worlds(begins, lines, found.problems)
    return found


def _check_worlds(begins: dict[_World, _Begin], lines: _Lines, problems: list[str]) -> None:
    """Checks the worlds of each run: none begins earlier than the second-last step of earlier worlds."""
    ended: dict[_World, int] = {}
    for each in lines.values():
        for line in each:
            ended[line.world] = max(line.last, ended.get(line.world, 0))
    furthest, of, before = 0, (-1, 0), _Begin(0, {}, 0, "")
    for world, begin in sorted(begins.items()):
        if world[0] != of[0] or begin.restart != before.restart:
            furthest = 0
        if begin.step < furthest - 1:
            problems.append(
                f"{begin.place}: world {world[1]} begins after step {begin.step}, and world {of[1]} had ended step {furthest}: "
                f"{furthest - begin.step} steps are trained anew"
            )
        before = begin
        if (last := max(begin.step, ended.get(world, 0))) >= furthest:
            furthest, of = last, world


def _check(what: str, lines: list[_Line], at: int, problems: list[str]) -> int:
    """Checks the lines of one epoch, ascending, from sample `at` on. Returns the sample at which the lines end."""
    before: Optional[_Line] = None
    for line in lines:
        if line.begin > at:
            problems.append(f"{line.place}: {what}: samples {at} to {line.begin - 1} are in no line before")
        elif line.begin < at and before is not None:
            # Several ranks of one world may report the same samples.
            if line.world != before.world or line.first > before.last:
                again = f"samples {line.begin} to {min(at, line.end) - 1}"
                problems.append(f"{line.place}: {what}: {again} are used once more, after {before.place}")
        if line.end >= at:
            at, before = line.end, line
    return at


def _read(file: pathlib.Path, folder: int, begins: dict[_World, _Begin], lines: _Lines) -> None:
    texts = file.read_bytes().split(b"\n")
    for number, text in enumerate(texts[:-1], 1):  # a last text without a newline was cut off
        try:
            line: dict[str, Any] = json.loads(text)
            world, place = (folder, int(line["world"])), f"{file}:{number}"
            if "size" in line:
                stood = {name: (int(epoch), int(cursor)) for name, (epoch, cursor) in line["samplers"].items()}
                begins[world] = _Begin(int(line["step"]), stood, int(line.get("restart", 0)), place)
                continue
            (begin, end), (first, last) = line["samples"], line["steps"]
            key = str(line["sampler"]), int(line["epoch"])
            lines.setdefault(key, []).append(_Line(int(begin), int(end), int(first), int(last), world, place))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Corrupt(f"{file}:{number}: no line of a ledger -- {type(error).__name__}: {error}") from error
