"""Options of a table: optimizers, consistencies, and initial rows."""

from __future__ import annotations

from typing import Any, Union

from cohort import _core
from cohort.ps._checks import integer, number, refuse


def _numbers(what: str, **given: Any) -> list[float]:
    return [number(what, name, value) for name, value in given.items()]


def _adams(what: str, lr: Any, betas: Any, eps: Any, weight_decay: Any) -> list[float]:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        refuse(what, "betas", betas, "pass two numbers: (0.9, 0.999)")
    both = {"betas[0]": betas[0], "betas[1]": betas[1]}
    return _numbers(what, lr=lr, **both, eps=eps, weight_decay=weight_decay)


class Sgd(_core.PsSgd):
    """torch.optim.SGD. Without momentum it needs no memory per row."""

    def __init__(self, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
                 nesterov: bool = False) -> None:  # fmt: skip
        lr, momentum, dampening, weight_decay = _numbers(
            "Sgd", lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay
        )
        if not isinstance(nesterov, bool):
            refuse("Sgd", "nesterov", nesterov, "pass True or False")
        super().__init__(lr, momentum, dampening, weight_decay, nesterov)


class Adagrad(_core.PsAdagrad):
    """torch.optim.Adagrad; its `lr_decay` uses the row's own steps."""

    def __init__(self, lr: float = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
                 initial_accumulator_value: float = 0.0, eps: float = 1e-10) -> None:  # fmt: skip
        super().__init__(
            *_numbers(
                "Adagrad",
                lr=lr,
                lr_decay=lr_decay,
                weight_decay=weight_decay,
                initial_accumulator_value=initial_accumulator_value,
                eps=eps,
            )
        )


class RowAdagrad(_core.PsRowAdagrad):
    """Adagrad with one accumulator per row: the sum over steps of the mean of the gradient's squares."""

    def __init__(self, lr: float = 1e-2, initial_accumulator_value: float = 0.0, eps: float = 1e-10) -> None:
        super().__init__(*_numbers("RowAdagrad", lr=lr, initial_accumulator_value=initial_accumulator_value, eps=eps))


class Adam(_core.PsAdam):
    """torch.optim.SparseAdam, and torch.optim.Adam with `weight_decay`; uses the row's own steps."""

    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        super().__init__(*_adams("Adam", lr, betas, eps, weight_decay))


class AdamW(_core.PsAdamW):
    """torch.optim.AdamW, with the row's own steps."""

    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2
    ) -> None:
        super().__init__(*_adams("AdamW", lr, betas, eps, weight_decay))


class Ftrl(_core.PsFtrl):
    """FTRL-Proximal (McMahan et al. 2013, algorithm 1): `alpha` is `lr`. It is fixed, so other rates are refused."""

    def __init__(self, lr: float = 0.1, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0) -> None:
        super().__init__(*_numbers("Ftrl", lr=lr, beta=beta, l1=l1, l2=l2))


Optimizer = Union[Sgd, Adagrad, RowAdagrad, Adam, AdamW, Ftrl]
_OPTIMIZERS = (Sgd, Adagrad, RowAdagrad, Adam, AdamW, Ftrl)


def constant(value: float) -> _core.PsInitializer:
    """Initial rows whose elements are all this number."""
    return _core.PsInitializer.constant(number("constant", "value", value))


def uniform(low: float, high: float) -> _core.PsInitializer:
    """Initial rows of uniformly distributed numbers, from `low` up to `high`."""
    return _core.PsInitializer.uniform(number("uniform", "low", low), number("uniform", "high", high))


def normal(mean: float, deviation: float) -> _core.PsInitializer:
    """Initial rows of normally distributed numbers."""
    return _core.PsInitializer.normal(number("normal", "mean", mean), number("normal", "deviation", deviation))


def Sync() -> _core.PsConsistency:
    """A pull sees exactly the pushes of all workers' earlier clocks: the bits of one process, on any number of servers."""
    return _core.PsConsistency.sync()


def Bounded(staleness: int) -> _core.PsConsistency:
    """A worker's pushes take effect when its clock ends; pulls wait while one is over `staleness` clocks behind."""
    return _core.PsConsistency.bounded(integer("Bounded", "staleness", staleness))


def Async() -> _core.PsConsistency:
    """Pushes take effect when they arrive, and pulls wait for nobody."""
    return _core.PsConsistency.asynchronous()


Consistency = Union[_core.PsConsistency, str, None]


def optimizer_of(what: str, value: Any) -> Optimizer:
    """Returns the optimizer; Sgd() for None."""
    if value is None:
        return Sgd()
    if isinstance(value, _OPTIMIZERS):
        return value
    if isinstance(value, type) and issubclass(value, _OPTIMIZERS):
        refuse(what, "optimizer", value, f"pass an instance of it: {value.__name__}(lr=0.1)")
    refuse(
        what,
        "optimizer",
        value,
        "servers step by those of cohort.ps: pass Sgd(lr=0.1), or one of Adagrad, RowAdagrad, Adam, AdamW and Ftrl",
    )


def consistency_of(what: str, value: Any) -> _core.PsConsistency:
    """Returns the consistency; Sync() for None. Accepts "sync" and "async", too."""
    if value is None:
        return Sync()
    if isinstance(value, _core.PsConsistency):
        return value
    if isinstance(value, str) and value in ("sync", "async"):
        return Sync() if value == "sync" else Async()
    if any(value is one for one in (Sync, Bounded, Async)):
        refuse(what, "consistency", value, f"call it: {value.__name__}({'2' if value is Bounded else ''})")
    refuse(what, "consistency", value, 'pass Sync(), Bounded(2) or Async(), or the text "sync" or "async"')


def initializer_of(what: str, value: Any) -> _core.PsInitializer:
    if isinstance(value, _core.PsInitializer):
        return value
    try:
        if not isinstance(value, (str, bytes)):
            return constant(float(value))
    except (TypeError, ValueError, RuntimeError):
        pass
    refuse(what, "initializer", value, "pass a number, constant(0.5), uniform(-0.1, 0.1) or normal(0, 0.1)")
