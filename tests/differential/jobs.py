"""Worlds whose ranks stay up and run program after program. A server that has imported torch and Cohort makes them by fork, which
takes a tenth of the time of processes that do so themselves; they find each other as a script's ranks do that are started by
hand (RANK, WORLD_SIZE, MASTER_ADDR)."""

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


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """The process that makes ranks."""

    def __init__(self) -> None:
        environment = {**os.environ, "COHORT_TIMEOUT": TIMEOUT, "DIFFERENTIAL_RUNNER": str(os.getpid()),
                       "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
        environment.pop("COHORT_PRETEND_HOSTS", None)
        # The ranks run in the job's folder, where what they leave is removed with it.
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths if path)
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(120)
        self.process = subprocess.Popen([sys.executable, str(HERE / "worker.py"), str(theirs.fileno())], env=environment,
                                        pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)  # fmt: skip
        theirs.close()

    def start(self, folder: pathlib.Path, environments: list[dict[str, str]]) -> list[int]:
        worker_protocol.send(self.connection, ("start", str(folder), environments))
        pids: list[int] = worker_protocol.receive(self.connection)
        return pids

    def end(self, pids: list[int]) -> None:
        """They have been told to; those that do not are killed."""
        worker_protocol.send(self.connection, ("end", pids, None))
        worker_protocol.receive(self.connection)

    def close(self) -> None:
        self.connection.close()
        self.process.wait()


class Job:
    """One world of so many ranks. `plant`: faults that `planted` puts into its ranks."""

    def __init__(self, server: Server, ranks: int, hosts: str, plant: str = "") -> None:
        self.server, self.ranks = server, ranks
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="differential"))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.folder / "socket"))
        listener.listen(ranks)
        listener.settimeout(120)
        common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                  "MASTER_PORT": str(free_port()), "DIFFERENTIAL_PLANT": plant}  # fmt: skip
        if hosts:
            common["COHORT_PRETEND_HOSTS"] = hosts
        self.connections: list[Any] = [None] * ranks
        self.pids = server.start(self.folder, [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)])
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
        self.server.end(self.pids)
        shutil.rmtree(self.folder, ignore_errors=True)


class Jobs:
    """By ranks and hosts, each started when a program needs it."""

    def __init__(self, plant: str = "") -> None:
        self.plant = plant
        self.server = Server()
        self.jobs: dict[tuple[int, str], Job] = {}
        self.restarts = 0

    def of(self, program: dict[str, Any]) -> Job:
        key = max(source.phases_of(program)), program["hosts"]
        job = self.jobs.get(key)
        if job is None:
            job = self.jobs[key] = Job(self.server, *key, plant=self.plant)
        return job

    def after(self, program: dict[str, Any], replies: list[Optional[dict[str, Any]]]) -> None:
        """Worlds, or the whole job, are made anew where an error may have left something behind, or a step that one rank has left
        out: with double buffering the others' last operation waits for it then, and nobody for that."""
        key = max(source.phases_of(program)), program["hosts"]
        errors = [reply["error"] for reply in replies if reply and reply["error"]]
        lost = any(reply is None for reply in replies) or any(error["type"] in ("PeerLost", "Timeout") for error in errors)
        apart = errors or any(event.get("how", "").endswith("_one") for event in program["events"])
        if lost or (apart and program["method"] == "torch_ddp"):
            self.restart(key)
        elif apart:
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
        self.server.close()
