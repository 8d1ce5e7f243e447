"""The driver's side: one barrier job whose tasks start the agents of a `cohort run` here, which waits for them.

As in any job, the command has the secret, meets the agents, numbers the ranks by host, shows output and handles
failures. Spark only places the tasks. The end of either side ends the other: if the command ends, so do the agents and
the tasks; if the Spark job ends, so does the command. A thread waits for the Spark job; the caller's shows the output."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import secrets
import socket
import sys
import threading
import time

from cohort._spark import shipment, task
from cohort.errors import Error, RankFailed, Unavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from cohort._launch import command as _command

# Time to wait for more executors after the last arrival, and for the first executor.
_SECONDS_FOR_SLOTS = 10.0
_SECONDS_FOR_THE_FIRST = 60.0
_SECONDS_BETWEEN_LINES = 5.0
# Time for the tasks to end after the job's processes have ended; then they are cancelled.
_SECONDS_TO_END = 5.0
# Prefixes of the driver's variables that belong to the job; the ranks take other variables from their own host.
_TRAVELS = ("COHORT_", "MLFLOW_", "NCCL_", "GLOO_", "TORCH_", "HOROVOD_")
_FOR_THE_COMMAND = ("HOME", "USER", "LOGNAME", "TMPDIR", "TMP", "TEMP", "TERM", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
_BOOTSTRAP = """\
from cohort._launch.rank_call import end, main_elsewhere
end(main_elsewhere({name!r}))
"""
# Runs the executor's Python; only the task knows its path.
_SHELL = 'exec "$PYSPARK_PYTHON" -c "$0"'


def _session() -> Any:
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise Unavailable(
            f"Spark's workers cannot be used -- {error} -- run this where Spark's driver is, or `pip install pyspark`"
        ) from error
    session = SparkSession.getActiveSession()
    if session is None:
        raise Unavailable(
            "Spark's workers cannot be used -- there is no active SparkSession in this thread -- "
            "SparkSession.builder...getOrCreate() first; local_mode=True needs none"
        )
    if not hasattr(session, "_jsparkSession"):
        raise Unavailable(
            "Spark's workers cannot be used through Spark Connect -- the driver's program, not a client of it, is what they "
            "can reach -- run this on the cluster itself (spark.remote unset)"
        )
    return session


class Stage:
    """The Spark stage that runs the ranks of one job."""

    def __init__(self, processes: int | str, use_gpu: bool, frame: Any = None, as_horovod: bool = False) -> None:
        """`frame`: the DataFrame whose partitions are given to the ranks."""
        self._session = _session()
        self._context = self._session.sparkContext
        self._frame = frame
        self._as_horovod = as_horovod
        gpus = self._gpus_of_task() if use_gpu else 0.0
        self.gpus = gpus > 0
        self._per_task = max(1, int(gpus))
        # Before the first executor has arrived, Spark's own estimate is used.
        auto = self._slots() or self._context.defaultParallelism
        self.processes = auto * self._per_task if processes == "auto" else int(processes)
        self._tasks = -(-self.processes // self._per_task)
        self._trouble = ""
        self._ended_it = False  # the command ended the Spark job because of this failure, so Spark's reason is no news
        self._needs_cohort = False
        self._over = threading.Event()

    # The job's parts.

    def _setting(self, name: str, default: str = "") -> str:
        return str(self._context.getConf().get(name, default))

    def _gpus_of_task(self) -> float:
        try:
            return float(self._setting("spark.task.resource.gpu.amount", "0"))
        except ValueError:
            return 0.0

    def words(self) -> list[str]:
        if any(
            self._setting(name).lower() == "true"
            for name in ("spark.ssl.enabled", "spark.ssl.rpc.enabled", "spark.network.crypto.enabled")
        ):
            return ["--env", "COHORT_ENCRYPT=1"]  # Spark is configured to encrypt its network traffic
        return []

    @staticmethod
    def program(name: str) -> list[str]:
        return ["/bin/sh", "-c", _SHELL, _BOOTSTRAP.format(name=name)]

    @staticmethod
    def environment(environment: Mapping[str, str], more: Mapping[str, str] | None) -> dict[str, str]:
        """Returns the command's environment: the variables that it passes to the ranks override the hosts' variables."""
        chosen = {
            name: value
            for name, value in environment.items()
            if name in _FOR_THE_COMMAND or (name.startswith(_TRAVELS) and not name.startswith("COHORT_RUN_"))
        }
        chosen.update({str(name): str(value) for name, value in (more or {}).items()})
        return chosen

    # Slots.

    def _slots(self) -> int | None:
        """Returns the number of tasks that can run at a time in a barrier job; None if Spark does not say."""
        try:
            context = self._context._jsc.sc()
            return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))
        except Exception:
            return None

    def wait_for_slots(self) -> None:
        """Waits for enough slots. Spark itself would retry for ten minutes, without a message."""
        begun = said = time.monotonic()
        before = -1
        while True:
            slots = self._slots()
            if slots is None or slots >= self._tasks:
                return
            now = time.monotonic()
            if slots != before:
                before, begun = slots, now
            seconds = _SECONDS_FOR_SLOTS if slots > 0 else _SECONDS_FOR_THE_FIRST
            if now - begun >= seconds:
                break
            if now - said >= _SECONDS_BETWEEN_LINES:
                said = now
                print(f"cohort: waiting for executors: {slots} of {self._tasks} slots", file=sys.stderr)
            time.sleep(0.1)
        wants = f"{self.processes} processes need {self._tasks} tasks at a time"
        has = ", ".join(
            f"{name}={self._setting(name)}"
            for name in (
                "spark.executor.instances", "spark.executor.cores", "spark.cores.max", "spark.task.cpus",
                "spark.executor.resource.gpu.amount", "spark.task.resource.gpu.amount",
            )
            if self._setting(name)
        )
        raise Unavailable(
            f"{wants}, and Spark has {slots} slot{'' if slots == 1 else 's'} ({self._context.master}"
            f"{': ' + has if has else ''}), also after {seconds:.0f} s -- more executors (spark.executor.instances, "
            "spark.cores.max), more cores or GPUs for each (spark.executor.cores, spark.executor.resource.gpu.amount), less for "
            "each task (spark.task.cpus, spark.task.resource.gpu.amount), or fewer processes"
        )

    # The run.

    def run(self, make_job: Callable[..., _command.Job]) -> tuple[_command.Job, int]:
        """Returns the command that ran to its end, and its status."""
        while True:
            job = make_job(agents=self._tasks)
            self._over.clear()
            self._trouble, self._ended_it, self._needs_cohort = "", False, False
            tag = f"cohort-{secrets.token_hex(6)}"
            from pyspark import InheritableThread

            thread = InheritableThread(target=self._submit, args=(job, tag))
            thread.daemon = True
            thread.start()
            try:
                status = job.run()
            finally:
                self._over.set()
                with _without_interrupts():
                    thread.join(_SECONDS_TO_END)
                    if thread.is_alive():
                        self._context.cancelJobsWithTag(tag)
                        thread.join(_SECONDS_TO_END)
            if not self._needs_cohort:
                return job, status
            if shipment.sent(self._context) is not None:
                return job, status
            shipment.send(self._context)

    def explain(self, error: BaseException) -> BaseException:
        """Returns the exception for a failure of the job, with Spark's reason if no rank has given one."""
        if isinstance(error, Unavailable) and "no sign of running ranks" in str(error):
            return Unavailable(f"{error}{self._trouble and f' -- {self._trouble}'} -- do other jobs of this cluster hold its slots?")
        if not self._trouble or not isinstance(error, Error) or error.rank is not None:
            return error
        told = self._trouble if self._ended_it else f"{error} -- {self._trouble}"
        return RankFailed(told, status=getattr(error, "status", None))

    def _submit(self, job: _command.Job, tag: str) -> None:
        from pyspark import cloudpickle

        announcement, _, invitation = job.invitation().partition("\n")
        if not invitation:
            return
        order: task.Order = {
            "announcement": announcement,
            "invitation": self._with_own_address(invitation),
            "processes": self.processes,
            "per_task": self._per_task,
            "gpus": self.gpus,
            "keeps_batches": self._frame is not None,
            "archive": shipment.sent(self._context),
            "python": sys.version_info[:2],
            "as_horovod": self._as_horovod,
        }
        try:
            self._context.addJobTag(tag)
            self._context.setInterruptOnCancel(True)
            frame = self._frame
            if frame is None:
                frame = self._session.range(0, self._tasks, 1, self._tasks)
            else:
                frame = frame.repartition(self._tasks) if frame.rdd.getNumPartitions() != self._tasks else frame
            cloudpickle.register_pickle_by_value(task)  # (permanently, because another thread may be about to send it)
            frame.mapInArrow(task.attending(order), "nothing int", barrier=True).collect()
        except Exception as error:
            text = str(error)
            self._needs_cohort = task.NOT_HERE in text
            self._trouble = _reason(text)
            self._ended_it = not self._over.is_set() and job.is_running()
            if self._needs_cohort and order["archive"] is None:
                job.be_silent()
            job.stop()

    def _with_own_address(self, invitation: str) -> str:
        """Adds the driver's own address, which executors can certainly reach."""
        try:
            address = socket.gethostbyname(self._setting("spark.driver.host"))
            ipaddress.ip_address(address)
        except (OSError, ValueError):
            return invitation
        ports = re.findall(r"^address \S+:(\d+)$", invitation, re.MULTILINE)
        line = f"address {address}:{ports[0]}\n" if ports else ""
        return invitation if line in invitation else invitation.replace("address ", line + "address ", 1)


def _reason(text: str) -> str:
    """Returns the part of Spark's text that gives the reason."""
    for pattern in (
        r"RuntimeError: (cohort: [^\n]*)",
        r"(ExecutorLostFailure[^\n]*)",
        r"(Python worker exited[^\n]*)",
        r"^  File [^\n]*(?:\n {2,}[^\n]*)*\n((?:\w+\.)*\w*(?:Error|Exception)\b[^\n]*)",
        r"barrier task ResultTask\(\d+, \d+\) finished unsuccessfully\.\s*(?:\S+Exception: )?([^\n]+)",
        r"([^\n]*\bcancell?ed\b[^\n]*)",
    ):
        found = re.search(pattern, text, re.IGNORECASE | re.MULTILINE)
        if found:
            break
    reason = found.group(1) if found else next((line for line in text.splitlines() if line.strip()), "")
    if reason.startswith("cohort: "):
        return reason[len("cohort: ") :].replace(task.NOT_HERE, "there is no Cohort on")
    reason = re.sub(r"^[\s:]*(?:[\w.]+(?:Exception|Error): )?", "", reason).strip()
    return f"the Spark job has failed: {reason}" if reason else "the Spark job has failed"


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignores a second Ctrl-C while the tasks end, so that they are not abandoned."""
    import signal

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
