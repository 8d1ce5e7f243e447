"""The state of a training with torch, and how it keeps, restores and sends each object. The list of types and handlers can be
replaced."""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from cohort._checkpoint import optimizer_state as _optimizer_state
from cohort.horovod import basics
from cohort.horovod.elastic import ObjectState
from cohort.horovod.objects import broadcast_object
from cohort.horovod.torch._wrapping import Wrapped
from cohort.horovod.torch.elastic.sampler import ElasticSampler
from cohort.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters

__all__ = ["ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler", "StateHandler", "TorchState",
           "get_handler_registry", "set_handler_registry"]  # fmt: skip


class StateHandler:
    """The base of handlers. `value` is the object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keeps the object's current contents."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the contents kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Sets all ranks' objects to rank 0's contents, and keeps those."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called when the world is a new one."""

    def set_value(self, value: Any) -> None:
        """Replaces the object, and keeps the new one's contents immediately."""
        self.value = value
        self.save()


class _SavedStateHandler(StateHandler):
    """Keeps the object's state from the beginning."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()


class ModelStateHandler(_SavedStateHandler):
    """A torch.nn.Module."""

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_SavedStateHandler):
    """A torch.optim.Optimizer."""

    def save(self) -> None:
        self._saved = copy.deepcopy(_optimizer_state.take(self.value))

    def restore(self) -> None:
        if isinstance(self.value, Wrapped):
            self.value._forget()
        # Copied, because an optimizer may use the given tensors, and its next step would change the kept ones.
        _optimizer_state.put(self.value, copy.deepcopy(self._saved))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_SavedStateHandler):
    """An ElasticSampler."""

    def save(self) -> None:
        self._saved = self.value.state_dict()

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=0))
        self.save()

    def reset(self) -> None:
        # A rank that goes on has counted up to the whole world's last batch; the new world distributes the rest.
        self.value.reset()


class _StateDictHandler(_SavedStateHandler):
    """Any other object with state_dict and load_state_dict: a schedule, a GradScaler, a running average. It may refer
    to other objects; these references are kept."""

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        own = self.value.state_dict()
        sent = broadcast_object(_moved(own, None), root_rank=0)
        if basics.rank() != 0:
            self.value.load_state_dict(_moved(sent, own))
        self.save()


def _moved(value: Any, like: Any) -> Any:
    """Returns the value with its tensors on the devices of their counterparts in `like`, or on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.to(like.device if isinstance(like, torch.Tensor) else "cpu")
    if type(value) is dict:
        return {key: _moved(one, like.get(key) if isinstance(like, dict) else None) for key, one in value.items()}
    if type(value) in (list, tuple):
        others = like if isinstance(like, (list, tuple)) and len(like) == len(value) else [None] * len(value)
        return type(value)(map(_moved, value, others))
    return value


Registry = List[Tuple[type, Callable[[Any], StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Returns the types that have handlers, in the order in which they are tried."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replaces the registry, for states made from now on."""
    global _registry
    _registry = registry


def handler_for(value: Any) -> Optional[StateHandler]:
    """Returns a handler for the object, or None if the object is to be pickled."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    has_state = all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    return _StateDictHandler(value) if has_state and not isinstance(value, type) else None


class TorchState(ObjectState):
    """The state of a training with torch: `model`, `optimizer`, and anything else by name.

    Modules, optimizers and ElasticSamplers are kept by copies of their state, and sent tensor by tensor. Other objects
    with state_dict and load_state_dict (a schedule, a GradScaler, a running average) are kept by those methods, and
    stay the same objects, with their references. Other values are handled as in ObjectState. `state.batch = 3` sets an
    attribute.
    """

    def __init__(self, model: Optional[torch.nn.Module] = None, optimizer: Optional[torch.optim.Optimizer] = None,
                 **kwargs: Any) -> None:  # fmt: skip
        if model is not None:
            kwargs["model"] = model
        if optimizer is not None:
            kwargs["optimizer"] = optimizer
        handlers = {name: handler_for(value) for name, value in kwargs.items()}
        self._handlers: Dict[str, StateHandler] = {name: one for name, one in handlers.items() if one is not None}
        for name in self._handlers:
            object.__setattr__(self, name, kwargs.pop(name))
        self.model: Any = model
        self.optimizer: Any = optimizer
        super().__init__(**kwargs)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for name in sorted(self._handlers):
            self._handlers[name].sync()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
