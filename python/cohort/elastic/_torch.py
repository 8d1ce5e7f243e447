"""Modules and optimizers of torch as parts and values of a State."""

from __future__ import annotations

import ast
import io
import operator
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

import torch
from torch import Tensor

from cohort import _core
from cohort._checkpoint import optimizer_state as _optimizer_state
from cohort._checkpoint.tensors import bare, to_entry
from cohort._slots import Slots
from cohort.errors import InvalidArgument
from cohort.optim import Scaling, scale_factor

_version = operator.attrgetter("_version")
_PLAIN = (int, float, bool, str, type(None))
_SCALES = {None: Scaling.NONE, "linear": Scaling.LINEAR, "sqrt": Scaling.SQUARE_ROOT}


def fill(tensor: Tensor, data: memoryview) -> None:
    """Fills the tensor with the bytes of a tensor of the same type and shape, in the order of its elements."""
    if tensor.numel():
        with torch.no_grad():
            tensor.copy_(torch.frombuffer(data, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape))


def _layout(tensors: Mapping[str, Tensor]) -> bytes:
    return "; ".join(f"{name} {str(one.dtype)[6:]} {list(one.shape)}" for name, one in tensors.items()).encode()


def _require_same(name: str, there: bytes, here: bytes) -> None:
    if there != here:
        raise InvalidArgument(
            f"elastic.State: '{name}' is another one on another rank: {there.decode()} there, {here.decode()} here -- all "
            "ranks make the same model"
        )


# ------------------------------------------------------------------------------------------------ modules


def add_module(state: Any, name: str, module: torch.nn.Module) -> None:
    if bare(module) is not module:
        raise InvalidArgument(
            f"elastic.State.add: '{name}' is a {type(module).__name__}, which belongs to one world -- add its module, and "
            "wrap that in `train`"
        )
    if any(type(one).get_extra_state is not torch.nn.Module.get_extra_state for one in module.modules()):
        raise InvalidArgument(
            f"elastic.State.add: '{name}' has a get_extra_state, which is no tensor -- keep that by something of yours with "
            "state_dict and load_state_dict"
        )
    parameters: list[Tensor] = []  # as of the last search of the module, which is too slow for each step

    def look() -> dict[str, Tensor]:
        named = dict(module.named_parameters())
        parameters[:] = named.values()
        return named

    def contents() -> tuple[bytes, list]:
        named = look()
        return _layout(named), [(f"{name}.{one}", to_entry(one, tensor)[3]) for one, tensor in named.items()]

    def assign(layout: bytes, items: list) -> None:
        named = look()
        _require_same(name, layout, _layout(named))
        for tensor, (_, data) in zip(named.values(), items):
            fill(tensor, data)

    def version() -> int:
        return sum(map(_version, parameters))

    def forget_gradients(*_: int) -> None:
        for parameter in module.parameters():
            parameter.grad = None  # the gradient is of a step that did not end, in memory of a world that has ended

    look()
    state._core.add_part(name, contents, assign, version)
    state._core.on_change(forget_gradients)
    _add_buffers(state, name, module)


def _add_buffers(state: Any, name: str, module: torch.nn.Module) -> None:
    buffers = _Buffers(name, module)  # even if there are none yet: a forward may register some
    state._core.add_value(f"{name}'s buffers", buffers.get, buffers.set, False)


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Buffers:
    """A module's buffers, which forwards change. They are read in place as long as they are the same tensors."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self._name, self._module = name, module
        self._kept: list[Tensor] = []  # the buffers of the last copy
        self._look()

    def _look(self) -> None:
        self._slots = Slots(self._module, "_buffers", "_modules")
        self._buffers = [
            buffer for part in self._module.modules() for buffer in part._buffers.values() if buffer is not None
        ]
        self._addresses = list(map(Tensor.data_ptr, self._buffers))
        self._pieces: Optional[_core.Pieces] = None
        if all(one.device.type == "cpu" and one.is_contiguous() for one in self._buffers):
            self._pieces = _core.Pieces([to_entry("", one)[3] for one in self._buffers])

    def get(self) -> Any:
        if self._slots.changed() or list(map(Tensor.data_ptr, self._buffers)) != self._addresses:
            self._look()
        self._kept = self._buffers
        return self._pieces or _core.Pieces([to_entry("", one)[3] for one in self._buffers])

    def set(self, copy: bytes) -> None:
        self._look()
        buffers = self._buffers
        if sum(map(_bytes_of, buffers)) != len(copy):
            buffers = self._kept  # other buffers were registered since the copy
        if sum(map(_bytes_of, buffers)) != len(copy):
            raise InvalidArgument(
                f"elastic.State: the buffers of '{self._name}' have {sum(map(_bytes_of, self._buffers))} bytes, and "
                f"{len(copy)} were kept -- buffers of a model in training keep their shapes, and those that a forward registers "
                "are there before the model is added (one forward under torch.no_grad())"
            )
        data, at = memoryview(bytearray(copy)), 0
        for buffer, size in zip(buffers, map(_bytes_of, buffers)):
            fill(buffer, data[at : at + size])
            at += size


# ------------------------------------------------------------------------------------------------ optimizers


class _Pickler(pickle.Pickler):
    """Pickles an optimizer's state without the tensors, which become separate items."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 4)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1, str(obj.dtype)[6:], tuple(obj.shape), tuple(obj.stride()), obj.device.type


class _Unpickler(pickle.Unpickler):
    def __init__(self, layout: bytes, items: list, device: torch.device) -> None:
        super().__init__(io.BytesIO(layout))
        self._items, self._device = items, device

    def persistent_load(self, pid: Any) -> Tensor:
        index, dtype, shape, stride, kind = pid
        device = self._device if kind == self._device.type else torch.device(kind)
        tensor = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
        fill(tensor, self._items[index][1])
        return tensor


class _Rates:
    """The rates of an optimizer and of its schedules, in proportion to the size of the world."""

    _OPTIONS = ("lr", "initial_lr", "max_lr", "min_lr")
    _LISTS = ("base_lrs", "_last_lr", "max_lrs")

    def __init__(self, optimizer: torch.optim.Optimizer, kind: Scaling, schedules: Callable[[], list]) -> None:
        self._optimizer, self._kind, self._schedules = optimizer, kind, schedules
        self.factor = 1.0
        self.scaled: dict[tuple, tuple[float, float]] = {}  # by place: the rate at the first size, and now

    def _places(self) -> Iterator[tuple[tuple, Any, Any]]:
        """Yields (name, object that holds the rate, key in the object)."""
        for number, group in enumerate(self._optimizer.param_groups):
            for option in self._OPTIONS:
                if option in group:
                    yield (option, number), group, option
        for name, schedule in self._schedules():
            for attribute in self._LISTS:
                rates = getattr(schedule, attribute, None)
                if isinstance(rates, list):
                    for number in range(len(rates)):
                        yield (name, attribute, number), rates, number

    def scale(self, size: int, first_size: int) -> None:
        factor = scale_factor(self._kind, size) / scale_factor(self._kind, first_size)
        scaled = {}
        for place, owner, key in self._places():
            now = owner[key]
            value = float(now)
            before = self.scaled.get(place)
            # A value that a schedule has changed since is divided by the factor by which it had been multiplied.
            base = before[0] if before is not None and before[1] == value else value / self.factor
            fresh = base * factor
            scaled[place] = base, fresh
            if isinstance(now, Tensor):
                now.fill_(fresh)
            else:
                owner[key] = fresh
        self.factor, self.scaled = factor, scaled


def add_optimizer(state: Any, name: str, optimizer: torch.optim.Optimizer, model: Optional[torch.nn.Module] = None, *,
                  scale_lr: Optional[str] = None) -> None:  # fmt: skip
    if scale_lr not in _SCALES:
        raise InvalidArgument(f"elastic.State.add: scale_lr is {scale_lr!r} -- None, 'linear' or 'sqrt'")
    if model is not None:
        known = {id(parameter) for parameter in model.parameters()}
        if not all(id(parameter) in known for parameter in _optimizer_state.parameters_of(optimizer)):
            raise InvalidArgument(f"elastic.State.add: the optimizer '{name}' has parameters that are not the model's")
    steps = 0  # counted, because a change of a parameter's `.data` does not change the parameter's version

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    if hasattr(optimizer, "register_step_post_hook"):  # not in 1.13
        optimizer.register_step_post_hook(count)
    parameters = _optimizer_state.parameters_of(optimizer)

    def contents() -> tuple[bytes, list]:
        parameters[:] = _optimizer_state.parameters_of(optimizer)
        file = io.BytesIO()
        pickler = _Pickler(file)
        taken = _optimizer_state.take(optimizer)
        pickler.dump({**taken, "groups": [{} for _ in taken["groups"]]})
        return file.getvalue(), [(f"{name}.{i}", to_entry("", one)[3]) for i, one in enumerate(pickler.tensors)]

    def assign(layout: bytes, items: list) -> None:
        device = parameters[0].device if parameters else torch.device("cpu")
        taken = _Unpickler(layout, items, device).load()
        # The options are a separate value.
        taken["groups"] = [_options(group) for group in optimizer.param_groups]
        _optimizer_state.put(optimizer, taken)
        count()

    def version() -> int:
        return sum(map(_version, parameters)) + steps

    state._core.add_part(name, contents, assign, version)
    options = _Options(optimizer, _Rates(optimizer, _SCALES[scale_lr], lambda: _schedules_of(state, optimizer)) if scale_lr else None)
    state._core.add_value(f"{name}'s options", options.get, options.set, False)

    def on_change(_rank: int, size: int, first_size: int) -> None:
        if "cohort.horovod.torch._wrapping" in sys.modules:
            from cohort.horovod.torch._wrapping import Wrapped

            if isinstance(optimizer, Wrapped):
                optimizer._forget()
        options.scale(size, first_size)

    state._core.on_change(on_change)
    state._policies.append(
        lambda first_size: f"optimizer '{name}': "
        + (
            "rates as they are"
            if scale_lr is None
            else f"rates times {'' if scale_lr == 'linear' else 'the root of '}ranks / {first_size}"
        )
    )


def add_local_steps(state: Any, name: str, steps: Any) -> None:
    trained = {id(one) for fragment in steps._fragments for one in fragment.parameters}
    kept = {key: one for key, one in steps._module.named_parameters() if id(one) not in trained}

    def contents() -> tuple[bytes, list]:
        counts = [fragment.synchronisations for fragment in steps._fragments]
        outer = steps._outer()
        described = [(one, str(tensor.dtype)[6:], tuple(tensor.shape)) for one, tensor in outer.items()]
        items = [(f"{name}.{one}", to_entry("", tensor)[3]) for one, tensor in (*outer.items(), *kept.items())]
        return repr((counts, described, _layout(kept))).encode(), items

    def assign(layout: bytes, items: list) -> None:
        counts, described, others = ast.literal_eval(layout.decode())
        _require_same(name, others, _layout(kept))
        for tensor, (_, data) in zip(kept.values(), items[len(described) :]):
            fill(tensor, data)
        own = steps._outer()
        for (one, dtype, shape), (_, data) in zip(described, items):
            if one not in own:  # the state belongs to an outer optimizer that has not stepped here
                _, key, number = one.split("/")
                flat = steps._fragments[int(number)].outer
                own[one] = torch.empty(shape, dtype=getattr(torch, dtype), device=flat.device if shape else "cpu")
                steps.outer_optimizer.state[flat][key] = own[one]
            if tuple(own[one].shape) != shape:
                _require_same(name, layout, contents()[0])
            fill(own[one], data)
        steps._assign(counts)

    def on_change(world: Any) -> None:
        if steps._rebind(world.comm):
            print(
                "cohort: elastic: this rank begins with the last synchronised parameters, "
                f"{steps.steps_left} steps before the next synchronisation",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    state._core.add_part(name, contents, assign, lambda: steps._version)
    state._core.add_value(f"{name}'s counts", lambda: pickle.dumps(steps._counts(), 4),
                          lambda copy: steps._set_counts(pickle.loads(copy)), False)  # fmt: skip
    _add_buffers(state, name, steps._module)
    for what, optimizer in (("options", steps.inner_optimizer), ("outer options", steps.outer_optimizer)):
        options = _Options(optimizer, None)
        state._core.add_value(f"{name}'s {what}", options.get, options.set, False)
    state.on_change(on_change)
    steps._advance = state._core.advance
    state._core.after_step(steps._go_on)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


class _Options:
    """The options of an optimizer's groups, pickled again only when they have changed."""

    def __init__(self, optimizer: torch.optim.Optimizer, rates: Optional[_Rates]) -> None:
        self._optimizer, self.rates = optimizer, rates
        self._seen: Optional[list[dict]] = None
        self._copy = b""

    def get(self) -> bytes:
        now = [_options(group) for group in self._optimizer.param_groups]
        if self._seen is None or now != self._seen:
            rates = self.rates
            self._copy = pickle.dumps((now, (rates.factor, rates.scaled) if rates else None), 4)
            plain = all(type(one) in _PLAIN or _is_plain_tuple(one) for group in now for one in group.values())
            self._seen = now if plain else None  # mutable options always count as changed
        return self._copy

    def scale(self, size: int, first_size: int) -> None:
        self._seen = None
        if self.rates:
            self.rates.scale(size, first_size)

    def set(self, copy: bytes) -> None:
        self._seen = None
        groups, scaled = pickle.loads(copy)
        for group, options in zip(self._optimizer.param_groups, groups):
            _optimizer_state.put_items(group, options, keep=("params",))
        if self.rates and scaled:
            self.rates.factor, self.rates.scaled = scaled


def _is_plain_tuple(value: Any) -> bool:
    return type(value) is tuple and all(type(one) in _PLAIN for one in value)


def _schedules_of(state: Any, optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    """Returns all schedules of the state that set this optimizer's rates, also those within other schedules."""
    found = []
    todo = list(state._things.items())
    while todo:
        name, thing = todo.pop(0)
        todo += [(f"{name}.{i}", one) for i, one in enumerate(getattr(thing, "_schedulers", None) or ())]
        if getattr(thing, "optimizer", None) is optimizer and hasattr(thing, "base_lrs"):
            found.append((name, thing))
    return found
