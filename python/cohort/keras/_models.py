"""Models from files."""

from __future__ import annotations

from typing import Any, Dict, Optional

from cohort.keras import _flavor, _reduction
from cohort.keras.compression import Compression
from cohort.keras.optimizer import DistributedOptimizer


def load_model(filepath: Any, custom_optimizers: Any = None, custom_objects: Optional[Dict[str, Any]] = None,
               compression: Any = Compression.none, legacy_opts: bool = False) -> Any:  # fmt: skip
    """Loads a model, and makes its optimizer a distributed one that has the state of the file.

    filepath           as keras.models.load_model
    custom_optimizers  classes of optimizers that are not Keras's
    custom_objects     other classes and functions, by name
    compression        what gradients travel as
    legacy_opts        means nothing here: Keras 2's legacy optimizers are known
    """
    known = {one.__name__: one for one in custom_optimizers or ()}
    known.update(custom_objects or {})
    model = _flavor.module().models.load_model(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and _reduction.of(optimizer) is None:
        model.optimizer = DistributedOptimizer(optimizer, compression=compression)
        model.train_function = None
    return model
