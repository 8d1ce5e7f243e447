"""The reductions of a process group."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from cohort.distributed import sparse
from cohort.distributed.arguments import one_for_each, only
from cohort.distributed.reductions import reduction_of
from cohort.distributed.tensors import Pieces, Written, read
from cohort.distributed.work import Work, for_caller, for_caller_of_half, may_be_compressed


class Reductions:
    """What ProcessGroup has of all_reduce, reduce and reduce_scatter, under all their names."""

    def allreduce(self: Any, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceOptions()
        other = self._elsewhere(tensors[0])
        if other is not None:
            return other.allreduce(tensors, opts)
        if tensors[0].layout != torch.strided:
            return for_caller(sparse.all_reduce(self, only(tensors, "all_reduce"), opts))
        work = self._all_reduce(tensors, opts)
        return for_caller_of_half(work) if may_be_compressed(tensors[0]) else for_caller(work)

    def allreduce_coalesced(self: Any, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceCoalescedOptions()
        other = self._elsewhere(tensors[0])
        if other is not None:
            return other.allreduce_coalesced(tensors, opts)
        return for_caller(self._all_reduce(tensors, opts))

    def _all_reduce(self: Any, tensors: list[torch.Tensor], opts: Any) -> Work:
        if len(tensors) == 1:
            written = [Written(tensors[0], "all_reduce", reads=True)]
            memory = written[0].memory
        else:
            written = [Written(tensor, "all_reduce", reads=True) for tensor in tensors]
            memory = [one.memory for one in written]
        for tensor in tensors:
            op, prescale = reduction_of(opts.reduceOp, tensor.dtype, "all_reduce")
        how = {"op": op, "prescale": prescale, "timeout": self._limit(opts)}
        return self._start("all_reduce", tensors, tensors, written, self.communicator.all_reduce, [memory], how)

    def reduce(self: Any, tensors: list[torch.Tensor], opts: Any) -> Any:
        tensor = only(tensors, "reduce")
        other = self._elsewhere(tensor)
        if other is not None:
            return other.reduce(tensors, opts)
        op, prescale = reduction_of(opts.reduceOp, tensor.dtype, "reduce")
        if self._rank == opts.rootRank:
            written = [Written(tensor, "reduce", reads=True)]
            memory = written[0].memory
        else:
            written, memory = [], read(tensor, "reduce")
        how = {"root": opts.rootRank, "op": op, "prescale": prescale, "timeout": self._limit(opts)}
        return for_caller(self._start("reduce", tensors, tensors, written, self.communicator.reduce, [memory], how))

    def reduce_scatter(self: Any, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        output = only(outputs, "reduce_scatter")
        other = self._elsewhere(output)
        if other is not None:
            return other.reduce_scatter(outputs, inputs, opts)
        brought = one_for_each(inputs, self._size, "reduce_scatter")
        parts = Pieces(brought, "reduce_scatter", reads=True)
        written = Written(output, "reduce_scatter", reads=False)
        op, prescale = reduction_of(opts.reduceOp, output.dtype, "reduce_scatter")
        how = {"op": op, "prescale": prescale, "timeout": self._limit(opts)}
        call, arguments = self.communicator.reduce_scatter, [parts.memory, written.memory]
        if not parts.are_equal:
            call = self.communicator.reduce_scatter_v
            arguments.append(parts.counts)
        return for_caller(self._start("reduce_scatter", brought, outputs, [written], call, arguments, how))

    def _reduce_scatter_base(self: Any, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        other = self._elsewhere(output)
        if other is not None:
            return other._reduce_scatter_base(output, input, opts)
        return for_caller(self._reduce_scatter([output], [input], opts))

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        other = self._elsewhere(outputs[0])
        if other is not None:
            return other.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return for_caller(self._reduce_scatter(outputs, inputs, opts))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(self: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        written = [Written(output, "reduce_scatter", reads=False) for output in outputs]
        sources = [read(input, "reduce_scatter") for input in inputs]
        for output in outputs:
            op, prescale = reduction_of(opts.reduceOp, output.dtype, "reduce_scatter")
        bring, take = sources, [output.memory for output in written]
        if len(outputs) == len(inputs) == 1:
            bring, take = sources[0], take[0]
        call, how = self.communicator.reduce_scatter, {"op": op, "prescale": prescale, "timeout": self._limit(opts)}
        return self._start("reduce_scatter", inputs, outputs, written, call, [bring, take], how)
