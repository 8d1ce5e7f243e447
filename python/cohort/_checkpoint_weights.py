"""Weights alone, in one file of safetensors or .pt: implements cohort.checkpoint.load_weights and save_weights."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Union

import torch

from cohort import _core, _pt_files
from cohort._checkpoint_tensors import Assignment, Entry, named_tensors, to_entry
from cohort.errors import Corrupt, InvalidArgument, Io

Path = Union[str, "os.PathLike[str]"]


@dataclass(frozen=True)
class LoadedWeights:
    """Result of load_weights."""

    missing: list[str]  # in the module only (match="subset")
    unexpected: list[str]  # in the file only (match="subset")


def load_weights(
    module: torch.nn.Module, path: Path, *, match: str = "strict", convert: str = "exact", key: str = ""
) -> LoadedWeights:
    """Copies weights from a safetensors or .pt file, detected by content, into parameters and buffers. Not collective.

    match    "strict": the file has to hold exactly the module's names; "subset": names on only one side are skipped
    convert  "exact": only where no value can change, as from bfloat16 to float32; "any": rounding allowed
    key      for a .pt whose top level is not the weights: the key of the weights ("model"); nested: "a/b"

    A prefix "module." on all names is removed, and so are the parts that torch.compile and other wrappers add to names.
    A .pt is read by torch.load(weights_only=True), so that nothing in it is executed. Raises Unavailable or Io if the file cannot be read, Corrupt if it is damaged or of
    another format, InvalidArgument with all differences in one message if it does not fit; the module is then
    unchanged.
    """
    _one_of("match", match, ("strict", "subset"))
    _one_of("convert", convert, ("exact", "any"))
    name = os.fspath(path)
    weights: Iterable[Entry]
    if _core.is_pt(name):
        try:
            weights = [to_entry(*tensor) for tensor in _pt_files.load(name, key).items()]
        except _pt_files.Damaged as error:
            raise Corrupt(str(error)) from error
        except ValueError as error:
            raise InvalidArgument(str(error)) from error
    else:
        weights, _ = _core.read_weights(name, key)
    assignment = Assignment(named_tensors(module), weights, name, strict=match == "strict", exact=convert == "exact")
    assignment.prepared()()
    return LoadedWeights(assignment.missing, assignment.unexpected)


def save_weights(module: torch.nn.Module, path: Path, format: str = "safetensors") -> None:
    """Writes parameters and buffers by name; replaces the whole file atomically. Not collective: one rank calls it.

    format  "safetensors", or "pt": readable by torch.load(path, weights_only=True)
    """
    _one_of("format", format, ("safetensors", "pt"))
    if format == "pt":
        tensors = {name: _pt_files.plain(tensor) for name, tensor in named_tensors(module).items()}
        try:
            _core.write_atomically(os.fspath(path), lambda descriptor: _pt_files.save(tensors, descriptor))
        except Io:
            raise
        except OSError as error:
            raise Io(f"cannot write {os.fspath(path)} -- {error}") from error
    else:
        _core.write_weights(os.fspath(path), [to_entry(*tensor) for tensor in named_tensors(module).items()])


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidArgument(f"{name} is {value!r} -- it is one of {', '.join(map(repr, known))}")
