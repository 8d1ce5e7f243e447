"""The same as collectives.cpp, in Python, on arrays of NumPy. A tensor of torch does as well."""

import numpy as np

import cohort

cohort.init()
world = cohort.world()
rank, size = world.rank(), world.size()


def show(name: str, values: np.ndarray) -> None:
    if rank == 0:
        print(f"{name:<14}", *values)


# (1) Everybody's sum, in place.
total = np.array([rank, 10 * rank])
world.all_reduce(total)
show("all_reduce", total)

# (2) From one to all.
told = np.array([7 if rank == 0 else 0])
world.broadcast(told, root=0)
show("broadcast", told)

# (3) Parts of different sizes, one after the other: rank r has r + 1 elements.
counts = list(range(1, size + 1))
everything = np.empty(sum(counts), dtype=np.int64)
world.all_gather_v(np.full(rank + 1, rank), everything, counts)
show("all_gather_v", everything)

# (4) Two ranks alone: each one's number goes once around. With async_op one gets a Work, and waits for it later.
got = np.array([rank])
if size > 1:
    sent = world.send(np.array([rank]), (rank + 1) % size, async_op=True)
    world.recv(got, (rank - 1) % size)
    sent.wait()
show("recv", got)

# (5) A part of the world: the even ranks, and the odd ones.
half = world.split(color=rank % 2)
ranks = np.array([rank])
half.all_reduce(ranks)
show("split", ranks)

# (6) Ranks that disagree are refused, all of them, before anything is changed; then the world goes on.
try:
    world.all_reduce(np.zeros(2 if rank == 0 else 3))
    show("alone", [size])
except cohort.Mismatch:
    show("refused", [size])
world.barrier()
