"""Converts between torch's tensors and a file's entries, which are (name, type as torch calls it, shape, bytes)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

import torch

from cohort.errors import Corrupt, InvalidArgument

Entry = tuple[str, str, Sequence[int], Any]

_log = logging.getLogger("cohort.checkpoint")
_PREFIX = "module."
# Parts added to names by wrappers within a module: torch.compile's, activation checkpointing's, FSDP's.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_SHOWN = 20
# For each type, the types that can hold all of its values.
_FLOATS = ("float32", "float64")
_EXACT = {
    "float8_e4m3fn": ("float16", "bfloat16", *_FLOATS),
    "float8_e5m2": ("float16", "bfloat16", *_FLOATS),
    "float16": _FLOATS,
    "bfloat16": _FLOATS,
    "float32": ("float64",),
    "int8": ("int16", "int32", "int64"),
    "uint8": ("int16", "int32", "int64"),
    "int16": ("int32", "int64"),
    "int32": ("int64",),
}


def type_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype)[len("torch.") :]


def to_entry(name: str, tensor: torch.Tensor) -> Entry:
    """Returns an entry with the tensor's elements, without a copy if they are dense and on the CPU."""
    if tensor.layout != torch.strided:
        raise InvalidArgument(f"cannot save tensor '{name}' -- it is sparse -- make it dense first")
    dense = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return name, type_name(dense), list(dense.shape), dense.view(-1).view(torch.uint8)


def to_tensor(entry: Entry) -> torch.Tensor:
    """Returns a copy of a file's tensor."""
    name, kind, shape, data = entry
    dtype = getattr(torch, kind, None)
    if dtype is None:
        raise InvalidArgument(
            f"cannot load tensor '{name}' -- torch {torch.__version__} has no type {kind} -- convert the file, or use a "
            "newer torch"
        )
    if len(data) == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8).clone()
    if dtype is torch.bool and bool((flat > 1).any()):
        raise Corrupt(f"tensor '{name}' has bools that are neither 0 nor 1")
    return flat.view(dtype).view(list(shape))


def bare(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the module inside a data-parallel wrapper: Cohort's or torch's."""
    from cohort.nn import DataParallel, DistributedDataParallel

    wrappers = (
        DistributedDataParallel,
        DataParallel,
        torch.nn.DataParallel,
        *([torch.nn.parallel.DistributedDataParallel] if torch.distributed.is_available() else []),
    )
    while isinstance(module, wrappers):
        module = module.module
    return module


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the module inside data-parallel wrappers and torch.compile's, in any order."""
    while True:
        inner = bare(module)
        compiled = getattr(inner, "_orig_mod", None)
        inner = compiled if isinstance(compiled, torch.nn.Module) else inner
        if inner is module:
            return module
        module = inner


def plain_name(name: str) -> str:
    """Returns the name that a tensor would have without wrappers within the module."""
    if not any(one in name for one in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and persistent buffers, not copies, by their names without wrappers."""
    tensors: dict[str, torch.Tensor] = {}
    for whole_name, value in unwrapped(module).state_dict(keep_vars=True).items():
        name = plain_name(whole_name)
        if name in tensors:
            raise InvalidArgument(f"the module has two tensors '{name}', one within a wrapper -- rename one")
        tensors[name] = value
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise InvalidArgument(
                f"the module's '{name}' is a {type(value).__name__} and no tensor (its get_extra_state) -- keep it in "
                "the checkpoint's values, or save it yourself"
            )
    return tensors


def overlaps(tensor: torch.Tensor) -> bool:
    """Returns whether elements share memory, as in an expanded tensor; then nothing can be copied into it."""
    return tensor.layout == torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride())
    )


def module_entries(module: torch.nn.Module) -> list[Entry]:
    """Returns a checkpoint's entries for a module. Raises InvalidArgument for tensors that cannot be loaded."""
    tensors = named_tensors(module)
    for name, tensor in tensors.items():
        if overlaps(tensor):
            raise InvalidArgument(
                f"cannot save the module's '{name}' -- several of its elements lie in one place (expand), so that it "
                "could not be loaded -- make it a clone(), or a buffer with persistent=False"
            )
    return [to_entry(*named) for named in tensors.items()]


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:_SHOWN]) + more


class Assignment:
    """Copies to make after everything has been found to fit."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], weights: Iterable[Entry], source: str, *, strict: bool, exact: bool
    ) -> None:
        """Raises InvalidArgument with all differences in one message; `source` is the file's name."""
        weights = [entry if entry[0] in tensors else (plain_name(entry[0]), *entry[1:]) for entry in weights]
        if weights and all(name.startswith(_PREFIX) and name not in tensors for name, *_ in weights):
            _log.info("%s: the prefix '%s' of its names is passed over", source, _PREFIX)
            weights = [(name[len(_PREFIX) :], *rest) for name, *rest in weights]
        self._copies: list[tuple[torch.Tensor, Entry]] = []
        names = {name for name, *_ in weights}
        self.missing = [name for name in tensors if name not in names]
        self.unexpected = [name for name, *_ in weights if name not in tensors]
        problems = []
        for entry in weights:
            name, kind, shape, _ = entry
            to = tensors.get(name)
            if to is None:
                continue
            here = type_name(to)
            if list(to.shape) != list(shape):
                problems.append(f"'{name}' has shape {list(shape)} there and {list(to.shape)} here")
            elif exact and kind != here and here not in _EXACT.get(kind, ()):
                problems.append(f"'{name}' is {kind} there and {here} here (convert='any' rounds)")
            elif overlaps(to):
                problems.append(f"'{name}' has several elements in one place here (expand): make it a clone()")
            elif to.is_inference() and not torch.is_inference_mode_enabled():
                problems.append(f"'{name}' was made in inference mode, and cannot be changed outside of it")
            else:
                self._copies.append((to, entry))
        if strict and self.missing:
            problems.append("missing in the file: " + _listing(self.missing))
        if strict and self.unexpected:
            problems.append("not in the module: " + _listing(self.unexpected))
        if problems:
            raise InvalidArgument(
                f"{source}: does not fit the module -- {'; '.join(problems)} -- was it saved from another model?"
            )

    def require_same_types(self, source: str) -> None:
        for to, (name, kind, *_) in self._copies:
            if kind != type_name(to):
                raise InvalidArgument(
                    f"{source}: tensor '{name}' is {kind} there and {type_name(to)} here -- make the model as it was "
                    "made then"
                )

    def prepared(self) -> Callable[[], None]:
        """Returns a function that overwrites the tensors; every byte has been checked before."""
        pairs = [(to, to_tensor(entry)) for to, entry in self._copies]

        def apply() -> None:
            with torch.no_grad():
                for to, value in pairs:
                    to.copy_(value)

        return apply
