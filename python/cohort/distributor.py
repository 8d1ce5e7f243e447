"""`cohort.Distributor`: for those who come from Spark's TorchDistributor. The same calls, the same results."""

from __future__ import annotations

import json
import operator
import os
import pathlib
import shutil
import sys
import tempfile
import warnings

from cohort import _command, _gpus, _mlflow
from cohort._functions import (
    call_on_ranks,
    environment_of,
    first_value,
    goes_elsewhere,
    host_words,
    job_failure,
    job_words,
    may_travel,
    run_folder,
)
from cohort.errors import InvalidArgument, Unavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Union

    from cohort._functions import Hosts

    TrainObject = Union[Callable[..., Any], str, os.PathLike[str]]


class Distributor:
    """Runs a training function or script on processes of its own.

    num_processes  how many processes, from 1
    local_mode     True: on this host. False (on the workers of a Spark cluster) is not there yet: Unavailable
    use_gpu        True: at most one process for each GPU that this one may use, more are not started; each rank sees the
                   GPUs of the job and takes the one of its LOCAL_RANK. Without any GPU it says so and uses the CPU.
                   False: the ranks see no GPU

    hosts, hostfile  on these hosts, as `cohort.run` takes them (TorchDistributor has Spark's workers instead); default: this
                   one, or those of the Slurm allocation that this process is in. On several hosts GPUs are each host's own:
                   they are not counted here, and CUDA_VISIBLE_DEVICES is what it is there

    Fewer processes than asked for, and no GPU where one was asked for, are warnings (RuntimeWarning). `num_processes` is
    then the number that will really run.

    Raises InvalidArgument (a ValueError) for a number of processes below 1.
    """

    def __init__(
        self,
        num_processes: int = 1,
        local_mode: bool = True,
        use_gpu: bool = True,
        *,
        hosts: Hosts | None = None,
        hostfile: str | os.PathLike[str] | None = None,
    ) -> None:
        try:
            asked = operator.index(num_processes)
        except TypeError:
            raise InvalidArgument(f"Distributor: num_processes is {num_processes!r} -- a whole number is wanted") from None
        if asked < 1:
            raise InvalidArgument(f"Distributor: num_processes is {asked} -- at least one process is needed")
        if not local_mode:
            raise Unavailable(
                "Distributor: local_mode=False, on the workers of a Spark cluster, is not there yet -- local_mode=True "
                "runs the processes on this host, and hosts=\"a:4,b:4\" on several"
            )
        self.num_processes = asked
        self.local_mode = True
        self.use_gpu = bool(use_gpu)
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

    def run(self, train_object: TrainObject, *args: Any, **kwargs: Any) -> Any:
        """Runs a function, or a Python script, as `num_processes` ranks, and waits.

        A function is called with `args` and `kwargs` on each rank; what it returns on rank 0 is returned here, what it
        returns elsewhere is dropped. A path is run with `args` as its arguments, made text; keyword arguments have no
        meaning then (InvalidArgument), and None is returned.

        The ranks have RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT and this process's environment. Raises
        as `cohort.run`: the exception of the rank that failed first, or RankFailed (a RuntimeError) with its last words.
        """
        words = [*self._where, *job_words(self.num_processes)]
        environment = environment_of(None)
        if not self.use_gpu:
            words += ["--env", "CUDA_VISIBLE_DEVICES="]  # what belongs to a host goes to others only so
        elif not self._elsewhere:
            words += ["--env", f"CUDA_VISIBLE_DEVICES={','.join(self._gpus)}"]
        if isinstance(train_object, (str, os.PathLike)):
            if kwargs:
                raise InvalidArgument(
                    f"Distributor.run: keyword arguments ({', '.join(kwargs)}) have no meaning for a script -- give its "
                    "options as they stand on a command line: run(path, '--epochs', 5)"
                )
            return self._run_script(os.fspath(train_object), [str(arg) for arg in args], words, environment)
        if not callable(train_object):
            raise InvalidArgument(
                f"Distributor.run: {train_object!r} is neither a function nor the path of a script"
            )
        return first_value(
            call_on_ranks(
                train_object, args, kwargs, words=words, environment=environment, all_values=False, travels=self._travels
            )
        )

    @staticmethod
    def _run_script(path: str, arguments: list[str], words: list[str], environment: dict[str, str]) -> None:
        if not os.path.isfile(path):
            raise InvalidArgument(f"Distributor.run: there is no script {path} (from {os.getcwd()})")
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
