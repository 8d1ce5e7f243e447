"""`fit` with ranks: equal weights before the first step, averages by samples, and ends that all ranks reach together.

The first DistributedOptimizer wraps `compile` and `fit` of the program's models; models without one are not affected.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import warnings
import zlib
from typing import Any, Callable, Dict, List, Optional, Tuple

from cohort.horovod import basics
from cohort.horovod.objects import allgather_object
from cohort.keras import _errors, _flavor, _hooks, _reduction, _step
from cohort.keras._reduction import Reduction
from cohort.keras._variables import broadcast_variables

drop_old_arguments = False
"""True, under Horovod's own names: arguments that Keras 3's `compile` no longer takes are left out."""

_OLD_ARGUMENTS = ("experimental_run_tf_function", "sample_weight_mode", "target_tensors", "distribute")
_SAMPLES = "keras.samples"
_METRICS = " (hvd.callbacks.MetricAverageCallback before the others), or give DistributedOptimizer(compare_ranks=False)"


def install(package: str) -> None:
    """Makes `compile` and `fit` of that Keras's models look for distributed optimizers from now on."""
    for name, make in (("compile", _compile), ("fit", _fit)):
        # Replaced in the class that defines it, because Keras compares a model's method with this one to see whether the
        # model overrides it.
        owner = next(one for one in _flavor.module(package).Model.__mro__ if name in vars(one))
        if not getattr(vars(owner)[name], "_cohort", False):
            wrapper = make(vars(owner)[name], package)
            wrapper._cohort = True
            setattr(owner, name, wrapper)


def _compile(original: Callable[..., Any], package: str) -> Any:
    parameters = inspect.signature(original)
    known = parameters.parameters

    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        if drop_old_arguments and not _flavor.is_keras_2(package):
            dropped = [name for name in _OLD_ARGUMENTS if name in kwargs and name not in known]
            for name in dropped:
                del kwargs[name]
            if dropped and basics.is_initialized() and basics.rank() == 0:
                print(f"horovod: compile({', '.join(dropped)}=...) means nothing to Keras 3 and is left out", file=sys.stderr)
        bound = parameters.bind_partial(self, *args, **kwargs)
        optimizer = bound.arguments.get("optimizer")
        if _reduction.of(optimizer) is not None and _flavor.backend_name(package) == "tensorflow":
            if bound.arguments.get("jit_compile") is True:
                raise ValueError(
                    "compile(jit_compile=True): XLA compiles no operation between ranks for TensorFlow, and would refuse the "
                    "step -- leave jit_compile out"
                )
            bound.arguments["jit_compile"] = False
        result = original(*bound.args, **bound.kwargs)
        if not _flavor.is_keras_2(package) and _reduction.of(self.optimizer) is not None:
            _hooks.agreeing(self.optimizer) if _reduction.inner_of(self.optimizer) is not None else None
        return result

    return compile


def _fit(original: Callable[..., Any], package: str) -> Any:
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizers = distributed_optimizers(self)
        if not optimizers:
            return original(self, *args, **kwargs)
        bound = parameters.bind(self, *args, **kwargs)
        bound.apply_defaults()
        training = Training.of(self, optimizers, package)
        before, after = training.callbacks((bound.arguments["initial_epoch"], bound.arguments["epochs"]))
        given = bound.arguments["callbacks"]
        if hasattr(given, "callbacks"):  # a CallbackList
            given.callbacks.insert(0, before)
            given.append(after)
            for one in (before, after):
                one.set_model(self)
                one.set_params(given.params)
        else:
            given = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
            bound.arguments["callbacks"] = [before, *given, after]
        training.others = [one for one in given if hasattr(one, "before_absent_batch")] if isinstance(given, list) else []
        with _errors.translated():
            training.build(bound.arguments["x"])
            return original(*bound.args, **bound.kwargs)

    return fit


def distributed_optimizers(model: Any) -> List[Any]:
    """Returns a model's optimizers: the one of `compile`, and those in attributes, if a model has several."""
    found = [getattr(model, "optimizer", None), *vars(model).values()]
    unique: Dict[int, Any] = {id(one): one for one in found if _reduction.of(one) is not None}
    return list(unique.values())


class Training:
    """A model whose `fit` all ranks run together."""

    def __init__(self, model: Any, original_step: Callable[..., Any], package: str) -> None:
        self.model = model
        self.package = package
        self.reduction: Reduction
        self.optimizers: List[Any] = []
        self.recipe: List[Tuple[Any, List[Any]]] = []  # the last step's optimizers, and the variables that they changed
        self.others: List[Any] = []  # callbacks for steps of ranks without data
        self._original_step = original_step
        self._batches = 0  # batches that this rank has begun in this epoch
        self._finished = False
        self._epochs = 0  # epochs that have ended, in all calls of `fit` of all ranks
        self._asks_kinds = False  # True: ranks have to exchange which gradients are sparse

    @classmethod
    def of(cls, model: Any, optimizers: List[Any], package: str) -> "Training":
        """Returns the Training of a model, made on the first call."""
        training: Optional[Training] = getattr(model.train_step, "training", None)
        if training is None:
            training = cls(model, model.train_step, package)
            model.train_function = None
        if model.train_function is None:
            model.train_step = training._wrapper()
        training.optimizers = optimizers
        reduction = _reduction.of(optimizers[0])
        assert reduction is not None
        training.reduction = reduction
        if _flavor.backend_name(package) == "tensorflow" and getattr(model, "jit_compile", False):
            model.jit_compile = False
            model.train_function = None
        return training

    def _wrapper(self) -> Any:
        """Returns the step for `fit`. It is a new function each time, because JAX keeps the compiled form of a function."""

        @functools.wraps(self._original_step)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            return self.step(*args, **kwargs)

        train_step.training = self  # type: ignore[attr-defined]
        return train_step

    # --- steps ---

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step on this rank's batch."""
        reduction = self.reduction
        if not reduction.is_shared():
            return self._original_step(*args, **kwargs)
        data = kwargs["data"] if "data" in kwargs else args[-1]
        by_samples = self._by_samples()
        count = reduction.backend.samples_in(_first_leaf(data)) if by_samples else 1
        samples = reduction.backend.total(count, _SAMPLES, reduction.settings.process_set)
        factor = reduction.backend.factor_of(count, reduction.ranks(), samples) if by_samples else None
        with _step.at(_step.Step(reduction.settings.process_set, factor, self._exchange_kinds)) as step:
            result = self._original_step(*args, **kwargs)
        self.recipe = step.applied or self.recipe
        return result

    def _exchange_kinds(self) -> None:
        """Runs once, before gradients are reduced for the first time, because ranks without a batch cannot know which
        gradients are sparse. If steps are graphs, such ranks have built one, too."""
        if not self._asks_kinds:
            return
        self._asks_kinds = False
        self._learn(allgather_object(self._kinds(), "keras.kinds", self.reduction.settings.process_set))

    def _kinds(self) -> List[Dict[str, Any]]:
        """Returns, for each optimizer, the known gradients by name, with the index type of sparse ones."""
        reductions = map(_reduction.of, self.optimizers)
        return [{} if reduction is None else dict(reduction.sparse) for reduction in reductions]

    def _learn(self, everyone: List[List[Dict[str, Any]]]) -> None:
        for kinds in everyone:
            for optimizer, known in zip(self.optimizers, kinds):
                reduction = _reduction.of(optimizer)
                for name, kind in known.items() if reduction is not None else ():
                    reduction.sparse.setdefault(name, kind)  # type: ignore[union-attr]

    def _is_eager(self) -> bool:
        """Returns True if gradients may be sparse, and steps are not graphs."""
        if _flavor.backend_name(self.package) != "tensorflow":
            return False
        import tensorflow as tf

        return bool(getattr(self.model, "run_eagerly", False)) or tf.config.functions_run_eagerly()

    def _by_samples(self) -> bool:
        """Returns True if this rank's loss is a mean over samples, and the average over ranks is to be one, too."""
        settings = self.reduction.settings
        if settings.op != _reduction.Average or settings.average_by != "samples":
            return False
        losses = _flat(getattr(self.model, "loss", None))
        return not any(str(getattr(one, "reduction", "")).lower().endswith("sum") for one in losses)

    def _absent_step(self) -> None:
        """Takes part in a step for which only other ranks have batches."""
        recipe = self.recipe or [(self.model.optimizer, list(self.model.trainable_variables))]
        for optimizer, variables in recipe:
            outer = next((one for one in self.optimizers if _reduction.inner_of(one) is optimizer), optimizer)
            reduction = _reduction.of(outer)
            assert reduction is not None
            _apply(outer, reduction, variables)

    def finish_epoch(self) -> None:
        """Takes part in the others' steps until no rank has data left in this epoch."""
        if self._finished or not self.reduction.is_shared():
            return
        self._finished = True
        every = max(1, int(getattr(self.model, "steps_per_execution", None) or 1)) if not _flavor.is_keras_2(self.package) else 1
        backend, process_set, absent = self.reduction.backend, self.reduction.settings.process_set, 0
        while float(backend.total(0, _SAMPLES, process_set)) > 0:
            batch = self._batches
            if batch % every == 0:
                for one in self.others:
                    one.before_absent_batch(batch)
            self._exchange_kinds()
            self._absent_step()
            self._batches += 1
            absent += 1
            if self._batches % every == 0:
                for one in self.others:
                    one.after_absent_batch(batch)
        self._level(absent)

    def _level(self, absent: int) -> None:
        """Gives the weights of a rank that had data to the end to ranks that made steps without data, since those computed
        them differently (not by a compiled step, for example), to the last bits."""
        process_set = self.reduction.settings.process_set
        missed = allgather_object(absent, "keras.absent", process_set)
        if not any(missed):
            return
        _flavor.synchronize_state(self.model)
        root = (process_set.ranks or [])[missed.index(min(missed))]
        weights = [one for one in self.model.trainable_variables if not self._is_local(one)]
        broadcast_variables(weights, root, "weights", process_set)
        for i, optimizer in enumerate(self.optimizers):
            broadcast_variables(_flavor.optimizer_variables(optimizer), root, f"optimizer.{i}", process_set)

    # --- callbacks ---

    def callbacks(self, epochs: Tuple[int, int]) -> Tuple[Any, Any]:
        """Returns the callbacks to run before the program's, and those to run after them."""
        training, base = self, _flavor.module(self.package).callbacks.Callback

        class Before(base):  # type: ignore[misc,valid-type]
            async_safe = False

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                training._finished, training._batches = False, 0

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                training._batches = batch

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                training._batches = batch + 1
                training.check_reached()

            def on_test_begin(self, logs: Any = None) -> None:
                training.finish_epoch()

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                training.finish_epoch()
                training._epochs += 1
                count = training._epochs
                if count == 1 or (training.reduction.settings.compare_ranks and count & (count - 1) == 0):
                    when = f"after {count} epochs" if count > 1 else "after the first epoch"
                    training.compare_weights(when, "gradients were not reduced on all ranks alike, or one rank changed weights")

        class After(base):  # type: ignore[misc,valid-type]
            def on_train_begin(self, logs: Any = None) -> None:
                training._finished = True
                training.agree(epochs, (self.params or {}).get("steps"))

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                training.agree_on_end()
                if training.reduction.settings.compare_ranks:
                    training.compare_numbers(epoch)

            def on_train_end(self, logs: Any = None) -> None:
                if training.reduction.settings.compare_ranks:
                    training.compare_weights("at the end of fit", "let callbacks look at metrics of all ranks" + _METRICS)

        return Before(), After()

    def build(self, x: Any) -> None:
        """Builds the model before the first step, so that weights can be made equal."""
        model = self.model
        if _flavor.is_keras_2(self.package):
            batch = None if model.built else _peek(x)
            if batch is not None:
                model(batch)
        elif hasattr(model, "_maybe_symbolic_build") and not getattr(model, "_distribute_strategy", None):

            def build(iterator: Any = None, data_batch: Any = None) -> None:
                # TensorFlow's iterator yields iterators; the others' yield lists of batches. The iterator may be empty.
                if iterator is not None:
                    data_batch = next((next(one, None) for _, _, one in iterator), None)
                if data_batch is not None:
                    model._symbolic_build(data_batch=data_batch)

            model._maybe_symbolic_build = build

    def check_reached(self) -> None:
        """After a step: raises RuntimeError if no optimizer has reduced anything."""
        reduction = self.reduction
        optimizer = self.optimizers[0]
        # Steps that only accumulate or that overflow do not reach the hook.
        if _reduction.inner_of(optimizer) is not None:
            return
        if self._batches < (getattr(optimizer, "gradient_accumulation_steps", None) or reduction.settings.passes):
            return
        if reduction.is_shared() and not any(self._reduced(one) for one in self.optimizers):
            raise RuntimeError(
                f"fit: the first step has reduced nothing: {reduction.hook} of {type(optimizer).__name__} was "
                f"called {reduction.reached} times -- ranks would train apart -- a train_step of one's own has to apply "
                "gradients with the optimizer that DistributedOptimizer returned"
            )

    @staticmethod
    def _reduced(optimizer: Any) -> bool:
        reduction = _reduction.of(optimizer)
        return reduction is not None and reduction.bytes > 0

    def agree(self, epochs: Tuple[int, int], steps: Optional[int]) -> None:
        """Called before the first step. Raises ValueError, on all ranks, if they would not train the same model."""
        reduction = self.reduction
        if not reduction.is_shared():
            return
        begin = getattr(self.model, "_initial_epoch", None) or epochs[0]
        own = (begin, epochs[1], steps, self._kinds(), self._is_eager(), self._epochs, bool(self.model.built))
        plans = allgather_object(own, "keras.fit", reduction.settings.process_set)
        for rank, plan in enumerate(plans):
            if plan[:2] != plans[0][:2]:
                raise ValueError(
                    f"fit: ranks train for different epochs -- {self._name(0)} from {plans[0][0]} to {plans[0][1]}, "
                    f"{self._name(rank)} from {plan[0]} to {plan[1]} -- give all ranks the same epochs and initial_epoch"
                )
        self._learn([plan[3] for plan in plans])
        self._epochs = min(plan[5] for plan in plans)  # a new rank may be in a world that others have been in before
        self._asks_kinds = not any(self._kinds()) and all(plan[4] for plan in plans)
        if len({plan[2] for plan in plans}) > 1 and reduction.settings.process_set.rank() == 0:
            print(
                "cohort: ranks have different numbers of steps per epoch: "
                + ", ".join(f"{self._name(rank)} {plan[2] or 'unknown'}" for rank, plan in enumerate(plans))
                + "; those that have no data left take part in the others' steps without any",
                file=sys.stderr,
            )
        # In an elastic job programs call `fit` before their state is made equal, to create its variables.
        elastic = basics.may_grow()
        differ = self.compare_weights(
            "before the first step", "add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit's callbacks", refuses=not elastic
        )
        if elastic and all(plan[6] for plan in plans) and (differ or len({plan[5] for plan in plans}) > 1):
            self._take_those_of_first(differ)

    def _name(self, rank: int) -> str:
        ranks = self.reduction.settings.process_set.ranks or []
        return f"rank {ranks[rank] if rank < len(ranks) else rank}"

    def _take_those_of_first(self, differ: bool) -> None:
        """Gives all ranks the first rank's weights and the states of its optimizers."""
        process_set, model = self.reduction.settings.process_set, self.model
        root = (process_set.ranks or [0])[0]
        if differ and process_set.rank() == 0:
            warnings.warn(
                f"fit: ranks have different weights before the first step; all get those of {self._name(0)}, as the job is "
                "elastic. hvd.callbacks.BroadcastGlobalVariablesCallback(0) among fit's callbacks does it without a warning",
                stacklevel=2,
            )
        broadcast_variables([one for one in model.weights if not self._is_local(one)], root, "weights", process_set)
        for i, optimizer in enumerate(self.optimizers):
            build = getattr(optimizer, "build", None)
            if optimizer is getattr(model, "optimizer", None) and build is not None and not getattr(optimizer, "built", True):
                build(model.trainable_variables)
            broadcast_variables(_flavor.optimizer_variables(optimizer), root, f"optimizer.{i}", process_set)

    def compare_weights(self, when: str, advice: str, refuses: bool = True) -> bool:
        """Raises ValueError, on all ranks, if the names or shapes of their trainable weights differ, or the values. For
        values with refuses=False, returns True on all ranks instead."""
        if not self.reduction.is_shared():
            return False
        _flavor.synchronize_state(self.model)
        mine: List[Tuple[str, Tuple[int, ...], int]] = []
        if self.model.built:
            variables = [one for one in self.model.trainable_variables if not self._is_local(one)]
            for path, variable in zip(_flavor.unique_paths(variables), variables):
                value = _flavor.value_of(variable)
                mine.append((path, tuple(value.shape), zlib.crc32(value.tobytes())))
        everyone = allgather_object(mine, "keras.weights", self.reduction.settings.process_set)
        differ = False
        for rank, theirs in enumerate(everyone):
            if not theirs or not everyone[0] or theirs == everyone[0]:
                continue
            for own, other in zip(everyone[0], theirs):
                if own[:2] != other[:2]:
                    raise ValueError(
                        f"fit: ranks have different models -- {self._name(0)} has {own[0]} {list(own[1])} where "
                        f"{self._name(rank)} has {other[0]} {list(other[1])} -- make the same layers in the same order on "
                        "all ranks, or name them"
                    )
                differ = differ or own != other
                if own != other and refuses:
                    raise ValueError(
                        f"fit: ranks have different weights {when} -- {own[0]} of {self._name(rank)} is not that of "
                        f"{self._name(0)} -- {advice}"
                    )
            if len(theirs) != len(everyone[0]):
                raise ValueError(
                    f"fit: ranks have different models -- {self._name(0)} has {len(everyone[0])} variables to train, "
                    f"{self._name(rank)} {len(theirs)}"
                )
        return differ

    def compare_numbers(self, epoch: int) -> None:
        """Raises ValueError, on all ranks, if the optimizers' learning rates or other numbers now differ."""
        if not self.reduction.is_shared():
            return
        mine = [pair for optimizer in self.optimizers for pair in _numbers_of(optimizer).items()]
        everyone = allgather_object(mine, "keras.numbers", self.reduction.settings.process_set)
        for rank, theirs in enumerate(everyone):
            for own, other in zip(everyone[0], theirs):
                # Hosts of different kinds may round a schedule's powers and cosines differently.
                if repr(own) != repr(other) and not math.isclose(own[1], other[1], rel_tol=1e-6):
                    raise ValueError(
                        f"fit: ranks have different optimizers after epoch {epoch + 1} -- {own[0]} is {own[1]} on "
                        f"{self._name(0)} and {other[1]} on {self._name(rank)} -- let all ranks change it alike, from metrics "
                        f"of all ranks{_METRICS}"
                    )

    def _is_local(self, variable: Any) -> bool:
        return any(reduction.is_local(variable) for reduction in map(_reduction.of, self.optimizers) if reduction)

    def agree_on_end(self) -> None:
        """If one rank's callbacks have ended the training, ends it on all ranks with this epoch."""
        reduction = self.reduction
        if reduction.is_shared():
            asked = 1.0 if self.model.stop_training else 0.0
            if float(reduction.backend.total(asked, "keras.stop", reduction.settings.process_set)) > 0:
                self.model.stop_training = True


def _numbers_of(optimizer: Any) -> Dict[str, Any]:
    """Returns the numbers that a step uses: the current learning rate, and numeric arguments."""
    inner = _reduction.inner_of(optimizer) or optimizer
    try:
        found = {name: one for name, one in inner.get_config().items() if isinstance(one, (bool, int, float))}
    except NotImplementedError:  # a custom optimizer
        found = {}
    if not hasattr(inner.learning_rate, "get_config"):  # Keras 2's schedules are functions of the step
        found["learning_rate"] = _flavor.learning_rate(inner)
    return found


def _apply(optimizer: Any, reduction: Reduction, variables: List[Any]) -> None:
    """Makes a step with only the other ranks' gradients."""
    nothing = reduction.nothing(variables)
    name = _flavor.backend_name(reduction.package)
    if _flavor.is_keras_2(reduction.package):
        optimizer.apply_gradients(zip(nothing, variables))
    elif name == "jax":
        # Outside of a compiled step, a condition of JAX must not assign.
        values, state = optimizer.stateless_apply(
            [one.value for one in optimizer.variables], nothing, [one.value for one in variables]
        )
        for variable, value in [*zip(variables, values), *zip(optimizer.variables, state)]:
            variable.assign(value)
    elif name == "torch":
        import torch

        with torch.no_grad():
            optimizer.apply(nothing, variables)
    else:
        optimizer.apply(nothing, variables)


def _flat(value: Any) -> List[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in _flat(one)]
    return [] if value is None else [value]


def _first_leaf(data: Any) -> Any:
    """Returns the first leaf of a batch's inputs, (x, y, weights) or only x."""
    return _flat(data[0] if isinstance(data, tuple) else data)[0]


def _peek(x: Any) -> Any:
    """Returns some inputs of a training if reading them consumes nothing; else None."""
    import tensorflow as tf

    if isinstance(x, tf.data.Dataset):
        batch = next(iter(x.take(1)))
        return batch[0] if isinstance(batch, tuple) else batch
    if hasattr(x, "__getitem__") and hasattr(x, "shape"):
        return tf.convert_to_tensor(x[:1])
    if isinstance(x, (list, tuple)) and all(hasattr(one, "shape") for one in x):
        return [tf.convert_to_tensor(one[:1]) for one in x]
    if isinstance(x, dict) and all(hasattr(one, "shape") for one in x.values()):
        return {key: tf.convert_to_tensor(one[:1]) for key, one in x.items()}
    warnings.warn("fit: the model is built with its first batch, so ranks begin it with weights of their own", stacklevel=4)
    return None
