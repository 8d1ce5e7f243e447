"""Communication within the package: exchanges bytes of different lengths, and errors, so that either all ranks go on or
all raise. All calls are collective and wait; one thread per rank. A communicator of None means a world of one rank."""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Sequence

from cohort import errors
from cohort._core import Communicator

_NOBODY = 2**63 - 1


def rank_of(comm: Communicator | None) -> int:
    return comm.rank() if comm is not None else 0


def size_of(comm: Communicator | None) -> int:
    return comm.size() if comm is not None else 1


def all_gather_bytes(comm: Communicator | None, mine: bytes | bytearray) -> list[memoryview]:
    """Returns all ranks' bytes, by rank."""
    if comm is None:
        return [memoryview(mine)]
    sizes = array.array("q", bytes(8 * comm.size()))
    comm.all_gather(array.array("q", [len(mine)]), sizes)
    together = bytearray(sum(sizes))
    comm.all_gather_v(mine, together, list(sizes))
    return cut(together, sizes)


def cut(together: bytearray, sizes: Sequence[int]) -> list[memoryview]:
    """Splits `together` into consecutive parts of these sizes."""
    view, ends = memoryview(together), list(itertools.accumulate(sizes))
    return [view[end - size : end] for size, end in zip(sizes, ends)]


def broadcast_bytes(comm: Communicator | None, mine: bytes | bytearray, root: int = 0) -> bytes | bytearray:
    """Returns the root's bytes, on all ranks."""
    if comm is None or comm.size() == 1:
        return mine
    size = array.array("q", [len(mine)])
    comm.broadcast(size, root=root)
    if comm.rank() != root:
        mine = bytearray(size[0])
    elif isinstance(mine, bytes):
        mine = bytearray(mine)
    if size[0]:
        comm.broadcast(mine, root=root)
    return mine


def attempt(work: Callable[[], object]) -> errors.Error | None:
    """Runs `work` and returns the exception it raises: cohort.Error unchanged, others as Internal, with their cause."""
    try:
        work()
    except errors.Error as error:
        return error
    except MemoryError as error:
        wrapped: errors.Error = errors.Unavailable(
            "not enough memory for the checkpoint -- free some, or use fewer processes per host"
        )
        wrapped.__cause__ = error
        return wrapped
    except Exception as error:
        wrapped = errors.Internal(f"the checkpoint failed: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return wrapped
    return None


def agree(comm: Communicator | None, error: errors.Error | None) -> None:
    """Raises on all ranks if any rank has an error: the error of the lowest such rank."""
    if comm is None or comm.size() == 1:
        if error is not None:
            raise error
        return
    first = array.array("q", [_NOBODY if error is None else comm.rank()])
    comm.all_reduce(first, op="min")
    if first[0] != _NOBODY:
        _raise_everywhere(comm, error, first[0])


def share(comm: Communicator | None, mine: bytes, error: errors.Error | None = None) -> bytes | bytearray:
    """Returns rank 0's bytes, or raises rank 0's error, on all ranks."""
    if comm is None or comm.size() == 1:
        if error is not None:
            raise error
        return mine
    failed = array.array("q", [0 if error is None else 1])
    comm.broadcast(failed)
    if failed[0]:
        _raise_everywhere(comm, error, 0)
    return broadcast_bytes(comm, mine)


def _raise_everywhere(comm: Communicator, error: errors.Error | None, root: int) -> None:
    if comm.rank() == root:
        assert error is not None
        broadcast_bytes(comm, f"{error.code}\n{error}".encode(), root)
        raise error
    code, message = broadcast_bytes(comm, b"", root).decode().split("\n", 1)
    kind = getattr(errors, code, errors.Internal)
    theirs = kind(f"rank {root}: {message}")
    theirs.rank = root
    raise theirs
