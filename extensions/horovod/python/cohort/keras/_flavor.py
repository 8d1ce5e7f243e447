"""Differences between kinds of Keras: Keras 3, with a choice of backends, or Keras 2 (tf_keras, or keras before 3), on
TensorFlow."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Iterable, List


def name() -> str:
    """Returns the package that the program uses as Keras: "tf_keras" if TF_USE_LEGACY_KERAS selects it, or if the
    program has imported no other, else "keras"."""
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        return "tf_keras"
    return "tf_keras" if "tf_keras" in sys.modules and "keras" not in sys.modules else "keras"


def module(package: str = "") -> Any:
    """Imports that package, or the given one."""
    return importlib.import_module(package or name())


def package_of(one: Any) -> str:
    """Returns the Keras package of an optimizer or a model."""
    for base in type(one).__mro__:
        root = base.__module__.split(".")[0]
        if root in ("keras", "tf_keras"):
            return root
    return ""


def is_keras_2(package: str) -> bool:
    """Returns whether the package is Keras 2."""
    return package == "tf_keras" or str(module(package).__version__).startswith("2.")


def backend_name(package: str) -> str:
    """Returns "tensorflow", "torch" or "jax"."""
    return "tensorflow" if is_keras_2(package) else str(module(package).backend.backend())


def path_of(variable: Any) -> str:
    """Returns the name of a variable, as given by the program's layers."""
    path = getattr(variable, "path", None)
    return str(path if path else variable.name).split(":")[0]


def unique_paths(variables: Iterable[Any]) -> List[str]:
    """Returns names for variables; layers may share names, and a repeated name gets the same number on every rank."""
    seen: dict[str, int] = {}
    paths = []
    for variable in variables:
        path = path_of(variable)
        seen[path] = seen.get(path, 0) + 1
        paths.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    return paths


def optimizer_variables(optimizer: Any) -> List[Any]:
    """Returns the variables of an optimizer, which are a property, or in Keras 2's old optimizers a method."""
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def value_of(variable: Any) -> Any:
    """Returns a variable's value as a NumPy array, which is not the variable's own memory."""
    import numpy

    if hasattr(variable, "path"):
        return numpy.array(module("keras").ops.convert_to_numpy(variable))
    return numpy.array(variable.numpy())


def learning_rate(optimizer: Any) -> float:
    """Returns the current learning rate."""
    rate = optimizer.learning_rate
    return float(value_of(rate) if hasattr(rate, "numpy") or hasattr(rate, "path") else rate)


def synchronize_state(model: Any) -> None:
    """Writes the current values to the variables, which do not hold them while JAX trains."""
    synchronize = getattr(model, "jax_state_sync", None)
    if synchronize is not None and getattr(model, "_jax_state", None) is not None:
        synchronize()
