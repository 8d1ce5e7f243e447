"""How a TorchState keeps, restores and sends one object. The list of types and handlers can be replaced."""

from __future__ import annotations

import copy
from typing import Any, Callable, List, Optional, Tuple

import torch
from cohort import _optimizer_state
from cohort._horovod.objects import broadcast_object
from cohort.torch._wrapping import Wrapped
from cohort.torch.elastic.sampler import ElasticSampler
from cohort.torch.functions import broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """The base of handlers. `value` is the object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keeps what the object holds now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Makes all ranks' objects hold what rank 0's does, and keeps that."""
        raise NotImplementedError

    def reset(self) -> None:
        """The world is a new one."""

    def set_value(self, value: Any) -> None:
        """Another object takes the place; it is kept at once."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """A torch.nn.Module."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    """A torch.optim.Optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(_optimizer_state.take(self.value))

    def restore(self) -> None:
        if isinstance(self.value, Wrapped):
            self.value._forget()
        # Where it takes the tensors as they are, the next step would change what is kept.
        _optimizer_state.put(self.value, copy.deepcopy(self._saved))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    """An ElasticSampler."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        self.save()

    def save(self) -> None:
        self._saved = self.value.state_dict()

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=0))
        self.save()

    def reset(self) -> None:
        # Who has gone on counts from the whole world's last batch; the new world shares out what is left.
        self.value.reset()


Registry = List[Tuple[type, Callable[[Any], StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """The types that have handlers, in the order in which they are tried."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replaces it, for the states that are made from now on."""
    global _registry
    _registry = registry


def handler_for(value: Any) -> Optional[StateHandler]:
    """A handler for the object, or None: then it is pickled."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None
