"""Jobs of `cohort run` whose ranks stay up and run program after program."""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, Optional

import source
import worker_protocol

HERE = pathlib.Path(__file__).parent
DEADLINE = 45.0  # seconds for a program; the ranks' own waits end after COHORT_TIMEOUT
TIMEOUT = "10"


class Job:
    """One world of so many ranks. `plant`: faults that `planted` puts into its ranks."""

    def __init__(self, command: str, ranks: int, hosts: str, plant: str = "") -> None:
        self.ranks = ranks
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="differential"))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.folder / "socket"))
        listener.listen(ranks)
        listener.settimeout(120)
        environment = {**os.environ, "COHORT_TIMEOUT": TIMEOUT, "DIFFERENTIAL_RUNNER": str(os.getpid()), "DIFFERENTIAL_PLANT": plant,
                       "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
        environment.pop("COHORT_PRETEND_HOSTS", None)
        # The ranks run in the job's folder, where what they leave is removed with it.
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths if path)
        program = os.path.abspath(command) if os.sep in command else command
        if hosts:
            environment["COHORT_PRETEND_HOSTS"] = hosts
        self.log = open(self.folder / "log", "wb")
        self.process = subprocess.Popen(
            [program, "run", "-q", "-np", str(ranks), "--", sys.executable, str(HERE / "worker.py"), str(self.folder / "socket")],
            env=environment, cwd=self.folder, stdout=self.log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)  # fmt: skip
        self.connections: list[Any] = [None] * ranks
        self.fresh = False
        try:
            for _ in range(ranks):
                connection, _ = listener.accept()
                connection.settimeout(DEADLINE)
                self.connections[worker_protocol.receive(connection)] = connection
        except OSError as error:
            said = (self.folder / "log").read_text()[-2000:]
            self.close()
            raise RuntimeError(f"a job of {ranks} ranks has not begun: {error}\n{said}") from error
        finally:
            listener.close()

    def start(self, program: dict[str, Any]) -> None:
        self.work = tempfile.mkdtemp(dir=self.folder)
        for connection in self.connections:
            worker_protocol.send(connection, (program, self.work, self.fresh))
        self.fresh = False

    def finish(self) -> list[Optional[dict[str, Any]]]:
        """Replies by rank; None from one that gives none in time, after which the job is of no use."""
        replies: list[Optional[dict[str, Any]]] = [None] * self.ranks
        until = time.monotonic() + DEADLINE
        left = {connection: rank for rank, connection in enumerate(self.connections)}
        while left:
            ready, _, _ = select.select(list(left), [], [], max(0.0, until - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = left.pop(connection)
                with contextlib.suppress(OSError, EOFError):
                    replies[rank] = worker_protocol.receive(connection)
        shutil.rmtree(self.work, ignore_errors=True)
        return replies

    def close(self) -> None:
        for connection in self.connections:
            if connection is not None:
                with contextlib.suppress(OSError):
                    worker_protocol.send(connection, (None, None, None))
                connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(3)
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Jobs:
    """By ranks and hosts, each started when a program needs it."""

    def __init__(self, command: str, plant: str = "") -> None:
        self.command, self.plant = command, plant
        self.jobs: dict[tuple[int, str], Job] = {}
        self.restarts = 0

    def of(self, program: dict[str, Any]) -> Job:
        key = max(source.phases_of(program)), program["hosts"]
        job = self.jobs.get(key)
        if job is None:
            job = self.jobs[key] = Job(self.command, *key, plant=self.plant)
        return job

    def after(self, program: dict[str, Any], replies: list[Optional[dict[str, Any]]]) -> None:
        """Worlds, or the whole job, are made anew where an error may have left something behind."""
        key = max(source.phases_of(program)), program["hosts"]
        errors = [reply["error"] for reply in replies if reply and reply["error"]]
        lost = any(reply is None for reply in replies) or any(error["type"] in ("PeerLost", "Timeout") for error in errors)
        if lost or (errors and program["method"] == "torch_ddp"):
            self.restart(key)
        elif errors:
            self.jobs[key].fresh = True

    def restart(self, key: tuple[int, str]) -> None:
        job = self.jobs.pop(key, None)
        if job is not None:
            self.restarts += 1
            job.close()

    def close(self) -> None:
        for job in self.jobs.values():
            job.close()
        self.jobs.clear()
