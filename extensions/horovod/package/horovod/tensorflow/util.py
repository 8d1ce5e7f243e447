"""The small utilities of `horovod.tensorflow.util` that programs import, with its names and meanings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def _executing_eagerly() -> bool:
    """Returns True if operations run eagerly, not in a graph."""
    return bool(tf.executing_eagerly())


def _make_subgraph(function: Callable[..., Any]) -> Any:
    """Returns the function as a graph."""
    return tf.function(function)


def vars_to_refs(variables: Sequence[Any]) -> Any:
    """Returns references that can stand for variables as keys of a dict."""
    return tuple(vars_to_refs(one) if isinstance(one, (list, tuple)) else one.ref() for one in variables)


def refs_to_vars(references: Sequence[Any]) -> Any:
    """Returns the variables of such references, as lists."""
    return [refs_to_vars(one) if isinstance(one, (list, tuple)) else one.deref() for one in references]
