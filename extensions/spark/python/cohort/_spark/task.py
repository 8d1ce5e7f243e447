"""One task of the barrier job: starts `cohort agent` as a child, gives it its invitation and watches it until its end.

This module is sent to the executors by value: it must not use other modules of Cohort, and only those other modules that
Spark itself needs. Spark reuses the task's process for other tasks, so nothing of the job happens in it: ranks are
processes below the agent. The pipe to the agent's stdin is its lifeline: if this process ends, all processes below the
agent end.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn, TypedDict

    class Order(TypedDict):
        """The driver's instructions for each task."""

        announcement: str  # the driver's version, protocol and build; the agent's have to be the same
        invitation: str
        processes: int
        per_task: int  # ranks per task; the last task may have fewer
        gpus: bool
        keeps_batches: bool  # ranks receive the input as a file
        archive: str | None  # Cohort's archive, by its name in SparkFiles
        python: tuple[int, int]
        as_horovod: bool


# The driver looks for this mark in the text of Spark's exception.
NOT_HERE = "[cohort is not here]"

_SECONDS_TO_ANNOUNCE = 30.0
_LONGEST_TAIL = 4000
# Variables that Spark gives to this worker only.
_SECRETS = ("PYTHON_WORKER_FACTORY_SECRET", "PYTHON_WORKER_FACTORY_PORT", "PYTHON_WORKER_FACTORY_SOCK_PATH")


def attending(order: Order) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Returns a function for mapInArrow that runs the task and yields nothing."""

    def attend(batches: Iterator[Any]) -> Iterator[Any]:
        _attend(order, batches)
        return iter(())

    return attend


def _attend(order: Order, batches: Iterator[Any]) -> None:
    import shutil
    import tempfile

    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    partition = context.partitionId()
    host = context.getTaskInfos()[partition].address.rpartition(":")[0].strip("[]")
    package, command = _find(order, host)
    folder = None
    try:
        environment = _environment(order, package, command)
        if order["keeps_batches"]:
            folder = tempfile.mkdtemp(prefix="cohort-batches-", dir=_local_folder())
            environment["COHORT_SPARK_BATCHES"] = _keep(batches, os.path.join(folder, f"{partition}.arrow"))
        else:
            for _ in batches:
                pass
        ranks = min(order["per_task"], order["processes"] - partition * order["per_task"])
        words = [command, "agent", "--invited", "--name", host, "--ranks", str(ranks)]
        if order["gpus"]:
            gpus = context.resources().get("gpu")
            if gpus is not None and gpus.addresses:
                words += ["--devices", ",".join(gpus.addresses)]
        invitation = order["invitation"].replace("\nhost 0\n", f"\nhost {partition}\n")
        _watch(words, environment, invitation, order, host)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _not_here(host: str, why: str) -> NoReturn:
    raise RuntimeError(f"cohort: {NOT_HERE} {host}: {why}")


def _find(order: Order, host: str) -> tuple[str, str]:
    """Returns the folder of the package `cohort`, and the command. A package sent by the driver takes precedence."""
    if sys.version_info[:2] != tuple(order["python"]):
        raise RuntimeError(
            "cohort: the executor on {} runs Python {}.{} ({}) and the driver {}.{} -- functions and Cohort itself are for one "
            "version -- set spark.pyspark.python (PYSPARK_PYTHON) to the same one for both, with `pip install cohort` there".format(
                host, *sys.version_info[:2], sys.executable, *order["python"]
            )
        )
    if order["archive"] is not None:
        return _unpacked(order["archive"])
    import importlib.util

    try:
        found = importlib.util.find_spec("cohort")
        if found is None or not found.origin:
            _not_here(host, f"{sys.executable} has no package cohort")
        from cohort._launch import command as _command

        return os.path.dirname(os.path.dirname(os.path.abspath(found.origin))), _command.find()
    except Exception as error:  # another version of the package may raise anything
        _not_here(host, f"{type(error).__name__}: {error}")


def _unpacked(name: str) -> tuple[str, str]:
    """Unpacks the archive once per executor, even if tasks run concurrently; its folder is removed with it."""
    import shutil
    import tempfile
    import zipfile

    from pyspark import SparkFiles

    archive = SparkFiles.get(name)
    folder = archive + ".d"
    if not os.path.isdir(folder):
        aside = tempfile.mkdtemp(prefix="cohort-", dir=os.path.dirname(archive))
        with zipfile.ZipFile(archive) as files:
            files.extractall(aside)
        os.chmod(os.path.join(aside, "bin", "cohort"), 0o755)
        try:
            os.rename(aside, folder)
        except OSError:  # another task was first
            shutil.rmtree(aside, ignore_errors=True)
    modules = os.path.join(folder, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    return modules, os.path.join(folder, "bin", "cohort")


def _environment(order: Order, package: str, command: str) -> dict[str, str]:
    """Returns the environment of the agent and its ranks: this worker's environment, which Spark's settings have made."""
    environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    path = [package, *(entry for entry in sys.path if entry and entry != package)]
    if order["as_horovod"]:
        prefix = os.path.dirname(os.path.dirname(os.path.realpath(command)))
        path.insert(0, os.path.join(prefix, "share", "cohort", "as-horovod"))
    environment["PYTHONPATH"] = os.pathsep.join(path)
    environment["PYSPARK_PYTHON"] = sys.executable
    return environment


def _local_folder() -> str | None:
    """Returns the folder for large files, which Spark removes with the executor."""
    for variable in ("SPARK_LOCAL_DIRS", "SPARK_EXECUTOR_DIRS"):
        for folder in os.environ.get(variable, "").replace(os.pathsep, ",").split(","):
            if folder and os.access(folder, os.W_OK):
                return folder
    return None


def _keep(batches: Iterator[Any], path: str) -> str:
    """Writes the batches to a file that ranks map into memory; without batches an empty file, since no schema is known then."""
    import pyarrow

    writer = None
    with open(path, "wb") as file:
        for batch in batches:
            if writer is None:
                writer = pyarrow.ipc.new_file(file, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
    return path


def _watch(words: list[str], environment: dict[str, str], invitation: str, order: Order, host: str) -> None:
    import subprocess

    agent = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        tail = _listen(agent, invitation, order, host)
        status = agent.wait()
    finally:
        for pipe in (agent.stdin, agent.stdout, agent.stderr):
            if pipe is not None:
                pipe.close()
        if agent.poll() is None:  # interrupted: the pipe is closed, which ends the agent
            agent.wait()
    if status != 0:
        raise RuntimeError(f"cohort: the agent of {host} ended with status {status}" + (f": {tail}" if tail else ""))


def _listen(agent: Any, invitation: str, order: Order, host: str) -> str:
    """Waits until both streams of the agent have ended. Returns the end of its stderr."""
    import selectors
    import time

    heard = b""
    tail = b""
    invited = False
    limit = time.monotonic() + _SECONDS_TO_ANNOUNCE
    with selectors.DefaultSelector() as selector:
        for pipe in (agent.stdout, agent.stderr):
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            left = None if invited else limit - time.monotonic()
            if left is not None and left <= 0:
                raise RuntimeError(f"cohort: the agent of {host} said nothing for {_SECONDS_TO_ANNOUNCE:.0f} s")
            for key, _ in selector.select(left):
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is agent.stderr:
                    tail = (tail + data)[-_LONGEST_TAIL:]
                    sys.stderr.write(data.decode(errors="replace"))  # the executor's log
                elif not invited:
                    heard += data
                    line = next((one for one in heard.decode(errors="replace").split("\n")[:-1] if "\t" in one), None)
                    if line is not None:
                        _compare(line, order, host)
                        agent.stdin.write(invitation.encode())
                        agent.stdin.flush()
                        invited = True
    return tail.decode(errors="replace").strip()


def _compare(line: str, order: Order, host: str) -> None:
    there, here = line.split("\t"), order["announcement"].split("\t")
    if len(there) != 6 or there[1:4] != here[1:4]:
        _not_here(host, f"the Cohort there is {', '.join(there[1:4])}, the driver's {', '.join(here[1:4])}")
