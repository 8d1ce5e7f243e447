"""The process group: torch.distributed's operations on a Communicator of Cohort's.

Results are delivered into the tensors that the caller gave, wherever they lie; contiguous ones are used without a copy.
What a rank does wrong is refused on all of them (cohort.Mismatch), and the group stays usable.
"""

from __future__ import annotations

import datetime
import itertools
from typing import Any, Optional, Sequence

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import cohort
from cohort.distributed import completion, environment, sparse
from cohort.distributed.messages import Messages
from cohort.distributed.reductions import reduction_of
from cohort.distributed.tensors import Pieces, Written, as_moved, read
from cohort.distributed.work import Work, for_caller

_numbers = itertools.count()
# What is unfinished when a group is destroyed may go on for so long.
_GRACE_SECONDS = 30.0


def _only(tensors: Sequence[Any], operation: str) -> Any:
    if len(tensors) != 1:
        raise cohort.InvalidArgument(f"{operation}: takes one tensor of each rank, not {len(tensors)}")
    return tensors[0]


class ProcessGroup(Messages, dist.ProcessGroup):
    """One rank's handle of a group. Use it through torch.distributed."""

    def __init__(self, store: Any, communicator: cohort.Communicator, is_world: bool = False) -> None:
        dist.ProcessGroup.__init__(self, communicator.rank(), communicator.size())
        self.communicator = communicator
        self._store = store
        self._rank, self._size = communicator.rank(), communicator.size()
        self._timeout: Optional[float] = None
        self._number = next(_numbers)
        self._line = (self._number, "collectives")
        self._started = 0
        self._name, self._description = "", "undefined"
        self._coalesced: Optional[list[Work]] = None
        self._beside: Any = None
        self._beside_devices: list[str] = []
        self._filled = environment.fill(communicator) if is_world else []

    # --- who it is ---

    def getBackendName(self) -> str:  # noqa: N802 -- torch's name
        return "cohort"

    # C++ keeps the name with the backends that a group has, and this one has none.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout.total_seconds()

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *map(torch.device, self._beside_devices)]

    def _get_backend(self, device: Any) -> Any:
        kind = torch.device(device).type
        return self._beside._get_backend(torch.device(device)) if kind in self._beside_devices else self

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_tensor_alloc = False
    supports_time_estimate = False

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._started

    def set_beside(self, container: Any, devices: list[str]) -> None:
        """Backends of other devices (beside.py)."""
        self._beside, self._beside_devices = container, devices

    # --- how operations begin ---

    def _elsewhere(self, tensor: Any) -> Any:
        """The group of another device's backend, if the tensor is for it."""
        if self._beside is not None and isinstance(tensor, torch.Tensor) and tensor.device.type in self._beside_devices:
            return self._beside
        return None

    def _limit(self, opts: Any) -> Optional[float]:
        """Of an operation, in seconds; None: the group's own."""
        timeout = getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if timeout is not None else 0
        return seconds if seconds > 0 else self._timeout

    def _work(self, name: str, core: Any, outputs: Sequence[Any], written: Sequence[Any] = (), line: Any = None, source: int = -1) -> Work:
        self._started += 1

        def deliver() -> None:
            for one in written:
                one.deliver()

        work = Work(name, line or self._line, (core,), outputs, deliver, source)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, *_: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, *_: Any) -> Work:
        works, self._coalesced = self._coalesced or [], None

        def deliver() -> None:
            for work in works:
                work.wait()

        core = [one for work in works for one in work._core]
        return Work("coalesced", (self._number, "coalesced"), core, [t for work in works for t in work._outputs], deliver)

    # --- reductions ---

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceOptions()
        other = self._elsewhere(tensors[0])
        if other is not None:
            return other.allreduce(tensors, opts)
        if tensors[0].layout != torch.strided:
            return for_caller(sparse.all_reduce(self, _only(tensors, "all_reduce"), opts))
        return for_caller(self._all_reduce(tensors, opts))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceCoalescedOptions()
        other = self._elsewhere(tensors[0])
        if other is not None:
            return other.allreduce_coalesced(tensors, opts)
        return for_caller(self._all_reduce(tensors, opts))

    def _all_reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        if len(tensors) == 1:
            written = [Written(tensors[0], "all_reduce", reads=True)]
            memory = written[0].memory
        else:
            written = [Written(tensor, "all_reduce", reads=True) for tensor in tensors]
            memory = [one.memory for one in written]
        reductions = {reduction_of(opts.reduceOp, tensor.dtype, "all_reduce") for tensor in tensors}
        op, prescale = reductions.pop()
        core = self.communicator.all_reduce(memory, op=op, prescale=prescale, timeout=self._limit(opts), async_op=True)
        return self._work("all_reduce", core, tensors, written)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        tensor = _only(tensors, "reduce")
        other = self._elsewhere(tensor)
        if other is not None:
            return other.reduce(tensors, opts)
        op, prescale = reduction_of(opts.reduceOp, tensor.dtype, "reduce")
        if self._rank == opts.rootRank:
            written = [Written(tensor, "reduce", reads=True)]
            memory = written[0].memory
        else:
            written, memory = [], read(tensor, "reduce")
        core = self.communicator.reduce(
            memory, root=opts.rootRank, op=op, prescale=prescale, timeout=self._limit(opts), async_op=True
        )
        return for_caller(self._work("reduce", core, tensors, written))

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        output = _only(outputs, "reduce_scatter")
        other = self._elsewhere(output)
        if other is not None:
            return other.reduce_scatter(outputs, inputs, opts)
        parts = Pieces(self._list(inputs, "reduce_scatter"), "reduce_scatter", reads=True)
        written = Written(output, "reduce_scatter", reads=False)
        op, prescale = reduction_of(opts.reduceOp, output.dtype, "reduce_scatter")
        how = {"op": op, "prescale": prescale, "timeout": self._limit(opts), "async_op": True}
        if parts.are_equal:
            core = self.communicator.reduce_scatter(parts.memory, written.memory, **how)
        else:
            core = self.communicator.reduce_scatter_v(parts.memory, written.memory, parts.counts, **how)
        return for_caller(self._work("reduce_scatter", core, outputs, [written]))

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        other = self._elsewhere(output)
        if other is not None:
            return other._reduce_scatter_base(output, input, opts)
        return for_caller(self._reduce_scatter([output], [input], opts))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        other = self._elsewhere(output)
        if other is not None:
            return other._reduce_scatter_base(output, input, opts)
        return for_caller(self._reduce_scatter([output], [input], opts))

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        other = self._elsewhere(outputs[0])
        if other is not None:
            return other.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return for_caller(self._reduce_scatter(outputs, inputs, opts))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        written = [Written(output, "reduce_scatter", reads=False) for output in outputs]
        sources = [read(input, "reduce_scatter") for input in inputs]
        op, prescale = {reduction_of(opts.reduceOp, output.dtype, "reduce_scatter") for output in outputs}.pop()
        one = len(outputs) == len(inputs) == 1
        core = self.communicator.reduce_scatter(
            sources[0] if one else sources,
            written[0].memory if one else [output.memory for output in written],
            op=op,
            prescale=prescale,
            timeout=self._limit(opts),
            async_op=True,
        )
        return self._work("reduce_scatter", core, outputs, written)

    # --- moving ---

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        other = self._elsewhere(tensors[0])
        if other is not None:
            return other.broadcast(tensors, opts)
        is_root = self._rank == opts.rootRank
        if is_root:
            written: list[Any] = []
            memory = [as_moved(read(tensor, "broadcast")) for tensor in tensors]
        else:
            written = [Written(tensor, "broadcast", reads=False) for tensor in tensors]
            memory = [as_moved(one.memory) for one in written]
        core = self.communicator.broadcast(
            memory[0] if len(memory) == 1 else memory, root=opts.rootRank, timeout=self._limit(opts), async_op=True
        )
        return for_caller(self._work("broadcast", core, tensors, written))

    def _list(self, lists: list[list[torch.Tensor]], operation: str) -> list[torch.Tensor]:
        tensors = _only(lists, operation)
        if len(tensors) != self._size:
            raise cohort.InvalidArgument(
                f"{operation}: the list has {len(tensors)} tensors, and the group {self._size} ranks -- give one for each"
            )
        return tensors

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        input = _only(inputs, "all_gather")
        other = self._elsewhere(input)
        if other is not None:
            return other.allgather(outputs, inputs, *([opts] if opts is not None else []))
        pieces = Pieces(self._list(outputs, "all_gather"), "all_gather", reads=False)
        source, memory = as_moved(read(input, "all_gather")), as_moved(pieces.memory)
        limit = self._limit(opts)
        if pieces.are_equal:
            core = self.communicator.all_gather(source, memory, timeout=limit, async_op=True)
        else:
            core = self.communicator.all_gather_v(
                source, memory, _in_elements(pieces.counts, pieces.memory, memory), timeout=limit, async_op=True
            )
        return for_caller(self._work("all_gather", core, pieces.tensors, [pieces]))

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        other = self._elsewhere(output)
        if other is not None:
            return other._allgather_base(output, input, *([opts] if opts is not None else []))
        return for_caller(self._all_gather([output], [input], opts))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        other = self._elsewhere(output)
        if other is not None:
            return other._allgather_base(output, input, *([opts] if opts is not None else []))
        return for_caller(self._all_gather([output], [input], opts))

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        other = self._elsewhere(outputs[0])
        if other is not None:
            return other.allgather_into_tensor_coalesced(outputs, inputs, *([opts] if opts is not None else []))
        return for_caller(self._all_gather(outputs, inputs, opts))

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        written = [Written(output, "all_gather", reads=False) for output in outputs]
        sources = [as_moved(read(input, "all_gather")) for input in inputs]
        memory = [as_moved(one.memory) for one in written]
        one = len(sources) == len(memory) == 1
        core = self.communicator.all_gather(
            sources[0] if one else sources, memory[0] if one else memory, timeout=self._limit(opts), async_op=True
        )
        return self._work("all_gather", core, outputs, written)

    def allgather_coalesced(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        """outputs[r][i] receives rank r's inputs[i]."""
        if len(outputs) != self._size or any(len(one) != len(inputs) for one in outputs):
            raise cohort.InvalidArgument(
                f"all_gather_coalesced: {len(inputs)} tensors of each of {self._size} ranks need as many lists as ranks, each of "
                f"that length, not {[len(one) for one in outputs]}"
            )
        pieces = [Pieces([of_rank[i] for of_rank in outputs], "all_gather", reads=False) for i in range(len(inputs))]
        sources = [as_moved(read(input, "all_gather")) for input in inputs]
        core = self.communicator.all_gather(
            sources, [as_moved(one.memory) for one in pieces], timeout=self._limit(opts), async_op=True
        )
        return for_caller(self._work("all_gather_coalesced", core, [t for one in outputs for t in one], pieces))

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Any:
        input = _only(inputs, "gather")
        other = self._elsewhere(input)
        if other is not None:
            return other.gather(outputs, inputs, opts)
        source, limit, root = as_moved(read(input, "gather")), self._limit(opts), opts.rootRank
        if self._rank != root:
            core = self.communicator.gather(source, root=root, timeout=limit, async_op=True)
            return for_caller(self._work("gather", core, []))
        pieces = Pieces(self._list(outputs, "gather"), "gather", reads=False)
        core = self.communicator.gather(source, as_moved(pieces.memory), root=root, timeout=limit, async_op=True)
        return for_caller(self._work("gather", core, pieces.tensors, [pieces]))

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Any:
        output = _only(outputs, "scatter")
        other = self._elsewhere(output)
        if other is not None:
            return other.scatter(outputs, inputs, opts)
        written = Written(output, "scatter", reads=False)
        memory, root = as_moved(written.memory), opts.rootRank
        parts = None
        if self._rank == root:
            parts = as_moved(Pieces(self._list(inputs, "scatter"), "scatter", reads=True).memory)
        core = self.communicator.scatter(parts, memory, root=root, timeout=self._limit(opts), async_op=True)
        return for_caller(self._work("scatter", core, outputs, [written]))

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Optional[list[int]] = None,
        input_splits: Optional[list[int]] = None,
        opts: Any = None,
    ) -> Any:
        other = self._elsewhere(output)
        if other is not None:
            return other.alltoall_base(output, input, output_splits or [], input_splits or [], opts or c10d.AllToAllOptions())
        written = Written(output, "all_to_all", reads=False)
        source, memory, limit = as_moved(read(input, "all_to_all")), as_moved(written.memory), self._limit(opts)
        if not output_splits and not input_splits:
            core = self.communicator.all_to_all(source, memory, timeout=limit, async_op=True)
        else:
            core = self.communicator.all_to_all_v(
                source,
                self._rows(input, input_splits, source),
                memory,
                self._rows(output, output_splits, memory),
                timeout=limit,
                async_op=True,
            )
        return for_caller(self._work("all_to_all", core, [output], [written]))

    all_to_all_single = alltoall_base

    def _rows(self, tensor: torch.Tensor, splits: Optional[list[int]], moved: torch.Tensor) -> list[int]:
        """Elements for each rank, from rows."""
        rows = tensor.size(0) if tensor.dim() else 0
        if not splits:
            if rows % self._size:
                raise cohort.InvalidArgument(
                    f"all_to_all: {rows} rows cannot be split evenly over {self._size} ranks -- give the sizes"
                )
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise cohort.InvalidArgument(
                f"all_to_all: the sizes {list(splits)} are not {self._size} numbers whose sum is the tensor's {rows} rows"
            )
        row = moved.numel() // rows if rows else 0
        return [count * row for count in splits]

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        other = self._elsewhere(outputs[0])
        if other is not None:
            return other.alltoall(outputs, inputs, opts or c10d.AllToAllOptions())
        received = Pieces(self._list([outputs], "all_to_all"), "all_to_all", reads=False)
        sent = Pieces(self._list([inputs], "all_to_all"), "all_to_all", reads=True)
        source, memory = as_moved(sent.memory), as_moved(received.memory)
        core = self.communicator.all_to_all_v(
            source,
            _in_elements(sent.counts, sent.memory, source),
            memory,
            _in_elements(received.counts, received.memory, memory),
            timeout=self._limit(opts),
            async_op=True,
        )
        return for_caller(self._work("all_to_all", core, received.tensors, [received]))

    # --- waiting for each other, and ends ---

    def barrier(self, opts: Any = None) -> Any:
        core = self.communicator.barrier(timeout=self._limit(opts), async_op=True)
        return for_caller(self._work("barrier", core, []))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Raises cohort.Timeout, naming every rank that has not come."""
        self.communicator.barrier(timeout=timeout if timeout is not None else self._timeout)

    def abort(self, reason: str = "aborted by the program") -> None:
        """Ends the group on all ranks: what is under way and what comes raises cohort.Aborted."""
        if self._beside is not None and hasattr(self._beside, "abort"):
            self._beside.abort()
        if not self.communicator.has_left:
            self.communicator.abort(reason)
        self._leave()

    def shutdown(self) -> None:
        """Leaves the group, once what is under way has ended; that is given 30 s."""
        if self._beside is not None and hasattr(self._beside, "shutdown"):
            self._beside.shutdown()
        self._leave()

    def _leave(self) -> None:
        self.communicator.leave(grace=_GRACE_SECONDS, reason=f"rank {self._rank} has destroyed the process group")
        completion.forget(lambda line: line[0] == self._number)
        environment.take_back(self._filled)

    def __del__(self) -> None:
        # torch 1.13 destroys a group by forgetting it.
        environment.take_back(getattr(self, "_filled", []))


def _in_elements(counts: list[int], tensor: torch.Tensor, moved: torch.Tensor) -> list[int]:
    """Counts of elements, of tensors that are moved as bytes."""
    if moved.dtype == tensor.dtype:
        return counts
    return [count * tensor.element_size() for count in counts]


