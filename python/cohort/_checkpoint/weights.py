"""Weights only, in one file of safetensors or .pt: implements cohort.checkpoint.load_weights and save_weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Union

import torch

from cohort import _core
from cohort._checkpoint.tensors import Assignment, named_tensors, to_entry
from cohort.errors import InvalidArgument

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
    Nothing in the file is executed. Raises Unavailable or Io if the file cannot be read, Corrupt if it is damaged or of
    another format, InvalidArgument with all differences in one message if it does not fit; the module is then
    unchanged.
    """
    _one_of("match", match, ("strict", "subset"))
    _one_of("convert", convert, ("exact", "any"))
    weights, _ = _core.read_weights(os.fspath(path), key)
    assignment = Assignment(
        named_tensors(module), weights, os.fspath(path), strict=match == "strict", exact=convert == "exact"
    )
    assignment.prepared()()
    return LoadedWeights(assignment.missing, assignment.unexpected)


def save_weights(module: torch.nn.Module, path: Path, format: str = "safetensors") -> None:
    """Writes parameters and buffers by name; replaces the whole file atomically. Not collective: one rank calls it.

    format  "safetensors", or "pt": readable by torch.load(path, weights_only=True)
    """
    _one_of("format", format, ("safetensors", "pt"))
    entries = [to_entry(name, tensor) for name, tensor in named_tensors(module).items()]
    _core.write_weights(os.fspath(path), entries, format == "pt")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidArgument(f"{name} is {value!r} -- it is one of {', '.join(map(repr, known))}")
