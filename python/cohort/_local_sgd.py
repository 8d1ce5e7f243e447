"""LocalSGD and DiLoCo, for cohort.optim. The C++ classes in <cohort/torch/local_sgd.h> give the same bits."""

from __future__ import annotations

import ctypes
import functools
import math
import types
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch
from torch import Tensor

from cohort._checkpoint import optimizer as _checkpoint_optimizer
from cohort._process import world as _world
from cohort._checkpoint.tensors import bare, named_tensors, to_entry
from cohort._collective import all_gather_bytes
from cohort._core import Communicator, Transaction, Work
from cohort._slots import Slots
from cohort.errors import Error, InvalidArgument, Mismatch, NonFinite
from cohort.nn._tensors import broadcast_tensors, shown_of


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise InvalidArgument(f"DiLoCo, LocalSGD: {what}")


def _places(tensors: Sequence[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each tensor with the part of `flat` that stands for it, in the tensor's shape."""
    begin = 0
    for tensor in tensors:
        yield tensor, flat[begin : begin + tensor.numel()].view(tensor.shape)
        begin += tensor.numel()


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    dtype = torch.float64 if any(one.dtype == torch.float64 for one in tensors) else torch.float32
    flat = torch.empty(sum(one.numel() for one in tensors), dtype=dtype, device=tensors[0].device)
    for one, place in _places(tensors, flat):
        place.copy_(one.detach())
    return flat


@dataclass
class Fragment:
    parameters: list[Tensor]
    outer: Tensor  # 1-D: all ranks' parameters after the last synchronisation
    # The same on all ranks.
    synchronisations: int = 0
    synchronised_at: int = 0  # steps included in the last one
    sent_at: int = 0  # steps included in the one under way
    # Different on each rank.
    samples: float = 0.0  # samples since the last synchronisation
    sent: float = 0.0  # the part of `samples` that the synchronisation under way includes
    # Autograd's counts of in-place changes of the parameters, noted when the values were the synchronised ones.
    versions: Optional[list[int]] = None

    def note(self) -> None:
        self.versions = [one._version for one in self.parameters]

    def written(self) -> bool:
        """Returns whether anything but the inner optimizer has changed the parameters since `note`."""
        if self.versions is None or self.versions == [one._version for one in self.parameters]:
            return False
        with torch.no_grad():
            return not all(torch.equal(own, place.to(own.dtype)) for own, place in _places(self.parameters, self.outer))


def _cut(trained: list[Tensor], parts: int) -> list[list[Tensor]]:
    """Divides the list, in order, into parts of about equal size."""
    _require(parts <= len(trained), "there are more fragments than parameters")
    whole, seen = sum(one.numel() for one in trained), 0
    cut: list[list[Tensor]] = []
    for number, one in enumerate(trained):
        full = seen * parts >= whole * len(cut)
        needed = len(trained) - number <= parts - len(cut)
        if not cut or (len(cut) < parts and (full or needed)):
            cut.append([])
        cut[-1].append(one)
        seen += one.numel()
    return cut


class LocalSteps:
    """Common base of LocalSGD and DiLoCo. All ranks make the same calls, except those marked as not collective."""

    def __init__(self, model_fragments: Union[torch.nn.Module, Sequence[torch.nn.Module]],
                 inner_optimizer: torch.optim.Optimizer, outer_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
                 sync_every: int, fragments: int, delay: int, alpha: float, warm_up_steps: int, wire_format: Any,
                 comm: Optional[Communicator]) -> None:  # fmt: skip
        several = not isinstance(model_fragments, torch.nn.Module)
        modules = [bare(one) for one in (model_fragments if several else [model_fragments])]
        self._module = torch.nn.ModuleList(modules) if several else modules[0]
        _require(not (several and fragments != 1), "give one module and a number of fragments, or a list of modules")
        fragments = len(modules) if several else fragments
        _require(sync_every >= 1 and warm_up_steps >= 0, "sync_every is 1 or more, warm_up_steps 0 or more")
        _require(
            fragments >= 1 and sync_every % fragments == 0,
            "sync_every has to be a multiple of the number of fragments, each of which is synchronised once in it",
        )
        self._apart = sync_every // fragments
        _require(
            0 <= delay < self._apart,
            "fragment_sync_delay is 0 or more, and less than the steps between two synchronisations",
        )
        _require(0 <= alpha <= 1, "fragment_update_alpha is between 0 and 1")
        seen: set[int] = set()  # several modules may share a parameter

        def trained_of(module: torch.nn.Module) -> list[Tensor]:
            trained = [one for one in module.parameters() if one.requires_grad and id(one) not in seen]
            seen.update(map(id, trained))
            for one in trained:
                _require(one.is_floating_point(), "the module trains complex parameters, which are not averaged")
            _require(bool(trained), "a module has no parameter that needs a gradient")
            return trained

        parts = [trained_of(one) for one in modules] if several else _cut(trained_of(modules[0]), fragments)
        self._held = {id(one) for part in parts for one in part}
        self.inner_optimizer = inner_optimizer
        self._transaction = Transaction("LocalSteps")
        self._slots: Optional[Slots] = None  # the parameters found by the last check; `_others` are not averaged
        self._others: list[Tensor] = []
        drop = weakref.WeakMethod(self._drop)
        self._transaction.keep("what travels", lambda: (drop() or bool)())
        self._require_held("made")
        self._delay, self._alpha, self._warm_up, self._wire = delay, alpha, warm_up_steps, wire_format
        self._told = [("sync_every", sync_every), ("fragments", fragments), ("fragment_sync_delay", delay),
                      ("fragment_update_alpha", alpha), ("warm_up_steps", warm_up_steps)]  # fmt: skip
        if comm is None and _world.is_initialized():
            comm = _world.world()
        self._comm = comm
        self._fragments = [Fragment(one, _flatten(one)) for one in parts]
        self._make_outer = lambda: outer_optimizer([one.outer for one in self._fragments])
        self.outer_optimizer = self._make_outer()
        self._begin()
        # The same on all ranks.
        self._steps = 0
        self._since = 0  # steps since the last synchronisation
        self._turn = 0  # number of synchronisations due so far
        # The synchronisation under way.
        self._under_way: Optional[int] = None
        self._difference: Optional[Tensor] = None
        self._rest: Optional[Tensor] = None
        self._rest_of: list[tuple[str, tuple[int, ...]]] = []  # name and shape of the buffers in `_rest`
        self._works: list[Work] = []
        # Error about this rank's number of samples that all ranks must get ("": none); `_fault_sent` is under way.
        self._fault = self._fault_sent = ""
        self._advance: Optional[Callable[[], None]] = None  # from an elastic State, whose step then synchronises
        self._version = 0
        self._entered = False
        self._sees_inner_steps = False
        if getattr(inner_optimizer, "_optimizer_step_pre_hooks", None) is not None:  # in torch 2.0 and later
            self_ref = weakref.ref(self)

            def before(*_: Any) -> None:
                steps = self_ref()
                if steps is not None:
                    steps._sees_inner_steps = True
                    steps._before_inner_step()

            inner_optimizer.register_step_pre_hook(before)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidArgument(
            f"{type(self).__name__}: it cannot be copied or pickled, since it belongs to one model, one optimizer and a "
            f"communicator -- copy those, make a new {type(self).__name__} over them on all ranks, and give it this one's "
            "state (load_state_dict(state_dict()))"
        )

    @torch.no_grad()
    def _begin(self) -> None:
        """Makes rank 0's parameters the last synchronised ones on all ranks; the outer optimizer has no momentum then."""
        if self._comm is not None:
            broadcast_tensors(self._comm, list(named_tensors(self._module).values()))
        for fragment in self._fragments:
            for own, place in _places(fragment.parameters, fragment.outer):
                place.copy_(own)
            fragment.note()
        for group in self.outer_optimizer.param_groups:  # made early, so that it can be saved and sent
            for one in group["params"] if isinstance(self.outer_optimizer, torch.optim.SGD) and group["momentum"] else ():
                self.outer_optimizer.state[one]["momentum_buffer"] = torch.zeros_like(one)

    def parameters_written(self) -> None:
        """Call it after loading weights (load_state_dict): all ranks continue from rank 0's parameters and buffers, and
        the outer optimizer starts without momentum. Without this call, a change of the parameters that the inner
        optimizer did not make counts as a step of training. Collective, if there is a world."""
        self._require_held("parameters_written")
        self._drop()
        self.outer_optimizer.state.clear()
        self.outer_optimizer.state.update(self._make_outer().state)
        self._begin()
        self._since = 0
        for one in self._fragments:
            one.synchronised_at = one.sent_at = self._steps
            one.samples = one.sent = 0.0
        self._fault = ""
        self._version += 1

    def _require_held(self, where: str) -> None:
        """Raises InvalidArgument for trained parameters that would never be averaged."""
        who = f"{type(self).__name__} ({where})"
        advice = (
            "is trained and in no fragment, so that it would never be the same on all ranks: parameters were unfrozen, replaced "
            "or added since, or the modules do not have all that the optimizer steps -- give all modules; to unfreeze or "
            f"replace, synchronize() first, and then make a new {type(self).__name__}"
        )
        same = self._slots is not None and not self._slots.changed() and not any(one.requires_grad for one in self._others)
        shown = [] if same else shown_of(self._module)
        for name, identity, *_, requires_grad in shown:
            if requires_grad and identity not in self._held:
                raise InvalidArgument(f"{who}: parameter '{name}' {advice}")
        for number, group in enumerate(self.inner_optimizer.param_groups):
            for one in group["params"]:
                if one.requires_grad and id(one) not in self._held:
                    raise InvalidArgument(
                        f"{who}: parameter of shape {list(one.shape)} in group {number} of the inner optimizer {advice}"
                    )
        if same:
            return self._transaction.unchanged()
        # Parameters that are not averaged may differ between ranks.
        advice = f"it would never be the same on all ranks: synchronize() first, and then make a new {type(self).__name__}"
        self._transaction.update([one for one in shown if one[1] in self._held], who, advice)
        self._others = [one for one in self._module.parameters() if id(one) not in self._held]
        self._slots = Slots(self._module, "_parameters", "_modules")

    def _require_unwritten(self, where: str) -> None:
        # LocalSGD may average loaded values, but DiLoCo's outer optimizer would continue in their direction.
        if where == "step" and isinstance(self, LocalSGD):
            return
        if any(one.written() for one in self._fragments):
            raise InvalidArgument(
                f"{type(self).__name__} ({where}): parameters were written to since the last synchronisation, by others than "
                "the inner optimizer (weights were loaded?), which would be taken back or taken for a step of training -- "
                "load before it is made, or call parameters_written() on all ranks afterwards"
            )

    def _before_inner_step(self) -> None:
        self._require_unwritten("step")
        for one in self._fragments:
            one.versions = None

    def step(self, samples: float = 1.0) -> None:
        """Call it after each step of the inner optimizer, equally often on all ranks. Synchronises if due.

        samples  weight of this step in this rank's part of the next average, such as the batch's size; 0: no samples

        Raises the errors of all_reduce, Mismatch if ranks have different options, and NonFinite on all ranks, naming
        the parameter, if the average would be NaN or infinite; then the last synchronised parameters stay. A number of
        samples that is negative or not finite is an error on all ranks at their next synchronisation: Mismatch, or
        InvalidArgument if all ranks had it.
        """
        if not 0 <= samples < math.inf:
            fault = f"{samples} in step {self._steps + 1}"
            if self._comm is None or self._comm.size() == 1:
                self._raise_fault(fault)
            # Others may already be averaging: they learn of the fault from the data sent with the average.
            self._fault, samples = self._fault or fault, 0.0
        self._require_held("step")
        if self._sees_inner_steps:  # otherwise changes may be the inner optimizer's
            self._require_unwritten("step")
        for one in self._fragments:
            one.versions = None
        self._steps += 1
        self._since += 1
        for one in self._fragments:
            one.samples += samples
        if self._advance is None:
            self._go_on()

    def _raise_fault(self, fault: str) -> None:
        raise InvalidArgument(f"{type(self).__name__}: a number of samples is 0 or more, not {fault}")

    def synchronize(self) -> None:
        """Synchronises all fragments now: parameters and floating-point buffers are then the same on all ranks, to the
        bit."""
        self._require_held("synchronize")
        if self._under_way is not None:
            self._complete(0.0)
        self._require_unwritten("synchronize")
        for number, one in enumerate(self._fragments):
            # No step since: only drops what ranks kept of their own values (alpha); averaging would apply the momentum again.
            if one.synchronised_at == self._steps:
                self._take(one, 0.0)
            else:
                self._since = 0
                self._start(number)
                self._complete(0.0)

    @property
    def steps_left(self) -> int:
        """Returns the number of steps until the next synchronisation of a fragment."""
        return max(0, self._period(self._steps + 1) - self._since)

    def __enter__(self) -> LocalSteps:
        """Makes each step of the inner optimizer call `step()` while the context lasts."""
        own = vars(self.inner_optimizer).get("step")
        inner = self.inner_optimizer.step

        @functools.wraps(inner)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            self.step()
            return result

        self.inner_optimizer.step = types.MethodType(step, self.inner_optimizer)  # schedules use its __func__
        self._own_step = own
        return self

    def __exit__(self, *_: Any) -> None:
        del self.inner_optimizer.step
        if self._own_step is not None:
            self.inner_optimizer.step = self._own_step

    # -------------------------------------------------------------------------------------------- synchronisation

    def _period(self, step: int) -> int:
        return 1 if step <= self._warm_up else self._apart

    def _go_on(self) -> None:
        if self._under_way is None and self._since >= self._period(self._steps) - self._delay:
            self._start(self._turn % len(self._fragments))
        if self._under_way is not None and self._since >= self._period(self._steps):
            self._turn += 1
            self._since = 0
            self._complete(self._alpha)

    @torch.no_grad()
    def _start(self, number: int) -> None:
        comm = self._comm
        if comm is None:
            raise InvalidArgument("DiLoCo, LocalSGD: there is no world yet -- cohort.init(), or add it to an elastic State")
        fragment = self._fragments[number]
        difference = fragment.outer.clone()
        for own, place in _places(fragment.parameters, difference):
            place.sub_(own)
        self._difference = difference.float() if self._wire is not None else difference
        fragment.sent, fragment.sent_at = fragment.samples, self._steps
        # An outer optimizer's options may be any objects, and may change.
        outer, who = self.outer_optimizer, type(self).__name__
        options = [(who, name, str(value)) for name, value in (*self._told, ("outer optimizer", type(outer).__qualname__))]
        options += [
            (f"group {at} of the outer optimizer", key, str(one))
            for at, group in enumerate(outer.param_groups)
            for key, one in sorted(group.items())
            if isinstance(one, (int, float, str, tuple))
        ]
        self._fault_sent, self._fault = self._fault, ""
        options.append(("", "number of samples", self._fault_sent or "0 or more"))
        options.append(("", "number of steps", str(self._steps)))  # a rank may have loaded a state of another step
        self._transaction.agree(options)
        tag = self._transaction.tag(number)
        how: dict[str, Any] = {"op": "average", "weight": fragment.sent, "tag": tag, "async_op": True}
        self._under_way = number
        self._works.append(comm.all_reduce(self._difference, wire_format=self._wire, **how))
        self._rest, self._rest_of = self._besides(number), self._described_buffers()
        self._works.append(comm.all_reduce(self._rest, **how))

    def _besides(self, number: int) -> Tensor:
        """Returns what is averaged with a fragment: the number 1 (0 if no rank had samples); with the first, also buffers."""
        one = torch.ones(1, device=self._fragments[number].outer.device)
        return _flatten([one, *(self._buffers() if number == 0 else ())])

    def _average_buffers_anew(self, comm: Communicator, number: int, samples: bool) -> None:
        """Averages the values of `_besides` again if buffers were added or removed meanwhile, or if no rank had samples
        (then all ranks have the same weight)."""
        buffers = self._described_buffers()
        if samples and (number != 0 or buffers == self._rest_of):
            return
        self._rest = self._besides(number)
        weight = self._fragments[number].sent if samples else 1.0
        comm.all_reduce(self._rest, op="average", weight=weight, tag=zlib.crc32(repr(buffers).encode()))

    def _described_buffers(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(one.shape)) for name, one in self._module.named_buffers() if one.is_floating_point()]

    def _buffers(self) -> list[Tensor]:
        """Returns the buffers of floating types; a forward may have replaced them."""
        return [one for one in self._module.buffers() if one.is_floating_point()]

    @torch.no_grad()
    def _complete(self, alpha: float) -> None:
        try:
            for work in self._works:
                work.wait()
            self._works.clear()
            samples = self._rest is not None and bool(self._rest[0] > 0)
            if self._under_way is not None and self._comm is not None:
                self._average_buffers_anew(self._comm, self._under_way, samples)
        except Error as error:
            if error._tagged:
                self._fault_sent = ""  # all ranks have learned of it
            self._drop()  # other fragments of this synchronisation are not reported as well
            self._transaction.end("error", False)
            if isinstance(error, Mismatch) and self._comm is not None:
                self._transaction.explain(self._comm, error)
            raise
        if self._fault_sent:  # the same on all ranks
            fault, self._fault_sent = self._fault_sent, ""
            self._drop()
            self._transaction.end("error", False)
            self._raise_fault(fault)
        assert self._under_way is not None and self._difference is not None and self._rest is not None
        fragment = self._fragments[self._under_way]
        if not bool(torch.isfinite(self._difference).all()):  # on all ranks
            self._transaction.end("averages", False)
            self._raise_non_finite(fragment)
        if samples:
            fragment.outer.grad = self._difference.to(fragment.outer.dtype)
            self.outer_optimizer.step()
            fragment.outer.grad = None
        fragment.synchronisations += 1
        fragment.synchronised_at = fragment.sent_at
        fragment.samples -= fragment.sent
        self._take(fragment, alpha)
        if self._under_way == 0:
            for own, place in _places(self._buffers(), self._rest[1:]):
                own.copy_(place)
        self._transaction.end("averages", True)
        self._drop()
        self._version += 1
        if self._advance is not None:
            self._advance()

    def _raise_non_finite(self, fragment: Fragment) -> None:
        """Raises NonFinite on all ranks, naming the ranks whose parameters are NaN, infinite, or too large to average."""
        assert self._comm is not None
        names = {id(one): name for name, one in self._module.named_parameters()}
        bad = [names.get(id(one), "?") for one in fragment.parameters if not bool(torch.isfinite(one).all())]
        texts = [bytes(one).decode() for one in all_gather_bytes(self._comm, (bad[0] if bad else "").encode())]
        which = [f"'{text}' of rank {rank}" for rank, text in enumerate(texts) if text]
        raise NonFinite(
            f"{type(self).__name__}, step {self._steps}: the average over ranks is not finite, and the last synchronised "
            f"parameters were kept -- NaN or infinite: parameter {', '.join(which) if which else 'of no rank now'} -- "
            "lower the learning rate or clip gradients there, and go on from a checkpoint"
        )

    @torch.no_grad()
    def _take(self, fragment: Fragment, alpha: float) -> None:
        """Sets this rank's parameters to the synchronised ones, keeping the fraction `alpha` of its own."""
        for own, outer in _places(fragment.parameters, fragment.outer):
            own.copy_(outer if alpha == 0 else outer.lerp(own.to(outer.dtype), alpha))
        fragment.versions = None
        if alpha == 0:
            fragment.note()

    def _drop(self) -> None:
        """Drops the synchronisation under way, as if it had not begun."""
        for work in self._works:
            try:
                work.wait()
            except Error:  # its world has ended
                pass
        self._works.clear()
        self._difference = self._rest = self._under_way = None
        self._fault, self._fault_sent = self._fault_sent or self._fault, ""  # no other rank has learned of it

    def _rebind(self, comm: Communicator) -> bool:
        """Moves to an elastic job's new world. Returns whether this rank joins in the middle of a round."""
        for parameter in self._module.parameters():
            parameter.grad = None  # left by a step that did not end
        self._drop()
        self._comm = comm
        fresh, self._entered = not self._entered, True
        return fresh and self._since > 0

    def _assign(self, fragments: Sequence[int]) -> None:
        """Sets the outer parameters to another rank's, with that rank's synchronisation count. A rank that was in an
        earlier world lacks at most one synchronisation, and keeps its steps in other fragments."""
        for fragment, there in zip(self._fragments, fragments):
            if fragment.synchronisations != there or not self._entered:
                fragment.synchronisations = there
                self._take(fragment, self._alpha if self._entered else 0.0)
                fragment.samples = fragment.samples - fragment.sent if self._entered else 0.0
        self._version += 1

    # -------------------------------------------------------------------------------------------- state

    def _counts(self) -> list[int]:
        each = [(one.synchronised_at, one.sent_at) for one in self._fragments]
        return [self._steps, self._since, self._turn, *(count for pair in each for count in pair)]

    def _set_counts(self, counts: Sequence[int]) -> None:
        self._steps, self._since, self._turn = counts[:3]
        for fragment, at, sent_at in zip(self._fragments, counts[3::2], counts[4::2]):
            fragment.synchronised_at, fragment.sent_at = at, sent_at

    def _outer(self) -> dict[str, Tensor]:
        """Returns the state that is the same on all ranks, without copying the tensors."""
        tensors = {}
        for number, fragment in enumerate(self._fragments):
            tensors[f"outer/parameters/{number}"] = fragment.outer
            for key, value in sorted(self.outer_optimizer.state.get(fragment.outer, {}).items()):
                if isinstance(value, Tensor):
                    tensors[f"outer/{key}/{number}"] = value
        return tensors

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state from which this rank can continue, to the bit, even between synchronisations: parameters,
        buffers, the inner optimizer's state, and state that is the same on all ranks. Save it by torch.save in a file
        for each rank, or as `state` of CheckpointFolder.save (model and optimizer there are rank 0's). The tensors are
        not copies. Waits for a synchronisation under way. Not collective. Raises InvalidArgument, only on this rank,
        if `step` was called with an invalid number of samples."""
        for work in self._works:
            work.wait()
        if self._fault or self._fault_sent:
            self._raise_fault(self._fault or self._fault_sent)
        counts: list[float] = [self._steps, self._since, self._turn, -1 if self._under_way is None else self._under_way]
        for one in self._fragments:
            counts += [one.synchronisations, one.synchronised_at, one.sent_at, one.samples, one.sent]
        state = {"outer/counts": torch.tensor(counts, dtype=torch.float64), **self._outer()}
        if self._difference is not None:
            state["outer/difference"] = self._difference
        if self._rest is not None:
            state["outer/rest"] = self._rest
        state.update((f"inner/{name}", one.detach()) for name, one in named_tensors(self._module).items())
        for name, kind, shape, data in _checkpoint_optimizer.snapshot(self.inner_optimizer, self._module)[0]:
            state[f"optimizer/{name}"] = data.view(getattr(torch, kind)).view(shape)
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor], *, own: bool = True) -> None:
        """Loads the same rank's state. For another rank's (if the world has become larger) use own=False, which loads
        the state common to all ranks and that rank's buffers, and begins from there. Raises InvalidArgument for state
        that does not fit. Not collective."""

        def get(name: str, shape: Sequence[int]) -> Tensor:
            found = state_dict.get(name)
            if found is None or tuple(found.shape) != tuple(shape):
                raise InvalidArgument(
                    f"DiLoCo, LocalSGD: the state has no '{name}' of {math.prod(shape)} elements -- it is of a rank that had "
                    "another model or other options"
                )
            return found

        parts = len(self._fragments)
        counts = get("outer/counts", [4 + 5 * parts]).tolist()
        for at, value in enumerate(counts):
            least, most = -1 if at == 3 else 0, parts - 1 if at == 3 else 2**53
            whole = at < 4 or (at - 4) % 5 < 3
            if not (least <= value <= most) or (whole and value != int(value)):
                raise InvalidArgument(f"DiLoCo, LocalSGD: the state's 'outer/counts' has {value} at {at} -- it is damaged")
        for name, one in self._outer().items():
            get(name, one.shape)
        outer: dict[str, tuple[int, str]] = {}  # by name: fragment, and name in it
        for name, one in state_dict.items():
            kind, _, place = name.partition("/")
            key, _, number = place.partition("/")
            if kind == "outer" and number:
                fits = number.isdecimal() and int(number) < parts
                if not fits or tuple(one.shape) not in ((), tuple(self._fragments[int(number)].outer.shape)):
                    raise InvalidArgument(
                        f"DiLoCo, LocalSGD: the state has '{name}' of shape {list(one.shape)}, which fits none of the "
                        f"{parts} fragments here -- it is of a rank that had another model or other options"
                    )
                outer[name] = int(number), key
        under_way = int(counts[3])
        difference = rest = None
        if under_way >= 0:
            flat = self._fragments[under_way].outer
            difference = get("outer/difference", flat.shape).to(flat.device, copy=True)
            rest = self._besides(under_way)
            rest.copy_(get("outer/rest", rest.shape))
        restore_optimizer: Callable[[], None] = lambda: None  # noqa: E731
        inner = named_tensors(self._module)
        for name, one in inner.items():
            get(f"inner/{name}", one.shape)
        if own:
            entries = [to_entry(name[10:], one) for name, one in state_dict.items() if name.startswith("optimizer/")]
            # In the form in which a file's tensors are read.
            moments = [(*one, (ctypes.c_char * data.numel()).from_address(data.data_ptr())) for *one, data in entries]
            optimizer = self.inner_optimizer
            _, metadata = _checkpoint_optimizer.snapshot(optimizer, self._module)
            restore_optimizer = _checkpoint_optimizer.restore(optimizer, self._module, moments, metadata, "this rank's state")
        self._drop()
        self._fault = ""
        for name, one in inner.items():
            one.copy_(state_dict[f"inner/{name}"])
        for name, (owner, key) in outer.items():
            flat = self._fragments[owner].outer
            if key == "parameters":
                flat.copy_(state_dict[name])
            else:
                self.outer_optimizer.state[flat][key] = state_dict[name].detach().clone()
        self._steps, self._since, self._turn = map(int, counts[:3])
        for at, fragment in enumerate(self._fragments):
            *whole, samples, sent = counts[4 + 5 * at : 9 + 5 * at]
            fragment.synchronisations, fragment.synchronised_at, fragment.sent_at = map(int, whole)
            fragment.samples, fragment.sent = (samples, sent) if own else (0.0, 0.0)
            fragment.versions = None
            if not own:
                self._take(fragment, 0.0)
        self._version += 1
        restore_optimizer()
        if under_way >= 0:  # its averages had arrived when the state was saved
            self._under_way, self._difference, self._rest = under_way, difference, rest
            self._rest_of = self._described_buffers()
            self._transaction.resume()


class LocalSGD(LocalSteps):
    """Averages parameters each `sync_every` steps (Stich 2018, arXiv 1805.09767); in between every rank trains its own.

        with cohort.optim.LocalSGD(model, optimizer, sync_every=10) as local:
            ...  loss.backward(); optimizer.step()
        local.synchronize()             # at the end, and when all ranks need the same parameters

    Without `with`, call `local.step()` after each `optimizer.step()` (also with a GradScaler, which may skip steps).

    model          a module, not in a DistributedDataParallel of all ranks. It may be in one of a single host's ranks, if
                   `comm` then connects the hosts
    optimizer      any torch optimizer of its parameters. Each rank keeps its own state
    sync_every     steps from one synchronisation to the next
    warm_up_steps  number of steps at the beginning that are each synchronised
    wire_format    "bfloat16", "int8" or "int4": format in which differences from the last synchronised parameters
                   travel between hosts
    comm           default: the default world, or in an elastic job each of its worlds

    Begins with rank 0's parameters and buffers (collective, if there is a world). Parameters that need no gradient, and
    those that are not floating-point, stay each rank's own. Floating-point buffers (statistics of BatchNorm) are
    averaged. One thread per rank. Raises InvalidArgument for options that have no meaning, and if the optimizer has
    parameters that are not the model's. `step` and `synchronize` raise it for parameters that were unfrozen, replaced or added
    since, and if weights loaded since the last synchronisation would be lost (see `parameters_written`).
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync_every: int = 10, *,
                 warm_up_steps: int = 0, wire_format: Any = None, comm: Optional[Communicator] = None) -> None:  # fmt: skip
        outer = functools.partial(torch.optim.SGD, lr=1.0)
        super().__init__(model, optimizer, outer, sync_every, 1, 0, 0.0, warm_up_steps, wire_format, comm)


class DiLoCo(LocalSteps):
    """LocalSGD with an outer optimizer. Its gradient is the average over ranks of the last synchronised parameters minus
    the rank's own (Douillard et al. 2023, arXiv 2311.08105). The model may be synchronised in fragments, in turn, while
    training continues (Streaming DiLoCo, arXiv 2501.18512).

        diloco = cohort.optim.DiLoCo(model, torch.optim.AdamW(model.parameters(), 4e-4), sync_every=100)
        ...  loss.backward(); optimizer.step(); diloco.step()
        diloco.synchronize()

    Names are torchft's, where they mean the same; there is no manager.

    model_fragments        a module; or a list of modules, each of which is a fragment
    inner_optimizer        any torch optimizer of their parameters. Each rank keeps its own state
    outer_optimizer        a function that gets the outer parameters, one flat tensor for each fragment, and returns an
                           optimizer of torch: lambda flat: torch.optim.SGD(flat, 0.7, momentum=0.9, nesterov=True) is the
                           default, with the rate and momentum of
    outer_learning_rate, outer_momentum, nesterov
    sync_every             H: steps from one synchronisation of a parameter to the next
    fragments              for one module: number of parts of about equal size, in the order of its parameters. One is
                           synchronised each sync_every / fragments steps, which has to be a whole number
    fragment_sync_delay    tau: number of steps during which a synchronisation is under way, before its result is used.
                           Less than the steps between synchronisations. 0: `step` waits for the result
    fragment_update_alpha  fraction of this rank's own parameters in the result, 0 to 1. 0 uses only the synchronised
                           parameters, and drops the changes made during the delay. Streaming DiLoCo uses 0.5
                           with a delay
    wire_format            "bfloat16", "int8" or "int4": format of pseudo-gradients between hosts
    comm                   default: the default world, or in an elastic job each of its worlds

    Outer parameters are float32, or float64 if a parameter is, whatever the parameters' types. Otherwise like LocalSGD.
    """

    def __init__(self, model_fragments: Union[torch.nn.Module, Sequence[torch.nn.Module]],
                 inner_optimizer: torch.optim.Optimizer,
                 outer_optimizer: Optional[Callable[[list[Tensor]], torch.optim.Optimizer]] = None,
                 sync_every: int = 100, *, outer_learning_rate: float = 0.7, outer_momentum: float = 0.9,
                 nesterov: bool = True, fragments: int = 1, fragment_sync_delay: int = 0,
                 fragment_update_alpha: float = 0.0, wire_format: Any = None,
                 comm: Optional[Communicator] = None) -> None:  # fmt: skip
        if outer_optimizer is None:
            _require(
                outer_learning_rate > 0 and 0 <= outer_momentum < 1,
                "outer_learning_rate is above 0, outer_momentum 0 or more and below 1",
            )
            outer_optimizer = functools.partial(torch.optim.SGD, lr=outer_learning_rate, momentum=outer_momentum,
                                                nesterov=nesterov and outer_momentum > 0)  # fmt: skip
        super().__init__(model_fragments, inner_optimizer, outer_optimizer, sync_every, fragments, fragment_sync_delay,
                         fragment_update_alpha, 0, wire_format, comm)  # fmt: skip
