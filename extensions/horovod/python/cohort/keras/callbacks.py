"""Callbacks for `fit`: Horovod's, for Keras 3 and 2."""

from __future__ import annotations

import sys
import warnings
from typing import Any, Callable, Dict, Optional, Tuple, Union

from cohort.horovod import basics
from cohort.horovod.objects import allgather_object
from cohort.keras import _flavor, _reduction
from cohort.keras._variables import broadcast_variables

_callbacks: Any = _flavor.module().callbacks

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CommitStateCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
]


class _Callback(_callbacks.Callback):
    async_safe = False  # ranks communicate from one thread

    def before_absent_batch(self, batch: int) -> None:
        """Called if this rank has no data left, before it takes part in the others' batch of this number."""

    def after_absent_batch(self, batch: int) -> None:
        """Called after that batch."""

    def on_train_batch_end(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Does nothing. If any callback has this method, Keras calls all of them on the training's own thread."""


class BroadcastGlobalVariablesCallback(_Callback):
    """Sets all ranks' weights and optimizer state to those of `root_rank`, before the first step.

    root_rank        a rank of the world
    device           has no effect
    local_variables  variables that stay each rank's own

    Random number generators are not made equal, so each rank drops different units.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.local_variables = list(local_variables or ())
        self.broadcast_done = False

    def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
        self._broadcast()

    def on_train_batch_begin(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        self._broadcast()  # for a model that was built by its first batch

    def _broadcast(self) -> None:
        model = self.model
        if self.broadcast_done or not model.built or not model.weights:
            return
        self.broadcast_done = True
        optimizer = getattr(model, "optimizer", None)
        reduction = _reduction.of(optimizer)
        _flavor.synchronize_state(model)
        local = {id(one) for one in self.local_variables}
        is_local = lambda one: id(one) in local or (reduction is not None and reduction.is_local(one))  # noqa: E731
        broadcast_variables([one for one in model.weights if not is_local(one)], self.root_rank, "weights")
        if optimizer is not None:
            if hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
                optimizer.build(model.trainable_variables)
            broadcast_variables(_flavor.optimizer_variables(optimizer), self.root_rank, "optimizer")


class MetricAverageCallback(_Callback):
    """Puts the averages over ranks into the logs of each epoch, for later callbacks. They are weighted by each rank's
    number of samples, also in validation.

    Exact for means over samples (losses, accuracies). Other metrics (AUC, precision) are means of the ranks' values.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._trained: Optional[float] = None

    def on_epoch_begin(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        self._trained = None

    def on_test_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
        if self._trained is None:
            self._trained = _samples_seen(self.model)

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        if logs is None or basics.size() == 1:
            return
        seen = _samples_seen(self.model)
        trained = seen if self._trained is None else self._trained
        mine: Dict[str, Tuple[float, float]] = {}
        for key, value in logs.items():
            try:
                mine[key] = (float(value), seen if key.startswith("val_") else trained)
            except (TypeError, ValueError):
                pass  # no number
        everyone = allgather_object(mine, "keras.metrics")
        for key in sorted({key for one in everyone for key in one}):
            values = [one[key] for one in everyone if key in one and one[key][1] > 0]
            weight = sum(weight for _, weight in values)
            if weight > 0:
                logs[key] = sum(value * weight for value, weight in values) / weight


def _samples_seen(model: Any) -> float:
    """Returns the number of samples since the model's metrics were reset; 1 if not counted, so that ranks count equally."""
    tracker = getattr(model, "_loss_tracker", None)
    if tracker is None:
        tracker = getattr(getattr(model, "compiled_loss", None), "_loss_metric", None)
    if tracker is None:
        tracker = next((one for one in model.metrics if one.name == "loss"), None)
    count = getattr(tracker, "count", None)
    return 1.0 if count is None else float(_flavor.value_of(count))


class LearningRateScheduleCallback(_Callback):
    """Sets the learning rate to initial_lr times a multiplier.

    initial_lr           the rate to be multiplied
    multiplier           a function of the epoch; a number m means m ** (epoch - start_epoch)
    start_epoch          the first epoch in which it acts
    end_epoch            the first epoch in which it no longer acts; None: it acts to the end
    staircase            change the rate once in each epoch, not in each batch
    momentum_correction  scale momentum with the rate for the batch that changes the rate; Keras 3 compiles momentum
                         into the step, so this has an effect only with torch, with run_eagerly and with Keras 2's
                         legacy optimizers
    steps_per_epoch      batches in an epoch; default: the number known to `fit`

    Raises ValueError if the optimizer's rate is a LearningRateSchedule.
    """

    def __init__(self, initial_lr: float, multiplier: Union[float, Callable[[float], float]], start_epoch: int = 0,
                 end_epoch: Optional[int] = None, staircase: bool = True, momentum_correction: bool = True,
                 steps_per_epoch: Optional[int] = None) -> None:  # fmt: skip
        super().__init__()
        if initial_lr is None:
            raise ValueError(f"{type(self).__name__}: initial_lr is needed")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._momentum: Optional[float] = None  # the value to be restored
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            factor = float(multiplier)
            self.multiplier = lambda epoch: factor ** (epoch - start_epoch)

    def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__}: nobody knows how many steps an epoch has -- give steps_per_epoch"
                )
        momentum: Any = getattr(self.model.optimizer, "momentum", None)
        if self.momentum_correction and momentum and not self._momentum_counts():
            warnings.warn(
                f"{type(self).__name__}: momentum is not corrected -- it is compiled into the step -- give "
                "momentum_correction=False, or run_eagerly=True to compile()",
                stacklevel=2,
            )

    def on_epoch_begin(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        if self.current_epoch < self.start_epoch or (self.end_epoch is not None and self.current_epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._adjust(self.current_epoch + batch / float(self.steps_per_epoch or 1))
        elif batch == 0:
            self._adjust(self.current_epoch)

    def on_train_batch_end(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        if self._momentum is not None:
            _set_momentum(self.model.optimizer, self._momentum)
            self._momentum = None

    def before_absent_batch(self, batch: int) -> None:
        self.on_train_batch_begin(batch)

    def after_absent_batch(self, batch: int) -> None:
        self.on_train_batch_end(batch)

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        if logs is not None:
            logs["lr"] = _flavor.learning_rate(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        before, now = _flavor.learning_rate(self.model.optimizer), self.initial_lr * self.multiplier(epoch)
        if now != before:
            _set_learning_rate(self.model, now)
        momentum = getattr(self.model.optimizer, "momentum", None)
        if self.momentum_correction and momentum is not None and before and self._momentum_counts():
            self._momentum = float(momentum)
            _set_momentum(self.model.optimizer, self._momentum * now / before)

    def _momentum_counts(self) -> bool:
        model = self.model
        if getattr(model, "run_eagerly", False) or hasattr(model.optimizer, "_hyper"):
            return True
        return _flavor.backend_name(_flavor.package_of(model.optimizer)) == "torch"


def _set_learning_rate(model: Any, rate: float) -> None:
    _flavor.synchronize_state(model)
    try:
        model.optimizer.learning_rate = rate
    except TypeError as error:
        raise ValueError(
            "the learning rate of this optimizer is a LearningRateSchedule, which no callback can set -- give it a number, or "
            f"leave out the callback -- {error}"
        ) from error


def _set_momentum(optimizer: Any, momentum: float) -> None:
    optimizer.momentum = momentum


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate, batch by batch, from initial_lr / size to initial_lr.

    initial_lr     the rate after the warm-up, usually one process's rate times the number of ranks
    warmup_epochs  length of the warm-up
    verbose        1: rank 0 reports the end of the warm-up

    Other arguments are those of LearningRateScheduleCallback.
    """

    def __init__(self, initial_lr: float, warmup_epochs: int = 5, momentum_correction: bool = True,
                 steps_per_epoch: Optional[int] = None, verbose: int = 0) -> None:  # fmt: skip
        def multiplier(epoch: float) -> float:
            # Counts to the batch's end, so that epochs end with round numbers.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / basics.size() * (epoch * (basics.size() - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and basics.rank() == 0:
            print(f"\nEpoch {epoch + 1}: the learning rate has grown to {_flavor.learning_rate(self.model.optimizer):g}.", file=sys.stdout)


class BestModelCheckpoint(_callbacks.ModelCheckpoint):
    """A ModelCheckpoint of the best model so far, written by rank 0.

    filepath  path of the file; default "best-model.keras". It can be set later: `callback.filepath = ...`
    """

    def __init__(self, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto", save_freq: Any = "epoch",
                 filepath: str = "best-model.keras") -> None:  # fmt: skip
        super().__init__(filepath=filepath, monitor=monitor, verbose=verbose, save_best_only=True, save_weights_only=False,
                         mode=mode, save_freq=save_freq)  # fmt: skip

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        if not basics.is_initialized() or basics.rank() == 0:
            super()._save_model(*args, **kwargs)


class CommitStateCallback(_Callback):
    """Commits an elastic state after each `batches_per_commit` batches and each epoch. Put it after callbacks that
    change the state: callbacks after it are not called if it learns that hosts have changed."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
        # The same on all ranks, including new ones.
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def after_absent_batch(self, batch: int) -> None:
        self.on_train_batch_end(batch)

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(_Callback):
    """Keeps `state.batch`: the number, from 0, of the last batch done in this epoch. Keras cannot begin within an epoch,
    so an epoch interrupted by a reset is repeated in full, from the weights of the last commit."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(_Callback):
    """Keeps `state.epoch`: the number of epochs done, including earlier worlds'. `fit` may count from there
    (`initial_epoch=state.epoch`) or from 0 (`epochs=EPOCHS - state.epoch`)."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        self.state.epoch += 1
