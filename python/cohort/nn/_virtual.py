"""Virtual ranks and torch's state: random numbers and buffers begin each virtual rank's part of a step alike, wherever it
is trained (src/torch/virtual_step.h is the same in C++). One thread per rank."""

from __future__ import annotations

import random
import sys
from typing import Any, Optional

import torch

from cohort import _core
from cohort._process import world as _world
from cohort.errors import InvalidArgument


def refuse_beside(module: torch.nn.Module, options: Any, of_sampler: int) -> None:
    """Refuses whatever has no order that is the same for any number of ranks. All ranks refuse it, because their models
    and options are the same."""
    if of_sampler != options.virtual_ranks:
        raise InvalidArgument(
            f"DistributedDataParallel: virtual_ranks={options.virtual_ranks}, and {of_sampler} of its sampler -- give both "
            "the same"
        )
    if not options.virtual_ranks:
        return
    _refuse_buffers(module, options)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type != "cpu":
            raise InvalidArgument(f"DistributedDataParallel: virtual_ranks with '{name}' on a GPU -- on CPUs alone")
    over_ranks = sys.modules.get("cohort._batch_norm")
    on_threads = _world.rank_thread() is not None
    for part in module.modules():
        if on_threads and isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p > 0:
            raise InvalidArgument(
                f"DistributedDataParallel: virtual_ranks with {type(part).__name__}, and ranks that are threads share torch's "
                "random numbers -- start processes with cohort run"
            )
        sums = isinstance(part, torch.nn.SyncBatchNorm) or (over_ranks and isinstance(part, over_ranks.OverRanks))
        if sums:
            raise InvalidArgument(
                f"DistributedDataParallel: virtual_ranks with {type(part).__name__}, which sums over ranks -- take BatchNorm"
            )


def _refuse_buffers(module: torch.nn.Module, options: Any) -> None:
    if not options.broadcast_buffers and any(True for _ in module.named_buffers()):
        raise InvalidArgument(
            "DistributedDataParallel: virtual_ranks begin with the same buffers -- leave broadcast_buffers on"
        )


class VirtualStep:
    def __init__(self, module: torch.nn.Module, options: Any, seed_python: bool) -> None:
        self._module, self._options = module, options
        self._seed_python = seed_python
        self._at_begin: list[torch.Tensor] = []  # buffers when the step began
        self._after_first: Optional[list[torch.Tensor]] = None  # after virtual rank 0, once others follow it on this rank
        self._part = -1  # the virtual rank that had the last forward
        self._forwards = 0  # its forwards so far
        self._failed = False  # the last forward has not ended
        self._threads = torch.get_num_threads()
        self._place = (0, 0, -1)  # of the step under way, or the last one
        self._accepted = False  # the last step has ended well

    def begin_forward(self, reducer: Any, place: tuple[int, int, int], begins_step: bool, buffers: list[torch.Tensor]) -> None:
        """Begins a forward. place: seed, epoch and cursor of the step; begins_step: the step's first forward, with buffers
        that are the same on all ranks; buffers: the module's. Raises InvalidArgument if a parameter was changed since the step
        began, the sampler has moved within the step or not since the last step, or torch has another number of threads now.
        """
        due = reducer.core.virtual_rank
        _refuse_buffers(self._module, self._options)
        if torch.get_num_threads() != self._threads:
            raise InvalidArgument(
                f"DistributedDataParallel: torch has {torch.get_num_threads()} threads now, and had {self._threads} when the "
                "model was wrapped: with virtual_ranks the bits depend on that -- leave torch.set_num_threads alone, and give "
                "compute_threads"
            )
        if begins_step and self._accepted and place == self._place:
            raise InvalidArgument(
                "DistributedDataParallel: the sampler's position is that of the last step, which was taken -- call the "
                "sampler's step() after each batch"
            )
        if not begins_step and place != self._place:
            raise InvalidArgument(
                f"DistributedDataParallel: the sampler has moved on within a step, before a forward of virtual rank {due} -- "
                "each virtual rank has one batch of the sampler: divide that into micro-batches"
            )
        if begins_step:
            reducer.note_begin()
            self._place, self._accepted = place, False
            self._at_begin, self._after_first = _copies_of(buffers), None
        elif (name := reducer.changed_parameter()) is not None:
            raise InvalidArgument(
                f"DistributedDataParallel: {name} was changed, or frozen, within a step, before virtual rank {due} -- let the "
                "optimizer step where step_complete() is true, and nothing else change parameters in between"
            )
        # A forward that has raised may be tried again, if it was the first.
        if begins_step or not reducer.core.has_forward or (self._failed and self._forwards == 1):
            if not begins_step:
                _set_buffers(buffers, self._at_begin)
            self._part, self._forwards = due, 0
            seed = _core.virtual_seed(*place, due)
            torch.default_generator.manual_seed(seed)
            if self._seed_python:
                random.seed(seed)
                numpy = sys.modules.get("numpy")
                if numpy is not None:
                    numpy.random.seed(seed & 0xFFFFFFFF)
        self._forwards += 1
        self._failed = True

    def end_forward(self) -> None:
        self._failed = False

    def end_backward(self, core: Any, buffers: list[torch.Tensor]) -> None:
        """Called when a backward has ended, well or not, with the module's buffers: after a step, those after virtual rank 0."""
        if self._part < 0:
            return
        if core.in_step:
            if self._part == 0 and core.virtual_rank != 0 and self._after_first is None:
                self._after_first = _copies_of(buffers)
            return
        self._accepted = core.step_complete
        if self._after_first is not None:
            _set_buffers(buffers, self._after_first)
        self._after_first, self._part = None, -1


def _copies_of(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    return [buffer.detach().clone() for buffer in buffers]


def _set_buffers(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    if [(one.shape, one.dtype) for one in buffers] != [(one.shape, one.dtype) for one in values]:
        raise InvalidArgument(
            "DistributedDataParallel: a buffer was added, removed or given another shape or type within a step of "
            "virtual_ranks, each of which begins with the same buffers -- do it between two steps"
        )
    for buffer, value in zip(buffers, values):
        buffer.data.copy_(value)  # running statistics are not part of an earlier pass's gradient
