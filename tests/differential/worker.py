"""The server that makes ranks by fork, and a rank that stays up: it gets programs from the runner's socket, runs each, and sends
back what the replica had, or its error.

    python3 worker.py DESCRIPTOR    # of the server's socket: see jobs.py
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from typing import Any

import grammar
import reference
import source
import torch
import torch._dynamo  # optimizers import it in their first step
from worker_protocol import receive, send

import cohort
import cohort.chainermn
import cohort.checkpoint
import cohort.distributed
import cohort.nn
import cohort.optim
import cohort.horovod.torch as hvd
from cohort.nn import comm_hooks


class Worlds:
    """Worlds of the first so many ranks; made anew after an error, which may have left operations behind."""

    def __init__(self) -> None:
        self.worlds: dict[int, Any] = {}
        self.sets: dict[int, Any] = {}
        self.groups: dict[int, Any] = {}

    def world(self, ranks: int) -> Any:
        if ranks not in self.worlds:
            self.worlds[ranks] = cohort.world().group(list(range(ranks)))
        return self.worlds[ranks]

    def process_set(self, ranks: int) -> Any:
        if not hvd.is_initialized():
            hvd.init()
        if ranks == hvd.size():
            return hvd.global_process_set
        if ranks not in self.sets:
            self.sets[ranks] = hvd.add_process_set(list(range(ranks)))
        return self.sets[ranks]

    def group(self, ranks: int) -> Any:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("cohort")
        if ranks not in self.groups:
            self.groups[ranks] = dist.new_group(list(range(ranks)))
        return self.groups[ranks]

    def forget(self) -> None:
        for world in self.worlds.values():
            if world is not None:
                with contextlib.suppress(Exception):
                    world.leave(grace=0.0)
        self.worlds.clear()
        if hvd.is_initialized():
            hvd.shutdown()
            self.sets.clear()


def run(program: dict[str, Any], folder: str, worlds: Worlds) -> dict[str, Any]:
    """Returns what happened on this rank. An error ends it."""
    me = cohort.rank()
    records = reference.Records(grammar.is_lossy(program))
    names = reference.names_for(program, records, folder)
    names.update(cohort=cohort, hvd=hvd, comm_hooks=comm_hooks, chainermn=cohort.chainermn)
    error = None
    phases = source.phases_of(program)
    exec(compile(source.text_of(program, reference=False), "program", "exec"), names)
    done: list[int] = []
    for phase, ranks in enumerate(phases):
        world = worlds.world(ranks)
        if program["method"] == "hvd":
            names["ranks"] = worlds.process_set(ranks)
        if program["method"] == "torch_ddp":
            names["group"] = worlds.group(ranks)
        done.append(len(records.states))
        if me >= ranks or error is not None:
            continue
        names["world"] = world
        if program["method"] == "chainermn":
            names["communicator"] = cohort.chainermn.create_communicator("naive", world)
        try:
            with contextlib.ExitStack() as contexts:
                names["contexts"] = contexts
                names[f"phase_{phase}"](me, ranks)
            if phase + 1 < len(phases):
                world.barrier()
        except Exception as failed:
            frames = traceback.extract_tb(failed.__traceback__)
            line = next((frame.lineno for frame in reversed(frames) if frame.filename == "program"), 0)
            error = {"type": type(failed).__name__, "text": str(failed), "line": line, "phase": phase,
                     "own": isinstance(failed, (cohort.Error, ValueError, AssertionError)) or program["method"] == "torch_ddp", "trace": traceback.format_exc()[-1500:]}  # fmt: skip
    torch.set_default_dtype(torch.float32)
    return {"states": records.states, "gradients": records.gradients, "error": error, "rank": me}


def watch_runner() -> None:
    """Ends this process with the runner, whatever it waits for."""
    parent = int(os.environ["DIFFERENTIAL_RUNNER"])
    ended = threading.Event()
    while not ended.wait(2):
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os._exit(3)


def rank(folder: str) -> None:
    """In a process of its own."""
    for planted in filter(None, os.environ["DIFFERENTIAL_PLANT"].split(",")):
        importlib.import_module("planted").plant(planted)
    threading.Thread(target=watch_runner, daemon=True).start()
    cohort.init()
    worlds = Worlds()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(folder, "socket"))
    send(connection, cohort.rank())
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            program, work, fresh = receive(connection)
            if program is None:
                break
            if fresh:
                worlds.forget()
            send(connection, run(program, work, worlds))
            gc.collect()


def fork(folder: str, environment: dict[str, str], server: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        server.close()
        log = os.open(os.path.join(folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        os.environ.update(environment)
        rank(folder)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def end(pids: list[int]) -> None:
    left, until = list(pids), time.monotonic() + 0.5
    while left:
        left = [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0]
        if left and time.monotonic() > until:
            for pid in left:  # not waited for yet, so that they are still ours
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return
        time.sleep(0.005)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    server = socket.socket(fileno=int(sys.argv[1]))
    gc.collect()
    gc.freeze()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            what, about, environments = receive(server)
            if what == "start":
                send(server, [fork(about, one, server) for one in environments])
            else:
                end(about)
                send(server, None)


if __name__ == "__main__":
    main()
