"""Programs for runner.cpp, which runs them over C++'s wrappers: the part of the grammar that it knows, and its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any, Optional

import grammar
import jobs
import numpy
import source

METHODS = ("ddp", "sharded", "local_sgd", "diloco")
PIECES = ("Linear", "BatchNorm", "LayerNorm", "Gate", "Scale", "Tanh")
HOOKS = ("allreduce", "bf16_compress", "fp16_compress", "powerSGD")
STEPS = ("plain", "accumulate", "twice", "clip", "clip_value", "nan", "inf", "skip", "two_forwards", "new_output", "retain", "validate",
         "no_batch", "keep", "zero_before", "direct", "step_twice", "clip_weights", "drop_gradient", "grad_zeros", "freeze_between",
         "freeze_after")  # fmt: skip
CHANGES = ("freeze", "thaw", "add_group", "rate", "rate_one", "eval", "gate", "reassign_data", "reload", "write", "set_gradients")


def program(seed: int, method: str = "", world: int = -1) -> grammar.Program:
    """Program of the grammar, without what runner.cpp does not know, which has not been written there."""
    made = grammar.program(seed, method or METHODS[seed % len(METHODS)], world)
    made["pieces"] = [piece for piece in made["pieces"] if piece["kind"] in PIECES]
    made["dtype"] = made["dtype"] if made["dtype"] in ("float64", "float32") else "float32"
    made.update(schedule=None, scaler=False, ema=False, second_model=False)
    optimizer = made["optimizer"]
    optimizer["options"].pop("foreach", None)
    if optimizer["kind"] == "Adagrad":
        optimizer.update(kind="SGD", options={"lr": 0.03})
    options = made["options"]
    if "context" in options:
        options["context"] = False
    if options.get("hook") and options["hook"] not in HOOKS:
        options["hook"] = "allreduce"
    made["lossy"] = grammar.is_lossy(made)
    made["events"] = [event for one in made["events"] for event in known(made, one)]
    return made


def known(made: grammar.Program, event: dict[str, Any]) -> list[dict[str, Any]]:
    method, options = made["method"], made["options"]
    if event["kind"] != "step":
        shared = event["kind"] == "write" and options.get("sharding") == "parameters"
        return [event] if event["kind"] in CHANGES and not shared else []
    how = event["how"]
    divided = method == "sharded" and options["sharding"] != "optimizer"
    plain = (
        how not in STEPS
        or event.get("rank", 0) >= grammar.replicas(made)
        or (how == "no_batch" and (method not in ("ddp", "sharded") or options.get("hook")))
        or (how == "keep" and divided)
        or (how == "direct" and options.get("weighted"))
    )
    return [{"kind": "step", "how": "plain"} if plain else event]


def values_of(text: str) -> numpy.ndarray:
    return numpy.frombuffer(bytes.fromhex(text), dtype=numpy.float64)


def reply_of(line: bytes) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(line)
    reply["states"] = [(tuple(map(tuple, one["what"])), values_of(one["values"])) for one in reply["states"]]
    reply["gradients"] = [{name: None if one is None else values_of(one[1]).reshape(one[0]) for name, one in each.items()}
                          for each in reply["gradients"]]  # fmt: skip
    if reply["error"]:
        reply["error"].update(line=0, phase=0, trace="")
    return reply


class Job:
    """One world of runner.cpp's processes."""

    def __init__(self, runner: str, ranks: int, hosts: str) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="differential"))
        environment = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(jobs.free_port()), "COHORT_TIMEOUT": jobs.TIMEOUT, "OMP_NUM_THREADS": "1"}  # fmt: skip
        environment.pop("COHORT_PRETEND_HOSTS", None)
        if hosts:
            environment["COHORT_PRETEND_HOSTS"] = hosts
        self.log = open(self.folder / "log", "wb")
        self.ranks = [subprocess.Popen([runner], env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=self.folder,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, bufsize=0)
                      for rank in range(ranks)]  # fmt: skip

    def start(self, program: grammar.Program) -> None:
        for one in self.ranks:
            assert one.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                one.stdin.write((json.dumps(program) + "\n").encode())

    def finish(self) -> list[Optional[dict[str, Any]]]:
        """As jobs.Job's."""
        lines = [b""] * len(self.ranks)
        until = time.monotonic() + jobs.DEADLINE
        left = {one.stdout: rank for rank, one in enumerate(self.ranks)}
        while left:
            ready, _, _ = select.select(list(left), [], [], max(0.0, until - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert pipe is not None
                part = os.read(pipe.fileno(), 1 << 20)
                lines[left[pipe]] += part
                if not part or part.endswith(b"\n"):
                    del left[pipe]
        return [reply_of(line) if line.endswith(b"\n") else None for line in lines]

    def close(self) -> None:
        for one in self.ranks:
            assert one.stdin is not None and one.stdout is not None
            one.stdin.close()
            one.stdout.close()
        for one in self.ranks:
            try:
                one.wait(1)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Jobs(jobs.Jobs):
    """Made anew after each error, which may have left something behind."""

    def __init__(self, runner: str) -> None:
        self.runner = runner
        self.jobs: dict[tuple[int, str], Any] = {}
        self.restarts = 0

    def of(self, program: grammar.Program) -> Any:
        key = max(source.phases_of(program)), program["hosts"]
        if key not in self.jobs:
            self.jobs[key] = Job(self.runner, *key)
        return self.jobs[key]

    def after(self, program: grammar.Program, replies: list[Optional[dict[str, Any]]]) -> None:
        if any(reply is None or reply["error"] for reply in replies):
            self.restart((max(source.phases_of(program)), program["hosts"]))

    def close(self) -> None:
        for job in self.jobs.values():
            job.close()
        self.jobs.clear()
