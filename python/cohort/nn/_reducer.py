"""Autograd's side of gradient reduction: torch hooks tell the core (C++, train/gradients) when a backward begins,
yields a gradient and ends, and gradients are tensors over their places in the buckets.

If `.grad` is None, a hook before AccumulateGrad copies a small gradient to its place in the bucket, keeps a large one
for the reduction to read, and gives AccumulateGrad nothing. If there is a gradient already, AccumulateGrad adds to it
in place. One thread at a time per rank calls the reducer; autograd calls its hooks on that thread or, for a GPU's
gradients, on a thread for which that thread waits.

torch makes a new AccumulateGrad, without hooks, when a parameter is given data of another type or device, even
temporarily (`module.half(); module.float()`). Each forward compares all addresses to detect this; if an address is the
same again, a hook on the tensor itself, which outlives the node, receives the gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch.autograd import Variable

from cohort import Communicator
from cohort._core import GradientReducer, Transaction
from cohort.errors import InvalidArgument
from cohort.nn._forwards import accumulates
from cohort.nn._hooks import GradBucket, Hook, Hooked
from cohort.nn._same_parameters import require_same_parameters
from cohort.nn._tensors import gpu_of, is_dense, tensors_in

# torch 1.13 runs the user's hooks on a parameter inside AccumulateGrad, which is skipped if a gradient is written.
_HOOKS_RUN_INSIDE = torch.__version__ < "2"
# torch 2.1 and later has hooks on a tensor that run after any node has accumulated its gradient.
_HAS_HOOKS_AFTER = hasattr(torch.Tensor, "register_post_accumulate_grad_hook")
_STEPS_BETWEEN_NODES = 64  # without such hooks: steps between checks of all nodes

# Parameters of living reducers, by id: a parameter has at most one. (An attribute would go into copies and pickles.)
_owners: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()


class _Parameter:
    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.dtype, self.device, self.shape = tensor.dtype, tensor.device, tensor.shape  # as when the tensor was wrapped
        self.node = _node_of(tensor)  # autograd holds the node, and the hooks with it, only weakly
        # Optimizers are fastest where gradient and parameter have the same strides.
        self.stride = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        # The gradient's place, if there are buckets. None: the gradient is reduced from the memory that autograd made.
        self.place: torch.Tensor | None = None
        self.address = 0  # of the place
        self.bucket: Any = None  # memory in which the place lies
        self.offset = 0  # element of the bucket at which the place begins
        self.home: torch.Tensor | None = None  # the memory of its values, if training state is divided
        self.home_address = 0  # of the home
        self.version = 0  # of the tensor: autograd's count of changes in place
        self.writes = 0  # writes by anything but the optimizer


class _Piece:
    """A part of a parameter that this rank owns, if training state is divided: see cohort.optim.Sharded."""

    def __init__(self, index: int, name: str, begin: int, values: torch.Tensor, average: torch.Tensor | None) -> None:
        self.index, self.name, self.begin = index, name, begin
        self.values = values  # 1-D, a view of the parameter
        self.average = average  # the reduction's result, if gradients are divided
        self.gradient: torch.Tensor | None = None


def _node_of(tensor: torch.Tensor) -> Any:
    """Returns the node that currently accumulates the tensor's gradient."""
    with torch.enable_grad():
        return tensor.expand_as(tensor).grad_fn.next_functions[0][0]


def _is_at_home(tensor: torch.Tensor, parameter: _Parameter) -> bool:
    home = parameter.home
    assert home is not None
    return tensor.data_ptr() == parameter.home_address and tensor.shape == home.shape and tensor.dtype == home.dtype


def _assign(place: torch.Tensor, value: torch.Tensor) -> None:
    # Sparse tensors cannot be copied into dense ones, only added.
    if value.layout == torch.strided:
        place.copy_(value)
    else:
        place.zero_().add_(value)


class Reducer:
    def __init__(self, comm: Communicator, parameters: Sequence[tuple[str, torch.Tensor]],
                 options: Any, transaction: Transaction) -> None:  # fmt: skip
        for name, tensor in parameters:
            if id(tensor) in _owners:
                raise InvalidArgument(
                    f"parameter '{name}' is already wrapped by a DistributedDataParallel -- use that one, or delete it "
                    "first; where that one is a part of this model, put the module that it wraps (its `module`) in its "
                    "place"
                )
        self.comm = comm  # also used by the core
        self._observer = options.observer
        self._is_virtual = options.virtual_ranks > 0
        self.parameters = [tensor for _, tensor in parameters]
        self.frozen: Sequence[torch.Tensor] = ()  # parameters that are not reduced; drop_all drops their gradients, too
        self._parameters = [_Parameter(name, tensor) for name, tensor in parameters]
        self._nodes = [parameter.node for parameter in self._parameters]
        described = [
            (name, str(tensor.dtype), list(tensor.shape), list(parameter.stride), gpu_of(tensor))
            for (name, tensor), parameter in zip(parameters, self._parameters)
        ]
        self._kept: dict[int, torch.Tensor] = {}
        self._at_begin: list[tuple[int, int, bool]] = []  # of a step, by parameter
        # Memory of buckets on a GPU, by address; the core owns it.
        self._memories: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.core = GradientReducer(comm, described, options, self, transaction)
        self.core.lay_out()
        self._hook: tuple[Hook, Any] | None = None  # the hook and its state
        # Called at the end of each backward, with whether it has ended well; may raise to refuse the state it used.
        self.after_backward: Callable[[bool], None] = lambda _ended: None
        self._nodes_at = 0  # the step in which all nodes were last checked
        self._found: set[int] = set()  # parameters whose gradients in this backward came from nodes without our hooks
        self._left_out: set[int] = set()  # parameters whose gradients came from nodes with our hooks, but are not used
        self.pieces: list[_Piece] = []
        self.pieces_of: dict[int, list[_Piece]] = {}
        self.has_optimizer = False  # an optimizer steps the parameters
        if options.sharding != "none":
            self._move_parameters()
        self._addresses = list(map(torch.Tensor.data_ptr, self.parameters))
        self._attach()

    def _attach(self) -> None:
        self_ref = weakref.ref(self)
        self._handles: list[list] = [[] for _ in self._parameters]  # of the hooks on the nodes, by parameter
        handles = []
        for index, parameter in enumerate(self._parameters):
            self._hook_node(index)
            if _HAS_HOOKS_AFTER:

                def after(_tensor: torch.Tensor, index: int = index) -> None:
                    # torch calls this also if nothing was accumulated. If the node has our hooks, they have done the work.
                    reducer = self_ref()
                    if reducer is not None and (index in reducer._found or not reducer.core.received(index)):
                        reducer._take_accumulated(index)

                handles.append(parameter.tensor.register_post_accumulate_grad_hook(after))
            _owners[id(parameter.tensor)] = self
        self._remove_hooks = weakref.finalize(self, _remove_all, [handles, *self._handles])

    def _hook_node(self, index: int) -> None:
        self_ref = weakref.ref(self)

        def before(gradients: tuple) -> tuple | None:
            reducer = self_ref()
            return None if reducer is None else reducer._before_accumulate(index, gradients)

        def after(_outputs: tuple, _inputs: tuple) -> None:
            reducer = self_ref()
            if reducer is not None:
                reducer._after_accumulate(index)

        node, handles = self._parameters[index].node, self._handles[index]
        # Existing graphs may still use the last node.
        handles[:] = [*handles[-2:], node.register_prehook(before), node.register_hook(after)]

    def _hook_new_nodes(self) -> bool:
        """Puts hooks on new nodes. Returns whether there were any. Reductions stay the same, so no other rank need know."""
        self._found.clear()
        self._left_out.clear()
        any_new = False
        for index, parameter in enumerate(self._parameters):
            node = _node_of(parameter.tensor) if parameter.tensor.requires_grad else parameter.node
            if node is not parameter.node:
                parameter.node = self._nodes[index] = node
                self._hook_node(index)
                any_new = True
        return any_new

    def look_at_parameters(self) -> bool:
        """Called before a forward. Returns False if a parameter has another type, device or shape than when it was wrapped."""
        addresses = list(map(torch.Tensor.data_ptr, self.parameters))
        step = self.core.progress
        due = not _HAS_HOOKS_AFTER and step - self._nodes_at >= _STEPS_BETWEEN_NODES
        if addresses == self._addresses and not self._found and not due:
            return True
        for one in self._parameters:
            if one.tensor.dtype != one.dtype or one.tensor.device != one.device or one.tensor.shape != one.shape:
                return False
        self._addresses, self._nodes_at = addresses, step
        self._hook_new_nodes()
        return True

    def detach(self) -> None:
        """Removes all hooks; another reducer may use the parameters."""
        self._remove_hooks()
        self._nodes.clear()
        for parameter in self._parameters:
            parameter.node = None  # a node kept alive would know only the shape that the parameter had
            _owners.pop(id(parameter.tensor), None)

    def use_hook(self, hook: Hook, state: Any) -> None:
        self.core.use_hook()
        self._hook = hook, state

    # -------------------------------------------------------------------------------------------- a pass

    def watch(self, outputs: object) -> None:
        """Puts hooks on a forward's outputs that tell when a backward begins, even one without our parameters."""
        self_ref = weakref.ref(self)
        references: list[weakref.ref] = []

        def on_backward(_gradient: torch.Tensor) -> None:
            reducer = self_ref()
            if reducer is None or reducer.core.in_backward:
                return
            if accumulates(references, reducer._nodes, reducer._hook_new_nodes):
                reducer.core.begin_backward()

        for output in tensors_in(outputs):
            # A leaf would keep its hook forever, so leaves get none.
            if output.requires_grad and not output.is_leaf:
                references.append(weakref.ref(output))
                output.register_hook(on_backward)

    def _before_accumulate(self, index: int, gradients: tuple) -> tuple | None:
        incoming = gradients[0]
        if incoming is None or not self._parameters[index].tensor.requires_grad:  # frozen since the forward: autograd adds nothing
            self._left_out.add(index)
            return None
        if not self.core.receive(index):
            self._left_out.add(index)
            return (None,)
        parameter = self._parameters[index]
        tensor, place = parameter.tensor, parameter.place
        # Without a reduction, AccumulateGrad works as usual. A gradient that exists is added to, and read afterwards.
        if place is None and (tensor.grad is not None or not self.core.in_sync):
            return None
        if tensor.grad is not None:
            self.put_in_place(index)
            return None
        if torch.is_grad_enabled():
            return None  # create_graph: AccumulateGrad makes the gradient, and it is copied afterwards
        if place is not None and place.data_ptr() != parameter.address:
            place = self._place(index)
        if _HAS_HOOKS_AFTER and len(tensor._post_accumulate_grad_hooks or ()) > 1:  # one hook is ours
            if place is None:
                return None
            # The user's hooks run inside AccumulateGrad, which is therefore not skipped.
            place.zero_()
            tensor.grad = place
            self.core.count_written()
            return None
        if _HOOKS_RUN_INSIDE and tensor._backward_hooks:
            for hook in list(tensor._backward_hooks.values()):
                changed = hook(incoming)
                incoming = incoming if changed is None else changed
        if place is None:
            self._read_from(index, incoming)
            self.core.count_written()
            return (None,)
        if (
            self.core.can_read(index)
            and incoming.layout == torch.strided
            and incoming.dtype == place.dtype
            and incoming.device == place.device
            and incoming.shape == place.shape
            and incoming.stride() == place.stride()
        ):
            self.core.read_from(index, incoming.data_ptr(), incoming)
        else:
            _assign(place, incoming)
        tensor.grad = place
        self.core.count_written()
        return (None,)

    def _after_accumulate(self, index: int) -> None:
        if self.core.received(index):
            # Needed only if the gradient has left its place (create_graph), or has none and is not read where it is.
            parameter, place = self._parameters[index], self._parameters[index].place
            left = place is not None and (parameter.tensor.grad is not place or place.data_ptr() != parameter.address)
            if left or (place is None and self.core.in_sync and not self.core.reads(index)):
                self.put_in_place(index)
            self.core.arrive(index)

    def _take_accumulated(self, index: int) -> None:
        parameter = self._parameters[index]
        tensor = parameter.tensor
        if index in self._left_out or tensor.grad is None:
            return
        if tensor.dtype != parameter.dtype or tensor.device != parameter.device:
            raise InvalidArgument(
                f"DistributedDataParallel: parameter '{parameter.name}' is of {tensor.dtype} on {tensor.device}, and was of "
                f"{parameter.dtype} on {parameter.device} in the last forward on rank {self.comm.rank()}: its gradient cannot "
                "be averaged -- cast or move a model after a step, before the next forward through DistributedDataParallel"
            )
        if self._is_virtual and not self.core.in_backward:
            raise InvalidArgument(
                f"DistributedDataParallel: parameter '{parameter.name}' got a gradient before the backward reached the forward's "
                f"output on rank {self.comm.rank()}, which virtual_ranks would take for an earlier step's -- cast or move a "
                "model after a step, before the next forward"
            )
        self._found.add(index)
        if self.core.receive(index):
            self._after_accumulate(index)
        elif parameter.place is not None and tensor.grad is parameter.place:
            raise InvalidArgument(
                f"DistributedDataParallel: parameter '{parameter.name}' was cast or moved between a forward and its backward "
                f"without samples on rank {self.comm.rank()}, which has been added to its gradient -- cast or move a model "
                "after a step, before the next forward"
            )
        else:
            tensor.grad = None

    def _read_from(self, index: int, gradient: torch.Tensor) -> None:
        # Uses a contiguous copy, unless the gradient itself is contiguous and of the parameter's type.
        values, made = self._parameters[index].tensor, gradient.detach()
        if made.layout != torch.strided or made.dtype != values.dtype or not made.is_contiguous():
            made = torch.empty_like(values, memory_format=torch.contiguous_format)
            with torch.no_grad():
                _assign(made, gradient.detach())
        self.core.read_from(index, made.data_ptr(), made)

    def _take_from_new_nodes(self) -> None:
        # Without hooks that outlive nodes, a backward that brought no gradient may have used only new nodes.
        if _HAS_HOOKS_AFTER or any(map(self.core.received, range(len(self._parameters)))):
            return
        before = list(self._nodes)
        if self._hook_new_nodes():
            for index, parameter in enumerate(self._parameters):
                if parameter.node is not before[index] and parameter.tensor.grad is not None:
                    self._take_accumulated(index)

    def drop(self, index: int) -> None:
        """Sets the parameter's gradient to None; its place keeps the values."""
        self._parameters[index].tensor.grad = None

    def drop_all(self) -> None:
        """Sets all parameters' gradients to None."""
        for tensor in (*(parameter.tensor for parameter in self._parameters), *self.frozen):
            tensor.grad = None
        for piece in self.pieces:
            piece.gradient = None

    # -------------------------------------------------------------------------------------------- what is divided

    def _move_parameters(self) -> None:
        """Moves parameters into memory of the communicator. All ranks' parameters are equal already."""
        for parameter in self._parameters:
            if not parameter.tensor.is_contiguous():
                raise InvalidArgument(
                    f"DistributedDataParallel: parameter '{parameter.name}' is not contiguous, which sharding needs -- "
                    "parameter.data = parameter.data.contiguous() before it is wrapped"
                )
        memory = self.core.homes()
        for parameter, offset in zip(self._parameters, self.core.home_offsets()):
            tensor = parameter.tensor.data
            parameter.home = self._view(memory, tensor.dtype)[offset : offset + tensor.numel()].view(tensor.shape)
            parameter.home_address = parameter.home.data_ptr()
        self.bring_home()
        averages = self.core.averages() if self.core.divides_gradients else None
        for index, begin, count, offset in self.core.pieces():
            home = self._parameters[index].home
            assert home is not None
            values = home.view(-1)[begin : begin + count]
            average = None if averages is None else self._view(averages, values.dtype)[offset : offset + count]
            self.pieces.append(_Piece(index, self._parameters[index].name, begin, values, average))
            self.pieces_of.setdefault(index, []).append(self.pieces[-1])
        self.note_step()
        self.core.protect_parameters()

    def _view(self, memory: Any, dtype: torch.dtype) -> torch.Tensor:
        on_gpu = self._memories.get(memory.data_ptr())
        return memory.as_torch(dtype) if on_gpu is None else on_gpu.view(dtype)

    def take_gradients(self) -> None:
        """Sets each piece's gradient to its part of the parameter's gradient, if gradients are not divided."""
        if self.core.divides_gradients:
            return
        for piece in self.pieces:
            gradient = self._parameters[piece.index].tensor.grad
            count = piece.values.numel()
            piece.gradient = (
                None if gradient is None else gradient.detach().reshape(-1)[piece.begin : piece.begin + count]
            )

    def bring_home(self) -> None:
        """Moves parameters that were given other memory back to their home, with their values. Collective; values have
        to be equal on all ranks."""
        moved = []
        for parameter in self._parameters:
            tensor, home = parameter.tensor.data, parameter.home
            assert home is not None
            if (tensor.shape, tensor.dtype, tensor.device) != (home.shape, home.dtype, home.device):
                raise InvalidArgument(
                    f"DistributedDataParallel: parameter '{parameter.name}' has another shape, type or device than when it "
                    "was wrapped -- wrap the module again, and make its optimizer anew"
                )
            if home.data_ptr() != parameter.home_address:
                raise InvalidArgument(
                    f"DistributedDataParallel: the memory of parameter '{parameter.name}' was moved (share_memory), which sharding "
                    "does not allow -- call share_memory before the module is wrapped"
                )
            if not _is_at_home(tensor, parameter):
                moved.append((parameter, tensor, home))
        self.core.meet()  # no rank reads the old values any more
        if self.core.writes_shared:
            for _, tensor, home in moved:
                home.copy_(tensor)
        self.core.meet()
        for parameter, _, home in moved:
            parameter.tensor.data = home
            parameter.writes += 1

    def note_step(self) -> None:
        """Records that the optimizer wrote the parameters' values."""
        for parameter in self._parameters:
            parameter.version = parameter.tensor._version

    def note_begin(self) -> None:
        """Records the parameters' values and which are frozen, for `changed_parameter`."""
        self._at_begin = self._states()

    def changed_parameter(self) -> Optional[str]:
        """Returns a parameter, in words, that was changed since `note_begin`; None if there is none. Values that are
        written in place through `.data` are not noticed."""
        states = self._states()
        if states == self._at_begin:
            return None
        at = next((i for i, (now, then) in enumerate(zip(states, self._at_begin)) if now != then), len(self._parameters))
        return f"parameter '{self._parameters[at].name}'" if at < len(self._parameters) else "a frozen parameter"

    def _states(self) -> list[tuple[int, int, bool]]:
        return [(one._version, one.data_ptr(), one.requires_grad) for one in (*self.parameters, *self.frozen)]

    def note_writes(self) -> None:
        """Records that values written by anything but the optimizer are intended, too."""
        for parameter in self._parameters:
            parameter.writes += parameter.tensor._version != parameter.version
            parameter.version = parameter.tensor._version

    def writes_to(self, index: int) -> int:
        """Returns how often anything but the optimizer wrote to a parameter, as counted by `note_writes`."""
        return self._parameters[index].writes

    def check_parameters(self, where: str) -> None:
        """Called before a pass or a step. Raises InvalidArgument, naming the parameter, if a parameter was given other
        memory or the user wrote to one that ranks share; also if gradients are divided and no optimizer steps them."""
        shared = self.core.shares_parameters
        for parameter in self._parameters:
            if not _is_at_home(parameter.tensor, parameter):
                raise InvalidArgument(
                    f"{where}: rank {self.comm.rank()}: parameter '{parameter.name}' was given other memory (.data, "
                    "module.to, share_memory), which the optimizer does not step -- copy values into it (copy_ under torch.no_grad()), or "
                    "call parameters_written() on all ranks afterwards"
                )
            if shared and parameter.tensor._version != parameter.version:
                raise InvalidArgument(
                    f"{where}: rank {self.comm.rank()} has written to parameter '{parameter.name}' in place, which all "
                    f"ranks of {self.comm.host()} share (sharding='parameters'), so that it was changed once for each rank "
                    "that did -- let the optimizer alone change parameters, or where all have written the same values "
                    "(weights were loaded), call parameters_written() on all ranks afterwards"
                )
        if self.core.divides_gradients and not self.has_optimizer and self.core.progress > 0:
            raise InvalidArgument(
                f"{where}: gradients are divided (sharding), and no cohort.optim.Sharded has been made over this model: "
                "nothing steps it"
            )

    def put_aside(self) -> None:
        """Moves the pieces' gradients out of the memory that later reductions overwrite."""
        for piece in self.pieces:
            gradient, average = piece.gradient, piece.average
            if average is not None and id(gradient) == id(average):
                piece.gradient = average.clone()

    # -------------------------------------------------------------------------------------------- asked by the core

    def take_places(self) -> None:
        """Called when there are new buckets: puts gradients that exist into their places."""
        for memory, members, offsets in self.core.buckets():
            first = self._parameters[members[0]].tensor
            # Tensors over the memory keep it alive, so a gradient may outlive the bucket and the communicator.
            flat = self._view(memory, first.dtype)
            for index, offset in zip(members, offsets):
                parameter = self._parameters[index]
                parameter.bucket, parameter.offset = memory, offset
                self._make_place(parameter, flat)
                self.put_in_place(index)

    @staticmethod
    def _make_place(parameter: _Parameter, flat: torch.Tensor) -> torch.Tensor:
        # `set_` on an empty tensor instead of a view of the whole: views refuse detach_().
        place = parameter.place = torch.empty(0, dtype=flat.dtype, device=flat.device).set_(
            flat, parameter.offset, parameter.tensor.shape, parameter.stride
        )
        parameter.address = place.data_ptr()
        return place

    def put_in_place(self, index: int) -> bool:
        """Copies the gradient into its place if it is elsewhere. Returns False if there is no gradient."""
        parameter = self._parameters[index]
        gradient = parameter.tensor.grad
        if gradient is None:
            return False
        if parameter.place is None:
            self._read_from(index, gradient)
            return True
        place = self._place(index)
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
        """Zeroes the gradient's place."""
        if self._parameters[index].place is None:
            self._read_from(index, torch.zeros_like(self._parameters[index].tensor))
        else:
            self._place(index).zero_()

    def keep(self, index: int) -> None:
        """Saves the contents of the gradient's place, for `put_back`, until `drop_kept`."""
        if not self.core.divides_gradients:
            self._kept[index] = self._place(index).clone()

    def put_back(self, index: int) -> None:
        self._place(index).copy_(self._kept[index])

    def drop_kept(self) -> None:
        self._kept.clear()

    def allocate(self, gpu: int, nbytes: int) -> torch.Tensor:
        """Returns zeroed memory of a GPU from torch's own allocator, which holds most of that memory."""
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{gpu}")
        self._memories[memory.data_ptr()] = memory
        return memory

    def stream_of(self, gpu: int) -> int:
        """Returns the stream in which torch currently works on the GPU."""
        return torch.cuda.current_stream(gpu).cuda_stream

    def are_finite(self, indices: Sequence[int]) -> bool:
        """Returns whether the gradients in these places, on a GPU, are finite."""
        return bool(torch.stack([torch.isfinite(self._place(index)).all() for index in indices]).all())

    def copy_to_host(self, index: int) -> bytes:
        """Returns a copy of the bytes in the gradient's place."""
        place = self._place(index)
        return place.as_strided((place.numel(),), (1,)).cpu().view(torch.uint8).numpy().tobytes()

    def give(self, index: int) -> None:
        """Sets the parameter's gradient to its place, or its pieces' gradients to theirs."""
        parameter = self._parameters[index]
        if not self.core.divides_gradients:
            parameter.tensor.grad = self._place(index)
            return
        parameter.tensor.grad = None
        for piece in self.pieces_of.get(index, ()):
            assert piece.average is not None
            # Adds, since without a zero_grad the next reduction would overwrite what has been summed.
            piece.gradient = piece.average if piece.gradient is None else piece.gradient + piece.average

    def _place(self, index: int) -> torch.Tensor:
        parameter = self._parameters[index]
        place = parameter.place
        assert place is not None
        # The tensor is the user's `.grad`, too, which may be given other data (`p.grad.data = ...`, a cast of the
        # module), or other memory for all gradients of the bucket (share_memory).
        if place.data_ptr() == parameter.address:
            return place
        return self._make_place(parameter, self._view(parameter.bucket, parameter.dtype))

    def values_of(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """Returns addresses and bytes of the parameters' values; (0, 0) if values are not one piece of host memory."""
        tensors = [self._parameters[index].tensor for index in indices]
        return [
            (tensor.data_ptr(), tensor.numel() * tensor.element_size())
            if tensor.device.type == "cpu" and (tensor.is_contiguous() or is_dense(tensor))
            else (0, 0)
            for tensor in tensors
        ]

    def compare(self, indices: Sequence[int], step: int) -> None:
        """Raises Mismatch if the values of these parameters differ between ranks. Collective."""
        named = [(f"parameter '{self._parameters[index].name}'", self._parameters[index].tensor) for index in indices]
        require_same_parameters(named, self.comm, step=step)

    def call_at_end(self, held: object) -> None:
        """Calls the core's `finish` at the end of the backward under way; releases `held` then, or on failure."""
        self_ref, holding = weakref.ref(self), [held]

        def at_end() -> None:
            holding.clear()  # an exception that someone keeps may refer to `holding`
            reducer = self_ref()
            if reducer is not None:
                reducer._take_from_new_nodes()
                reducer._left_out.clear()
                try:
                    reducer.core.finish()
                except BaseException:
                    reducer.after_backward(False)
                    raise
                reducer.after_backward(True)

        Variable._execution_engine.queue_callback(at_end)

    def run_hook(self, number: int, last: bool, memory: Any, members: Sequence[int], offsets: Sequence[int],
                 share: float, last_step_refused: bool) -> Hooked:  # fmt: skip
        """Calls the hook with a bucket whose gradients are complete."""
        assert self._hook is not None
        hook, state = self._hook
        parameters = [self.parameters[index] for index in members]
        buffer = self._view(memory, parameters[0].dtype)
        with torch.no_grad():
            if share == 0:
                buffer.zero_()  # zeroes NaN, too
            elif share != 1:
                buffer.mul_(share)
            names = [self._parameters[index].name for index in members]
            strides = [self._parameters[index].stride for index in members]
            bucket = GradBucket(number, last, buffer, parameters, offsets, self.comm, names, strides, last_step_refused)
            return Hooked(hook, state, bucket)

    def on_bucket_ready(self, number: int, nbytes: int) -> None:
        """Called by the core if there is an observer."""
        assert self._observer is not None
        self._observer(number, nbytes)


def _remove_all(lists: list[list]) -> None:
    for handles in lists:
        for handle in handles:
            handle.remove()
