"""The journey of a gradient: autograd makes it, a full bucket of them is reduced while backward goes on, and the end of
backward waits for the rest.

The design is that of the C++ reducer. A hook before AccumulateGrad, where `.grad` is None, copies a small gradient to
its place in the bucket and keeps a large one for the reduction to read, and hands AccumulateGrad nothing; where there is
a gradient already, AccumulateGrad adds to it in place. One thread per rank calls it; autograd calls its hooks on that
thread too (CPU).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from cohort import Communicator, Work
from cohort._core import count_step
from cohort.errors import Aborted, Error, InvalidArgument
from cohort.nn._bucket import Bucket, plan_buckets
from cohort.nn._forwards import ForwardRecord, accumulates, takes_part
from cohort.nn._gradient_watch import GradientWatch
from cohort.nn._tensors import tensors_in
from cohort.nn.options import BucketSlot, DistributedDataParallelOptions, ReducerStats

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
        self.bucket = 0
        self.position = 0
        self.place = tensor  # its gradient's, once there are buckets
        self.unread: torch.Tensor | None = None  # its gradient, if the reduction reads it instead of what lies at its place
        self.received = False  # in this backward: a gradient has come
        self.ready = False  # in this backward: nothing more will come
        self.used = False  # since the last reduction
        self.kept: torch.Tensor | None = None  # the gradient that it had, if nobody uses it


def _assign(place: torch.Tensor, value: torch.Tensor) -> None:
    # Sparse tensors cannot be copied into dense ones, only added.
    if value.layout == torch.strided:
        place.copy_(value)
    else:
        place.zero_().add_(value)


class Reducer:
    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[tuple[str, torch.Tensor]],
        options: DistributedDataParallelOptions,
    ) -> None:
        self.comm = comm
        self._options = options
        for name, tensor in parameters:
            if id(tensor) in _owners:
                raise InvalidArgument(
                    f"parameter '{name}' is already wrapped by a DistributedDataParallel -- use that one, or delete it "
                    "first"
                )
        self._parameters = [_Parameter(name, tensor) for name, tensor in parameters]
        self._tensors = [parameter.tensor for parameter in self._parameters]
        self._nodes = [parameter.node for parameter in self._parameters]
        self._buckets: list[Bucket] = []
        self._plan: list[list[int]] = []
        self._order: list[int] = []  # that the plan was made from
        self._arrivals: list[int] = []  # parameters in the order of their gradients in the first synchronising backward
        self._reordered = False
        self.progress = 0  # synchronised steps of the world, as far as this rank has taken part or been told
        self.no_sync_depth = 0
        self._records: list[weakref.ref[ForwardRecord]] = []  # a pass whose graph is gone does not count
        self._unhooked: list[ForwardRecord] = []
        self._accumulated_samples = 0  # of passes in no_sync
        self._in_backward = False
        self._pass: Callable[[], object] = _none  # the backward under way; None while _in_backward: it failed
        self._sync = False  # this backward reduces
        self._taking_part: list[ForwardRecord] = []  # in this backward,
        self._undecided: list[ForwardRecord] = []  # and what may turn out to
        self._led = False  # by a forward: this backward
        self._discard = False  # this backward has no samples: what it yields is dropped
        self._samples = 0
        self._pending: list[int] = []  # per bucket
        self._next_bucket = 0
        self._works: list[Work] = []
        self._any_samples = False
        self._watch = GradientWatch(comm, options)
        self.stats = ReducerStats()
        # Until the first backward has shown better: the last layers' gradients come first.
        self._build_buckets(list(reversed(range(len(self._parameters)))))
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
        weakref.finalize(self, _remove_all, handles)

    # -------------------------------------------------------------------------------------------- buckets

    def _build_buckets(self, order: list[int]) -> None:
        self._order = order
        plan = plan_buckets(
            self._tensors,
            order,
            first_bucket_bytes=self._options.first_bucket_bytes,
            bucket_bytes=self._options.bucket_bytes,
        )
        if plan == self._plan:
            return
        self._plan = plan
        self._buckets = [Bucket(self.comm, [self._tensors[index] for index in members]) for members in plan]
        self.stats.buckets = len(plan)
        self.stats.bucket_bytes = sum(bucket.bytes for bucket in self._buckets)
        for number, members in enumerate(plan):
            for position, index in enumerate(members):
                parameter = self._parameters[index]
                parameter.bucket, parameter.position = number, position
                parameter.place = self._buckets[number].gradients[position]
                # Values that live gradients have in their old places, or had before the model was wrapped, go on living.
                if parameter.tensor.grad is not None:
                    self._move_into_place(parameter)

    def prepare_synchronising_pass(self) -> None:
        """Collective: brings the buckets into the order in which gradients came, once."""
        self.require_whole()
        if self._reordered or self.progress == 0:
            return
        self._reordered = True
        if len(self._parameters) == 1:
            return
        # Rank 0's order holds for all (the lowest active rank's, if 0 has joined). Parameters without a gradient go last.
        seen = set(self._arrivals)
        order = self._arrivals + [i for i in reversed(range(len(self._parameters))) if i not in seen]
        message = torch.tensor(order, dtype=torch.int64)
        self.comm.broadcast(message)
        self._build_buckets(message.tolist())

    def take_plan_of(self, source: int, progress: int) -> None:
        """Collective: all ranks take over the order of `source`, whose progress was `progress`."""
        message = torch.tensor([*self._order, int(self._reordered)], dtype=torch.int64)
        self.comm.broadcast(message, root=source)
        *order, reordered = message.tolist()
        self._reordered = bool(reordered)
        self._build_buckets(order)
        self.progress = progress

    def _move_into_place(self, parameter: _Parameter) -> None:
        gradient, place = parameter.tensor.grad, parameter.place
        if gradient is place:
            return
        if not (
            gradient.layout == torch.strided
            and gradient.data_ptr() == place.data_ptr()
            and gradient.stride() == place.stride()
        ):
            with torch.no_grad():
                _assign(place, gradient.detach())
            self.stats.gradients_moved += 1
        parameter.tensor.grad = place

    def slot_of(self, name: str) -> BucketSlot:
        for parameter in self._parameters:
            if parameter.name == name:
                bucket = self._buckets[parameter.bucket]
                return BucketSlot(parameter.bucket, bucket.address, bucket.bytes, bucket.offsets[parameter.position])
        raise InvalidArgument(f"the model has no parameter '{name}' that requires a gradient")

    # -------------------------------------------------------------------------------------------- forward

    def begin_forward(self, samples: int) -> ForwardRecord:
        return ForwardRecord(samples, sync=self.no_sync_depth == 0)

    def end_forward(self, record: ForwardRecord, outputs: object) -> None:
        # The hooks keep the record alive as long as the graph lives, and say when a backward begins even if it then
        # reaches none of our parameters. A leaf would keep its hook for ever, so leaves get none.
        self_ref = weakref.ref(self)

        def on_backward(_gradient: torch.Tensor) -> None:
            reducer = self_ref()
            if reducer is not None:
                reducer._begin_backward(record, "an output")

        for output in tensors_in(outputs):
            if output.requires_grad and not output.is_leaf:
                record.hooked = True
                record.outputs.append(weakref.ref(output))
                output.register_hook(on_backward)
        self._records = [entry for entry in self._records if entry() is not None]
        if not record.hooked:
            self._unhooked = [record]
        self._records.append(weakref.ref(record))

    def _live_records(self) -> list[ForwardRecord]:
        return [record for record in (entry() for entry in self._records) if record is not None]

    # -------------------------------------------------------------------------------------------- backward

    def _begin_backward(self, record: ForwardRecord | None, origin: str) -> None:
        if record is not None and not accumulates(record, self._nodes):
            return
        if self._in_backward and self._pass() is None:
            self.require_whole()
        if self._in_backward and (record is None or not record.reduced):
            if record is not None:
                record.fired = True
                if record in self._undecided:
                    self._undecided.remove(record)
                    self._taking_part.append(record)
                    self._count_samples()
            return
        if record is not None and record.reduced:
            raise InvalidArgument(
                f"a second backward through one forward (rank {self.comm.rank()}): its gradients have been reduced -- "
                "add the losses and call backward once, or run all but the last backward in no_sync()"
            )
        live = self._live_records()
        leading = record if record is not None else live[-1] if live else None
        in_no_sync = self.no_sync_depth > 0
        if leading is None and not in_no_sync:
            raise InvalidArgument(
                f"backward reached {origin} on rank {self.comm.rank()} without a forward through "
                "DistributedDataParallel, so it would not be reduced -- call the wrapper instead of model.module(...), "
                "or do this in no_sync()"
            )
        self._sync = leading is not None and leading.sync and not in_no_sync
        # A record that is used up here may be no longer listed: its samples are those of this backward all the same.
        decided = [(entry, takes_part(entry)) for entry in live if entry is not record]
        self._taking_part = [entry for entry, does in decided if does]
        self._undecided = [entry for entry, does in decided if does is None]
        if record is not None:
            record.fired = True
            self._taking_part.append(record)
        self._led = leading is not None
        self._count_samples()
        self._start_pass()
        self._in_backward = True
        self_ref = weakref.ref(self)

        def at_end() -> None:
            reducer = self_ref()
            if reducer is not None:
                reducer._finish_backward()

        self._pass = weakref.ref(at_end)  # autograd drops it, called or not
        Variable._execution_engine.queue_callback(at_end)

    def _count_samples(self) -> None:
        # Of what has come to a parameter by now: what is undecided then is no part of its gradient.
        self._discard = self._led and sum(entry.samples for entry in self._taking_part) == 0
        self._samples = self._accumulated_samples + sum(e.samples for e in self._taking_part if not e.counted)

    def _start_pass(self) -> None:
        for parameter in self._parameters:
            parameter.received = parameter.ready = False
            parameter.unread = None
        self._pending = [len(members) for members in self._plan]
        self._next_bucket = 0
        self._watch.begin_step()

    def _before_accumulate(self, index: int, gradients: tuple) -> tuple | None:
        incoming = gradients[0]
        if incoming is None:
            return None
        parameter = self._parameters[index]
        if not self._in_backward or self._pass() is None:
            self._begin_backward(None, f"parameter '{parameter.name}'")
        if self._discard:
            return (None,)
        if parameter.ready:
            raise InvalidArgument(
                f"parameter '{parameter.name}' got a second gradient in one backward (rank {self.comm.rank()}) after it "
                "was handed to its reduction -- re-entrant backward (activation checkpointing) over shared parameters is "
                "not supported; torch.utils.checkpoint with use_reentrant=False is"
            )
        parameter.received = True
        tensor = parameter.tensor
        if tensor.grad is not None:
            self._move_into_place(parameter)
            return None
        if torch.is_grad_enabled():
            return None  # create_graph: AccumulateGrad makes it, and it is copied afterwards
        if getattr(tensor, "_post_accumulate_grad_hooks", None):
            # The user's hooks run inside AccumulateGrad, which is therefore not skipped.
            parameter.place.zero_()
            tensor.grad = parameter.place
            self.stats.gradients_written += 1
            return None
        if _HOOKS_RUN_INSIDE and tensor._backward_hooks:
            for hook in list(tensor._backward_hooks.values()):
                changed = hook(incoming)
                incoming = incoming if changed is None else changed
        if self._sync and self._buckets[parameter.bucket].can_read(parameter.position, incoming):
            parameter.unread = incoming
        else:
            _assign(parameter.place, incoming)
        tensor.grad = parameter.place
        self.stats.gradients_written += 1
        return (None,)

    def _after_accumulate(self, index: int) -> None:
        parameter = self._parameters[index]
        if not (self._in_backward and parameter.received):
            return
        self._move_into_place(parameter)  # nothing to do except under create_graph
        parameter.used = True
        if self._sync:
            if self.progress == 0:
                self._arrivals.append(index)
            self._mark_ready(parameter)

    def _mark_ready(self, parameter: _Parameter) -> None:
        parameter.ready = True
        bucket = parameter.bucket
        self._pending[bucket] -= 1
        if self._pending[bucket] == 0:
            self._tell_bucket_ready(bucket)
        # All ranks launch in the order of the plan, whatever the order in which buckets happen to fill. The weight has to
        # be known: in the end it is.
        while not self._undecided and self._next_bucket < len(self._buckets) and self._pending[self._next_bucket] == 0:
            self._launch_next()

    def _tell_bucket_ready(self, bucket: int) -> None:
        if self._options.observer is not None:
            self._options.observer(bucket, self._buckets[bucket].bytes)

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next_bucket]
        members = [self._parameters[index] for index in self._plan[self._next_bucket]]
        bucket.set_flags([member.used for member in members], self._samples > 0)
        if self._watch.on:
            # What is found is told by the flag of this bucket and all later ones: no rank needs another message as long
            # as there is nothing to tell.
            if self._samples > 0:
                self._watch.look(self._next_bucket, bucket, members)
            bucket.set_non_finite_flag(self._watch.has_found)
        self._next_bucket += 1
        options: dict[str, Any] = {"op": "average", "weight": float(self._samples), "async_op": True}
        if bucket.small.dtype == torch.float32:
            options["wire_dtype"] = self._options.wire_dtype
        for position in bucket.large:
            member = members[position]
            gradient = member.place if member.unread is None else member.unread
            # Asked for also where this rank has nothing unread: all learn the same.
            self._works.append(
                self.comm.all_reduce(gradient, member.place, check_finite=self._watch.looks_at_averages, **options)
            )
        self._works.append(self.comm.all_reduce(bucket.small, **options))

    def _complete_unused(self, parameter: _Parameter) -> None:
        # No gradient came for it in this backward. What it accumulated before still counts; a gradient that it merely
        # has is the same on all ranks, and averages to itself.
        if parameter.tensor.grad is None:
            parameter.used = False
            if self._samples > 0:
                parameter.place.zero_()
            return
        self._move_into_place(parameter)
        # The average of equal values may differ from them in the last bit: if nobody uses it, it gets these back.
        if not parameter.used:
            parameter.kept = parameter.place.clone()

    def _launch_rest(self) -> None:
        while self._next_bucket < len(self._buckets):
            for index in self._plan[self._next_bucket]:
                parameter = self._parameters[index]
                if not parameter.ready:
                    self._complete_unused(parameter)
            if self._pending[self._next_bucket] > 0:
                self._tell_bucket_ready(self._next_bucket)
            self._launch_next()

    def _wait_for_all(self) -> bool:
        """Whether all averages are finite, as far as they were looked at."""
        try:
            for work in self._works:
                work.wait()
        except Error:
            self._in_backward = False  # of a collective: the others have it, too
            raise
        finite = all(work.finite() is not False for work in self._works)
        self._works.clear()
        return finite

    def _settle(self) -> None:
        mine = self._samples > 0
        self._any_samples = mine or self._buckets[0].flags()[-1]
        flags: dict[int, list[bool]] = {}
        for parameter in self._parameters:
            if not (parameter.used and mine):
                number = parameter.bucket
                if number not in flags:
                    flags[number] = self._buckets[number].flags()
                if flags[number][parameter.position]:
                    parameter.tensor.grad = parameter.place
                elif parameter.kept is not None:
                    parameter.place.copy_(parameter.kept)
                parameter.kept = None
            parameter.used = parameter.ready = parameter.received = False

    def _finish_backward(self) -> None:
        begin = time.perf_counter()
        self._pass = _none  # an exception that somebody holds may hold the callback
        self._undecided.clear()
        self._taking_part.clear()
        for record in self._live_records():
            if record.hooked and not record.fired:
                continue
            if not record.counted:
                self._accumulated_samples += record.samples
            record.counted = True
            record.reduced = self._sync
            record.fired = False
            self._records = [entry for entry in self._records if entry() is not record]
        self._unhooked.clear()
        if not self._sync:
            self._in_backward = False
            return
        # From here until it has ended well this rank owes the others a reduction: `require_whole` says so.
        self._in_backward = True
        self._accumulated_samples = 0
        with torch.no_grad():
            try:
                self._launch_rest()
                averages_finite = self._wait_for_all()
            except BaseException:
                self._works.clear()  # the module keeps those under way, with their memory, until they have ended
                for parameter in self._parameters:
                    parameter.kept = parameter.unread = None
                    parameter.used = parameter.ready = parameter.received = False
                raise
            may_raise = not averages_finite or (self._watch.on and self._buckets[-1].non_finite_flag())
            if not averages_finite and self._samples > 0:
                self._watch.look_again(self._buckets, lambda number, at: self._parameters[self._plan[number][at]])
            for parameter in self._parameters:
                parameter.unread = None
            self._settle()
        self._in_backward = False
        self.stats.steps += 1
        count_step()
        self.progress += 1
        exposed = time.perf_counter() - begin
        self.stats.exposed_communication_seconds = exposed
        self.stats.exposed_communication_seconds_total += exposed
        if may_raise:  # all ranks know that, so all come here
            error = self._watch.error(self.progress - 1)
            if error is not None:
                self.stats.non_finite_steps += 1
                self.zero_grad()
                raise error

    def reduce_without_backward(self) -> bool:
        """Takes part with weight 0, or with what was accumulated. False if no rank had samples."""
        self._sync = self._discard = True
        self._samples = self._accumulated_samples
        self._start_pass()
        self._finish_backward()
        return self._any_samples

    def require_whole(self) -> None:
        """Raises Aborted if a synchronising backward began and did not end."""
        if not self._in_backward:
            return
        if not self._sync:
            self._in_backward = False  # a failed local pass concerns nobody else
            return
        rank = self.comm.rank()
        error = Aborted(
            f"DistributedDataParallel: rank {rank} is out of step with the others -- its last backward ended in an "
            "exception before its reductions were complete -- abort the communicator and form a new one, or end this "
            "process"
        )
        error.rank, error.host, error.operation = rank, self.comm.host(), "DistributedDataParallel"
        raise error

    def zero_grad(self) -> None:
        for tensor in self._tensors:
            tensor.grad = None


def _none() -> None:
    pass


def _remove_all(handles: list) -> None:
    for handle in handles:
        handle.remove()
