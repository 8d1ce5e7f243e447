"""The operations of a process group that move data: broadcast, gathers, scatter, all_to_all."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch._C import _distributed_c10d as c10d

import cohort
from cohort.distributed.arguments import one_for_each, only
from cohort.distributed.tensors import Pieces, Written, as_moved, read
from cohort.distributed.work import Work, for_caller


class Moves:
    """What ProcessGroup has of them, under all their names. Types that the core does not know are moved as bytes."""

    def broadcast(self: Any, tensors: list[torch.Tensor], opts: Any) -> Any:
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
        one = memory[0] if len(memory) == 1 else memory
        how = {"root": opts.rootRank, "timeout": self._limit(opts)}
        return for_caller(self._start("broadcast", tensors, tensors, written, self.communicator.broadcast, [one], how))

    def allgather(self: Any, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        input = only(inputs, "all_gather")
        other = self._elsewhere(input)
        if other is not None:
            return other.allgather(outputs, inputs, *([opts] if opts is not None else []))
        pieces = Pieces(one_for_each(outputs, self._size, "all_gather"), "all_gather", reads=False)
        source, memory = as_moved(read(input, "all_gather")), as_moved(pieces.memory)
        call, arguments = self.communicator.all_gather, [source, memory]
        if not pieces.are_equal:
            call = self.communicator.all_gather_v
            arguments.append(_in_elements(pieces.counts, pieces.memory, memory))
        how = {"timeout": self._limit(opts)}
        return for_caller(self._start("all_gather", inputs, pieces.tensors, [pieces], call, arguments, how))

    def _allgather_base(self: Any, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        other = self._elsewhere(output)
        if other is not None:
            return other._allgather_base(output, input, *([opts] if opts is not None else []))
        return for_caller(self._all_gather([output], [input], opts))

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        other = self._elsewhere(outputs[0])
        if other is not None:
            return other.allgather_into_tensor_coalesced(outputs, inputs, *([opts] if opts is not None else []))
        return for_caller(self._all_gather(outputs, inputs, opts))

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _all_gather(self: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        written = [Written(output, "all_gather", reads=False) for output in outputs]
        sources = [as_moved(read(input, "all_gather")) for input in inputs]
        memory = [as_moved(one.memory) for one in written]
        bring, take = (sources[0], memory[0]) if len(sources) == len(memory) == 1 else (sources, memory)
        call, how = self.communicator.all_gather, {"timeout": self._limit(opts)}
        return self._start("all_gather", inputs, outputs, written, call, [bring, take], how)

    def allgather_coalesced(
        self: Any, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
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
        return for_caller(self._start("all_gather", inputs, everything, pieces, call, [sources, memory], how))

    def gather(self: Any, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Any:
        input = only(inputs, "gather")
        other = self._elsewhere(input)
        if other is not None:
            return other.gather(outputs, inputs, opts)
        call, source = self.communicator.gather, as_moved(read(input, "gather"))
        how = {"root": opts.rootRank, "timeout": self._limit(opts)}
        if self._rank != opts.rootRank:
            return for_caller(self._start("gather", inputs, [], [], call, [source], how))
        pieces = Pieces(one_for_each(outputs, self._size, "gather"), "gather", reads=False)
        memory = as_moved(pieces.memory)
        return for_caller(self._start("gather", inputs, pieces.tensors, [pieces], call, [source, memory], how))

    def scatter(self: Any, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Any:
        output = only(outputs, "scatter")
        other = self._elsewhere(output)
        if other is not None:
            return other.scatter(outputs, inputs, opts)
        written = Written(output, "scatter", reads=False)
        memory, parts, brought = as_moved(written.memory), None, []
        if self._rank == opts.rootRank:
            brought = one_for_each(inputs, self._size, "scatter")
            parts = as_moved(Pieces(brought, "scatter", reads=True).memory)
        call, how = self.communicator.scatter, {"root": opts.rootRank, "timeout": self._limit(opts)}
        return for_caller(self._start("scatter", brought, outputs, [written], call, [parts, memory], how))

    def alltoall_base(self: Any, output: torch.Tensor, input: torch.Tensor, output_splits: Optional[list[int]] = None,
                      input_splits: Optional[list[int]] = None, opts: Any = None) -> Any:  # fmt: skip
        other = self._elsewhere(output)
        if other is not None:
            return other.alltoall_base(output, input, output_splits or [], input_splits or [], opts or c10d.AllToAllOptions())
        written = Written(output, "all_to_all", reads=False)
        source, memory = as_moved(read(input, "all_to_all")), as_moved(written.memory)
        call, arguments = self.communicator.all_to_all, [source, memory]
        if output_splits or input_splits:
            call = self.communicator.all_to_all_v
            rows = self._rows(input, input_splits, source), self._rows(output, output_splits, memory)
            arguments = [source, rows[0], memory, rows[1]]
        how = {"timeout": self._limit(opts)}
        return for_caller(self._start("all_to_all", [input], [output], [written], call, arguments, how))

    all_to_all_single = alltoall_base

    def _rows(self: Any, tensor: torch.Tensor, splits: Optional[list[int]], moved: torch.Tensor) -> list[int]:
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

    def alltoall(self: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        other = self._elsewhere(outputs[0])
        if other is not None:
            return other.alltoall(outputs, inputs, opts or c10d.AllToAllOptions())
        received = Pieces(one_for_each([outputs], self._size, "all_to_all"), "all_to_all", reads=False)
        sent = Pieces(one_for_each([inputs], self._size, "all_to_all"), "all_to_all", reads=True)
        source, memory = as_moved(sent.memory), as_moved(received.memory)
        counts = _in_elements(sent.counts, sent.memory, source), _in_elements(received.counts, received.memory, memory)
        call, arguments = self.communicator.all_to_all_v, [source, counts[0], memory, counts[1]]
        how = {"timeout": self._limit(opts)}
        return for_caller(self._start("all_to_all", inputs, outputs, [received], call, arguments, how))


def _in_elements(counts: list[int], tensor: torch.Tensor, moved: torch.Tensor) -> list[int]:
    """Counts of elements, of tensors that are moved as bytes."""
    if moved.dtype == tensor.dtype:
        return counts
    return [count * tensor.element_size() for count in counts]
