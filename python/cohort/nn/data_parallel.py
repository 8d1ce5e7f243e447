"""Data-parallel forwards in one process: see DataParallel."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional

import torch

from cohort.errors import InvalidArgument
from cohort.nn._tensors import tensors_in


class DataParallel(torch.nn.Module):
    """Splits each batch over replicas of `module` on threads of this process and joins their outputs in order. Replaces
    torch's DataParallel, for the CPU.

        model = cohort.nn.DataParallel(Net(), replicas=4)

    module    dense, on the CPU
    replicas  number of threads, each with a replica that shares the module's parameters; default:
              torch.get_num_threads(), at most the cores that this process may use. The threads of torch's own
              operations are divided among them

    Outputs and gradients are those of the plain module (to rounding, and the same in every run) if samples are
    independent of each other. BatchNorm sees the samples of its replica, and replica 0's running statistics are kept,
    as in torch. Random numbers (dropout) come from torch's single generator in the order in which threads ask for
    them. Tensors without dimensions and other arguments go to all replicas. An output without dimensions becomes one
    value per replica. Other parts of an output are replica 0's.

    Only the forward runs on these threads: autograd runs a backward on the CPU on the calling thread, with the threads
    of torch's operations. To make both faster, use processes and DistributedDataParallel.
    """

    def __init__(self, module: torch.nn.Module, replicas: Optional[int] = None, dim: int = 0, **torchs: Any) -> None:
        super().__init__()
        if torchs:
            raise InvalidArgument(
                f"DataParallel: there is no {' and no '.join(torchs)}, since it works on the CPU -- replicas=N says how many threads; "
                "GPUs have a process each: DistributedDataParallel, and `cohort run -np N`"
            )
        if replicas is None:
            replicas = max(1, min(len(os.sched_getaffinity(0)), torch.get_num_threads()))
        if not isinstance(replicas, int) or replicas < 1:
            raise InvalidArgument(
                f"DataParallel: replicas is {replicas!r} -- a number of threads; there are no device_ids, since it works "
                "on the CPU"
            )
        self.module = module
        self.replicas = replicas
        self.dim = dim
        self.training = module.training
        self._threads: list[ThreadPoolExecutor] = []
        self._process = 0  # the process that owns the threads

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward, in parts."""
        parts = self._split((args, kwargs))
        if len(parts) == 1:
            return self.module(*args, **kwargs)
        # Replica 0 is the module itself, so its buffers are the ones that are kept.
        modules = [self.module, *(_replica_of(self.module) for _ in parts[1:])]
        return _gathered(self._run(modules, parts), self.dim)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_threads": []}

    def _split(self, arguments: Any) -> list[Any]:
        """Returns the arguments of each replica."""
        sizes = {tensor.shape[self.dim] for tensor in tensors_in(arguments) if tensor.dim() > 0}
        if len(sizes) > 1:
            raise InvalidArgument(
                f"DataParallel: tensors of {sorted(sizes)} samples (dimension {self.dim}) in one call -- what all "
                "replicas are to get whole belongs into the module, as a buffer"
            )
        samples = sizes.pop() if sizes else 0
        count = min(self.replicas, samples)
        if count <= 1:
            return [arguments]
        each, more = divmod(samples, count)
        parts = []
        for replica in range(count):
            begin, length = replica * each + min(replica, more), each + (replica < more)
            parts.append(_mapped(arguments, _narrowing(self.dim, begin, length)))
        return parts

    def _run(self, modules: Sequence[torch.nn.Module], parts: Sequence[Any]) -> list[Any]:
        """Returns outputs in order, or raises the first failed thread's error; all threads have ended then."""
        if not self._threads or self._process != os.getpid():
            # One executor per replica: autograd orders a backward by each thread's earlier operations.
            self._threads = [ThreadPoolExecutor(1, f"cohort-replica-{i}") for i in range(self.replicas)]
            self._process = os.getpid()
        threads = max(1, torch.get_num_threads() // len(parts))
        mode = _Mode()

        def job(module: torch.nn.Module, part: Any) -> Any:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            with mode.here():
                return module(*part[0], **part[1])

        futures = [thread.submit(job, *both) for thread, *both in zip(self._threads, modules, parts)]
        for failure in [future.exception() for future in futures]:
            if failure is not None:
                raise failure
        return [future.result() for future in futures]


class _Mode:
    """State that torch keeps for each thread: whether gradients are wanted, and autocast."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        by_device = hasattr(torch, "get_autocast_dtype")
        self._autocast = torch.is_autocast_enabled("cpu") if by_device else torch.is_autocast_cpu_enabled()
        if self._autocast:
            self._type = torch.get_autocast_dtype("cpu") if by_device else torch.get_autocast_cpu_dtype()

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if self._inference else torch.set_grad_enabled(self._grad))
            if self._autocast:
                stack.enter_context(torch.autocast("cpu", dtype=self._type))
            yield


def _replica_of(module: torch.nn.Module) -> torch.nn.Module:
    """Returns a copy of the tree of modules with the same parameters, and buffers of its own."""
    replicas: dict[torch.nn.Module, torch.nn.Module] = {}
    for original in module.modules():
        replica = replicas[original] = original.__new__(type(original))
        replica.__dict__ = original.__dict__.copy()
        replica.__dict__["_parameters"] = original._parameters.copy()
        replica.__dict__["_buffers"] = {
            name: None if buffer is None else buffer.detach().clone() for name, buffer in original._buffers.items()
        }
    for original, replica in replicas.items():
        replica.__dict__["_modules"] = {
            name: None if child is None else replicas[child] for name, child in original._modules.items()
        }
    return replicas[module]


def _narrowing(dim: int, begin: int, length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.narrow(dim, begin, length) if tensor.dim() > 0 else tensor


def _mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Returns the same structure with `function` applied to its tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return _like(value, {key: _mapped(item, function) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return _like(value, [_mapped(item, function) for item in value])
    return value


def _gathered(outputs: Sequence[Any], dim: int) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(list(outputs)) if first.dim() == 0 else torch.cat(list(outputs), dim)
    if isinstance(first, dict):
        return _like(first, {key: _gathered([output[key] for output in outputs], dim) for key in first})
    if isinstance(first, (list, tuple)):
        return _like(first, [_gathered(items, dim) for items in zip(*outputs)])
    return first


def _like(value: Any, items: Any) -> Any:
    """Returns a container of `value`'s type with these items."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    return items if type(value) is type(items) else type(value)(items)
