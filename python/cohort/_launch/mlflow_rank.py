"""MLflow in the ranks of `cohort.run` and `Distributor`: rank 0 writes to the driver's run, and does not end it; on
other ranks writing functions do nothing. Never imports MLflow: changes its functions after the program has imported it.
"""

from __future__ import annotations

import functools
import os
import sys
import types
import weakref

from cohort._launch import mlflow as _mlflow
from cohort._torch_backend import when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Callable

# Functions that write, besides those whose names begin with log_.
_WRITERS = (
    "set_tag",
    "set_tags",
    "delete_tag",
    "set_experiment_tag",
    "set_experiment_tags",
    "delete_experiment_tag",
    "end_run",
    "set_logged_model_tags",
    "finalize_logged_model",
    "import_checkpoints",
)

_told = False


def install() -> None:
    """Call it before or after the program imports MLflow."""
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        when_imported("mlflow", lambda module: _on_other_ranks(module, rank))
        return
    when_imported("mlflow", _on_rank_0)
    when_imported("mlflow.pytorch", _log_bare_models)
    when_imported("torch.nn.parallel.distributed", lambda module: _watch_forwards(module.DistributedDataParallel))
    when_imported("cohort.nn.distributed", lambda module: _watch_forwards(module.DistributedDataParallel))


def _in_both(mlflow: ModuleType, name: str, value: Any) -> None:
    """Sets a name in mlflow, and in the module through which its own functions find each other."""
    setattr(mlflow, name, value)
    setattr(mlflow.tracking.fluent, name, value)


def _use_absolute_store(mlflow: Any) -> None:
    """Makes the driver's store one absolute path, even if this process's working directory changes."""
    said, uri = os.environ.get(_mlflow.SAID), os.environ.get("MLFLOW_TRACKING_URI")
    if not said:
        # The driver has not imported MLflow, so its default store is in the directory in which the ranks begin.
        if not mlflow.is_tracking_uri_set():
            mlflow.set_tracking_uri(mlflow.get_tracking_uri())
        return
    original = mlflow.set_tracking_uri

    @functools.wraps(original)
    def set_tracking_uri(uri_wanted: Any) -> None:
        original(uri if uri_wanted == said else uri_wanted)

    mlflow.set_tracking_uri = set_tracking_uri


# ---- Rank 0 ----------------------------------------------------------------------------------------------------------


def _on_rank_0(mlflow: ModuleType) -> bool:
    _use_absolute_store(mlflow)
    run, uri = os.environ.get(_mlflow.RUN), os.environ.get("MLFLOW_TRACKING_URI")
    if not run:
        return True
    here = os.getcwd()
    fluent = mlflow.tracking.fluent
    original_start, original_experiment = fluent.start_run, fluent.set_experiment
    client = mlflow.MlflowClient
    original_end = client.set_terminated

    def is_drivers_store() -> bool:
        return bool(_mlflow.absolute_uri(mlflow.get_tracking_uri(), here) == uri)

    @functools.wraps(original_start)
    def start_run(run_id: Any = None, experiment_id: Any = None, run_name: Any = None, nested: bool = False, parent_run_id: Any = None, **more: Any) -> Any:
        if run_id is None and parent_run_id is None and mlflow.active_run() is None and is_drivers_store():
            if not nested:
                return original_start(run_id=run, **more)
            parent_run_id = run
        if parent_run_id is not None:
            more["parent_run_id"] = parent_run_id
        return original_start(run_id, experiment_id, run_name, nested, **more)

    @functools.wraps(original_experiment)
    def set_experiment(experiment_name: Any = None, experiment_id: Any = None, **more: Any) -> Any:
        if not is_drivers_store():
            return original_experiment(experiment_name, experiment_id, **more)
        drivers = mlflow.get_experiment(os.environ["MLFLOW_EXPERIMENT_ID"])
        if experiment_name not in (None, drivers.name) or experiment_id not in (None, drivers.experiment_id):
            _say(f"mlflow.set_experiment: the driver's run is in the experiment {drivers.name!r}, and this rank writes into it")
        return drivers

    @functools.wraps(original_end)
    def set_terminated(self: Any, run_id: str, *args: Any, **kwargs: Any) -> None:
        if run_id != run:  # only the driver ends its run
            original_end(self, run_id, *args, **kwargs)

    _in_both(mlflow, "start_run", start_run)
    _in_both(mlflow, "set_experiment", set_experiment)
    client.set_terminated = set_terminated
    return True


# ---- Models ----------------------------------------------------------------------------------------------------------

# Inputs and outputs of a wrapped model's first forward, by the bare module: (inputs, outputs).
_forwards: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def _watch_forwards(kind: type) -> bool:
    original = kind.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)

        def look(module: Any, inputs: Any, outputs: Any) -> None:
            handle.remove()
            if len(inputs) == 1:
                _forwards[module.module] = (_shapes(inputs[0]), _shapes(outputs))

        handle = self.register_forward_hook(look)

    kind.__init__ = __init__  # type: ignore[misc]
    return True


def _shapes(value: Any) -> Any:
    """Returns (shape, type) of a tensor, or of each in a dict; None for others. The first dimension is the batch's."""
    if isinstance(value, dict):
        found = {str(name): _shapes(one) for name, one in value.items()}
        return None if any(one is None or isinstance(one, dict) for one in found.values()) else found
    if not hasattr(value, "shape") or not hasattr(value, "dtype") or not len(value.shape):
        return None
    return (-1, *value.shape[1:]), value.dtype


def _log_bare_models(flavor: ModuleType) -> bool:
    for name in ("log_model", "save_model"):
        setattr(flavor, name, _with_bare_model(getattr(flavor, name)))
    return True


def _with_bare_model(original: Callable[..., Any]) -> Callable[..., Any]:
    import inspect

    # MLflow versions that do not trust pickles export the graph, for which they need an example.
    takes_example = "serialization_format" in inspect.signature(original).parameters

    @functools.wraps(original)
    def log_model(pytorch_model: Any, *args: Any, **kwargs: Any) -> Any:
        bare = _bare(pytorch_model)
        if bare is pytorch_model:
            return original(bare, *args, **kwargs)
        if kwargs.get("signature") is None and kwargs.get("input_example") is None:
            kwargs.update(_signature_and_example(bare, takes_example and kwargs.get("serialization_format") != "pickle"))
        # An exported model keeps its current mode forever.
        modes = {module: module.training for module in bare.modules()}
        bare.eval()
        try:
            return original(bare, *args, **kwargs)
        finally:
            for module, mode in modes.items():
                module.training = mode

    return log_model


def _bare(model: Any) -> Any:
    """Returns the model without its distributed wrapper, which a program that loads the model may lack."""
    wrappers = {"DistributedDataParallel", "DataParallel"}
    while hasattr(model, "module") and any(kind.__name__ in wrappers for kind in type(model).__mro__):
        model = model.module
    return model


def _signature_and_example(bare: Any, wants_example: bool) -> dict[str, Any]:
    """Returns arguments derived from the first forward's inputs and outputs. An example has zeros, since no data is sent to
    MLflow without request."""
    inputs, outputs = _forwards.get(bare, (None, None))
    if inputs is None:
        return {}
    import numpy
    import torch
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def numpy_type(one: Any) -> Any:
        return torch.empty(0, dtype=one[1]).numpy().dtype

    def schema(found: Any) -> Any:
        if found is None:
            return None
        if not isinstance(found, dict):
            return Schema([TensorSpec(numpy_type(found), found[0])])
        return Schema([TensorSpec(numpy_type(one), one[0], name) for name, one in found.items()])

    try:
        found: dict[str, Any] = {"signature": ModelSignature(inputs=schema(inputs), outputs=schema(outputs))}
    except TypeError:  # NumPy does not have the type
        return {}
    if wants_example and not isinstance(inputs, dict):
        # Two samples, because a dimension of size one would count as a constant.
        found["input_example"] = numpy.zeros((2, *inputs[0][1:]), numpy_type(inputs))
    return found


# ---- Other ranks -----------------------------------------------------------------------------------------------------


class _StandIn:
    """The result of `start_run` where nothing is written. Its id is the id of the driver's run, if there is one."""

    def __init__(self) -> None:
        self.info = types.SimpleNamespace(
            run_id=os.environ.get(_mlflow.RUN, ""),
            experiment_id=os.environ.get("MLFLOW_EXPERIMENT_ID", ""),
            run_name="",
            status="RUNNING",
            artifact_uri="",
        )
        self.data = types.SimpleNamespace(params={}, metrics={}, tags={})

    def __enter__(self) -> _StandIn:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> bool:
        return kind is None


def _on_other_ranks(mlflow: ModuleType, rank: int) -> bool:
    _use_absolute_store(mlflow)
    fluent = mlflow.tracking.fluent
    names = {name for name in dir(fluent) if name.startswith("log_")} | set(_WRITERS)
    for name in sorted(names):
        original = getattr(fluent, name, None)
        if isinstance(original, types.FunctionType):
            _in_both(mlflow, name, _nothing(original, f"mlflow.{name}", rank))
    _in_both(mlflow, "start_run", _nothing(fluent.start_run, "mlflow.start_run", rank, _StandIn))
    stand_in = _StandIn().info
    experiment = types.SimpleNamespace(experiment_id=stand_in.experiment_id, name="", artifact_location="", tags={})
    _in_both(mlflow, "set_experiment", _nothing(fluent.set_experiment, "mlflow.set_experiment", rank, lambda: experiment))
    # log_model of every flavor calls this.
    from mlflow.models import Model

    Model.log = _nothing(Model.log, "mlflow's log_model", rank)
    return True


def _nothing(original: Any, shown: str, rank: int, result: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
    @functools.wraps(original)
    def do_nothing(*args: Any, **kwargs: Any) -> Any:
        if rank == 1:  # rank 1 reports for all
            _say(f"{shown}: MLflow's run is written on rank 0; on other ranks this does nothing (COHORT_MLFLOW=0: it does)")
        return result()

    return do_nothing


def _say(text: str) -> None:
    global _told
    if not _told:
        _told = True
        print(f"cohort: {text}", file=sys.stderr, flush=True)
