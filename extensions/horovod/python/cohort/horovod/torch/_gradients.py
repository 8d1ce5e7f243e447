"""Reduces parameters' gradients over ranks: each as soon as backward has computed it, all by the end of `finish`."""

from __future__ import annotations

import gc
import json
import time
import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Type, Union

import cohort
import torch
from cohort import _core
from cohort.horovod.claims import claimed
from cohort.horovod.process_sets import ProcessSet
from cohort.horovod.operations import Average, Max, Sum
from cohort.nn._non_finite import NonFiniteElement, error_of, first_non_finite
from cohort.errors import InvalidArgument, Mismatch
from cohort.horovod.torch import _collectives as start
from cohort.horovod.torch import _handles
from cohort.horovod.torch._comparison import Comparison
from cohort.horovod.torch._handles import synchronize
from cohort.horovod.torch._places import Places
from cohort.horovod.torch.compression import Compressor, NoneCompressor
from torch import Tensor

_PATIENCE = 1.0  # seconds
_DESCRIPTION_BYTES = 4096  # more than enough for the first value that is not finite


# The last reducer that was attached to a parameter, by its id. (Reducers keep their parameters alive.)
_reduced_by: "weakref.WeakValueDictionary[int, Reducer]" = weakref.WeakValueDictionary()


def on_gradient(parameter: Tensor, call: Callable[[], None]) -> Callable[[], None]:
    """Calls `call` whenever backward has added to the parameter's gradient. Returns a function that stops this."""
    if hasattr(parameter, "register_post_accumulate_grad_hook"):
        removable = parameter.register_post_accumulate_grad_hook(lambda _: call())
        return removable.remove
    # torch before 2.1: the node that adds to the gradient lives only while something refers to it.
    with torch.enable_grad():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    removable = node.register_hook(lambda *_: call())
    held = [node]

    def remove() -> None:
        removable.remove()
        held.clear()

    return remove


def _is_zero(gradient: Tensor) -> bool:
    values = gradient if gradient.layout is torch.strided else gradient.coalesce().values()
    return not bool(values.any())


class Reducer:
    """The gradients of some named parameters. Used from one thread at a time: the one that calls backward."""

    def __init__(self, names: Sequence[Tuple[str, Tensor]], compression: Union[Type[Compressor], Compressor],
                 passes: int, op: int, predivide: float, groups: List[List[Tensor]], sparse_as_dense: bool,
                 process_set: ProcessSet, non_finite: str = "ignore",
                 average_by: str = "ranks") -> None:  # fmt: skip
        self.names: Dict[Tensor, str] = {parameter: name for name, parameter in names}
        # Names under which ranks reduce them; not `names`, which another optimizer's parameters may share.
        self._meet: Dict[Tensor, str] = {parameter: claimed(name, parameter, process_set) for name, parameter in names}
        self.passes = passes
        self._compression = compression
        self._op = op
        self._scales = (1.0 / predivide, predivide) if op == Average else (1.0, 1.0)
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        # Compressed gradients are reduced in the compressor's memory.
        kind = compression if isinstance(compression, type) else type(compression)
        plain = kind.compress is NoneCompressor.compress
        self._wire_format: Optional[str] = getattr(compression, "wire_format", None)
        self._places = Places(process_set) if plain else None
        self._groups = {parameter: group for group in groups for parameter in group}
        self.attached = False
        self.synchronized = False  # the program has synchronized since the last backward
        self.scaled = False  # a GradScaler has synchronized, and has unscaled the gradients present then
        self.comparison: Optional[Comparison] = None
        self._passes_left: Dict[Tensor, int] = {}
        self._frozen: List[Tensor] = []  # parameters that did not require a gradient yet
        # The number of sparse dimensions of each gradient, 0 if dense: as agreed by all ranks since the set's world began
        # or ranks returned from `join` (`_kinds`), and of this rank's gradient in this step (`_own_kinds`).
        self._kinds: Dict[Tensor, int] = {}
        self._agreed_in: Any = None
        self._own_kinds: Dict[Tensor, int] = {}
        self._waiting: List[Callable[[], None]] = []  # each finishes a started reduction
        self._handles: List[int] = []  # the handles of these reductions
        # Parameters whose gradients are under way (True), or reduced before `finish` was called for all (False).
        self._started: Dict[Tensor, bool] = {}
        # Parameters that contribute zeros because other ranks may have a gradient: frozen ones, and members of groups that
        # no rank has used yet.
        self._lent: List[Tensor] = []
        # Their gradients, and the write count of each when its reduction began.
        self._handed: Dict[Tensor, Tuple[Optional[Tensor], Optional[int]]] = {}
        self._touched: Optional[Tensor] = None  # a parameter whose gradient was changed while being reduced
        self.raises_non_finite = non_finite == "raise"
        # The first non-finite gradient since the last step: name, shape, element.
        self._found: Optional[Tuple[str, Tuple[int, ...], NonFiniteElement]] = None
        self._steps = 0
        self._counts_samples = average_by == "samples"
        self._factor_of_step: Optional[Callable[[], float]] = None  # fraction of all samples, times ranks
        self._hooks: List[Callable[[], None]] = []  # keeps the nodes that older torch would drop

    def attach(self) -> None:
        """Reduces gradients from now on, while this object lives."""
        self.attached = True
        if any(id(parameter) in _reduced_by for parameter in self.names):
            gc.collect()  # an optimizer whose last step failed refers to itself
        for parameter in self.names:
            self._attach(parameter)

    def _attach(self, parameter: Tensor) -> None:
        if not parameter.requires_grad:
            self._frozen.append(parameter)
            return
        self._passes_left[parameter] = self.passes
        # Parameters outlive optimizers, so hooks do not keep this object alive, and two optimizers do not reduce twice.
        myself, weak = weakref.ref(self), weakref.ref(parameter)

        def call() -> None:
            reducer, one = myself(), weak()
            if reducer is None:
                remove()
            elif one is not None:
                reducer._on_gradient(one)

        remove = on_gradient(parameter, call)
        self._hooks.append(remove)
        _reduced_by[id(parameter)] = self

    def add(self, name: str, parameter: Tensor) -> None:
        """Adds one more parameter."""
        self.names[parameter] = name
        self._meet[parameter] = claimed(name, parameter, self._process_set)
        self._attach(parameter)

    def _attach_thawed(self) -> None:
        """Adds parameters that require a gradient only now."""
        if any(parameter.requires_grad for parameter in self._frozen):
            frozen, self._frozen = self._frozen, []
            for parameter in frozen:
                self._attach(parameter)

    def name_for(self, what: str) -> str:
        """Returns a name for an operation of this optimizer's own."""
        return f"cohort.{what}.{next(iter(self._meet.values()), '')}"

    def pending(self) -> bool:
        """Returns True if gradients are under way."""
        return bool(self._waiting)

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        self._passes_left = dict.fromkeys(self._passes_left, passes)

    def set_sample_count(self, count: int) -> None:
        """Sets this rank's number of samples in the next step. The sum over ranks is computed while forward runs."""
        if not self._counts_samples:
            raise ValueError("set_sample_count: this optimizer averages by ranks -- give average_by='samples'")
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"set_sample_count({count!r}): a number from 0 is wanted")
        if self._factor_of_step is not None:
            raise ValueError("set_sample_count: it was called for this step -- once before each backward(), then step()")
        if not self.attached:  # alone, or not in the process set
            return
        total = torch.tensor([count], dtype=torch.float64)
        handle = start.allreduce_async_(total, None, self.name_for("samples"), Sum, process_set=self._process_set)
        factor: List[float] = []

        def wait() -> float:
            if not factor:
                samples = float(synchronize(handle))
                factor.append(count * (self._process_set.size() or 1) / samples if samples else 0.0)
            return factor[0]

        self._factor_of_step = wait

    def _weigh(self, gradient: Tensor) -> None:
        if not self._counts_samples:
            return
        if self._factor_of_step is None:
            raise ValueError("average_by='samples': call optimizer.set_sample_count(n) before backward() and step()")
        values = gradient.detach() if gradient.layout is torch.strided else gradient.detach()._values()
        factor = self._factor_of_step()
        if factor == 0:
            values.zero_()  # any values
        elif factor != 1:
            values.mul_(factor)

    def _on_gradient(self, parameter: Tensor) -> None:
        if _reduced_by.setdefault(id(parameter), self) is not self:  # the later one's hook comes after this one's
            raise InvalidArgument(
                f"'{self.names[parameter]}' is a parameter of two DistributedOptimizers, and both would reduce its gradient -- "
                "give it to one of them (which may have several param_groups); an earlier optimizer that is not used any more "
                "has to be gone: delete it, and what refers to it"
            )
        self.synchronized = self.scaled = False
        left = self._passes_left[parameter]
        if left <= 0:
            self._hand_over(parameter)  # so `synchronize`, as advised, does not refuse this again
            raise AssertionError(
                f"the gradient of '{self.names[parameter]}' was computed more than {self.passes} times before step() or "
                "synchronize() -- if that is wanted, give backward_passes_per_step; where one of these was of a loss that "
                "another optimizer steps for (a GAN's), call this optimizer's synchronize() and zero_grad() after it"
            )
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise AssertionError("backward(create_graph=True): gradients that are reduced in place have none of their own")
        self._passes_left[parameter] = left - 1
        if left > 1:
            return
        group = self._groups.get(parameter)
        if group is not None:
            if all(self._passes_left[other] == 0 for other in group):
                self._start_group(group)
        elif self._sparse_as_dense or parameter.grad is None or parameter.grad.layout is torch.strided:
            self._start(parameter)
        elif parameter in self._agreed_kinds():
            self._start(parameter)
        # Otherwise it waits for `finish`, because another rank's gradient may be dense.

    # --- starting ---

    def _start(self, parameter: Tensor) -> None:
        self._started[parameter] = True
        gradient = self._gradient(parameter)
        self._weigh(gradient)
        self._hand_over(parameter)
        name = self._meet[parameter]
        if gradient.layout is torch.sparse_coo:
            self._look(parameter, gradient._values(), gradient)
            wait = start.sparse_allreduce_async(gradient, name, self._op, self._process_set)
            self._handles.append(wait.handle)  # type: ignore[attr-defined]
            self._waiting.append(lambda: self._put_sparse(parameter, wait()))
            return
        sent, context = self._compression.compress(gradient)
        self._look(parameter, sent, gradient)
        output = self._output(parameter, sent)
        if output is None:
            handle = start.allreduce_async_(sent, None, name, self._op, *self._scales, self._process_set,
                                            wire_format=self._wire_format)  # fmt: skip
        else:
            handle = start.allreduce_async_to(sent, output, name, self._op, *self._scales, self._process_set,
                                              self._wire_format)  # fmt: skip
        self._handles.append(handle)
        self._waiting.append(lambda: self._put(parameter, synchronize(handle), context, None if output is None else sent))

    def _start_group(self, group: List[Tensor]) -> None:
        for parameter in group:
            self._started[parameter] = True
        # Gradients that all ranks reduce together have to be of one kind on all ranks: dense.
        gradients = [self._gradient(parameter, densify=True) for parameter in group]
        for gradient in gradients:
            self._weigh(gradient)
        for parameter in group:
            self._hand_over(parameter)
        compressed = [self._compression.compress(gradient) for gradient in gradients]
        for parameter, gradient, (one, _) in zip(group, gradients, compressed):
            self._look(parameter, one, gradient)
        name = self._meet[group[0]]
        sent = [one for one, _ in compressed]
        outputs = [self._output(parameter, one) for parameter, one in zip(group, sent)]
        handle = start.grouped_allreduce_async_to(sent, outputs, name, self._op, *self._scales, self._process_set,
                                                  self._wire_format)  # fmt: skip
        self._handles.append(handle)

        def finish() -> None:
            for parameter, result, output, (one, context) in zip(group, synchronize(handle), outputs, compressed):
                self._put(parameter, result, context, None if output is None else one)

        self._waiting.append(finish)

    def _look(self, parameter: Tensor, sent: Tensor, gradient: Tensor) -> None:
        """Searches `sent` for the first value that is not finite."""
        if not self.raises_non_finite or self._found is not None:
            return
        if sent.is_cuda:  # the host receives only the tensors that it has to search
            if bool(torch.isfinite(sent).all()):
                return
            sent, gradient = sent.cpu(), gradient.cpu()
        if first_non_finite(sent) is None:
            return
        # A value that compression has made infinite is reported as before compression.
        plain = gradient.detach().to_dense() if gradient.layout is not torch.strided else gradient.detach()
        element = first_non_finite(plain)
        if element is None:
            infinite = first_non_finite(sent)
            assert infinite is not None
            index = infinite.index
            value = float(plain.reshape(-1)[index]) if sent.shape == plain.shape else infinite.value
            element = NonFiniteElement(index, infinite.position, value)
        self._found = (self.names[parameter], tuple(parameter.shape), element)

    def _raise_if_not_finite(self) -> None:
        """Raises NonFiniteError on all ranks if any rank found a value; it names the value of the lowest such rank."""
        found, self._found = self._found, None
        step, self._steps = self._steps, self._steps + 1
        ranks = torch.zeros(self._process_set.size() or 1, dtype=torch.int64)
        mine = self._process_set.rank()
        ranks[mine] = 0 if found is None else 1
        start.allreduce_(ranks, None, self.name_for("non_finite"), Sum, process_set=self._process_set)
        if not ranks.any():
            return
        first = int(ranks.nonzero()[0])
        root = self._process_set.ranks[first] if self._process_set.ranks else first
        room = torch.zeros(_DESCRIPTION_BYTES, dtype=torch.uint8)
        if first == mine and found is not None:
            name, shape, element = found
            of_names = cohort.world().host()[-100:], name[-400:]  # the ends of very long names
            text = json.dumps([*of_names, shape, element.index, element.position, element.value]).encode()
            room[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        call = start.call_of("broadcast", self.name_for("non_finite.first"), self._process_set, root=root, needs_all_ranks=False)
        start.run(call, [room], in_place=True)
        for parameter in self.names:
            parameter.grad = None
        self.renew()
        host, name, shape, index, position, value = json.loads(bytes(room.tolist()).rstrip(b"\0"))
        said = _core.non_finite_text(root, host, name, shape, index, value, step)
        error = error_of(said, root, host, name, index, tuple(position), value, step)
        error.operation = "DistributedOptimizer"
        raise error

    def _agreed_kinds(self) -> Dict[Tensor, int]:
        if self._agreed_in is not self._process_set._counters:
            self._agreed_in = self._process_set._counters  # other ranks may be new, and not have agreed
            self._kinds.clear()
        return self._kinds

    def _agree_on_kinds(self) -> None:
        """Agrees whether gradients are sparse or dense, for parameters that had no gradient on any rank yet: one small
        reduction.

        If ranks differ, all reduce dense gradients. Raises Mismatch, on all ranks, if they train different parameters.
        """
        kinds = self._agreed_kinds()
        # All parameters at first, because ranks would wait in vain for parameters that only they train.
        unknown = [one for one in (self._passes_left if kinds else self.names) if one not in kinds]
        if not unknown:
            return
        # By row: dense, dimensions of sparse ones, trained, not trained.
        seen = torch.zeros(4, len(unknown), dtype=torch.uint8)
        for i, parameter in enumerate(unknown):
            seen[2 if parameter in self._passes_left else 3, i] = 1
            if parameter.grad is not None:
                dims = 0 if parameter.grad.layout is torch.strided else parameter.grad.sparse_dim()
                seen[1 if dims else 0, i] = dims or 1
        start.allreduce_(seen, None, f"cohort.kinds.{self._meet[unknown[0]]}", Max, process_set=self._process_set)
        for parameter, dense, dims, trained, frozen in zip(unknown, *seen.tolist()):
            if trained and frozen:
                raise Mismatch(
                    f"'{self.names[parameter]}' requires a gradient on some ranks only (here: {parameter in self._passes_left}) "
                    "-- set requires_grad alike on all of them"
                )
            if trained and (dense or dims):
                kinds[parameter] = 0 if dense else dims

    def _gradient(self, parameter: Tensor, densify: bool = False) -> Tensor:
        """Returns the gradient to reduce; zeros if backward has not reached it, since on other ranks it may have."""
        gradient = parameter.grad
        agreed = self._agreed_kinds().get(parameter, 0)
        kind = 0 if densify or self._sparse_as_dense else agreed
        if gradient is None:
            if not parameter.requires_grad or parameter not in self._agreed_kinds():
                self._lent.append(parameter)
            self._own_kinds[parameter] = agreed
            if kind:
                indices = torch.empty(kind, 0, dtype=torch.int64, device=parameter.device)
                values = parameter.detach().new_empty(0, *parameter.shape[kind:])
                return torch.sparse_coo_tensor(indices, values, parameter.shape, **start.UNCHECKED)
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            return parameter.grad
        if gradient.layout is torch.strided:
            self._own_kinds[parameter] = 0
            return gradient.detach().to_sparse(kind) if kind else gradient
        self._own_kinds[parameter] = gradient.sparse_dim()
        if gradient.sparse_dim() == kind:
            return gradient
        return gradient.to_dense().to_sparse(kind) if kind else gradient.to_dense()  # torch 1.13's zero_() makes all dimensions sparse

    def _output(self, parameter: Tensor, sent: Tensor) -> Optional[Tensor]:
        """Returns the output for the reduction of `sent`; None: reduce in place."""
        return None if self._places is None else self._places.output_for(parameter, sent, self._passes_left)

    def _put(self, parameter: Tensor, result: Tensor, context: Any, sent: Optional[Tensor]) -> None:
        """Stores a result. sent: the reduction's input, if not reduced in place."""
        result = self._compression.decompress(result, context)
        gradient = parameter.grad
        if self._own_kinds[parameter]:  # optimizers for sparse gradients accept no others
            parameter.grad = result.to(parameter.dtype).to_sparse(self._own_kinds[parameter])
            return
        if sent is not None and gradient is sent:
            sent.data = result  # changes it for all references, as if reduced in place
        elif gradient is None or gradient.layout is not torch.strided:
            parameter.grad = result.to(parameter.dtype)
        elif gradient is not result and gradient.data_ptr() != result.data_ptr():
            gradient.detach().copy_(result)

    def _put_sparse(self, parameter: Tensor, result: Tensor) -> None:
        if self._own_kinds[parameter]:
            parameter.grad = result
        else:
            parameter.grad.detach().copy_(result.to_dense())

    # --- gradients that are changed meanwhile ---

    def _hand_over(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        self._handed[parameter] = (gradient, None if gradient is None else _writes_to(gradient))

    def _find_touched(self, under_way: bool) -> Optional[Tensor]:
        """Returns the first parameter whose gradient, being reduced or reduced already, is no longer the one whose
        reduction was started; None if there is none."""
        seen: Dict[int, int] = {}
        for gradient, _ in self._handed.values():
            seen[id(gradient)] = seen.get(id(gradient), 0) + 1
        for parameter, (gradient, writes) in self._handed.items():
            if self._started.get(parameter) is not under_way:
                continue
            if parameter.grad is not gradient:
                return parameter
            # A gradient shared by two parameters is added to by the other's backward.
            if gradient is not None and writes is not None and gradient._version != writes and seen[id(gradient)] == 1:
                return parameter
        return None

    # --- finishing ---

    def finish(self, complete: bool = True) -> None:
        """Waits until all gradients are reduced. `complete`: also those of parameters that backward has not reached.

        Raises HorovodInternalError if a reduction failed, after all have ended; InvalidArgument if a gradient was
        changed while it was being reduced.
        """
        self._touched = self._touched or self._find_touched(under_way=True)
        if complete and self.attached:
            early = self._find_touched(under_way=False)
            # If more gradients are still to come, a program that read the gradients before this has not seen all of
            # them.
            if self._start_rest() and self._touched is None:
                self._touched = early
        waiting, self._waiting = self._waiting, []
        self._handles.clear()
        failed: Optional[Exception] = None
        for i, wait in enumerate(waiting):
            try:
                wait()
            except KeyboardInterrupt:
                self._waiting = waiting[i:]
                raise
            except Exception as error:
                failed = failed or error
        for parameter in self._passes_left if complete else self._started:
            self._passes_left[parameter] = self.passes
        self._started = {} if complete else dict.fromkeys(self._started, False)
        for parameter in self._lent:
            # Not zero if another rank used the layer before it was frozen. Otherwise an optimizer has nothing to step.
            if parameter.grad is not None and _is_zero(parameter.grad):
                parameter.grad = None
        self._lent.clear()
        touched = self._touched
        if complete:
            self._factor_of_step = self._touched = None
            self._handed.clear()
        else:
            for parameter in self._started:
                self._hand_over(parameter)
        if failed is not None:
            raise failed
        if complete and self.raises_non_finite and self.attached:
            self._raise_if_not_finite()
        if complete and self.comparison is not None:
            self.comparison.step()
        if complete and touched is not None:
            raise InvalidArgument(
                f"the gradient of '{self.names[touched]}' was changed between backward() and step(), before those of all "
                "ranks were there: the average is not that of what the program computes -- call optimizer.synchronize() before clipping "
                "(or whatever else looks at gradients), and step within optimizer.skip_synchronize()"
            )

    def _start_rest(self) -> bool:
        """Starts the remaining reductions. Returns True if there were any."""
        self._attach_thawed()
        self._agree_on_kinds()
        found = False
        for parameter in self._passes_left:
            if parameter in self._started:
                continue
            group = self._groups.get(parameter)
            if not any(one in self._kinds for one in group or [parameter]):
                continue  # no rank has ever had a gradient
            if group is not None:
                self._start_group(group)
            else:
                self._start(parameter)
            found = True
        return found

    def renew(self) -> None:
        """Called when the gradients have been cleared."""
        self.synchronized = self.scaled = False
        self._started.clear()
        self._handed.clear()
        self._touched = None
        self._attach_thawed()

    def forget(self) -> None:
        """Starts over, without regard to operations under way.

        Waits only briefly for these: after a failure other ranks may never contribute.
        """
        until = time.monotonic() + _PATIENCE
        while not self.quiet() and time.monotonic() < until:
            time.sleep(0.001)
        if self.quiet():
            try:
                self.finish(complete=False)
            except Exception:
                pass
        for parameter in self._lent:
            parameter.grad = None
        self._lent.clear()
        self._waiting.clear()
        self._started.clear()
        self._handles.clear()
        self._handed.clear()
        self._found = self._touched = None
        self._factor_of_step = None
        self.synchronized = self.scaled = False
        self._passes_left = dict.fromkeys(self._passes_left, self.passes)

    def quiet(self) -> bool:
        """Returns True if `finish(complete=False)` would not have to wait."""
        return all(_handles.is_done(handle) for handle in self._handles)


def _writes_to(gradient: Tensor) -> Optional[int]:
    """Returns the number of writes to a gradient; None if it includes writes to others, as for views of one tensor."""
    if gradient.is_inference():
        return None
    if gradient.layout is not torch.strided:
        return gradient._version
    storage = gradient.untyped_storage() if hasattr(gradient, "untyped_storage") else gradient.storage()
    whole = storage.nbytes() == gradient.numel() * gradient.element_size()
    return gradient._version if whole and not gradient._is_view() else None
