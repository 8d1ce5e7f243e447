"""Argument of a hook on gradients, and how the hook's result becomes the bucket's average."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from cohort import Communicator
from cohort.errors import Error, InvalidArgument, Timeout

# A function of (state, bucket) that returns a torch.futures.Future of the average.
Hook = Callable[[Any, Any], Any]


class GradBucket:
    """A bucket of gradients, with the interface of torch.distributed.GradBucket. The gradients are this rank's, in the
    bucket's own memory. If samples are declared, they have been scaled so that the plain mean over ranks is the average
    by samples (a rank without samples has zeros)."""

    def __init__(self, index: int, is_last: bool, buffer: torch.Tensor, parameters: list[torch.Tensor],
                 offsets: Sequence[int], communicator: Communicator, names: Sequence[str] = (),
                 strides: Sequence[Sequence[int]] = (), last_step_refused: bool = False) -> None:  # fmt: skip
        self._index, self._is_last, self._last_step_refused = index, is_last, last_step_refused
        self._buffer, self._parameters, self._names = buffer, parameters, list(names)
        self._offsets, self._strides = offsets, strides
        self.communicator = communicator  # the ranks that train together

    def index(self) -> int:
        """Returns the bucket's number, from 0 in the order in which buckets become ready, the same on all ranks.
        Buckets are made anew after the first step, and if parameters are unfrozen or replaced."""
        return self._index

    def is_last(self) -> bool:
        """Returns True for the last bucket of this backward."""
        return self._is_last

    def last_step_refused(self) -> bool:
        """Returns True if the backward before this one ended in an error on all ranks (NonFiniteError, Mismatch). Then no
        rank has its gradients, and a hook has to drop what it has kept of that step."""
        return self._last_step_refused

    def buffer(self) -> torch.Tensor:
        """Returns all gradients, 1-D, with zeros between them. The hook may change the tensor."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the buffer by a tensor with as many elements, for hooks that call hooks."""
        if buffer.numel() != self._buffer.numel():
            raise InvalidArgument(
                f"GradBucket.set_buffer: {buffer.numel()} elements in place of {self._buffer.numel()}"
            )
        self._buffer = buffer.view(-1)

    def gradients(self) -> list[torch.Tensor]:
        """Returns the parameters' gradients, in their shapes: views of the buffer, with a dense parameter's strides."""
        begin = self._buffer.storage_offset()
        return [
            self._buffer.as_strided(parameter.shape, tuple(stride), begin + offset)
            for offset, stride, parameter in zip(self._offsets, self._strides, self._parameters)
        ]

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def names(self) -> list[str]:
        """Returns the parameters' names in the module."""
        return self._names


class OfOneModel:
    """A state that keeps, by buckets or by names, data of only one model. A copy is for another model, and shares
    nothing with the original but the process group."""

    _module: Optional[weakref.ref] = None
    process_group: Any

    def take_module(self, module: torch.nn.Module) -> None:
        """Called when the state is registered. Another DistributedDataParallel may take over the same module."""
        if self._module is not None and self._module() is not module:  # also if that model no longer exists
            raise InvalidArgument(
                f"register_comm_hook: this {type(self).__name__} is another model's, and what it keeps between steps would go "
                "from one to the other -- give each model a state of its own"
            )
        self._module = weakref.ref(module)

    def _without_model(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_module"}

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise InvalidArgument(
                f"{type(self).__name__}: a process group goes into no pickle -- set process_group to None before, and to a "
                "group in what is read, or save what the state keeps (state_dict)"
            )
        return self._without_model()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __copy__(self) -> OfOneModel:
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> OfOneModel:
        other = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.process_group)] = self.process_group
        other.__setstate__(copy.deepcopy(self._without_model(), memo))
        return other


class Hooked:
    """A bucket whose hook has been called."""

    def __init__(self, hook: Hook, state: Any, bucket: GradBucket) -> None:
        self._hook, self._bucket, self._comm = hook, bucket.index(), bucket.communicator
        self._buffer = bucket.buffer()
        self._future = hook(state, bucket)
        if not all(hasattr(self._future, name) for name in ("done", "value", "add_done_callback")):
            raise InvalidArgument(
                f"{self._name} has returned a {type(self._future).__name__} -- a torch.futures.Future of a tensor is wanted, "
                "such as work.get_future().then(lambda future: future.value()[0])"
            )

    @property
    def _name(self) -> str:
        return f"hook {getattr(self._hook, '__qualname__', repr(self._hook))}, bucket {self._bucket}"

    def finish(self) -> None:
        """Waits for the average and copies it to the gradients' memory. Raises the hook's error, and Timeout."""
        if not self._future.done():
            ended = threading.Event()
            self._future.add_done_callback(lambda _: ended.set())
            seconds = self._comm.timeout()
            if not ended.wait(seconds):
                raise Timeout(
                    f"{self._name}: its future has had no value for {seconds:g} s on rank {self._comm.rank()} of "
                    f"{self._comm.host()} -- does it wait for an operation that not all ranks have started?"
                )
        result = self._tensor(self._value())
        if result is not self._buffer:
            with torch.no_grad():
                self._buffer.copy_(result.view(-1))

    def _value(self) -> Any:
        try:
            return self._future.value()
        except RuntimeError as error:  # torch's, made from an operation's error by a function on a future
            if isinstance(error, Error) or not torch.distributed.is_available():
                raise
            from cohort.distributed.work import failure_told_by

            failure = failure_told_by(error)
            if failure is None:
                raise
            raise failure from error

    def _tensor(self, value: Any) -> torch.Tensor:
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if isinstance(value, torch.Tensor) and value.numel() == self._buffer.numel() and value.is_floating_point():
            return value
        got: Optional[str] = type(value).__name__
        if isinstance(value, torch.Tensor):
            got = f"tensor of {str(value.dtype)[len('torch.') :]} {list(value.shape)}"
        raise InvalidArgument(
            f"{self._name}: the future's value is a {got} -- as many floating-point elements as the bucket's "
            f"{self._buffer.numel()} are wanted"
        )
