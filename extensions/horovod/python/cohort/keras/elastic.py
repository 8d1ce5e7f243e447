"""Training that survives failures: the state of a model and of its optimizer, and `run`."""

from __future__ import annotations

from typing import Any, List, Optional

from cohort.horovod.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, run
from cohort.keras import _flavor
from cohort.keras._variables import broadcast_variables
from cohort.keras.callbacks import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(ObjectState):
    """The state of a training: a model's weights, its optimizer's, and anything else by name.

    model      a model of Keras; it may be built later
    optimizer  default: model.optimizer

    `state.batch = 3` sets an attribute. Weights are kept as copies, and sent as arrays.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.model = model
        self._optimizer = optimizer
        self._saved: List[Any] = []
        self._saved_count = 0  # how many saved weights are the model's
        super().__init__(**kwargs)
        self._keep()

    @property
    def optimizer(self) -> Optional[Any]:
        return self._optimizer if self._optimizer is not None else getattr(self.model, "optimizer", None)

    def _build(self) -> None:
        optimizer = self.optimizer
        if optimizer is not None and self.model.built and hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
            optimizer.build(self.model.trainable_variables)

    def _variables(self) -> List[Any]:
        weights = list(self.model.weights) if self.model.built else []
        self._saved_count = len(weights)
        return weights + ([] if self.optimizer is None else _flavor.optimizer_variables(self.optimizer))

    def _keep(self) -> None:
        _flavor.synchronize_state(self.model)
        self._build()
        self._saved = [_flavor.value_of(one) for one in self._variables()]

    def save(self) -> None:
        self._keep()
        super().save()

    def restore(self) -> None:
        self._build()
        variables = self._variables()
        if len(variables) == len(self._saved):
            for variable, value in zip(variables, self._saved):
                variable.assign(value)
        super().restore()

    def sync(self) -> None:
        self._build()
        variables = self._variables()
        broadcast_variables(variables[: self._saved_count], 0, "weights")
        broadcast_variables(variables[self._saved_count :], 0, "optimizer")
        self._keep()
        super().sync()

    def reset(self) -> None:
        # A compiled step was made for the ranks of the world that has ended.
        self.model.train_function = None
