"""The state of torch's optimizers as named tensors, in the format of the C++ optimizers: "state/PARAMETER/exp_avg" and
"group/0/lr", numbers as tensors without dimensions, so that every bit is kept. To add an optimizer: add its Kind."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cohort._checkpoint.optimizer_state import put_states
from cohort._checkpoint.tensors import Entry, plain_name, to_entry, to_tensor, unwrapped
from cohort.errors import Corrupt, InvalidArgument

_log = logging.getLogger("cohort.checkpoint")
_NUMBERS = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}
# Options that C++ lacks and that change the arithmetic. They are part of the saved type's name, so other types refuse it.
_VARIANTS = ("maximize", "decoupled_weight_decay")
# Entries of a group that are not saved for other programs (its kind's options are saved separately).
_NOT_SAVED = ("params", "param_names", "betas", "foreach", "fused", "capturable", "differentiable", *_VARIANTS)
# Metadata key: values that the program or a schedule has added to each group ("initial_lr"), as JSON.
_ADDED = "group_values"
_warned: set[str] = set()


@dataclass(frozen=True)
class _Kind:
    """Options and state of one type of optimizer, by libtorch's names. A value is the field's kind: "float", "int",
    "bool", "tensor", "list" (of tensors), "text", or "count" (an integer in C++, a tensor here). "?": may be missing."""

    name: str
    options: Mapping[str, str]
    state: Mapping[str, str]
    own_shapes: bool = False  # the state's tensors do not have the parameter's shape
    plain_counts: bool = False  # counts are Python ints, not tensors


_ADAM = {"lr": "float", "beta1": "float", "beta2": "float", "eps": "float", "weight_decay": "float", "amsgrad": "bool"}
_ADAM_STATE = {"step": "count", "exp_avg": "tensor?", "exp_avg_sq": "tensor?", "max_exp_avg_sq": "tensor?"}
_BETAS = ("beta1", "beta2")

_KINDS = (
    (
        torch.optim.SGD,
        _Kind(
            "SGD",
            {"lr": "float", "momentum": "float", "dampening": "float", "weight_decay": "float", "nesterov": "bool"},
            {"momentum_buffer": "tensor?"},
        ),
    ),
    (torch.optim.AdamW, _Kind("AdamW", _ADAM, _ADAM_STATE)),  # before Adam, its base class in newer versions
    (torch.optim.Adam, _Kind("Adam", _ADAM, _ADAM_STATE)),
    (
        torch.optim.Adagrad,
        _Kind(
            "Adagrad",
            {
                "lr": "float",
                "lr_decay": "float",
                "weight_decay": "float",
                "initial_accumulator_value": "float",
                "eps": "float",
            },
            {"sum": "tensor?", "step": "count"},
        ),
    ),
    (
        torch.optim.RMSprop,
        _Kind(
            "RMSprop",
            {
                "lr": "float",
                "alpha": "float",
                "eps": "float",
                "weight_decay": "float",
                "momentum": "float",
                "centered": "bool",
            },
            {"step": "count", "square_avg": "tensor?", "momentum_buffer": "tensor?", "grad_avg": "tensor?"},
            plain_counts=torch.__version__ < "2",
        ),
    ),
    (
        torch.optim.LBFGS,
        _Kind(
            "LBFGS",
            {
                "lr": "float",
                "max_iter": "int",
                "max_eval": "int?",
                "tolerance_grad": "float",
                "tolerance_change": "float",
                "history_size": "int",
                "line_search_fn": "text?",
            },
            {
                "func_evals": "int",
                "n_iter": "int",
                "t": "float",
                "prev_loss": "float",
                "d": "tensor?",
                "H_diag": "tensor?",
                "prev_flat_grad": "tensor?",
                "old_dirs": "list",
                "old_stps": "list",
                "ro": "list",
                "al": "list?",
            },
            own_shapes=True,
        ),
    ),
)


def _kind_of(optimizer: torch.optim.Optimizer) -> _Kind:
    for kind, description in _KINDS:
        if isinstance(optimizer, kind):
            return description
    raise InvalidArgument(
        f"cannot save or load the optimizer -- {type(optimizer).__name__} is none of SGD, Adam, AdamW, Adagrad, RMSprop, "
        "LBFGS -- pass None and save its state yourself"
    )


def _type_of(optimizer: torch.optim.Optimizer, kind: _Kind) -> str:
    used = [
        name
        for name in _VARIANTS
        if any(group.get(name) for group in optimizer.param_groups)
        and not (name == "decoupled_weight_decay" and kind.name == "AdamW")
    ]
    return " ".join([kind.name, *used])


def _names_of(module: torch.nn.Module) -> dict[int, str]:
    return {id(parameter): plain_name(name) for name, parameter in unwrapped(module).named_parameters()}


def _group_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> str:
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise InvalidArgument(
                    f"cannot save or load the optimizer -- it has a parameter of shape {list(parameter.shape)} that is "
                    "not the module's -- give the module whose parameters() it was made with"
                )
        groups.append([names[id(parameter)] for parameter in group["params"]])
    return json.dumps(groups, separators=(",", ":"), ensure_ascii=False)


def _added(group: Mapping[str, Any], kind: _Kind) -> dict[str, Any]:
    """Returns the group's numbers, text and bools that are not options of its kind. Warns once about other values."""
    added: dict[str, Any] = {}
    for name, value in group.items():
        if name in kind.options or name in _NOT_SAVED or not isinstance(name, str):
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if value is None or isinstance(value, (bool, int, float, str)):
            added[name] = value
        elif name not in _warned:
            _warned.add(name)
            _log.warning(
                "the optimizer's groups have '%s', a %s: checkpoints keep numbers, text and bools of groups, not this",
                name,
                type(value).__name__,
            )
    return added


def _restored_added(metadata: Mapping[str, str], groups: int, source: str) -> list[dict[str, Any]]:
    if _ADDED not in metadata:
        return [{} for _ in range(groups)]
    try:
        added = json.loads(metadata[_ADDED])
    except ValueError:
        added = None
    if not isinstance(added, list) or len(added) != groups or not all(isinstance(one, dict) for one in added):
        raise Corrupt(f"{source}: not a sound state of an optimizer -- '{_ADDED}' is not as many groups' values")
    return added


class _Saver:
    def __init__(self) -> None:
        self.tensors: list[Entry] = []
        self.metadata: dict[str, str] = {}

    def save(self, name: str, kind: str, value: Any) -> None:
        kind = kind.rstrip("?")
        if kind == "list":
            value = value if value is not None else []
            self.save(f"{name}/size", "int", len(value))
            for index, item in enumerate(value):
                if item is not None:
                    self.save(f"{name}/{index}", "tensor", item)
        elif kind == "text":
            self.metadata[name] = str(value)
        elif kind == "tensor":
            # LBFGS keeps numbers here, and tensors in C++.
            self.tensors.append(to_entry(name, value if isinstance(value, torch.Tensor) else torch.tensor(float(value))))
        else:
            kind = "int" if kind == "count" else kind
            number = value.item() if isinstance(value, torch.Tensor) else value
            self.tensors.append(to_entry(name, torch.tensor(0 if number is None else number, dtype=_NUMBERS[kind])))


def snapshot(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> tuple[list[Entry], dict[str, str]]:
    """Returns the optimizer's tensors and, as text, its type, the parameters' names in each group, and text options.

    Raises InvalidArgument if the optimizer is of no type listed above, has state beyond its kind's, or has parameters
    that are not the module's.
    """
    kind, names, out = _kind_of(optimizer), _names_of(module), _Saver()
    out.metadata["groups"] = _group_names(optimizer, names)
    out.metadata["type"] = _type_of(optimizer, kind)
    added = [_added(group, kind) for group in optimizer.param_groups]
    if any(added):
        out.metadata[_ADDED] = json.dumps(added)
    for index, group in enumerate(optimizer.param_groups):
        options = {**group, **dict(zip(_BETAS, group.get("betas", ())))}
        for name, field in kind.options.items():
            if not (field.endswith("?") and options.get(name) is None):
                out.save(f"group/{index}/{name}", field, options[name])
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state:
                continue  # no step yet
            more = sorted(str(name) for name in state if name not in kind.state)
            if more:
                raise InvalidArgument(
                    f"cannot save the optimizer -- {type(optimizer).__name__} keeps {', '.join(more)} for "
                    f"'{names[id(parameter)]}', which torch's {kind.name} has not -- pass None and save its state yourself"
                )
            for name, field in kind.state.items():
                if not (field.endswith("?") and state.get(name) is None):
                    out.save(f"state/{names[id(parameter)]}/{name}", field, state.get(name))
    return out.tensors, out.metadata


@dataclass(frozen=True)
class _Place:
    """Target of a parameter's loaded state."""

    device: torch.device = torch.device("cpu")
    like: torch.Tensor | None = None  # the parameter, whose shape the tensors have; None: own shapes
    count: torch.Tensor | None = None  # tensor for a count; None: counts are Python ints
    dtype: torch.dtype | None = None  # for floating-point tensors; None: as saved


def _place_of(parameter: torch.Tensor, group: Mapping[str, Any], kind: _Kind, masters: bool) -> _Place:
    count = None
    if not kind.plain_counts:
        # Created as torch does, on the device where kernels read it.
        double = torch.get_default_dtype() == torch.float64 and not group.get("fused")
        on_device = group.get("fused") or group.get("capturable")
        count = torch.zeros(
            (), dtype=torch.float64 if double else torch.float32, device=parameter.device if on_device else "cpu"
        )
    # The parameter's type, as in torch's load_state_dict, because the module may have been cast since the last step.
    has_master = masters and parameter.dtype in (torch.float16, torch.bfloat16)
    dtype = (torch.float32 if has_master else parameter.dtype) if parameter.is_floating_point() else None
    return _Place(parameter.device, None if kind.own_shapes else parameter, count, dtype)


def _plain_groups(text: str) -> str:
    """Converts the groups of an older file, whose names still have the parts that wrappers add."""
    try:
        groups = json.loads(text)
        plain = [[plain_name(name) for name in group] for group in groups]
    except (ValueError, TypeError):
        return text
    return json.dumps(plain, separators=(",", ":"), ensure_ascii=False)


def _plain_entry(entry: Entry) -> Entry:
    name, kind, shape, data = entry
    prefix = "state/"
    return (prefix + plain_name(name[len(prefix) :]) if name.startswith(prefix) else name, kind, shape, data)


class _Loader:
    def __init__(self, entries: Iterable[Entry], metadata: Mapping[str, str], source: str) -> None:
        self.entries = {entry[0]: entry for entry in entries}
        self.metadata = metadata
        self.source = source

    def corrupt(self, what: str) -> Corrupt:
        return Corrupt(f"{self.source}: not a sound state of an optimizer -- {what}")

    def has(self, name: str, kind: str) -> bool:
        kind = kind.rstrip("?")
        return name in self.metadata if kind == "text" else (f"{name}/size" if kind == "list" else name) in self.entries

    def number(self, name: str, dtype: torch.dtype) -> Any:
        entry = self.entries.pop(name, None)
        if entry is None:
            raise self.corrupt(f"'{name}' is missing")
        tensor = to_tensor(entry)
        if tensor.dim() != 0 or tensor.dtype != dtype:
            raise self.corrupt(f"'{name}' is of another type")
        return tensor.item()

    def load(self, name: str, kind: str, place: _Place = _Place()) -> Any:
        if kind.endswith("?") and not self.has(name, kind):
            return None
        kind = kind.rstrip("?")
        if kind == "list":
            size = self.number(f"{name}/size", torch.int64)
            if not 0 <= size <= 1_000_000:
                raise self.corrupt(f"'{name}' has {size} elements")
            return [self.load(f"{name}/{index}", "tensor?", place) for index in range(size)]
        if kind == "text":
            return self.metadata[name]
        if kind == "tensor":
            tensor, like = to_tensor(self.entries.pop(name)), place.like
            if like is None:
                return tensor.to(place.device)
            if tensor.shape != like.shape:
                raise self.corrupt(f"'{name}' has shape {list(tensor.shape)} where its parameter has {list(like.shape)}")
            # Uses the parameter's strides, like torch, so that later results do not depend on the file.
            dtype = place.dtype if place.dtype is not None and tensor.is_floating_point() else tensor.dtype
            return torch.empty_like(like, dtype=dtype).copy_(tensor)
        if kind == "count":
            count = self.number(name, torch.int64)
            return count if place.count is None else torch.full_like(place.count, count)
        return self.number(name, _NUMBERS[kind])


def restore(optimizer: torch.optim.Optimizer, module: torch.nn.Module, entries: Iterable[Entry],
            metadata: Mapping[str, str], source: str, *, masters: bool = False) -> Callable[[], None]:  # fmt: skip
    """Returns a function that sets the optimizer to the state in the file and can no longer fail. masters: parameters
    of 16 bits are updated in float32.

    Raises InvalidArgument if the file is of another type of optimizer or of other parameters, Corrupt if an entry is
    missing or misshapen; nothing is changed then.
    """
    kind, names = _kind_of(optimizer), _names_of(module)
    groups = _group_names(optimizer, names)
    if metadata.get("groups", "") != groups:
        metadata = {**metadata, "groups": _plain_groups(metadata.get("groups", ""))}
    if metadata["groups"] != groups:
        raise InvalidArgument(
            f"{source}: does not fit the optimizer -- its parameters are {metadata.get('groups', '')} there and {groups} "
            "here -- make the optimizer as it was made then"
        )
    if metadata.get("type", "") != _type_of(optimizer, kind):
        raise InvalidArgument(
            f"{source}: does not fit the optimizer -- it is of {metadata.get('type', '')}, and this one is "
            f"{_type_of(optimizer, kind)} -- use that, or pass None to start with a fresh one"
        )
    # Leaves out the master weights of a sharded optimizer, which have more bits than its parameters.
    loader = _Loader([_plain_entry(one) for one in entries if not one[0].endswith("/master")], metadata, source)
    options = _restored_added(metadata, len(optimizer.param_groups), source)
    states: list[tuple[torch.Tensor, dict[str, Any]]] = []
    with torch.no_grad():
        for index, group in enumerate(optimizer.param_groups):
            loaded = {name: loader.load(f"group/{index}/{name}", field) for name, field in kind.options.items()}
            if "beta1" in loaded:
                loaded["betas"] = (loaded.pop("beta1"), loaded.pop("beta2"))
            options[index].update(loaded)
            for parameter in group["params"]:
                prefix = f"state/{names[id(parameter)]}/"
                if not any(name.startswith(prefix) for name in loader.entries):
                    continue
                place = _place_of(parameter, group, kind, masters)
                state = {name: loader.load(prefix + name, field, place) for name, field in kind.state.items()}
                states.append((parameter, {name: value for name, value in state.items() if value is not None}))
    if loader.entries:
        raise loader.corrupt(f"'{next(iter(loader.entries))}' belongs to nothing")

    def apply() -> None:
        for group, loaded in zip(optimizer.param_groups, options):
            for name, value in loaded.items():
                old = group.get(name)
                if isinstance(old, torch.Tensor) and isinstance(value, (int, float)):
                    old.fill_(value)  # a rate that is a tensor stays the same tensor
                elif not (isinstance(old, (bool, int, float, tuple)) and old == value):  # an equal value stays (int 0)
                    group[name] = value
        put_states(optimizer.state, dict(states))

    return apply
