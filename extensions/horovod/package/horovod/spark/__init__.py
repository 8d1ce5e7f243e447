"""`horovod.spark.run`: a function on the workers of the active SparkSession."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from horovod._names import getattr_of

# Names of Horovod's part for Spark that are not here, and what to use instead.
_NOT_HERE = {
    "run_elastic": "cohort.run(on=\"spark\", options=[\"--max-restarts\", \"3\"]) starts all ranks again when one fails",
    **dict.fromkeys(("common", "keras", "lightning", "torch"), "train on files, or on a DataFrame with "
                    "cohort.Distributor(local_mode=False).run_on_dataframe"),
}


def run(fn: Callable[..., Any], args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None,
        num_proc: int | None = None, start_timeout: float | None = None, use_mpi: bool | None = None,
        use_gloo: bool | None = None, extra_mpi_args: str | None = None, env: Mapping[str, str] | None = None,
        stdout: Any = None, stderr: Any = None, verbose: int = 1, nics: Iterable[str] | None = None,
        prefix_output_with_timestamp: bool = False, executable: str | None = None) -> list[Any]:  # fmt: skip
    """Calls `fn(*args, **kwargs)` on `num_proc` processes, one for each task; returns their results, by rank.

    num_proc       default: as many as Spark runs tasks at a time
    start_timeout  seconds for all ranks to be running; default: HOROVOD_SPARK_START_TIMEOUT, else 600
    env            variables for the ranks, over those of the executors
    stdout, stderr  text files for the output; default: sys.stdout and sys.stderr
    nics           names of interfaces that hosts use with each other

    The arguments are those of Horovod's `run`. use_mpi and extra_mpi_args mean nothing here, since no MPI starts the ranks;
    `executable` raises ValueError: spark.pyspark.python is the ranks' Python. Otherwise like `cohort.run(on="spark")`.
    """
    import cohort
    from cohort._core import environment_value

    if use_mpi or extra_mpi_args:
        import sys

        print("horovod.spark.run: use_mpi and extra_mpi_args mean nothing here: no MPI starts the ranks", file=sys.stderr)
    if start_timeout is None:
        start_timeout = environment_value("HOROVOD_SPARK_START_TIMEOUT")
    options = ["--as-horovod"]
    if nics:
        options += ["--network", ",".join(nics)]
    with contextlib.ExitStack() as stack:
        if stdout is not None:
            stack.enter_context(contextlib.redirect_stdout(stdout))
        if stderr is not None:
            stack.enter_context(contextlib.redirect_stderr(stderr))
        return cohort.run(fn, args, kwargs, np="auto" if num_proc is None else num_proc, on="spark", env=env,
                          start_timeout=start_timeout, prefix="full" if prefix_output_with_timestamp else "rank",
                          quiet=verbose < 1, executable=executable, options=options)  # fmt: skip


__getattr__ = getattr_of(__name__, _NOT_HERE)
