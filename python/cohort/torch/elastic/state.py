"""The state of a training with torch."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch
from cohort._horovod.elastic_state import ObjectState
from cohort.torch.elastic.handlers import StateHandler, handler_for


class TorchState(ObjectState):
    """The state of a training with torch: `model`, `optimizer`, and anything else by name.

    Modules, optimizers and ElasticSamplers are kept by copies of what they hold, and sent tensor by tensor; all else as
    in ObjectState. `state.batch = 3` sets an attribute.
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
