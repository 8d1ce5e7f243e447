"""Do all ranks hold the same parameters, to the bit? A memory error, a library that is not deterministic or a step that
one rank took alone lets replicas drift apart, and nothing else says so."""

from __future__ import annotations

import array
import os
from collections.abc import Iterable, Sequence
from typing import NoReturn, Optional

import torch

from cohort import Communicator, _core
from cohort._collective import broadcast_bytes
from cohort.errors import InvalidArgument, Mismatch
from cohort.nn._groups import default_world
from cohort.nn._non_finite import position_of

_CHUNK_BYTES = 64 << 20
_ALL_ONES = 2**64 - 1

# What is compared is exchanged by minima, sums and broadcasts: in those, ranks that have joined take part without a
# word. All ranks come to the same decisions, since they see the same numbers.


def require_same_parameters(
    tensors: Iterable[tuple[str, torch.Tensor]], comm: Optional[Communicator] = None, *, step: Optional[int] = None
) -> None:
    """Compares dense CPU tensors of any type over all ranks by 128-bit digests. Collective; waits.

    tensors  pairs of a name and a tensor, as model.named_parameters(): the same shapes and types in the same order on all
             ranks. Each is read once, and 64 bytes are sent
    comm     the ranks; default: the world. Ranks that have joined are left out
    step     for the message: synchronised steps so far

    Poly1305 under a key drawn for each call: a difference of one bit goes unnoticed with a probability below 2**-66.
    Raises Mismatch on every rank, with the same text, if there is a difference: it names the first tensor that differs,
    the ranks that differ from most of the others, and of the lowest of them host, first element and both sides' values.
    Of two ranks, or of two halves, both are named, since nobody can tell which of them is right. `peer` is that lowest
    rank. The communicator stays usable. One thread at a time per communicator.
    """
    comm = comm if comm is not None else default_world()
    named = list(tensors)
    for name, tensor in named:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise InvalidArgument(
                f"require_same_parameters: {name} is not a dense CPU tensor ({tensor.device}, {tensor.layout})"
            )
    if comm.size() == 1 or not named:
        return
    key = bytearray(os.urandom(32))
    comm.broadcast(key)
    digests = [_core.digest_of(_bytes_of(tensor), bytes(key)) for _, tensor in named]
    words = array.array("Q", b"".join(digests))
    if all(_same_on_all_ranks(comm, array.array("Q", _core.digest_of(words, bytes(key))))):
        return
    first = next((at // 2 for at, same in enumerate(_same_on_all_ranks(comm, words)) if not same), None)
    if first is None:
        raise Mismatch("require_same_parameters: ranks gave different tensors")
    rows = _gather(comm, words[2 * first : 2 * first + 2])
    _raise_difference(comm, *named[first], rows, step)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _same_on_all_ranks(comm: Communicator, words: array.array) -> list[bool]:
    """Whether each word is the same on all ranks: a minimum of it and of its complement."""
    least = words + array.array("Q", [_ALL_ONES - word for word in words])
    comm.all_reduce(least, op="min")
    return [one == _ALL_ONES - other for one, other in zip(least, least[len(words) :])]


def _gather(comm: Communicator, mine: Sequence[int]) -> list[tuple[int, ...]]:
    """Row r: what rank r brings. Empty for a rank that has joined."""
    width = len(mine) + 1
    table = array.array("Q", bytes(8 * width * comm.size()))
    begin = width * comm.rank()
    table[begin : begin + width] = array.array("Q", [1, *mine])
    comm.all_reduce(table, op="sum")
    rows = [table[at : at + width] for at in range(0, len(table), width)]
    return [tuple(row[1:]) if row[0] else () for row in rows]


def _ranks_text(ranks: Sequence[int]) -> str:
    """ "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def _first_difference(comm: Communicator, mine: torch.Tensor, root: int) -> int:
    """The first byte in which mine differ from the root's; their number if there is none."""
    first = mine.numel()
    for begin in range(0, mine.numel(), _CHUNK_BYTES):
        part = mine[begin : begin + _CHUNK_BYTES]
        theirs = part.clone()
        comm.broadcast(theirs, root=root)
        if first == mine.numel() and not torch.equal(part, theirs):
            first = begin + int((part != theirs).nonzero()[0])
    return first


def _element_text(flat: torch.Tensor, index: int) -> str:
    """ "0.25 (0x3e800000)"."""
    bits = "0x" + bytes(reversed(flat[index : index + 1].view(torch.uint8).tolist())).hex()
    return bits if flat.is_complex() else f"{flat[index].item()} ({bits})"


def _raise_difference(
    comm: Communicator, name: str, tensor: torch.Tensor, rows: list[tuple[int, ...]], step: int | None
) -> NoReturn:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, row in enumerate(rows):
        if row:
            groups.setdefault(row, []).append(rank)
    most = max(groups.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    odd = sorted(rank for ranks in groups.values() if ranks is not most for rank in ranks)
    reference, other = most[0], odd[0]

    flat = tensor.detach().contiguous().reshape(-1)
    byte = _first_difference(comm, flat.view(torch.uint8), reference)
    index = _gather(comm, [byte // flat.element_size()])[other][0]
    mine = f"({comm.host()}) has {_element_text(flat, index)}"
    theirs = broadcast_bytes(comm, mine.encode(), other).decode()
    ours = broadcast_bytes(comm, mine.encode(), reference).decode()
    when = "" if step is None else f" after {step} steps"
    where = f"{name} of {list(tensor.shape)}, element {index} at {list(position_of(index, tensor.shape))}"
    if 2 * len(most) > len(most) + len(odd):
        value = ours.rpartition(") has ")[2]
        message = (
            f"{_ranks_text(odd)} {'differs' if len(odd) == 1 else 'differ'} from the others{when} -- {where}: rank "
            f"{other} {theirs}, {_ranks_text(most)} {'has' if len(most) == 1 else 'have'} {value} -- look at the memory "
            "of that host and at what changes parameters on one rank only; go on from a checkpoint"
        )
    else:
        message = (
            f"the ranks' parameters differ{when} -- {where}: rank {reference} {ours}, rank {other} {theirs} -- no side "
            f"has most of the ranks ({_ranks_text(most)} agree, {_ranks_text(odd)} do not), so nobody can tell which is "
            "right; go on from a checkpoint"
        )
    error = Mismatch(message)
    error.rank, error.host, error.peer, error.operation = comm.rank(), comm.host(), other, "require_same_parameters"
    raise error
