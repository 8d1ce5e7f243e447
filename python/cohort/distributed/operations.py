"""The operations of a process group, under all the names that torch has for them."""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterator, Optional, Sequence

import torch
from torch._C import _distributed_c10d as c10d

import cohort
from cohort.distributed import sparse
from cohort.distributed.reductions import reduction_of
from cohort.distributed.tensors import Pieces, Written, as_moved, read
from cohort.distributed.work import Work, for_caller, may_be_compressed


def operation(method: Callable[..., Work]) -> Callable[..., Any]:
    """Wraps a method that torch calls. Tensors of a device with another backend go to that backend (beside.py); the
    Work of other operations is one that the caller can hold."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if self._beside is not None:
            tensor = next(_tensors_in(arguments), None)
            if tensor is not None and tensor.device.type in self._beside_devices:
                return getattr(self._beside, method.__name__)(*arguments, **named)
        return for_caller(method(self, *arguments, **named))

    return call


def _tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    for one in arguments:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors_in(one)


class Operations:
    """ProcessGroup's operations. Types that the core does not support are moved as bytes."""

    # --- reductions ---

    @operation
    def allreduce(self: Any, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = opts or c10d.AllreduceOptions()
        if tensors[0].layout != torch.strided:
            return sparse.all_reduce(self, _only(tensors, "all_reduce"), opts)
        work = self._all_reduce(tensors, opts)
        work.is_of_half = may_be_compressed(tensors[0])
        return work

    @operation
    def allreduce_coalesced(self: Any, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self._all_reduce(tensors, opts or c10d.AllreduceCoalescedOptions())

    def _all_reduce(self: Any, tensors: list[torch.Tensor], opts: Any) -> Work:
        written = [Written(tensor, "all_reduce", reads=True) for tensor in tensors]
        memory: Any = [one.memory for one in written]
        for tensor in tensors:
            op, prescale = reduction_of(opts.reduceOp, tensor.dtype, "all_reduce")
        how = {"op": op, "prescale": prescale, "timeout": self._limit(opts)}
        call = self.communicator.all_reduce
        return self._start("all_reduce", tensors, tensors, written, call, [_alone(memory)], how)

    @operation
    def reduce(self: Any, tensors: list[torch.Tensor], opts: Any) -> Work:
        tensor = _only(tensors, "reduce")
        op, prescale = reduction_of(opts.reduceOp, tensor.dtype, "reduce")
        if self._rank == opts.rootRank:
            written = [Written(tensor, "reduce", reads=True)]
            memory = written[0].memory
        else:
            written, memory = [], read(tensor, "reduce")
        how = {"root": opts.rootRank, "op": op, "prescale": prescale, "timeout": self._limit(opts)}
        return self._start("reduce", tensors, tensors, written, self.communicator.reduce, [memory], how)

    @operation
    def reduce_scatter(self: Any, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        opts = opts or c10d.ReduceScatterOptions()
        output = _only(outputs, "reduce_scatter")
        brought = _one_for_each(inputs, self._size, "reduce_scatter")
        parts = Pieces(brought, "reduce_scatter", reads=True)
        written = Written(output, "reduce_scatter", reads=False)
        op, prescale = reduction_of(opts.reduceOp, output.dtype, "reduce_scatter")
        how = {"op": op, "prescale": prescale, "timeout": self._limit(opts)}
        call, arguments = self.communicator.reduce_scatter, [parts.memory, written.memory]
        if not parts.are_equal:
            call = self.communicator.reduce_scatter_v
            arguments.append(parts.counts)
        return self._start("reduce_scatter", brought, outputs, [written], call, arguments, how)

    @operation
    def _reduce_scatter_base(self: Any, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter([output], [input], opts)

    reduce_scatter_single = _reduce_scatter_base

    @operation
    def reduce_scatter_tensor_coalesced(
        self: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._reduce_scatter(outputs, inputs, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(self: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        opts = opts or c10d.ReduceScatterOptions()
        written = [Written(output, "reduce_scatter", reads=False) for output in outputs]
        sources = [read(input, "reduce_scatter") for input in inputs]
        for output in outputs:
            op, prescale = reduction_of(opts.reduceOp, output.dtype, "reduce_scatter")
        arguments = _pair(sources, [output.memory for output in written])
        call, how = self.communicator.reduce_scatter, {"op": op, "prescale": prescale, "timeout": self._limit(opts)}
        return self._start("reduce_scatter", inputs, outputs, written, call, arguments, how)

    # --- moves ---

    @operation
    def broadcast(self: Any, tensors: list[torch.Tensor], opts: Any) -> Work:
        if self._rank == opts.rootRank:
            written: list[Any] = []
            memory = [as_moved(read(tensor, "broadcast")) for tensor in tensors]
        else:
            written = [Written(tensor, "broadcast", reads=False) for tensor in tensors]
            memory = [as_moved(one.memory) for one in written]
        how = {"root": opts.rootRank, "timeout": self._limit(opts)}
        return self._start("broadcast", tensors, tensors, written, self.communicator.broadcast, [_alone(memory)], how)

    @operation
    def allgather(self: Any, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        input = _only(inputs, "all_gather")
        pieces = Pieces(_one_for_each(outputs, self._size, "all_gather"), "all_gather", reads=False)
        source, memory = as_moved(read(input, "all_gather")), as_moved(pieces.memory)
        call, arguments = self.communicator.all_gather, [source, memory]
        if not pieces.are_equal:
            call = self.communicator.all_gather_v
            arguments.append(_in_elements(pieces.counts, pieces.memory, memory))
        how = {"timeout": self._limit(opts)}
        return self._start("all_gather", inputs, pieces.tensors, [pieces], call, arguments, how)

    @operation
    def _allgather_base(self: Any, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self._all_gather([output], [input], opts)

    all_gather_single = _allgather_base

    @operation
    def allgather_into_tensor_coalesced(
        self: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._all_gather(outputs, inputs, opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _all_gather(self: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        written = [Written(output, "all_gather", reads=False) for output in outputs]
        sources = [as_moved(read(input, "all_gather")) for input in inputs]
        arguments = _pair(sources, [as_moved(one.memory) for one in written])
        call, how = self.communicator.all_gather, {"timeout": self._limit(opts)}
        return self._start("all_gather", inputs, outputs, written, call, arguments, how)

    @operation
    def allgather_coalesced(
        self: Any, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """outputs[r][i] receives rank r's inputs[i]."""
        if len(outputs) != self._size or any(len(one) != len(inputs) for one in outputs):
            raise cohort.InvalidArgument(
                f"all_gather_coalesced: {len(inputs)} tensors of each of {self._size} ranks need as many lists as ranks, each of "
                f"that length, not {[len(one) for one in outputs]}"
            )
        pieces = [Pieces([of_rank[i] for of_rank in outputs], "all_gather", reads=False) for i in range(len(inputs))]
        sources = [as_moved(read(input, "all_gather")) for input in inputs]
        memory = [as_moved(one.memory) for one in pieces]
        everything = [tensor for of_rank in outputs for tensor in of_rank]
        call, how = self.communicator.all_gather, {"timeout": self._limit(opts)}
        return self._start("all_gather", inputs, everything, pieces, call, [sources, memory], how)

    @operation
    def gather(self: Any, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        call, source = self.communicator.gather, as_moved(read(_only(inputs, "gather"), "gather"))
        how = {"root": opts.rootRank, "timeout": self._limit(opts)}
        if self._rank != opts.rootRank:
            return self._start("gather", inputs, [], [], call, [source], how)
        pieces = Pieces(_one_for_each(outputs, self._size, "gather"), "gather", reads=False)
        memory = as_moved(pieces.memory)
        return self._start("gather", inputs, pieces.tensors, [pieces], call, [source, memory], how)

    @operation
    def scatter(self: Any, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work:
        written = Written(_only(outputs, "scatter"), "scatter", reads=False)
        memory, parts, brought = as_moved(written.memory), None, []
        if self._rank == opts.rootRank:
            brought = _one_for_each(inputs, self._size, "scatter")
            parts = as_moved(Pieces(brought, "scatter", reads=True).memory)
        call, how = self.communicator.scatter, {"root": opts.rootRank, "timeout": self._limit(opts)}
        return self._start("scatter", brought, outputs, [written], call, [parts, memory], how)

    @operation
    def alltoall_base(self: Any, output: torch.Tensor, input: torch.Tensor, output_splits: Optional[list[int]] = None,
                      input_splits: Optional[list[int]] = None, opts: Any = None) -> Work:  # fmt: skip
        written = Written(output, "all_to_all", reads=False)
        source, memory = as_moved(read(input, "all_to_all")), as_moved(written.memory)
        call, arguments = self.communicator.all_to_all, [source, memory]
        if output_splits or input_splits:
            call = self.communicator.all_to_all_v
            rows = self._rows(input, input_splits, source), self._rows(output, output_splits, memory)
            arguments = [source, rows[0], memory, rows[1]]
        how = {"timeout": self._limit(opts)}
        return self._start("all_to_all", [input], [output], [written], call, arguments, how)

    all_to_all_single = alltoall_base

    def _rows(self: Any, tensor: torch.Tensor, splits: Optional[list[int]], moved: torch.Tensor) -> list[int]:
        """Returns the number of elements for each rank, from numbers of rows."""
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

    @operation
    def alltoall(self: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        received = Pieces(_one_for_each([outputs], self._size, "all_to_all"), "all_to_all", reads=False)
        sent = Pieces(_one_for_each([inputs], self._size, "all_to_all"), "all_to_all", reads=True)
        source, memory = as_moved(sent.memory), as_moved(received.memory)
        counts = _in_elements(sent.counts, sent.memory, source), _in_elements(received.counts, received.memory, memory)
        call, arguments = self.communicator.all_to_all_v, [source, counts[0], memory, counts[1]]
        how = {"timeout": self._limit(opts)}
        return self._start("all_to_all", inputs, outputs, [received], call, arguments, how)

    @operation
    def barrier(self: Any, opts: Any = None) -> Work:
        # As with NCCL, the barrier follows the work queued on GPUs. There is none if torch has used no GPU.
        for index in getattr(opts, "device_ids", None) or () if torch.cuda.is_initialized() else ():
            torch.cuda.current_stream(index).synchronize()
        return self._start("barrier", [], [], [], self.communicator.barrier, [], {"timeout": self._limit(opts)})

    # --- messages, which progress apart from the collectives ---

    @operation
    def send(self: Any, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Work:
        source = as_moved(read(_only(tensors, "send"), "send"))
        line, how = (self._number, "send", rank, tag), {"tag": tag, "timeout": self._timeout}
        return self._start("send", tensors, tensors, [], self.communicator.send, [source, rank], how, line)

    @operation
    def recv(self: Any, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Work:
        return self._receive("recv", tensors, rank, tag)

    @operation
    def recv_anysource(self: Any, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        return self._receive("recvAnySource", tensors, None, tag)

    def _receive(self: Any, name: str, tensors: list[torch.Tensor], rank: Optional[int], tag: int) -> Work:
        """Receives from `rank`, or from the first rank that sends."""
        written = Written(_only(tensors, "recv"), "recv", reads=False)
        call, memory, how = self.communicator.recv, as_moved(written.memory), {"tag": tag, "timeout": self._timeout}
        line = (self._number, "recv", rank, tag)
        return self._start(name, tensors, tensors, [written], call, [memory, rank], how, line, rank)


def _only(tensors: Sequence[Any], operation: str) -> Any:
    """Returns the tensor of a list; torch passes lists of one tensor each."""
    if len(tensors) != 1:
        raise cohort.InvalidArgument(f"{operation}: takes one tensor of each rank, not {len(tensors)}")
    return tensors[0]


def _one_for_each(lists: Sequence[Any], size: int, operation: str) -> Any:
    tensors = _only(lists, operation)
    if len(tensors) != size:
        raise cohort.InvalidArgument(
            f"{operation}: the list has {len(tensors)} tensors, and the group {size} ranks -- give one for each"
        )
    return tensors


def _alone(memory: list[torch.Tensor]) -> Any:
    """Returns the argument for one operation instead of a group of operations."""
    return memory[0] if len(memory) == 1 else memory


def _pair(sources: list[torch.Tensor], memory: list[torch.Tensor]) -> list[Any]:
    return [sources[0], memory[0]] if len(sources) == len(memory) == 1 else [sources, memory]


def _in_elements(counts: list[int], tensor: torch.Tensor, moved: torch.Tensor) -> list[int]:
    """Converts counts of elements for tensors that are moved as bytes."""
    if moved.dtype == tensor.dtype:
        return counts
    return [count * tensor.element_size() for count in counts]
