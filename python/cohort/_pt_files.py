"""Reads and writes .pt files by torch itself. `cohort export` and C++'s load_weights run this file as a program of its
own (src/train/formats/pt.cpp), so it imports nothing of the package.

    python3 -c PROGRAM read FILE KEY        the tensors of FILE, as safetensors, into descriptor 4
    python3 -c PROGRAM write WHAT FLOATS    the safetensors in descriptor 3 as a .pt into descriptor 4; WHAT is "weights" or
                                            "everything", FLOATS "numbers" or "tensors"

The last line that it prints, to stderr, is "done", or "invalid ...", "corrupt ..." or "failed ..." with the reason.
"""

import ctypes
import json
import math
import mmap
import os
import struct
import sys
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO, Optional

import torch

_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
_SHOWN = 20
_TORCH = {theirs: ours for ours, theirs in _SAFETENSORS.items()}
_Fields = dict[str, Any]


class Damaged(Exception):
    """The file is damaged, or holds more than tensors, numbers, text and their containers."""


def _keys_of(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "there is no dict"
    shown = ", ".join(f"'{key}' ({type(one).__name__})" for key, one in list(value.items())[:_SHOWN])
    return f"its keys: {shown}" + (f" and {len(value) - _SHOWN} more" if len(value) > _SHOWN else "")


def _first_line(error: BaseException) -> str:
    return str(error.__context__ or error).strip().split("\n")[0] or type(error).__name__


def _bytes_of_storage(tensor: torch.Tensor) -> int:
    return int((tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()).nbytes())


def load(path: str, key: str = "") -> dict[str, torch.Tensor]:
    """Returns the tensors of a .pt, on the CPU, by name. Nothing in it is executed. Raises Damaged, or ValueError if no
    dict of tensors is at `key` ("a/b": below another one)."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if (entry := archive.testzip()) is not None:  # torch itself compares no CRC-32
                    raise Damaged(f"{path}: not a .pt file that can be read -- the CRC-32 of {entry} is another one")
        at = torch.load(path, map_location="cpu", weights_only=True)
    except (Damaged, MemoryError, OSError):
        raise
    except Exception as error:
        # torch's own text, of many lines, advises to trust the file; the reason is in what it has caught.
        raise Damaged(f"{path}: not a .pt file that can be read -- {_first_line(error).split('. ')[0]}") from error
    for part in key.split("/") if key else ():
        if not isinstance(at, Mapping) or part not in at:
            raise ValueError(f"{path}: has no '{part}' on the way to '{key}' -- {_keys_of(at)}")
        at = at[part]
    if not isinstance(at, Mapping):
        raise ValueError(f"{path}: holds a {type(at).__name__} where a dict of tensors belongs")
    tensors = {}
    for name, value in at.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{path}: '{name}' is a {type(value).__name__} where tensors belong -- {_keys_of(at)} -- choose the dict of "
                'tensors by its key (--key, or "a/b" for one below another)'
            )
        if value.layout != torch.strided or value.is_quantized:
            raise ValueError(f"{path}: tensor '{name}' is sparse or quantised -- make it a plain one first")
        # An expanded tensor repeats a few bytes; a hostile one would repeat them until memory is full.
        if value.numel() * value.element_size() // 64 > _bytes_of_storage(value) + 2**20:
            raise Damaged(f"{path}: tensor '{name}' {list(value.shape)} repeats {_bytes_of_storage(value)} bytes far too often")
        tensors[name] = value.detach()
    return tensors


class _Steady:
    """A file in whose write nothing is raised: torch's writer may end the process then."""

    def __init__(self, file: BinaryIO) -> None:
        self.error: Optional[OSError] = None
        self._file = file

    def write(self, data: Any) -> int:
        try:
            if self.error is None:
                self._file.write(data)
        except OSError as error:
            self.error = error
        return len(data)

    def flush(self) -> None:
        """For torch, at the end."""


def save(value: Any, descriptor: int) -> None:
    """Writes a .pt into an open file. Raises OSError."""
    with os.fdopen(os.dup(descriptor), "wb") as file:
        steady = _Steady(file)
        torch.save(value, steady)
    if steady.error is not None:
        raise steady.error


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor on the CPU, dense, and without the rest of its storage, which torch would save with it."""
    dense = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return dense if _bytes_of_storage(dense) == dense.numel() * dense.element_size() else dense.clone()


def _write_safetensors(path: str, tensors: Mapping[str, torch.Tensor], file: BinaryIO) -> None:
    header, end = {}, 0
    entries = sorted(tensors.items(), key=lambda entry: -entry[1].element_size())  # so that all are aligned
    for name, tensor in entries:
        kind = str(tensor.dtype)[len("torch.") :]
        if kind not in _SAFETENSORS:
            raise ValueError(f"{path}: tensor '{name}' is of type {kind}, which safetensors does not have -- convert it first")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _SAFETENSORS[kind], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in entries:
        dense = plain(tensor)
        if dense.numel() > 0:
            file.write((ctypes.c_char * (dense.numel() * dense.element_size())).from_address(dense.data_ptr()))


def _read_safetensors(descriptor: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns tensors in the mapped file, and the file's metadata."""
    whole = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        dtype, shape = getattr(torch, _TORCH[entry["dtype"]], None), entry["shape"]
        if dtype is None:
            raise ValueError(f"tensor '{name}' is of type {_TORCH[entry['dtype']]}, which torch {torch.__version__} does not have")
        if (count := math.prod(shape)) == 0:
            tensors[name] = torch.empty(shape, dtype=dtype)
        else:
            flat = torch.frombuffer(whole, dtype=dtype, count=count, offset=start + entry["data_offsets"][0])
            tensors[name] = flat.reshape(shape)
    return tensors, metadata


def _number(tensor: torch.Tensor) -> Any:
    """Numbers are tensors without dimensions in a checkpoint, so that every bit survives."""
    return tensor.item() if tensor.dim() == 0 and tensor.dtype in (torch.float64, torch.int64, torch.bool) else tensor


def _with_lists(fields: _Fields) -> _Fields:
    """Replaces "FIELD/size", "FIELD/0", "FIELD/2" by a list, in which missing items are None."""
    for name in [name for name, size in fields.items() if name.endswith("/size") and isinstance(size, int)]:
        field = name[: -len("/size")]
        fields[field] = [fields.pop(f"{field}/{i}", None) for i in range(min(fields.pop(name), 1_000_000))]
    return dict(sorted(fields.items()))


def _group(options: _Fields, kind: str, members: list[int]) -> _Fields:
    """Returns a group's options by torch's names."""
    if "beta1" in options and "beta2" in options:
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    if kind.startswith("LBFGS"):  # torch requires these keys even if unset
        options = {"max_eval": None, "line_search_fn": None, **options}
    options.update(dict.fromkeys(kind.split(" ")[1:], True))  # flags that change the arithmetic: "Adam maximize"
    return {**_with_lists(options), "params": members}


def _optimizer(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> _Fields:
    """Returns what torch.optim.Optimizer.state_dict() returns, of a checkpoint's optimizer.safetensors."""
    problem = f"{metadata['optimizer']}: not a sound state of an optimizer --"
    try:
        groups = json.loads(metadata.get("groups", "[]"))
        added = json.loads(metadata.get("group_values", "[]"))
    except ValueError as error:
        raise Damaged(f"{problem} its groups are no JSON") from error
    numbers: dict[str, int] = {}
    members = [[numbers.setdefault(name, len(numbers)) for name in group if name not in numbers] for group in groups]
    options: list[_Fields] = [{} for _ in groups]
    states: dict[int, _Fields] = {}

    def place_of(name: str) -> tuple[Optional[_Fields], str]:
        """The fields to which "group/0/lr" or "state/a.weight/exp_avg" belongs, and the name within them."""
        kind, _, rest = name.partition("/")
        parts = rest.split("/")
        if kind == "group" and parts[0].isdigit() and int(parts[0]) < len(options):
            return options[int(parts[0])], "/".join(parts[1:])
        for end in range(1, len(parts) if kind == "state" else 0):
            if (number := numbers.get("/".join(parts[:end]))) is not None:
                return states.setdefault(number, {}), "/".join(parts[end:])
        return None, ""

    for name, value in entries.items():
        fields, field = place_of(name)
        if fields is None:
            raise Damaged(f"{problem} '{name}' belongs to nothing")
        fields[field] = value
    for name, text in metadata.items():
        fields, field = place_of(name)
        if fields is not None:
            fields[field] = text
    for fields, values in zip(options, added):  # what a schedule or the program has added in Python
        fields.update({name: value for name, value in values.items() if name not in fields})
    kind = metadata.get("type", "")
    return {
        "state": {number: _with_lists(fields) for number, fields in sorted(states.items())},
        "param_groups": [_group(fields, kind, indices) for fields, indices in zip(options, members)],
    }


def _value(value: Any) -> Any:
    return struct.unpack(">d", bytes.fromhex(value["float64"]))[0] if isinstance(value, dict) else value


def _everything(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> _Fields:
    """Returns a checkpoint: its "model/..." and "optimizer/...", and what the manifest in the metadata says."""
    manifest = json.loads(metadata["manifest"])["manifest"]

    def below(folder: str) -> dict[str, torch.Tensor]:
        return {name[len(folder) :]: tensor for name, tensor in tensors.items() if name.startswith(folder)}

    found: _Fields = {"model": below("model/")}
    if "optimizer" in metadata:
        found["optimizer"] = _optimizer({name: _number(one) for name, one in below("optimizer/").items()}, metadata)
    if "sampler" in manifest:
        found["sampler"] = {name: manifest["sampler"][name] for name in ("seed", "epoch", "cursor", "size")}
        if found["sampler"]["seed"] >= 2**63:
            found["sampler"]["seed"] = str(found["sampler"]["seed"])
    found["values"] = {name: _value(value) for name, value in manifest["values"].items()}
    return {**found, **{name: manifest[name] for name in ("step", "epoch", "world_size", "created")}}


def _without_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_floats(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_without_floats, value))
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value


def _main(job: str, first: str, second: str) -> None:
    if job == "read":
        with os.fdopen(4, "wb") as file:
            _write_safetensors(first, load(first, second), file)
        return
    tensors, metadata = _read_safetensors(3)
    value = _everything(tensors, metadata) if first == "everything" else tensors
    save(_without_floats(value) if second == "tensors" else value, 4)


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
        end = "done"
    except ValueError as error:
        end = f"invalid {error}"
    except Damaged as error:
        end = f"corrupt {error}"
    except (MemoryError, OSError) as error:
        end = f"failed {str(error) or type(error).__name__}"
    print("\n" + end.replace("\n", " "), file=sys.stderr)
