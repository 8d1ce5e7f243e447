"""`horovod.ray.RayExecutor`: a function on actors of Ray, each a rank."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from horovod._names import getattr_of


class _Settings:
    """The arguments of `create_settings`. Most have no effect, because Ray starts the ranks."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s


class _Mailbox:
    """Gives the other ranks the address of rank 0, and the secret of the world."""

    def __init__(self) -> None:
        import asyncio

        self._text: str | None = None
        self._there = asyncio.Event()

    async def put(self, text: str) -> None:
        self._text = text
        self._there.set()

    async def get(self) -> str:
        await self._there.wait()
        assert self._text is not None
        return self._text


class _Worker:
    """A rank."""

    def node_and_gpus(self) -> tuple[str, list[str]]:
        import ray

        return ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]

    def init(self, rank: int, size: int, env: Mapping[str, str], mailbox: Any, timeout: float, program: str) -> int:
        import ray

        import cohort

        os.environ.update(env)

        def share(key: str, mine: str | None, seconds: float) -> str:
            if mine is not None:
                ray.get(mailbox.put.remote(mine))
                return mine
            text: str = ray.get(mailbox.get.remote(), timeout=seconds)
            return text

        cohort.init(
            rank=rank, world_size=size, share=share, share_name="Ray", init_timeout=timeout, program=program
        )
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(cohort.local_rank()),
            LOCAL_WORLD_SIZE=str(cohort.local_size()), HOROVOD_RANK=str(rank), HOROVOD_SIZE=str(size),
            HOROVOD_LOCAL_RANK=str(cohort.local_rank()), HOROVOD_LOCAL_SIZE=str(cohort.local_size()),
        )
        return cohort.local_rank()

    def create(self, executable_cls: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        self.executable = executable_cls(*args, **kwargs)

    def execute(self, fn: Callable[..., Any]) -> Any:
        return fn(getattr(self, "executable", None))

    def call(self, fn: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
        return fn(*args, **kwargs)


class RayExecutor:
    """Ranks as actors of Ray, with the methods of Horovod's class of this name.

    settings         the result of `create_settings`; None: its defaults
    num_workers      how many ranks
    cpus_per_worker, use_gpu, gpus_per_worker   Ray's resources for each rank; a host's ranks see all of its GPUs

    `start` makes the actors and has them meet; `run` calls a function on each and returns the results, by rank;
    `shutdown` ends them. A rank's exception is Ray's RayTaskError, which is of the exception's own class, too.
    """

    @classmethod
    def create_settings(cls, timeout_s: float = 30, ssh_identity_file: str | None = None, ssh_str: str | None = None, **kwargs: Any) -> Any:
        return _Settings(timeout_s)

    def __init__(self, settings: Any = None, num_workers: int | None = None, num_hosts: int | None = None,
                 num_workers_per_host: int = 1, cpus_per_worker: int = 1, use_gpu: bool = False,
                 gpus_per_worker: int | None = None, use_current_placement_group: bool = True,
                 min_workers: int | None = None, max_workers: int | None = None, **kwargs: Any) -> None:  # fmt: skip
        if min_workers is not None or max_workers is not None:
            raise ValueError("RayExecutor: min_workers and max_workers ask for an elastic job, which is not here")
        if num_workers is None:
            num_workers = (num_hosts or 0) * num_workers_per_host
        if num_workers < 1:
            raise ValueError("RayExecutor: num_workers is wanted, or num_hosts and num_workers_per_host")
        self.num_workers = num_workers
        self._timeout = float(getattr(settings, "timeout_s", 30) or 30)
        self._cpus = cpus_per_worker
        self._gpus = (gpus_per_worker or 1) if use_gpu else 0
        self._workers: list[Any] = []

    def start(self, executable_cls: type | None = None, executable_args: Iterable[Any] | None = None,
              executable_kwargs: Mapping[str, Any] | None = None,
              extra_env_vars: Mapping[str, str] | None = None) -> None:  # fmt: skip
        import ray

        mailbox = ray.remote(num_cpus=0)(_Mailbox).remote()
        actor = ray.remote(num_cpus=self._cpus, num_gpus=self._gpus)(_Worker)
        workers = [actor.remote() for _ in range(self.num_workers)]
        places = ray.get([worker.node_and_gpus.remote() for worker in workers])
        # Ranks of one host get consecutive numbers, and see all of its GPUs in that order.
        nodes = list(dict.fromkeys(node for node, _ in places))
        order = sorted(range(self.num_workers), key=lambda one: nodes.index(places[one][0]))
        self._workers = [workers[one] for one in order]
        worlds = []
        program = f"RayExecutor {secrets.token_hex(8)}"
        for rank, one in enumerate(order):
            env = {str(name): str(value) for name, value in (extra_env_vars or {}).items()}
            if self._gpus:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(
                    gpu for other in order if places[other][0] == places[one][0] for gpu in places[other][1]
                )
            worlds.append(workers[one].init.remote(rank, self.num_workers, env, mailbox, self._timeout, program))
        ray.get(worlds)
        if executable_cls is not None:
            args, kwargs = tuple(executable_args or ()), dict(executable_kwargs or {})
            ray.get([worker.create.remote(executable_cls, args, kwargs) for worker in self._workers])

    def run_remote(
        self, fn: Callable[..., Any], args: Iterable[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Calls the function and returns object references of the results."""
        return [worker.call.remote(fn, tuple(args or ()), dict(kwargs or {})) for worker in self._started()]

    def run(self, fn: Callable[..., Any], args: Iterable[Any] | None = None, kwargs: Mapping[str, Any] | None = None,
            callbacks: Any = None) -> list[Any]:  # fmt: skip
        if callbacks:
            raise ValueError("RayExecutor.run: callbacks are not here -- return what they would be told")
        import ray

        results: list[Any] = ray.get(self.run_remote(fn, args, kwargs))
        return results

    def execute(self, fn: Callable[[Any], Any], callbacks: Any = None) -> list[Any]:
        """Calls `fn(executable)` on each rank, with the object that `start` has made there."""
        if callbacks:
            raise ValueError("RayExecutor.execute: callbacks are not here -- return what they would be told")
        import ray

        results: list[Any] = ray.get([worker.execute.remote(fn) for worker in self._started()])
        return results

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Like `execute`, but only on rank 0."""
        import ray

        return ray.get(self._started()[0].execute.remote(fn))

    def _started(self) -> list[Any]:
        if not self._workers:
            raise ValueError("RayExecutor: call start() first")
        return self._workers

    def shutdown(self) -> None:
        import ray

        for worker in self._workers:
            ray.kill(worker)
        self._workers = []


_ELASTIC = ("ElasticRayExecutor", "RayHostDiscovery")

__getattr__ = getattr_of(__name__, dict.fromkeys(_ELASTIC, "RayExecutor starts a fixed number of ranks"))
