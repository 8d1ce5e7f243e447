"""Autograd's side of a gradient's way: hooks of torch that tell the core (C++, train/gradients) when a backward begins,
brings a gradient and ends, and gradients as tensors over their places in the buckets.

A hook before AccumulateGrad, where `.grad` is None, copies a small gradient to its place in the bucket and keeps a large
one for the reduction to read, and hands AccumulateGrad nothing; where there is a gradient already, AccumulateGrad adds
to it in place. One thread at a time per rank calls it; autograd calls its hooks on that one, or, for a GPU's gradients,
on one that that one waits for.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.autograd import Variable

from cohort import Communicator
from cohort._core import GradientReducer
from cohort.errors import InvalidArgument
from cohort.nn._forwards import accumulates
from cohort.nn._same_parameters import require_same_parameters
from cohort.nn._tensors import gpu_of, tensors_in
from cohort.nn.options import DistributedDataParallelOptions

# 1.13 runs the user's hooks on a parameter inside AccumulateGrad, which is skipped where a gradient is written.
_HOOKS_RUN_INSIDE = torch.__version__ < "2"

# Parameters of living reducers, by id: a parameter may have one. (An attribute would go into copies and pickles.)
_owners: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()


class _Parameter:
    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        # Autograd holds it only weakly, and the hooks with it.
        with torch.enable_grad():
            self.node = tensor.expand_as(tensor).grad_fn.next_functions[0][0]
        # Optimizers are fastest where gradient and parameter have the same strides.
        self.stride = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        self.place = tensor  # its gradient's, once there are buckets


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps and overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _assign(place: torch.Tensor, value: torch.Tensor) -> None:
    # Sparse tensors cannot be copied into dense ones, only added.
    if value.layout == torch.strided:
        place.copy_(value)
    else:
        place.zero_().add_(value)


class Reducer:
    def __init__(self, comm: Communicator, parameters: Sequence[tuple[str, torch.Tensor]],
                 options: DistributedDataParallelOptions) -> None:  # fmt: skip
        for name, tensor in parameters:
            if id(tensor) in _owners:
                raise InvalidArgument(
                    f"parameter '{name}' is already wrapped by a DistributedDataParallel -- use that one, or delete it "
                    "first"
                )
        self.comm = comm  # which the core uses
        self._observer = options.observer
        self.parameters = [tensor for _, tensor in parameters]
        self._parameters = [_Parameter(name, tensor) for name, tensor in parameters]
        self._nodes = [parameter.node for parameter in self._parameters]
        described = [
            (name, str(tensor.dtype), list(tensor.shape), list(parameter.stride), gpu_of(tensor))
            for (name, tensor), parameter in zip(parameters, self._parameters)
        ]
        self._kept: dict[int, torch.Tensor] = {}
        # Of buckets in a GPU's memory, which the core holds: by address.
        self._memories: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.core = GradientReducer(comm, described, options, self)
        self.core.lay_out()
        self._attach()

    def _attach(self) -> None:
        self_ref = weakref.ref(self)
        handles = []
        for index, parameter in enumerate(self._parameters):

            def before(gradients: tuple, index: int = index) -> tuple | None:
                reducer = self_ref()
                return None if reducer is None else reducer._before_accumulate(index, gradients)

            def after(_outputs: tuple, _inputs: tuple, index: int = index) -> None:
                reducer = self_ref()
                if reducer is not None:
                    reducer._after_accumulate(index)

            handles.append(parameter.node.register_prehook(before))
            handles.append(parameter.node.register_hook(after))
            _owners[id(parameter.tensor)] = self
        self._remove_hooks = weakref.finalize(self, _remove_all, handles)

    def detach(self) -> None:
        """Its hooks are gone, and another may take the parameters."""
        self._remove_hooks()
        for tensor in self.parameters:
            _owners.pop(id(tensor), None)

    # -------------------------------------------------------------------------------------------- a pass

    def watch(self, outputs: object) -> None:
        """Outputs of a forward tell when a backward begins, also one that then reaches none of our parameters."""
        self_ref = weakref.ref(self)
        references: list[weakref.ref] = []

        def on_backward(_gradient: torch.Tensor) -> None:
            reducer = self_ref()
            if reducer is not None and not reducer.core.in_backward and accumulates(references, reducer._nodes):
                reducer.core.begin_backward()

        for output in tensors_in(outputs):
            # A leaf would keep its hook for ever, so leaves get none.
            if output.requires_grad and not output.is_leaf:
                references.append(weakref.ref(output))
                output.register_hook(on_backward)

    def _before_accumulate(self, index: int, gradients: tuple) -> tuple | None:
        incoming = gradients[0]
        if incoming is None:
            return None
        if not self.core.receive(index):
            return (None,)
        parameter = self._parameters[index]
        tensor, place = parameter.tensor, parameter.place
        if tensor.grad is not None:
            self.put_in_place(index)
            return None
        if torch.is_grad_enabled():
            return None  # create_graph: AccumulateGrad makes it, and it is copied afterwards
        if getattr(tensor, "_post_accumulate_grad_hooks", None):
            # The user's hooks run inside AccumulateGrad, which is therefore not skipped.
            place.zero_()
            tensor.grad = place
            self.core.count_written()
            return None
        if _HOOKS_RUN_INSIDE and tensor._backward_hooks:
            for hook in list(tensor._backward_hooks.values()):
                changed = hook(incoming)
                incoming = incoming if changed is None else changed
        alike = (
            incoming.layout == torch.strided
            and incoming.dtype == place.dtype
            and incoming.device == place.device
            and incoming.shape == place.shape
            and incoming.stride() == place.stride()
        )
        if alike and self.core.can_read(index):
            self.core.read_from(index, incoming.data_ptr(), incoming)
        else:
            _assign(place, incoming)
        tensor.grad = place
        self.core.count_written()
        return (None,)

    def _after_accumulate(self, index: int) -> None:
        if self.core.received(index):
            self.put_in_place(index)  # nothing to do except under create_graph
            self.core.arrive(index)

    def drop_all(self) -> None:
        """No parameter has a gradient any more."""
        for parameter in self._parameters:
            parameter.tensor.grad = None

    # -------------------------------------------------------------------------------------------- asked by the core

    def take_places(self) -> None:
        """There are new buckets: gradients that exist are put into their places."""
        for memory, members, offsets in self.core.buckets():
            first = self._parameters[members[0]].tensor
            dtype, device = first.dtype, first.device
            # Tensors over the memory keep it alive, so a gradient may outlive bucket and communicator.
            on_gpu = self._memories.get(memory.data_ptr())
            flat = memory.as_torch(dtype) if on_gpu is None else on_gpu.view(dtype)
            for index, offset in zip(members, offsets):
                parameter = self._parameters[index]
                # `set_` on an empty tensor instead of a view of the whole: views refuse detach_().
                parameter.place = torch.empty(0, dtype=dtype, device=device).set_(
                    flat, offset, parameter.tensor.shape, parameter.stride
                )
                self.put_in_place(index)

    def put_in_place(self, index: int) -> bool:
        """Puts the gradient into its place, if there is one and it lies elsewhere. False: there is none."""
        parameter = self._parameters[index]
        gradient, place = parameter.tensor.grad, parameter.place
        if gradient is None:
            return False
        if gradient is place:
            return True
        if not (
            gradient.layout == torch.strided
            and gradient.data_ptr() == place.data_ptr()
            and gradient.stride() == place.stride()
        ):
            with torch.no_grad():
                _assign(place, gradient.detach())
            self.core.count_moved()
        parameter.tensor.grad = place
        return True

    def clear(self, index: int) -> None:
        """What lies in its place is zero."""
        self._parameters[index].place.zero_()

    def keep(self, index: int) -> None:
        """Remembers what lies in its place, for `put_back`, until `drop_kept`."""
        self._kept[index] = self._parameters[index].place.clone()

    def put_back(self, index: int) -> None:
        self._parameters[index].place.copy_(self._kept[index])

    def drop_kept(self) -> None:
        self._kept.clear()

    def allocate(self, gpu: int, nbytes: int) -> torch.Tensor:
        """Zeroed memory of a GPU, from torch's own allocator, which has most of it."""
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{gpu}")
        self._memories[memory.data_ptr()] = memory
        return memory

    def stream_of(self, gpu: int) -> int:
        """The stream in which torch works on it now."""
        return torch.cuda.current_stream(gpu).cuda_stream

    def are_finite(self, indices: Sequence[int]) -> bool:
        """Whether what lies in these places, of a GPU, is."""
        return bool(torch.stack([torch.isfinite(self._parameters[index].place).all() for index in indices]).all())

    def copy_to_host(self, index: int) -> bytes:
        """What lies in its place, as it lies."""
        place = self._parameters[index].place
        return place.as_strided((place.numel(),), (1,)).cpu().view(torch.uint8).numpy().tobytes()

    def give(self, index: int) -> None:
        """The parameter's gradient is what lies in its place."""
        parameter = self._parameters[index]
        parameter.tensor.grad = parameter.place

    def values_of(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """Addresses and bytes of the parameters' values, each in one piece of the host's memory; (0, 0) where it is none."""
        tensors = [self._parameters[index].tensor for index in indices]
        return [
            (tensor.data_ptr(), tensor.numel() * tensor.element_size())
            if tensor.device.type == "cpu" and (tensor.is_contiguous() or _is_dense(tensor))
            else (0, 0)
            for tensor in tensors
        ]

    def compare(self, indices: Sequence[int], step: int) -> None:
        """Collective: raises Mismatch if the values of these differ."""
        named = [(f"parameter '{self._parameters[index].name}'", self._parameters[index].tensor) for index in indices]
        require_same_parameters(named, self.comm, step=step)

    def call_at_end(self, held: object) -> None:
        """Calls the core's `finish` at the end of the backward under way; `held` is let go then, or where it fails."""
        self_ref, holding = weakref.ref(self), [held]

        def at_end() -> None:
            holding.clear()  # an exception that somebody holds may hold this
            reducer = self_ref()
            if reducer is not None:
                reducer.core.finish()

        Variable._execution_engine.queue_callback(at_end)

    def on_bucket_ready(self, number: int, nbytes: int) -> None:
        """Asked for where there is an observer."""
        assert self._observer is not None
        self._observer(number, nbytes)


def _remove_all(handles: list) -> None:
    for handle in handles:
        handle.remove()
