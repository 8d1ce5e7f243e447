"""Turns an optimizer into one that reduces: derives a class that overrides the method to which each Keras passes all
gradients.

Keras 3: `_clip_gradients`, once for each update, after accumulation and before clipping, on all backends; Keras 2:
`aggregate_gradients`; its legacy optimizers: `_aggregate_gradients`.
"""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

from cohort.keras import _flavor
from cohort.keras._reduction import Reduction


class _Distributed:
    """Mixed into the optimizer's class."""

    _cohort_reduction: Reduction

    def register_local_var(self, var: Any) -> None:
        """Leaves this variable's gradients unreduced on this rank, divided by the number of ranks (unless
        scale_local_gradients=False)."""
        type(self)._cohort_reduction.add_local(var)


class _Keras3(_Distributed):
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        reduction = type(self)._cohort_reduction
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        grads = reduction.filled(list(grads), variables)
        with reduction.applying(self, [v for g, v in zip(grads, variables) if g is not None]):
            return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        return super()._clip_gradients(type(self)._cohort_reduction.reduce(grads))  # type: ignore[misc]

    def scale_loss(self, loss: Any) -> Any:
        return type(self)._cohort_reduction.weighted(super().scale_loss(loss))  # type: ignore[misc]


class _Keras2(_Distributed):
    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> List[Tuple[Any, Any]]:
        reduction = type(self)._cohort_reduction
        if tape is not None and not callable(loss):
            with tape:
                loss = reduction.weighted(loss)
        return _filled(reduction, super().compute_gradients(loss, var_list, tape=tape))  # type: ignore[misc]

    def aggregate_gradients(self, grads_and_vars: Any) -> List[Tuple[Any, Any]]:
        return _reduced(self, grads_and_vars)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        return _accumulated(self, grads_and_vars, lambda pairs: super(_Keras2, self).apply_gradients(pairs, *args, **kwargs))  # type: ignore[misc]


class _Legacy(_Distributed):
    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        reduction = type(self)._cohort_reduction
        if tape is not None and not callable(loss):
            with tape:
                loss = reduction.weighted(loss)
        return _filled(reduction, super()._compute_gradients(loss, var_list, grad_loss, tape))  # type: ignore[misc]

    def _aggregate_gradients(self, grads_and_vars: Any) -> List[Tuple[Any, Any]]:
        return _reduced(self, grads_and_vars)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        return _accumulated(self, grads_and_vars, lambda pairs: super(_Legacy, self).apply_gradients(pairs, *args, **kwargs))  # type: ignore[misc]


def _filled(reduction: Reduction, pairs: Sequence[Tuple[Any, Any]]) -> List[Tuple[Any, Any]]:
    pairs = list(pairs)
    gradients = reduction.filled([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
    return [(gradient, variable) for gradient, (_, variable) in zip(gradients, pairs)]


def _reduced(optimizer: Any, pairs: Any) -> List[Tuple[Any, Any]]:
    reduction = type(optimizer)._cohort_reduction
    pairs = _filled(reduction, list(pairs))
    variables = [variable for _, variable in pairs]
    with reduction.applying(optimizer, variables):
        return list(zip(reduction.reduce([gradient for gradient, _ in pairs], variables), variables))


def _accumulated(optimizer: Any, pairs: Any, apply: Any) -> Any:
    """Accumulates gradients, and applies them in every `passes`-th call, since Keras 2 itself does not accumulate."""
    reduction = type(optimizer)._cohort_reduction
    passes = reduction.settings.passes
    pairs = list(pairs)
    if passes == 1 or not pairs:
        return apply(pairs)
    import tensorflow as tf

    pairs = [(tf.convert_to_tensor(g), v) for g, v in _filled(reduction, pairs) if g is not None]
    kept = reduction.accumulated
    with tf.init_scope():
        if reduction.passes_done is None:
            reduction.passes_done = tf.Variable(0, dtype=tf.int64, trainable=False)
        for _, variable in pairs:
            if id(variable) not in kept:
                kept[id(variable)] = tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
        if hasattr(optimizer, "build"):
            optimizer.build([variable for _, variable in pairs])
        else:
            optimizer._create_all_weights([variable for _, variable in pairs])
    count = reduction.passes_done
    for gradient, variable in pairs:
        kept[id(variable)].assign_add(gradient)
    count.assign_add(1)

    def update() -> Any:
        # The hook assumes that Keras has averaged the gradients.
        apply([(kept[id(variable)] / passes, variable) for _, variable in pairs])
        for _, variable in pairs:
            kept[id(variable)].assign(tf.zeros(variable.shape, variable.dtype))
        return tf.identity(optimizer.iterations)

    return tf.cond(count % passes == 0, update, lambda: tf.identity(optimizer.iterations))


def _mixin(optimizer: Any, package: str) -> Tuple[type, str]:
    if not _flavor.is_keras_2(package):
        return _Keras3, "_clip_gradients"
    return (_Keras2, "aggregate_gradients") if hasattr(optimizer, "aggregate_gradients") else (_Legacy, "_aggregate_gradients")


def _public(base: type) -> type:
    """Returns the class named in files, since with torch Keras makes a second class of the same name."""
    for one in base.__mro__:
        if one.__name__ == base.__name__ and ".backend." not in one.__module__:
            return one
    return base


def _class(optimizer: Any, reduction: Reduction) -> Any:
    base = type(optimizer)
    mixin, reduction.hook = _mixin(optimizer, reduction.package)
    known = _public(base)
    make: Any = type
    return make(base.__name__, (mixin, base), {
        "__module__": known.__module__, "__qualname__": known.__qualname__, "__doc__": base.__doc__,
        "_cohort_reduction": reduction,
    })  # fmt: skip


def derived(optimizer: Any, reduction: Reduction) -> Any:
    """Returns an optimizer of such a class, with the attributes of the given one."""
    made = _class(optimizer, reduction)
    wrapped: Any = made.__new__(made)
    wrapped.__dict__.update(vars(optimizer))
    return wrapped


class _Probe(Reduction):
    """A reduction that only counts calls."""

    def is_shared(self) -> bool:
        return False


def prove(optimizer: Any, reduction: Reduction) -> None:
    """Applies a gradient to a test variable with an optimizer of the same kind. Raises RuntimeError unless that calls
    the hook that `reduction` needs. An optimizer that cannot be created again is not tested; `fit` also checks after
    its first step."""
    probe = _Probe(reduction.settings._replace(passes=1, groups=None), reduction.package)
    try:
        config = optimizer.get_config()
        cls = _class(optimizer, probe)
        copy = cls.from_config(config)
        keras = _flavor.module(reduction.package)
        if _flavor.is_keras_2(reduction.package):
            import tensorflow as tf

            variable: Any = tf.Variable([[1.0, 1.0]], name="cohort_probe")
            gradient: Any = tf.constant([[1.0, 1.0]])
        else:
            variable = keras.Variable([[1.0, 1.0]], name="cohort_probe")
            gradient = keras.ops.convert_to_tensor([[1.0, 1.0]])
        for _ in range(config.get("gradient_accumulation_steps") or 1):
            copy.apply_gradients([(gradient, variable)])
    except Exception:
        if probe.reached == 0:
            return
    if probe.reached == 0:
        raise RuntimeError(
            f"DistributedOptimizer: {type(optimizer).__name__} of {reduction.package} {_flavor.module(reduction.package).__version__} "
            f"never calls {reduction.hook}, where gradients are reduced -- ranks would train apart -- reduce them before the "
            "optimizer sees them, or take another optimizer"
        )


def agreeing(outer: Any) -> Any:
    """Returns a LossScaleOptimizer of Keras 3 whose ranks agree on whether gradients are finite: all ranks skip a step,
    or none. Keras 2's checks gradients that are reduced already."""
    base = type(outer)
    if not hasattr(base, "check_finite") or hasattr(base, "_cohort_agrees"):
        return outer

    def check_finite(self: Any, grads: Any) -> Any:
        finite = base.check_finite(self, grads)
        reduction = getattr(type(self.inner_optimizer), "_cohort_reduction", None)
        if reduction is None or not reduction.is_shared():
            return finite
        return reduction.backend.all_true(finite, "keras.finite", reduction.settings.process_set)

    def scale_loss(self: Any, loss: Any) -> Any:
        reduction = getattr(type(self.inner_optimizer), "_cohort_reduction", None)
        loss = base.scale_loss(self, loss)
        return loss if reduction is None else reduction.weighted(loss)

    outer.__class__ = type(base.__name__, (base,), {
        "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
        "check_finite": check_finite, "scale_loss": scale_loss, "_cohort_agrees": True,
    })  # fmt: skip
    return outer
