"""Data-parallel training of a torch.nn.Module: see DistributedDataParallel."""

from __future__ import annotations

import contextlib
import copy
import numbers
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional, Union

import torch
from torch.nn.parameter import is_lazy

from cohort import Communicator, _core
from cohort._slots import Slots
from cohort.data import DistributedSampler, _share_text
from cohort.errors import InvalidArgument
from cohort.nn._groups import communicator_of, default_world
from cohort.nn._hooks import Hook, OfOneModel
from cohort.nn._reducer import Reducer
from cohort.nn._same_parameters import require_same_parameters
from cohort.nn._virtual import VirtualStep, refuse_beside
from cohort.nn._tensors import Pack, broadcast_tensors, digest_of, shown_of, tensors_in
from cohort.nn.options import BucketSlot, DistributedDataParallelOptions, ReducerStats

_TRAINABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_PREFIX = "module."
# Attributes that a copy or a pickle creates anew.
_OF_THE_RANK = (
    "_comm _hook _transaction _reducer _frozen _known _slots _buffer_slots _buffers_found _buffer_packs _compared_at _next_samples _no_sync_depth _virtual".split()
)


def _describe(kind: str, name: str, tensor: torch.Tensor) -> str:
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    frozen = "" if tensor.requires_grad else ", frozen"
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{kind} '{name}' of {str(tensor.dtype)[len('torch.') :]} {list(tensor.shape)}{strides}{device}{frozen}"


def _check(name: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise InvalidArgument(
            f"DistributedDataParallel: '{name}' has no shape yet -- run one forward of the module, with the same shapes "
            "on all ranks, before wrapping it"
        )
    if hasattr(type(tensor), "__tensor_flatten__"):
        raise InvalidArgument(
            f"DistributedDataParallel: '{name}' is a {type(tensor).__name__}, which holds other tensors -- a model of "
            'DTensors is trained by torch\'s own fully_shard and replicate, over init_process_group("cohort")'
        )
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
        raise InvalidArgument(
            f"DistributedDataParallel: '{name}' is not dense, or neither in the host's memory nor in CUDA's "
            f"({tensor.device}, {tensor.layout})"
        )


class _Weights:
    """The number of samples of a forward, if the sampler, or a function of the arguments, gives it."""

    def __init__(self, sampler: Optional[DistributedSampler], samples: Optional[Callable[..., int]]) -> None:
        if sampler is not None and samples is not None:
            raise InvalidArgument("DistributedDataParallel: sampler and samples both tell the samples -- give one")
        if sampler is not None and not isinstance(sampler, DistributedSampler):
            raise InvalidArgument(
                f"DistributedDataParallel: sampler is a {type(sampler).__name__} -- a cohort.data.DistributedSampler is "
                "wanted; torch's gives all ranks equally many samples, so nothing has to be weighted"
            )
        if samples is not None and not callable(samples):
            raise InvalidArgument("DistributedDataParallel: samples is a function of forward's arguments")
        if sampler is not None and sampler.batch_size is None and sampler.remainder.value == "keep":
            raise InvalidArgument(
                "DistributedDataParallel: the sampler has no batch_size, so it cannot tell the size of a batch -- "
                "DistributedSampler(data, batch_size=...) as the DataLoader's batch_sampler"
            )
        self.sampler = sampler
        self._samples = samples
        self._asked_at: Optional[int] = None  # the sampler's cursor at the last forward that asked
        self._moves = False
        self._local_at: Optional[int] = None  # the same, for a forward in no_sync

    def describe(self) -> str:
        sampler = self.sampler
        if sampler is None:
            return "as declared" if self._samples is None else "by a function"
        return (
            f"by a sampler of {sampler.size} samples, batch_size={sampler.batch_size}, shuffle={sampler.shuffle}, "
            f"seed={sampler.seed}, remainder={sampler.remainder.value}, num_replicas={sampler.num_replicas}, "
            f"shares={sampler._share_text}, virtual_ranks={sampler.virtual_ranks}"
        )

    def of(self, args: tuple, kwargs: dict, core: Any) -> Optional[int]:
        if self._samples is not None:
            return _number_of(self._samples(*args, **kwargs), "DistributedDataParallel: samples()")
        sampler = self.sampler
        if sampler is None or sampler.batch_size is None:  # without a batch_size all ranks have equally many
            return None
        if sampler.virtual_ranks:
            return sampler._samples_of_batch(None)
        cursor = sampler.cursor
        self._moves = self._moves or self._asked_at not in (None, cursor)
        self._asked_at = cursor
        never_moved = not self._moves and core.progress > 0
        samples = sampler._samples_of_batch(cursor if never_moved else self._local_at)
        self._local_at = cursor if core.in_no_sync else None
        return samples


# The models whose `join` holds a loop on a communicator.
_joining: weakref.WeakKeyDictionary[Communicator, list[torch.nn.Module]] = weakref.WeakKeyDictionary()


def _bytes_of(mebibytes: Optional[float]) -> int:
    """The size of a bucket; None is torch's default."""
    size = 25 if mebibytes is None else mebibytes
    if isinstance(size, bool) or not isinstance(size, numbers.Real) or not 0 <= size < 1 << 40:
        raise InvalidArgument(f"DistributedDataParallel: bucket_cap_mb={mebibytes!r} -- a size in MiB is wanted")
    return int(size * (1 << 20))


def _number_of(samples: Any, who: str) -> int:
    try:
        number = -1 if isinstance(samples, bool) else operator.index(samples)
    except TypeError:
        number = -1
    if not 0 <= number <= 1 << 53:  # weights are float64
        raise InvalidArgument(f"{who}: {samples!r} is no number of samples, which is whole and not negative")
    return number


class _Contents:
    """A module's contents: what is trained, what else there is, and a description of both."""

    def __init__(self, module: torch.nn.Module, options: Any, weights: str) -> None:
        self.trained: list[tuple[str, torch.Tensor]] = []
        self.frozen: list[torch.Tensor] = []
        agreed = [(name, value) for _, name, value in _core.agreed_options(options) if name != "bucket_bytes"]
        self.description = [f"{name} = {value}" for name, value in agreed]
        self.description += [f"bucket_cap_mb = {options.bucket_bytes / (1 << 20)}", f"weights {weights}"]
        self.parameters: list[torch.Tensor] = []
        for name, tensor in module.named_parameters():
            _check(name, tensor)
            self.parameters.append(tensor)
            self.description.append(_describe("parameter", name, tensor))
            if not tensor.requires_grad:
                self.frozen.append(tensor)
                continue
            if tensor.dtype not in _TRAINABLE:
                raise InvalidArgument(
                    f"DistributedDataParallel: parameter '{name}' is of {tensor.dtype} -- only float32, float64, float16 "
                    "and bfloat16 can be averaged"
                )
            self.trained.append((name, tensor))
        self.buffers: list[torch.Tensor] = []
        for name, tensor in module.named_buffers():
            _check(name, tensor)
            self.buffers.append(tensor)
            self.description.append(_describe("buffer", name, tensor))
        if not self.trained:
            raise InvalidArgument("DistributedDataParallel: no parameter of the module requires a gradient")


class DistributedDataParallel(torch.nn.Module):
    """Every rank holds a replica of `module` and trains on its own part of each batch; backward() leaves the average
    gradient in every replica's parameters.

        cohort.init()
        model = cohort.nn.DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...  loss = F.nll_loss(model(images), labels); loss.backward(); optimizer.step()

    module              dense, on the CPU or one GPU, its trainable parameters floating-point (types may be mixed)
    comm                the ranks that train together; None: the default world, or the group of
                        init_process_group("cohort") if only that was called
    bucket_cap_mb       size of a gradient bucket, that is of one all_reduce, in MiB; default 25
    first_bucket_bytes  size of the bucket that is ready first, so that communication begins early; default 1 MiB
    gradient_as_bucket_view
                        True: gradients are views of buckets. False, by which torch copies them, is refused
    broadcast_buffers   buffers (running statistics) become rank 0's before each synchronising forward
    observer            called with (number, bytes) of each bucket that becomes ready
    wire_format         "bfloat16", "int8" or "int4": format of float32 gradients between hosts
    error_feedback      adds what rounding loses of a step's gradients to the next step's, with int8 and int4; None:
                        only with int4. Nothing is kept from a step that is refused or whose averages are not finite,
                        nor from earlier steps. See `residuals`
    non_finite          "raise": if any rank has a gradient that is NaN or infinite (or, with wire_format on several
                        hosts, infinite as bfloat16), backward() and step_without_samples() raise NonFiniteError on
                        every rank, which names the first one: rank, host, parameter, element, value and step. All
                        gradients are None then, so that an optimizer's step would change nothing, and training can
                        continue with the next batch. A sum of finite values that overflows is not detected. Over
                        several hosts this costs one reading of the gradients, on one host next to nothing. Default
                        "ignore": such gradients are averaged, which spreads them to all ranks
    compare_parameters_every
                        N > 0: every N synchronised steps a forward compares the parameters of all ranks to the bit, and
                        the buffers too if broadcast_buffers makes them equal, by require_same_parameters, which raises
                        Mismatch on every rank if there is a difference. Default 0: never
    sampler             a cohort.data.DistributedSampler: averages are weighted by the number of samples that it has
                        given each rank for its batch, possibly 0. Call its step() after each batch
    samples             instead of a sampler: a function that takes forward's arguments and returns their number of
                        samples, `lambda x: len(x)`
    check_replicas      each step compares some values of 8 parameters over the ranks, as of its first forward, all
                        parameters in turn, in a message that is sent anyway. If replicas have drifted apart by more
                        than rounding (half of a type's digits), every rank raises Mismatch, which names rank, parameter
                        and value; differences of rounding are logged once. Not checked: values in a GPU's memory.
                        Default True
    sharding            "optimizer", "gradients" or "parameters" (ZeRO stages 1 to 3): what is divided over the ranks. Then
                        use
                        a cohort.optim.Sharded, which documents the rest. Default "none"
    protect_parameters  for debugging, with sharding="parameters": any write to a parameter not by the optimizer, also
                        through a pointer, ends its rank with SIGSEGV and its stack, after a line that names rank and
                        parameter. Weights are loaded before the module is wrapped, or by load_latest of a
                        cohort.checkpoint.CheckpointFolder with its Sharded optimizer, which may write
    virtual_ranks       V > 0: each step's batch is divided among V virtual ranks, whatever the number of ranks, at most V.
                        Each rank trains a block of them one after the other, and gradients are summed in the order of
                        one tree over all V: so the weights have the same bits for every number of ranks. Give the
                        sampler the same V; step_complete() says when gradients are the average. Not with sharding,
                        wire_format, error_feedback, hooks, join, SyncBatchNorm, parameters on a GPU, or buffers without
                        broadcast_buffers. Default 0: off
    compute_threads     number of threads of torch's operations, on which the bits of some depend; set here. 0: not set,
                        but with virtual_ranks the same on all ranks. Default: 1 with virtual_ranks, else 0
    seed_python         with virtual_ranks: each seeds Python's `random` and NumPy, too, not only torch
    process_group       instead of comm: a group of torch.distributed, of the backend "cohort"

    Construction is collective. It checks that all ranks have the same model (names, shapes, types) and options, and
    raises Mismatch on every rank otherwise, naming the first difference; then all parameters and buffers become rank
    0's. Raises InvalidArgument for a module that it cannot train. Parameters that are unfrozen, added, replaced
    (load_state_dict with assign=True) or cast to another type later are included by the next forward; the model is then
    compared and made equal again. A parameter that is added or unfrozen after the forward has begun, and gets a
    gradient in its backward, is refused there. A temporary cast or move (`model.half().state_dict(); model.float()`)
    changes nothing. Buffers may be added and reassigned.

    The average is that of torch's DistributedDataParallel: the sum of the ranks' gradients over their number. It equals
    the gradient of the mean over all samples if the ranks' batches are equally large and losses are means. For other
    batches, `sampler`, `samples` or set_sample_count can give each rank's number of samples, by which gradients are
    then weighted. Nothing is derived from shapes. The first step in which the ranks' first arguments differ in their
    first dimension, and none of the three is used, is logged. So are batches of the first two steps that are the same
    on all ranks, as without a DistributedSampler (COHORT_LOG=batches=off silences that).

    Every backward that reaches a parameter outside of no_sync is averaged, whatever its graph: losses that use
    parameters outside of forward, penalties, a second backward through a retained graph (with as many samples as the
    first). It is dropped only if its rank has declared 0 samples. After a forward in no_sync, a backward stays local
    until there is a forward outside. An autograd.grad() for other tensors than parameters (a gradient penalty) is no
    step (before torch 2.1: only if the output is held).

    Gradients are in the communicator's memory: after a backward, `.grad` of each parameter is a tensor over its place
    in a bucket, which the next backward overwrites. A parameter that no rank used keeps its gradient unchanged, None or
    not; unused parameters need no declaration. Sparse gradients are made dense. Double backward through the reduction
    is not supported. torch.optim.LBFGS searches along a line by the loss that its closure returns, which is each rank's
    own: return the average, cohort.metrics.average(loss.item()).value. Until backward() has returned, do not read or
    write `.grad`, because the reduction may be under way, and instead of a gradient of 8 MiB or more, `.grad` usually still
    holds an earlier step's. A hook of register_post_accumulate_grad_hook finds its parameter's own gradient there;
    hooks on tensors receive the gradients themselves.

    Names in state_dict(), named_parameters() and named_buffers() are the module's, without a prefix; load_state_dict()
    also accepts names from torch's DistributedDataParallel ("module.").

    Errors of collectives surface in backward(), forward and the calls below, as cohort.Error. If a backward ends in an
    exception of only this rank (of a layer, of the observer, of memory), the ranks are out of step: this rank's next
    forward, backward or other call raises Aborted, and none of its gradients are averaged with the others'. One thread
    per rank calls it.
    """

    def __init__(self, module: torch.nn.Module, comm: Optional[Communicator] = None, *, bucket_cap_mb: Optional[float] = 25,
                 first_bucket_bytes: int = 1 << 20, gradient_as_bucket_view: bool = True, broadcast_buffers: bool = True,
                 observer: Optional[Callable[[int, int], None]] = None,
                 wire_format: Union[torch.dtype, str, None] = None,
                 error_feedback: Optional[bool] = None, non_finite: str = "ignore",
                 compare_parameters_every: int = 0, sampler: Optional[DistributedSampler] = None,
                 samples: Optional[Callable[..., int]] = None, check_replicas: bool = True,
                 sharding: str = "none", protect_parameters: bool = False, virtual_ranks: int = 0,
                 compute_threads: Optional[int] = None, seed_python: bool = False,
                 process_group: Any = None) -> None:  # fmt: skip
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise InvalidArgument(f"DistributedDataParallel: a torch.nn.Module is wanted, not a {type(module).__name__}")
        if comm is not None and not isinstance(comm, Communicator):
            raise InvalidArgument(
                f"DistributedDataParallel: comm is a {type(comm).__name__} -- the second argument is a "
                "cohort.Communicator, or nothing; there are no device_ids, since it works where the module lies "
                "(module.to(f'cuda:{local_rank}'))"
            )
        if comm is not None and process_group is not None:
            raise InvalidArgument("DistributedDataParallel: comm and process_group both say who trains -- give one")
        if not gradient_as_bucket_view:
            raise InvalidArgument(
                "DistributedDataParallel: gradient_as_bucket_view=False -- gradients are always views of buckets in the "
                "communicator's memory: leave it out, and clone() a gradient to keep it"
            )
        if observer is not None and not callable(observer):
            raise InvalidArgument(f"DistributedDataParallel: observer={observer!r} -- a function of (number, bytes) is wanted")
        comm = comm if comm is not None else communicator_of(process_group)
        self.options = DistributedDataParallelOptions(
            bucket_bytes=_bytes_of(bucket_cap_mb), first_bucket_bytes=first_bucket_bytes, broadcast_buffers=broadcast_buffers,
            wire_format=wire_format, error_feedback=error_feedback, non_finite=non_finite,
            compare_parameters_every=compare_parameters_every, check_replicas=check_replicas, sharding=sharding,
            protect_parameters=protect_parameters, virtual_ranks=virtual_ranks, compute_threads=compute_threads,
            observer=observer)  # fmt: skip
        self._seed_python = bool(seed_python)
        self._weights = _Weights(sampler, samples)
        self.module = module
        self.training = module.training
        self._forget(comm)
        self._attach()

    def _forget(self, comm: Optional[Communicator]) -> None:
        self._comm = comm
        self._hook: Optional[tuple[Hook, Any]] = None  # the hook and its state
        self._hook_left_behind: Optional[str] = None  # the hook of the original, in a copy
        self._transaction: Optional[_core.Transaction] = None
        self._reducer: Optional[Reducer] = None
        self._frozen: list[torch.Tensor] = []
        self._known: list[torch.Tensor] = []  # all parameters
        self._no_sync_depth = 0
        self._buffer_packs: list[Pack] = []  # one for each device
        self._compared_at = 0  # the step of the last comparison
        self._next_samples: Optional[int] = None
        self._virtual: Optional[VirtualStep] = None
        if (threads := _core.compute_threads(self.options)) > 0:  # also of a copy, which may be in another process
            torch.set_num_threads(threads)
        if self.options.virtual_ranks:
            self._virtual = VirtualStep(self.module, self.options, self._seed_python)

    def _attach(self) -> Reducer:
        """Compares the models, makes them equal, and adds the reducer's hooks. Collective."""
        if self._hook_left_behind is not None:
            raise InvalidArgument(
                f"DistributedDataParallel: this is a copy of a model with a hook ({self._hook_left_behind}), which it does not "
                "have: what a hook keeps is for one model -- register_comm_hook on the copy, with a state of its own "
                "(allreduce_hook for the plain average), or copy the module inside and wrap that"
            )
        comm = self._comm = self._comm if self._comm is not None else default_world()
        sampler = self._weights.sampler
        if sampler is not None and (sampler.num_replicas, sampler.rank) != (comm.size(), comm.rank()):
            raise InvalidArgument(
                f"DistributedDataParallel: the sampler is of rank {sampler.rank} of {sampler.num_replicas}, this is rank "
                f"{comm.rank()} of {comm.size()} -- DistributedSampler(..., comm=comm)"
            )
        contents = _Contents(self.module, self.options, self._weights.describe())
        if self._virtual is not None:
            contents.description.append(f"{torch.get_num_threads()} threads for torch's operations")
            contents.description.append(f"seed_python = {self._seed_python}")
        if self._transaction is None:
            self._transaction = _core.Transaction("divided" if self.options.sharding != "none" else "DistributedDataParallel")
            self._look()
        self._transaction.agree([("", line, "") for line in contents.description])
        self._transaction.require(comm)
        refuse_beside(self.module, self.options, self.options.virtual_ranks if sampler is None else sampler.virtual_ranks)
        if sampler is not None:
            sampler._bind(comm)
        elif comm.rank() == 0 and _share_text(None) != "even":
            _core.warn_of_unused_shares()
        self._frozen, self._known = contents.frozen, contents.parameters
        broadcast_tensors(comm, contents.parameters + contents.buffers)
        self._slots = Slots(self.module, "_parameters", "_modules")
        self._pack_buffers()
        before = self._reducer
        if before is not None:
            before.detach()
        reducer = self._reducer = Reducer(comm, contents.trained, self.options, self._transaction)
        reducer.frozen = contents.frozen
        if self._hook is not None:
            reducer.use_hook(*self._hook)
        if self._virtual is not None and sampler is not None:
            reducer.core.count_parts_once()
        if before is not None:
            reducer.core.go_on_from(before.core)
        else:
            for _ in range(self._no_sync_depth):
                reducer.core.enter_no_sync()
        self_ref = weakref.ref(self)

        def end_backward(ended: bool) -> None:
            wrapper = self_ref()
            if wrapper is None:
                return
            if wrapper._virtual is not None:
                wrapper._end_virtual_rank(wrapper._virtual, ended)
            if ended:
                wrapper._refuse_what_came_too_late()

        reducer.after_backward = end_backward
        return reducer

    def _attach_again_if_changed(self, reducer: Reducer) -> Reducer:
        # Newly trained, replaced or cast parameters need a new reducer.
        changed = any(map(operator.attrgetter("requires_grad"), self._frozen))
        if self._slots.changed():
            if list(map(id, self.module.parameters())) == list(map(id, self._known)):
                self._slots = Slots(self.module, "_parameters", "_modules")  # parts without parameters
            else:
                changed = True
        if not changed and reducer.look_at_parameters():
            return reducer
        self._look()
        if self.options.sharding != "none":
            raise InvalidArgument(
                "DistributedDataParallel: parameters were unfrozen, added, replaced or cast, and with sharding they are "
                "fixed -- wrap the module again, and make its optimizer anew"
            )
        if reducer.core.in_step:
            raise InvalidArgument(
                "DistributedDataParallel: parameters were unfrozen, added, replaced or cast between a forward and its "
                "reduction -- do it after a step, before the next forward"
            )
        return self._attach()

    def _look(self) -> None:
        assert self._transaction is not None
        self._transaction.update(
            shown_of(self.module),
            "DistributedDataParallel",
            "with sharding parameters are fixed: wrap the module again, and make its optimizer anew",
        )

    def _refuse_what_came_too_late(self) -> None:
        """At the end of a backward, refuses parameters added or unfrozen after its forward had begun."""
        if not self._slots.changed() and not any(map(operator.attrgetter("requires_grad"), self._frozen)):
            return
        known = {id(tensor) for tensor in self._known if tensor.requires_grad} - set(map(id, self._frozen))
        for name, tensor in self.module.named_parameters():
            if tensor.requires_grad and tensor.grad is not None and id(tensor) not in known:
                self._attached.drop_all()
                raise InvalidArgument(
                    f"DistributedDataParallel: parameter '{name}' was added or unfrozen after the forward of this backward had "
                    f"begun, so rank {self.communicator.rank()}'s gradient of it is its own -- do it before the forward, or run "
                    "a forward that makes parameters under torch.no_grad() before wrapping"
                )

    def _pack_buffers(self) -> None:
        self._buffer_slots = Slots(self.module, "_buffers", "_modules")
        buffers = self._buffers_found = list(self.module.buffers())
        self._buffer_packs = [
            Pack(self.communicator, [buffer for buffer in buffers if buffer.device == device])
            for device in sorted({buffer.device for buffer in buffers}, key=str)
        ]

    def _current_buffers(self) -> list[torch.Tensor]:
        if self._buffer_slots.changed():
            self._pack_buffers()
        return self._buffers_found

    def _named(self, buffers: bool = True) -> list[tuple[str, torch.Tensor]]:
        named = [(f"parameter '{name}'", tensor) for name, tensor in self.module.named_parameters()]
        if buffers:
            named += [(f"buffer '{name}'", tensor) for name, tensor in self.module.named_buffers()]
        return named

    @property
    def _attached(self) -> Reducer:
        return self._reducer if self._reducer is not None else self._attach()

    @property
    def communicator(self) -> Communicator:
        """The communicator of the ranks that train together."""
        return self._comm if self._comm is not None else default_world()

    # -------------------------------------------------------------------------------------------- passes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward; synchronising, unless in no_sync or if gradients are off."""
        # Without gradients, or in a repeated forward during a backward (checkpointing), there is nothing to begin.
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        reducer = self._attached
        if reducer.core.in_backward:
            return self.module(*args, **kwargs)
        if self._virtual is not None:
            reducer.core.require_whole()  # before it is asked which virtual rank is due
        samples, self._next_samples = self._next_samples, None
        if samples is None:
            samples = self._weights.of(args, kwargs, reducer.core)
        first = next(iter(tensors_in((args, kwargs))), None)
        rows = first.shape[0] if first is not None and first.dim() > 0 else None
        del first  # so that forward can free it early
        batch = digest_of((args, kwargs)) if reducer.core.wants_batch else None
        if self._virtual is not None:
            reducer = self._begin_virtual_rank(reducer, self._virtual)
        elif reducer.core.in_no_sync:
            reducer.core.require_whole()
            reducer = self._attach_again_if_changed(reducer)
        else:
            reducer = self._begin_synchronising_pass(reducer)
        sampler = self._weights.sampler
        reducer.core.add_forward(samples, rows, batch, None if sampler is None else sampler.epoch)
        output = self.module(*args, **kwargs)
        if self._virtual is not None:
            self._virtual.end_forward()
        reducer.watch(output)
        return output

    def _begin_virtual_rank(self, reducer: Reducer, virtual: VirtualStep) -> Reducer:
        # Begins a forward with virtual ranks, or a call for a virtual rank without samples. Only the first of a step
        # exchanges anything, also within no_sync.
        sampler, due = self._weights.sampler, reducer.core.virtual_rank
        drawn = -1 if sampler is None else sampler._virtual_rank()
        if drawn not in (-1, due):
            raise InvalidArgument(
                f"DistributedDataParallel: the sampler's oldest batch is of virtual rank {drawn}, and virtual rank {due} is "
                f"due on rank {self.communicator.rank()} -- train each batch that is drawn once, in order (or call "
                "step_without_samples() in its place), and call the sampler's step() after each; to give up a step that has "
                "begun, on all ranks, wrap the model again"
            )
        begins = not reducer.core.in_step
        reducer = self._begin_synchronising_pass(reducer) if begins else self._attach_again_if_changed(reducer)
        place = (0, 0, reducer.core.progress) if sampler is None else (sampler.seed, sampler.epoch, sampler.cursor)
        virtual.begin_forward(reducer, place, begins, self._current_buffers())
        return reducer

    def _begin_synchronising_pass(self, reducer: Reducer) -> Reducer:
        # Begins every pass that ends in a reduction, on all ranks.
        held = _joining.get(self.communicator) if _joining else None
        if held and all(one is not self for one in held):
            raise InvalidArgument(
                "DistributedDataParallel: this model is trained within another model's join, and would miss steps on ranks "
                "whose input ends early -- hold both, `with one.join(), other.join():`"
            )
        reducer.core.require_whole()
        if self.options.sharding != "none":
            reducer.check_parameters("DistributedDataParallel")
        reducer = self._attach_again_if_changed(reducer)
        reducer.core.prepare_synchronising_pass()
        if self._weights.sampler is not None:
            self._weights.sampler._begin_step()
        if self.options.broadcast_buffers:
            self._broadcast_buffers()
        every, step = self.options.compare_parameters_every, reducer.core.progress
        if every == 0 or step in (0, self._compared_at) or step % every:
            return reducer
        # Each rank's batches change its own buffers, unless these have just been made equal.
        named = self._named(buffers=self.options.broadcast_buffers)
        require_same_parameters(named, self.communicator, step=step)
        self._compared_at = step
        reducer.core.count_parameter_comparison()
        return reducer

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Passes gradients to `hook` instead of averaging them: `hook(state, bucket)` starts operations and returns a
        torch.futures.Future of the average, as hooks of torch's DistributedDataParallel do, which work here unmodified.
        cohort.nn.comm_hooks has some hooks.

        Call it once, before the first backward, the same on all ranks. `bucket` is a cohort.nn.GradBucket, which tells
        how weights by samples appear to a hook. The result has to be the same bits on all ranks. Backward waits for it
        at its end, up to the communicator's timeout, and raises the hook's errors, after which the rank is out of step.
        Gradients are all copied into buckets. Raises InvalidArgument with options that hooks cannot support:
        sharding="gradients" and "parameters", wire_format, and parameters on a GPU. `join` is refused.
        """
        if not callable(hook):
            raise InvalidArgument(
                f"register_comm_hook: hook is a {type(hook).__name__} -- (state, hook), where hook(state, bucket) is a function"
            )
        if isinstance(state, OfOneModel):
            state.take_module(self.module)
        self._hook_left_behind = None
        self._attached.use_hook(hook, state)
        self._hook = hook, state

    def set_sample_count(self, samples: int) -> None:
        """Sets the number of samples of the next forward with gradients on: the weight of this rank's gradient in the
        average over ranks, instead of the number given by a sampler or `samples`.

        Either all ranks call it or none. With 0, which any rank may give, this rank contributes nothing, and its
        backward's result (NaN, too) is dropped. Raises InvalidArgument unless it is a whole number from 0 to 2**53.
        """
        self._next_samples = _number_of(samples, "set_sample_count")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates locally: forward and backward passes inside do not communicate.

        Their gradients are summed and their sample counts added, and the next synchronising backward reduces them
        together. Scale the losses so that the sum is this rank's mean (k equal micro-batches: loss / k). Nests.
        """
        self._attached.core.enter_no_sync()
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1
            self._attached.core.leave_no_sync()

    def step_without_samples(self) -> bool:
        """Replaces forward and backward on a rank that has no sample; collective.

        Contributes with weight 0, and leaves the others' average in the gradients. Returns False if no rank had
        samples; then there are no gradients. Ranks whose inputs end early stay in step, optimizer included, with `while
        model.step_without_samples(): optimizer.step(); optimizer.zero_grad()`. Not in no_sync.
        """
        reducer = self._attached
        if reducer.core.in_no_sync:
            raise InvalidArgument("step_without_samples inside no_sync: there is nothing to take part in")
        self._next_samples = None
        if self._virtual is None:
            return self._begin_synchronising_pass(reducer).core.reduce_without_backward()
        reducer.core.require_whole()
        reducer = self._begin_virtual_rank(reducer, self._virtual)
        self._virtual.end_forward()
        try:
            any_samples = reducer.core.reduce_without_backward()
        except BaseException:
            self._end_virtual_rank(self._virtual, False)
            raise
        self._end_virtual_rank(self._virtual, True)
        return any_samples

    def _end_virtual_rank(self, virtual: VirtualStep, well: bool) -> None:
        # A step's buffers are those of rank 0, which may be lost before the next step begins: all ranks get them now.
        core = self._attached.core
        virtual.end_backward(core, self._current_buffers())
        if well and core.step_complete and self.options.broadcast_buffers:
            self._broadcast_buffers()

    def step_complete(self) -> bool:
        """Returns True after a backward that ended a step and left the average in the gradients: any outside of no_sync,
        but with virtual ranks only that of this rank's last virtual rank:

            loss.backward()
            if model.step_complete():
                optimizer.step()
                optimizer.zero_grad()
            sampler.step()
        """
        return self._attached.core.step_complete

    def mean_loss(self, loss: Any) -> Optional[float]:
        """With virtual ranks, call it once for each, after its forward (or step_without_samples), with its mean loss.

        Returns None until the last of the step; then it is collective, and returns the mean over all virtual ranks,
        weighted by samples, with the same bits on all ranks and for every number of ranks. NaN if none had samples.
        """
        return self._attached.core.mean_loss(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))

    @contextlib.contextmanager
    def join(self, divide_by_initial_world_size: bool = False, enable: bool = True,
             throw_on_early_termination: bool = False) -> Iterator[None]:  # fmt: skip
        """`with model.join():` holds the loop: a rank that comes to its end has no more input, and takes part in the
        others' steps with weight 0 until all ranks have come to the end.

        Ranks that missed steps then receive parameters and buffers of the lowest rank that took the most steps, but not
        its optimizer's state: to continue training, use step_without_samples. Averages are over ranks with input; torch's
        default, to divide by all ranks (divide_by_initial_world_size=True), is refused, as is throw_on_early_termination.
        With enable=False it does nothing. Several models of one loop are held together, `with a.join(), b.join():`; the
        forward of another model on the same communicator raises InvalidArgument. Blocks while others train, each wait
        under the communicator's timeout.
        """
        if not enable:
            yield
            return
        if divide_by_initial_world_size or throw_on_early_termination:
            raise InvalidArgument(
                "DistributedDataParallel.join: the ranks that have input train on, and averages are over them -- leave "
                "out divide_by_initial_world_size and throw_on_early_termination"
            )
        if self.options.sharding != "none":
            raise InvalidArgument(
                "DistributedDataParallel.join: with sharding every rank is needed in every step -- step_without_samples() "
                "takes the place of a forward and backward without input"
            )
        if self._virtual is not None:
            raise InvalidArgument(
                "DistributedDataParallel.join: virtual_ranks are all trained in each step -- step_without_samples() takes the "
                "place of one without input"
            )
        self._require_no_hook()
        self._attached.core.require_whole()
        held = _joining.setdefault(self.communicator, [])
        held.append(self)
        try:
            yield
        finally:
            held.remove(self)
            if not held:
                _joining.pop(self.communicator, None)
        self._require_no_hook()  # a hook may have been registered in the loop
        core = self._attached.core
        core.require_whole()
        self.communicator.join()
        source, steps = core.most_advanced()
        if steps is not None:
            broadcast_tensors(self.communicator, [tensor for _, tensor in self._named()], root=source)
            core.take_plan_of(source, steps)  # so that training may go on together

    def _require_no_hook(self) -> None:
        if self._hook is not None:
            raise InvalidArgument(
                "DistributedDataParallel.join: a hook on gradients is run by all ranks in every step -- "
                "step_without_samples() takes the place of a forward and backward without input"
            )

    def parameters_written(self) -> None:
        """With sharding: call it after all ranks wrote the same values to parameters (load_state_dict), in place or
        to other memory; the optimizer continues from them. Collective. Without sharding it does nothing."""
        if self.options.sharding != "none":
            self._attached.bring_home()
            self._attached.note_writes()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Allows anything but the optimizer to write to protected parameters while the context lasts."""
        core = None if self._reducer is None else self._reducer.core
        if core is not None:
            core.allow_writes()
        try:
            yield
        finally:
            if core is not None:
                core.forbid_writes()

    def sync_buffers(self) -> None:
        """Overwrites all ranks' buffers with rank 0's, now; collective.

        Useful before an evaluation spread over the ranks: forwards without gradients do not communicate.
        """
        _ = self._attached
        self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        self._current_buffers()
        for pack in self._buffer_packs:
            pack.broadcast()

    def require_same_parameters(self) -> None:
        """Compares parameters and buffers of all ranks to the bit, now; collective. Raises Mismatch on every rank if
        they
        differ: see cohort.nn.require_same_parameters. Buffers may differ between two forwards that synchronise them.
        """
        reducer = self._attached
        require_same_parameters(self._named(), self.communicator, step=reducer.core.progress)

    def residuals(self) -> dict[str, torch.Tensor]:
        """Returns copies of the rounding errors of this rank's gradients, which are added to the next ones
        (`error_feedback`): a flat tensor for each parameter, "residual.NAME"; empty without error feedback. They are
        each rank's own, for a checkpoint's `state`; training continues with the same bits if each host has one rank.
        (Otherwise the first step's buckets, which are like a new model's, are divided differently.)
        """
        return {f"residual.{name}": values.clone() for name, values in self._residuals().items()}

    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Loads the result of `residuals()` of this rank, or a mapping that has its entries. Ignores other names, and
        sets missing residuals to zero. Raises InvalidArgument if a size is not the parameter's. Not collective.
        """
        for name, values in self._residuals().items():
            saved = residuals.get(f"residual.{name}")
            if saved is None:
                values.zero_()
            elif saved.numel() != values.numel():
                raise InvalidArgument(
                    f"load_residuals: 'residual.{name}' has {saved.numel()} elements, the parameter {values.numel()}"
                )
            else:
                values.copy_(saved.reshape(-1))

    def _residuals(self) -> dict[str, torch.Tensor]:
        views = self._attached.core.residuals()
        return {name: torch.frombuffer(view, dtype=torch.float32) for name, view in views.items()}

    def stats(self) -> ReducerStats:
        """Returns a copy of the reducer's statistics so far."""
        return ReducerStats(**self._attached.core.stats())

    def slot_of(self, name: str) -> BucketSlot:
        """Returns the place of the gradient of parameter `name`. Raises InvalidArgument if there is none."""
        return BucketSlot(*self._attached.core.slot_of(name))

    # -------------------------------------------------------------------------------------------- the module's names

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets all gradients to None, the cheapest choice, since the next backward then writes instead of adding.

        With set_to_none=False they are filled with zeros, which is just as correct; divided gradients (sharding) are
        removed in any case. The module's own zero_grad does not know these.
        """
        if self._reducer is not None and (set_to_none or self._reducer.core.divides_gradients):
            self._reducer.drop_all()
        super().zero_grad(set_to_none=set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's state_dict."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads the module's state; removes a prefix "module." from all names. Local: load the same state on all ranks."""
        own = self.module.state_dict()
        if state_dict and all(name.startswith(_PREFIX) and name not in own for name in state_dict):
            state_dict = {name[len(_PREFIX) :]: value for name, value in state_dict.items()}
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        # Adds "module." to the names if a larger module that contains this one was saved without it.
        if not any(name.startswith(prefix + _PREFIX) for name in state_dict):
            for name in [name for name in state_dict if name.startswith(prefix)]:
                state_dict[prefix + _PREFIX + name[len(prefix) :]] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields the module's parameters."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the module's buffers."""
        return self.module.named_buffers(*args, **kwargs)

    # -------------------------------------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: their first synchronising use compares them and adds hooks, and is collective.

        A pickle does not hold the communicator, so the copy uses the default world. No copy holds the hook on gradients, so
        the first synchronising use raises InvalidArgument until another hook is registered.
        """
        state = self.__dict__.copy()
        if self._hook is not None:
            hook = self._hook[0]
            state["_hook_left_behind"] = getattr(hook, "__qualname__", repr(hook))
        for name in _OF_THE_RANK:
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget(None)
        self._hook_left_behind = state.get("_hook_left_behind")

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        memo[id(self._weights)] = self._weights  # the sampler belongs to others, too
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other._comm = self._comm
        return other
