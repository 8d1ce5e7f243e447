"""Memory for gradients that programs keep: a buffer for each large parameter, allocated by the communicator that
reduces the gradients.

A gradient that autograd allocates anew for each step is reduced in place, because writing the result to a buffer takes longer
than the copies it saves (10 to 20 percent of the reduction, at 2 ranks). A gradient whose memory is used again, since
it was zeroed or added to, is reduced into its parameter's buffer once, and from then on in the buffer, without copies.

A GPU's gradients stay in their own memory: NCCL reduces them there.

A buffer that is still referenced (by the gradient of an earlier step or an abandoned operation) is not written to. One
thread at a time. Tensors over the memory keep it alive, so gradients may outlive everything else.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Dict, Iterable, List, Optional

import torch
from cohort._core import NamedEngine
from cohort.horovod.process_sets import ProcessSet
from cohort.errors import Error, Unavailable
from cohort.horovod.torch._tensors import dense
from torch import Tensor

# Smaller gradients travel together, through a buffer of the core, wherever they are.
_LEAST_BYTES = (64 << 10) + 1

# Gradients begin on pages, as the memory does.
_ALIGNMENT = 4096


class _Place:
    """One parameter's place."""

    __slots__ = ("_bytes", "_dtype", "_lent", "_shape")

    def __init__(self, view: memoryview, parameter: Tensor) -> None:
        self._bytes = view
        self._dtype = parameter.dtype
        self._shape = parameter.shape
        self._lent: Optional[weakref.ref[memoryview]] = None

    def is_free(self) -> bool:
        """Returns True if nothing refers to the memory: neither the last tensor returned, nor any other over it."""
        return self._lent is None or self._lent() is None

    def fits(self, gradient: Tensor) -> bool:
        return gradient.dtype == self._dtype and gradient.shape == self._shape

    def lend(self) -> Tensor:
        """Returns a tensor over the memory."""
        view = self._bytes[:]  # lives as long as the storage made from it
        self._lent = weakref.ref(view)
        whole = torch.frombuffer(view, dtype=self._dtype)
        # Not a view of the whole, as programs call detach_() on gradients, which views refuse.
        return torch.empty(0, dtype=self._dtype).set_(whole, 0, self._shape)


def _make_places(engine: NamedEngine, parameters: List[Tensor]) -> List[_Place]:
    """Makes the buffers in one allocation, since each segment costs all ranks a mapping. Raises Unavailable."""
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT)
    view = memoryview(engine.allocate(offsets[-1]))
    return [_Place(view[at : at + size], parameter) for at, size, parameter in zip(offsets, sizes, parameters)]


class Places:
    """The places of the parameters of one Reducer."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._engine: Optional[weakref.ref[NamedEngine]] = None  # the memory's owner
        self._places: Dict[Tensor, Optional[_Place]] = {}  # None: the parameter has no place
        self._last: Dict[Tensor, weakref.ref[Tensor]] = {}  # the gradient reduced last

    def output_for(self, parameter: Tensor, gradient: Tensor, all: Iterable[Tensor]) -> Optional[Tensor]:
        """Returns the output for the reduction of a parameter's gradient; None: reduce in place.

        Call it once for each reduction.

        all  the parameters that may follow; their buffers are allocated together
        """
        if type(gradient) is not Tensor or gradient.numel() * gradient.element_size() < _LEAST_BYTES:
            return None
        last = self._last.get(parameter)
        if last is None or last() is not gradient:
            self._last[parameter] = weakref.ref(gradient)
            return None
        self._keep_up(parameter, all)
        place = self._places.get(parameter)
        # If the place is not free, the reason is usually that this gradient lies there already.
        if place is None or not place.is_free() or not place.fits(gradient):
            return None
        if not _is_ready(gradient) or _is_shared(parameter, gradient, all):
            return None
        return place.lend()

    def _keep_up(self, parameter: Tensor, all: Iterable[Tensor]) -> None:
        """Makes places for new parameters, or for all if the world is a new one."""
        engine = self._process_set._engine
        if engine is None or self._engine is None or self._engine() is not engine:
            self._places.clear()
            self._engine = None if engine is None else weakref.ref(engine)
        if engine is None or parameter in self._places:
            return
        wanted: Dict[torch.dtype, List[Tensor]] = {}
        for one in (parameter, *all):
            if one not in self._places:
                self._places[one] = None
                if engine.size() > 1 and _deserves(one):
                    wanted.setdefault(one.dtype, []).append(one)
        for parameters in wanted.values():
            try:
                self._places.update(zip(parameters, _make_places(engine, parameters)))
            except Error as error:
                if isinstance(error, Unavailable):  # otherwise the world has ended, which the reduction will report
                    warnings.warn(
                        f"DistributedOptimizer: gradients stay where they are, which takes longer -- {error}", stacklevel=2
                    )


def _deserves(parameter: Tensor) -> bool:
    """Returns True if the engine will usually be able to use the parameter's gradients without a copy."""
    return (
        parameter.layout is torch.strided
        and parameter.device.type == "cpu"
        and parameter.is_contiguous()
        and parameter.numel() * parameter.element_size() >= _LEAST_BYTES
    )


def _is_ready(gradient: Tensor) -> bool:
    """Returns True if the engine can use the gradient without a copy."""
    return (
        gradient.layout is torch.strided
        and gradient.device.type == "cpu"
        and gradient.is_contiguous()
        and dense(gradient, "allreduce_") is gradient
    )


def _is_shared(parameter: Tensor, gradient: Tensor, all: Iterable[Tensor]) -> bool:
    """Returns True if the gradient is also another parameter's, or part of a larger tensor; then it must not move."""
    storage = gradient.untyped_storage() if hasattr(gradient, "untyped_storage") else gradient.storage()
    if storage.nbytes() != gradient.numel() * gradient.element_size():
        return True
    address = gradient.data_ptr()
    others = (other.grad for other in all if other is not parameter)
    return any(type(one) is Tensor and one.layout is torch.strided and one.data_ptr() == address for one in others)
