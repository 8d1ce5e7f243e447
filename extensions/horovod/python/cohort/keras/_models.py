"""Loads models from files."""

from __future__ import annotations

from typing import Any, Dict, Optional

from cohort.keras import _flavor, _reduction
from cohort.keras.compression import Compression
from cohort.keras.optimizer import DistributedOptimizer


def load_model(filepath: Any, custom_optimizers: Any = None, custom_objects: Optional[Dict[str, Any]] = None,
               compression: Any = Compression.none, legacy_opts: bool = False) -> Any:  # fmt: skip
    """Loads a model, and makes its optimizer a distributed one with the state in the file.

    filepath           as for keras.models.load_model
    custom_optimizers  classes of optimizers that are not Keras's
    custom_objects     other classes and functions, by name
    compression        the format in which gradients travel
    legacy_opts        has no effect: Keras 2's legacy optimizers are recognized
    """
    known = {one.__name__: one for one in custom_optimizers or ()}
    known.update(custom_objects or {})
    model = _flavor.module().models.load_model(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and _reduction.of(optimizer) is None:
        optimizer = _mended(model, optimizer, filepath)
        model.optimizer = DistributedOptimizer(optimizer, compression=compression)
        model.train_function = None
    return model


def _mended(model: Any, optimizer: Any, filepath: Any) -> Any:
    """Returns the optimizer built for the model's variables, since for a Sequential in HDF5 Keras 3 loses its state."""
    built_for = getattr(optimizer, "_trainable_variables", None)
    variables = model.trainable_variables
    if not getattr(optimizer, "built", False) or built_for is None or len(built_for) == len(variables):
        return optimizer
    made = type(optimizer).from_config(optimizer.get_config())
    made.build(variables)
    import h5py
    from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group as load

    with h5py.File(filepath, "r") as file:
        made.set_weights(load(file))
    return made
