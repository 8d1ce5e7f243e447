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
        core = self._begin(self.communicator.broadcast, one, root=opts.rootRank, timeout=self._limit(opts))
        return for_caller(self._work("broadcast", core, tensors, written))

    def allgather(self: Any, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        input = only(inputs, "all_gather")
        other = self._elsewhere(input)
        if other is not None:
            return other.allgather(outputs, inputs, *([opts] if opts is not None else []))
        pieces = Pieces(one_for_each(outputs, self._size, "all_gather"), "all_gather", reads=False)
        source, memory = as_moved(read(input, "all_gather")), as_moved(pieces.memory)
        limit = self._limit(opts)
        if pieces.are_equal:
            core = self._begin(self.communicator.all_gather, source, memory, timeout=limit)
        else:
            counts = _in_elements(pieces.counts, pieces.memory, memory)
            core = self._begin(self.communicator.all_gather_v, source, memory, counts, timeout=limit)
        return for_caller(self._work("all_gather", core, pieces.tensors, [pieces]))

    def _allgather_base(self: Any, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        other = self._elsewhere(output)
        if other is not None:
            return other._allgather_base(output, input, *([opts] if opts is not None else []))
        return for_caller(self._all_gather([output], [input], opts))

    def all_gather_single(self: Any, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
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

    def _all_gather(self: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        written = [Written(output, "all_gather", reads=False) for output in outputs]
        sources = [as_moved(read(input, "all_gather")) for input in inputs]
        memory = [as_moved(one.memory) for one in written]
        bring, take = (sources[0], memory[0]) if len(sources) == len(memory) == 1 else (sources, memory)
        core = self._begin(self.communicator.all_gather, bring, take, timeout=self._limit(opts))
        return self._work("all_gather", core, outputs, written)

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
        core = self._begin(self.communicator.all_gather, sources, memory, timeout=self._limit(opts))
        return for_caller(self._work("all_gather_coalesced", core, [t for one in outputs for t in one], pieces))

    def gather(self: Any, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Any:
        input = only(inputs, "gather")
        other = self._elsewhere(input)
        if other is not None:
            return other.gather(outputs, inputs, opts)
        source, limit, root = as_moved(read(input, "gather")), self._limit(opts), opts.rootRank
        if self._rank != root:
            core = self._begin(self.communicator.gather, source, root=root, timeout=limit)
            return for_caller(self._work("gather", core, []))
        pieces = Pieces(one_for_each(outputs, self._size, "gather"), "gather", reads=False)
        core = self._begin(self.communicator.gather, source, as_moved(pieces.memory), root=root, timeout=limit)
        return for_caller(self._work("gather", core, pieces.tensors, [pieces]))

    def scatter(self: Any, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Any:
        output = only(outputs, "scatter")
        other = self._elsewhere(output)
        if other is not None:
            return other.scatter(outputs, inputs, opts)
        written = Written(output, "scatter", reads=False)
        memory, root = as_moved(written.memory), opts.rootRank
        parts = None
        if self._rank == root:
            parts = as_moved(Pieces(one_for_each(inputs, self._size, "scatter"), "scatter", reads=True).memory)
        core = self._begin(self.communicator.scatter, parts, memory, root=root, timeout=self._limit(opts))
        return for_caller(self._work("scatter", core, outputs, [written]))

    def alltoall_base(
        self: Any,
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
            core = self._begin(self.communicator.all_to_all, source, memory, timeout=limit)
        else:
            core = self._begin(
                self.communicator.all_to_all_v,
                source,
                self._rows(input, input_splits, source),
                memory,
                self._rows(output, output_splits, memory),
                timeout=limit,
                )
        return for_caller(self._work("all_to_all", core, [output], [written]))

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
        core = self._begin(
            self.communicator.all_to_all_v,
            source,
            _in_elements(sent.counts, sent.memory, source),
            memory,
            _in_elements(received.counts, received.memory, memory),
            timeout=self._limit(opts),
        )
        return for_caller(self._work("all_to_all", core, received.tensors, [received]))


def _in_elements(counts: list[int], tensor: torch.Tensor, moved: torch.Tensor) -> list[int]:
    """Counts of elements, of tensors that are moved as bytes."""
    if moved.dtype == tensor.dtype:
        return counts
    return [count * tensor.element_size() for count in counts]
