"""Do all ranks mean the same model? Compared before the first byte of it is sent, so that a difference is an error with
names instead of garbage. Collective; one thread at a time per communicator."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

from cohort import Communicator
from cohort._collective import all_gather_bytes
from cohort.errors import Mismatch


def require_same_on_all_ranks(comm: Communicator, lines: Sequence[str], who: str = "DistributedDataParallel") -> None:
    """Raises Mismatch on every rank, with the same text, if any rank's lines differ from rank 0's.

    Each line describes one thing ("parameter 'fc.weight' of float32 [10, 50]"); the error names the first that differs.
    """
    if comm.size() == 1:
        return
    text = "\n".join(lines).encode()
    digests = all_gather_bytes(comm, hashlib.sha256(text).digest())
    if all(digest == digests[0] for digest in digests):
        return
    texts = [one.decode().split("\n") for one in all_gather_bytes(comm, text)]
    for rank, other in enumerate(texts):
        for first, theirs in zip_longest(texts[0], other, fillvalue="nothing more"):
            if first != theirs:
                error = Mismatch(
                    f"{who}: the ranks' models differ -- rank 0 has {first}, rank {rank} has "
                    f"{theirs} -- build the same model with the same options on all ranks"
                )
                error.rank, error.host, error.peer = comm.rank(), comm.host(), rank
                error.operation = who
                raise error
