"""Models whose parts are on several ranks."""

from __future__ import annotations

from collections import deque
from typing import Any, Optional, Union

import torch

from cohort.chainermn import functions
from cohort.chainermn.communicators import CommunicatorBase
from cohort.errors import InvalidArgument

Ranks = Union[int, list[int], tuple[int, ...], None]


class MultiNodeChainList(torch.nn.Module):
    """This rank's parts of a model that runs over several ranks.

        class OnRank0(chainermn.MultiNodeChainList):
            def __init__(self, comm):
                super().__init__(comm)
                self.add_link(torch.nn.Linear(784, 100), rank_in=None, rank_out=1)
                self.add_link(torch.nn.Linear(100, 10), rank_in=1, rank_out=None)

    Parts run in the order in which they were added, and their backward in reverse. A part's result, a tensor or a tuple
    of tensors, is one argument of the part that receives it.

    forward returns the result of the part without rank_out; on a rank without such a part it returns a delegate variable. Every
    rank calls backward, on its loss or on the delegate variable. Each rank has its own optimizer.
    """

    def __init__(self, comm: CommunicatorBase) -> None:
        super().__init__()
        self._comm = comm
        self._routes: list[tuple[Optional[list[int]], Optional[list[int]]]] = []

    def add_link(self, link: torch.nn.Module, rank_in: Ranks = None, rank_out: Ranks = None) -> None:
        """rank_in   the rank, or ranks, whose parts give the arguments, possibly this rank; None: forward's arguments
        rank_out  the rank, or ranks, that receive the result; None: forward returns it

        Raises ValueError for ranks that do not exist, and for a second part without rank_out.
        """
        into, out = self._ranks(rank_in), self._ranks(rank_out)
        if out is None and any(other is None for _, other in self._routes):
            raise InvalidArgument(
                "MultiNodeChainList: there is a part without rank_out already, and forward returns one result"
            )
        self.add_module(str(len(self._routes)), link)
        self._routes.append((into, out))

    def _ranks(self, ranks: Ranks) -> Optional[list[int]]:
        if ranks is None:
            return None
        listed = [ranks] if isinstance(ranks, int) else list(ranks)
        for rank in listed:
            if not 0 <= rank < self._comm.size:
                raise InvalidArgument(f"MultiNodeChainList: rank {rank} in a world of {self._comm.size}")
        if not listed:
            raise InvalidArgument(
                "MultiNodeChainList: an empty list of ranks -- None stands for the model's own input or output"
            )
        return listed

    def forward(self, *inputs: Any) -> Any:
        if not self._routes:
            raise InvalidArgument("MultiNodeChainList: there is no part here -- add_link adds one")
        queue: deque[Any] = deque()  # from this rank to itself
        delegate: Optional[torch.Tensor] = None
        result: Any = None
        for number, (into, out) in enumerate(self._routes):
            arguments: list[Any] = list(inputs)
            if into is not None:
                arguments = []
                for rank in into:
                    if rank == self._comm.rank:
                        if not queue:
                            raise InvalidArgument(
                                f"MultiNodeChainList: part {number} takes from this rank, and nothing is there yet"
                            )
                        arguments.append(queue.popleft())
                    else:
                        # Connected, so that one graph contains all receives, and the backward reaches them in reverse
                        # order.
                        arguments.append(functions.recv(self._comm, rank, delegate_variable=delegate))
                        delegate = None
            made = getattr(self, str(number))(*arguments)
            if out is None:
                result = made
                continue
            for rank in out:
                if rank == self._comm.rank:
                    queue.append(made)
                    continue
                sent = functions.send(made, self._comm, rank)
                delegate = sent if delegate is None else functions.pseudo_connect(delegate, sent)
        if queue:
            raise InvalidArgument(
                f"MultiNodeChainList: {len(queue)} results for this rank itself were taken by no part of it"
            )
        if all(out is not None for _, out in self._routes):
            return delegate
        if delegate is None:
            return result
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        connected = functions.pseudo_connect(delegate, *tensors)
        return (connected,) if isinstance(result, (tuple, list)) and len(tensors) == 1 else connected
