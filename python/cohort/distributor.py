"""`cohort.Distributor`: for programs that use Spark's TorchDistributor, with the same calls and results."""

from __future__ import annotations

import json
import operator
import os
import pathlib
import shutil
import sys
import tempfile
import warnings

from cohort._launch import command as _command, mlflow as _mlflow
from cohort._process import gpus as _gpus
from cohort._launch.functions import (
    SECONDS_TO_START,
    call_on_ranks,
    call_on_stage,
    environment_of,
    first_value,
    goes_elsewhere,
    host_words,
    job_failure,
    job_words,
    may_travel,
    run_folder,
    spark_stage,
)
from cohort._launch.rank_call import run_script
from cohort.errors import InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Union

    from cohort._launch.functions import Hosts

    TrainObject = Union[Callable[..., Any], str, os.PathLike[str]]


class Distributor:
    """Runs a training function or script in new processes, the ranks.

    num_processes  how many processes, from 1
    local_mode     True: on this host. False: on the workers of the active SparkSession, where one task of a barrier job
                   runs one process, or as many as it has GPUs (spark.task.resource.gpu.amount)
    use_gpu        True: starts at most one process for each GPU that this process may use; each rank
                   sees the job's GPUs and uses the one of its LOCAL_RANK. Without any GPU, warns and uses the CPU.
                   False: the ranks see no GPU

    hosts, hostfile  run on these hosts, as with `cohort.run` (TorchDistributor has Spark's workers instead); default:
                   this host, or the hosts of this process's Slurm allocation. On several hosts each host manages its own
                   GPUs, so they are not counted here, and each host's CUDA_VISIBLE_DEVICES applies

    Warns (RuntimeWarning) if fewer processes run than were asked for, or if a GPU was asked for and there is none.
    `num_processes` is then the number that will really run.

    Raises InvalidArgument (a ValueError) for a number of processes below 1.
    """

    def __init__(self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool = True, *,
                 hosts: Hosts | None = None, hostfile: str | os.PathLike[str] | None = None) -> None:  # fmt: skip
        try:
            asked = operator.index(num_processes)
        except TypeError:
            raise InvalidArgument(f"Distributor: num_processes is {num_processes!r} -- a whole number is wanted") from None
        if asked < 1:
            raise InvalidArgument(f"Distributor: num_processes is {asked} -- at least one process is needed")
        self.num_processes = asked
        self.local_mode = bool(local_mode)
        self.use_gpu = bool(use_gpu)
        if not self.local_mode:
            if hosts is not None or hostfile is not None:
                raise InvalidArgument(
                    "Distributor: local_mode=False is on Spark's workers, hosts and hostfile are others -- give one of them"
                )
            self._look_at_spark()
            return
        self._where = host_words(hosts, hostfile)
        self._travels = may_travel(hosts, hostfile, (), os.environ)
        self._elsewhere = goes_elsewhere(hosts, hostfile, os.environ)
        self._gpus: list[str] = []
        if self.use_gpu and not self._elsewhere:
            self._choose_gpus()

    def _choose_gpus(self) -> None:
        usable = _gpus.usable()
        if not usable:
            warnings.warn(
                "Distributor: use_gpu=True, and this process can use no GPU (nvidia-smi, /dev/nvidia*, "
                "CUDA_VISIBLE_DEVICES): the ranks train on the CPU -- use_gpu=False says that this is meant",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        if self.num_processes > len(usable):
            warnings.warn(
                f"Distributor: {self.num_processes} processes were asked for, and this process can use {len(usable)} "
                f"GPU{'' if len(usable) == 1 else 's'}: {len(usable)} will run -- use_gpu=False runs all of them on the CPU",
                RuntimeWarning,
                stacklevel=3,
            )
            self.num_processes = len(usable)
        self._gpus = usable[: self.num_processes]

    def _look_at_spark(self) -> None:
        if not spark_stage(self.num_processes, self.use_gpu).gpus and self.use_gpu:
            warnings.warn(
                "Distributor: use_gpu=True, and Spark gives tasks no GPU (spark.task.resource.gpu.amount): the ranks train on "
                "the CPU, unless they find one -- use_gpu=False says that this is meant",
                RuntimeWarning,
                stacklevel=3,
            )

    def run_on_dataframe(self, train_function: Callable[..., Any], dataframe: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls `train_function(rows, *args, **kwargs)` on each rank, where `rows` is the rank's partition of a Spark
        DataFrame: a `cohort.Rows`, Arrow batches in memory. Only with local_mode=False.

        A DataFrame whose number of partitions differs from the number of tasks is repartitioned. Partitions may differ in
        size and be empty: `rows` knows how many rows each rank has. Returns and raises like `run`.
        """
        if self.local_mode:
            raise InvalidArgument("Distributor.run_on_dataframe: partitions are on Spark's workers -- local_mode=False")
        if not callable(train_function):
            raise InvalidArgument(f"Distributor.run_on_dataframe: {train_function!r} is not a function")
        from pyspark.sql.pandas.types import to_arrow_schema

        from cohort._spark.rows import call_with_rows

        schema = to_arrow_schema(dataframe.schema).serialize().to_pybytes()
        return self._run_on_spark(call_with_rows, (train_function, schema, *args), kwargs, dataframe)

    def _run_on_spark(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dataframe: Any = None
    ) -> Any:
        words = job_words(start_timeout=SECONDS_TO_START)
        if not self.use_gpu:
            words += ["--env", "CUDA_VISIBLE_DEVICES="]
        stage = spark_stage(self.num_processes, self.use_gpu, dataframe)
        return first_value(call_on_stage(stage, function, args, kwargs, words=words, all_values=False))

    def run(self, train_object: TrainObject, *args: Any, **kwargs: Any) -> Any:
        """Runs a function, or a Python script, as `num_processes` ranks, and waits.

        A function is called with `args` and `kwargs` on each rank; rank 0's result is returned here, other ranks' are
        dropped. A path is run with `args`, converted to text, as its arguments; keyword arguments are then refused
        (InvalidArgument), and None is returned.

        The ranks have RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT and this process's environment. Raises
        like `cohort.run`: the exception of the rank that failed first, or RankFailed (a RuntimeError) with its last words.
        """
        if isinstance(train_object, (str, os.PathLike)):
            if kwargs:
                raise InvalidArgument(
                    f"Distributor.run: keyword arguments ({', '.join(kwargs)}) have no meaning for a script -- give its "
                    "options as they stand on a command line: run(path, '--epochs', 5)"
                )
            path, arguments = os.fspath(train_object), [str(arg) for arg in args]
            if not os.path.isfile(path):
                raise InvalidArgument(f"Distributor.run: there is no script {path} (from {os.getcwd()})")
            if self.local_mode:
                self._run_script(path, arguments)
            else:
                self._run_on_spark(run_script, (path, pathlib.Path(path).read_bytes(), arguments), {})
            return None
        if not callable(train_object):
            raise InvalidArgument(
                f"Distributor.run: {train_object!r} is neither a function nor the path of a script"
            )
        if not self.local_mode:
            return self._run_on_spark(train_object, args, kwargs)
        return first_value(
            call_on_ranks(
                train_object,
                args,
                kwargs,
                words=self._words(),
                environment=environment_of(None),
                all_values=False,
                travels=self._travels,
            )
        )

    def _words(self) -> list[str]:
        """Returns the options of `cohort run`."""
        words = [*self._where, *job_words(self.num_processes)]
        if not self.use_gpu:
            words += ["--env", "CUDA_VISIBLE_DEVICES="]  # a host's settings go to other hosts only this way
        elif not self._elsewhere:
            words += ["--env", f"CUDA_VISIBLE_DEVICES={','.join(self._gpus)}"]
        return words

    def _run_script(self, path: str, arguments: list[str]) -> None:
        words, environment = self._words(), environment_of(None)
        _mlflow.hand_on(environment)
        folder = pathlib.Path(tempfile.mkdtemp(prefix="cohort-run-"))
        try:
            kept = run_folder(folder, words, environment)
            own = ["--no-logs", "--run-dir", str(kept), "--no-python", "--", sys.executable, path]
            job = _command.Job([*words, *own, *arguments], environment, folder)
            status = job.run()
            if status == 0:
                return
            try:
                record = json.loads((kept / "job.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                record = {}
            raise job_failure(status, job.refusal(), record)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
