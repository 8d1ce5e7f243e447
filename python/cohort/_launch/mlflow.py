"""Passes the driver's MLflow run to the ranks of `cohort.run` and `Distributor`, by their environment.

MLflow itself passes nothing on: the default store is in the working directory, ranks that begin at the same time create
a new database several times, and a process that joins a run by MLFLOW_RUN_ID ends it. The other half is `_mlflow_rank`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GUARD = "COHORT_MLFLOW"  # 0: MLflow is not changed
RUN = "COHORT_MLFLOW_RUN"  # the driver's run
SAID = "COHORT_MLFLOW_URI"  # the driver's store, as given there: perhaps a path relative to its working directory

_PARENT = "mlflow.parentRunId"


def wanted(environment: dict[str, str]) -> bool:
    return environment.get(GUARD, "1").lower() not in ("0", "false", "no", "off")


def absolute_uri(uri: str, folder: str) -> str:
    """Returns a URI of the same store that does not depend on the working directory. `folder`: the base of relative URIs."""
    if found := re.fullmatch(r"(sqlite(?:\+\w+)?:///)([^/].*)", uri):
        return uri if found[2].startswith(":memory:") else found[1] + os.path.join(folder, found[2])
    if found := re.fullmatch(r"(?:file:)?([^/:]+(?:/[^:]*)?)", uri):
        return uri if found[1] in ("databricks", "databricks-uc", "uc") else "file://" + os.path.normpath(os.path.join(folder, found[1]))
    return uri


def hand_on(environment: dict[str, str]) -> None:
    """Adds the variables that the ranks need. Imports nothing: without MLflow in the driver there is no run. A new
    database is created here, once, before ranks exist."""
    if not wanted(environment):
        return
    environment[GUARD] = "1"
    for name in (RUN, SAID):  # this process may itself be a rank, whose driver set them
        environment.pop(name, None)
    here = os.getcwd()
    mlflow = sys.modules.get("mlflow")
    chosen = environment.get("MLFLOW_TRACKING_URI")
    if mlflow is None or not hasattr(mlflow, "active_run") or chosen != os.environ.get("MLFLOW_TRACKING_URI"):
        # The ranks' environment selects its own store, or the driver has not imported MLflow.
        if chosen:
            environment["MLFLOW_TRACKING_URI"] = absolute_uri(chosen, here)
        return
    said = mlflow.get_tracking_uri()
    uri = absolute_uri(said, here)
    environment["MLFLOW_TRACKING_URI"] = uri
    environment[SAID] = said
    run = mlflow.active_run()
    if run is None:
        _make_database(mlflow, uri)
    else:
        environment[RUN] = run.info.run_id
        environment["MLFLOW_EXPERIMENT_ID"] = run.info.experiment_id
        for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"):
            environment.pop(name, None)
        # For programs that do not import cohort: their runs are children of this one.
        context: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            context = dict(json.loads(environment.get("MLFLOW_RUN_CONTEXT", "{}")))
        environment["MLFLOW_RUN_CONTEXT"] = json.dumps({**context, _PARENT: run.info.run_id})
    if uri.startswith("databricks"):
        _hand_on_databricks(environment, uri)


def _make_database(mlflow: Any, uri: str) -> None:
    if uri.startswith(("http:", "https:", "databricks", "file:")):
        return
    # If the store is inaccessible, the ranks that use it report that.
    with contextlib.suppress(Exception):
        mlflow.MlflowClient(uri).search_experiments(max_results=1)


def _hand_on_databricks(environment: dict[str, str], uri: str) -> None:
    """Passes on a Databricks notebook's credentials, which MLflow finds there outside of the environment, but not in
    ranks."""
    if environment.get("DATABRICKS_TOKEN") and environment.get("DATABRICKS_HOST"):
        return
    with contextlib.suppress(Exception):
        from mlflow.utils.databricks_utils import get_databricks_host_creds

        found = get_databricks_host_creds(uri)
        if found.host and found.token:
            environment["DATABRICKS_HOST"] = found.host
            environment["DATABRICKS_TOKEN"] = found.token
