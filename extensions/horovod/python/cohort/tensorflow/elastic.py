"""Training that survives failures and changes of hosts: states that can be saved, restored and sent, and `run`.

`run` forms a new world of the remaining processes and continues from the last commit. The launcher restarts processes.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, List, Optional, Sequence

import numpy as np
import tensorflow as tf

from cohort.horovod import elastic
from cohort.horovod.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State
from cohort.tensorflow._errors import as_internal_error
from cohort.tensorflow.functions import broadcast_variables

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Like `run` of `cohort.horovod.torch.elastic`; TensorFlow's error for a failed operation in a graph is a failure, too."""

    @functools.wraps(func)
    def with_internal_errors(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception as error:
            internal = as_internal_error(error)
            if internal is None or internal is error:
                raise
            raise internal from error

    return elastic.run(with_internal_errors)


class _VariablesState(ObjectState):
    """Variables, and anything else by name."""

    def __init__(self, **kwargs: Any) -> None:
        self._values: List[Any] = []
        super().__init__(**kwargs)
        self.save()

    def _variables(self) -> Sequence[Any]:
        raise NotImplementedError

    def _keep(self) -> None:
        self._values = [np.array(tf.convert_to_tensor(variable)) for variable in self._variables()]

    def save(self) -> None:
        self._keep()
        super().save()

    def restore(self) -> None:
        # Variables made since the last commit stay.
        for variable, value in zip(self._variables(), self._values):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        broadcast_variables(self._variables(), root_rank=0)
        self._keep()
        super().sync()


class TensorFlowState(_VariablesState):
    """The state of a training: a list of variables, and anything else by name (`state.batch = 3`). `session` is for
    TensorFlow 1, and is refused with a ValueError."""

    def __init__(self, variables: Optional[Sequence[Any]] = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None:
            raise ValueError(
                "TensorFlowState: sessions of TensorFlow 1 are not supported -- use variables of TensorFlow 2"
            )
        self.variables = list(variables or [])
        super().__init__(**kwargs)

    def _variables(self) -> Sequence[Any]:
        return self.variables


class TensorFlowKerasState(_VariablesState):
    """The state of a training with a Keras model: its weights, its optimizer's variables, and anything else by name.

    optimizer  default: the one that the model was compiled with
    backend    not needed
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        super().__init__(**kwargs)

    def reset(self) -> None:
        # A compiled step of `fit` was made for the ranks of the world that has ended.
        self.model.train_function = None

    def _variables(self) -> Sequence[Any]:
        found = list(self.model.weights)
        optimizer = self.optimizer
        if optimizer is None:
            return found
        # A new rank needs the same variables as the others.
        if self.model.built and not getattr(optimizer, "built", True):
            optimizer.build(self.model.trainable_variables)
        own = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
        return [*found, *own]
