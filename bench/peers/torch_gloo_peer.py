"""torch.distributed with Gloo as a peer: the same commands, buffers and order as peer_loop.h has, in Python.

usage: torch_gloo_peer.py FOLDER RANK RANKS
"""
import mmap
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.dont_write_bytecode = True

from lib import worker  # noqa: E402

worker.die_with_parent()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

PERIOD = 251
BACK_TO_BACK_BYTES = 4096
SYMMETRIC = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "send_recv"}
PARTS = {"all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"}
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int64": torch.int64}


def value_of(rank, index):
    a = ((index % PERIOD + 1) * 2654435761) & 0xFFFFFFFF
    b = ((rank + 7) * 2246822519) & 0xFFFFFFFF
    return 1 + ((a ^ b) >> 15) % 5


def pattern(ranks, first, count, dtype):
    """`count` elements from `first` on, summed over the ranks."""
    period = torch.tensor([sum(value_of(rank, i) for rank in ranks) for i in range(PERIOD)], dtype=dtype)
    shifted = period.roll(-(first % PERIOD))
    return shifted.repeat(count // PERIOD + 1)[:count]


class Peer:
    def __init__(self, folder, rank, ranks):
        self.rank, self.ranks, self.round = rank, ranks, 0
        dist.init_process_group("gloo", init_method=f"file://{folder}/torch-meet", rank=rank, world_size=ranks)
        with open(f"{folder}/flags", "r+b") as file:
            self.flags = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self.pool = {}

    def align(self):
        self.round += 1
        self.flags[self.rank * 16] = self.round
        for other in range(self.ranks):
            while self.flags[other * 16] < self.round:
                os.sched_yield()

    def tensor(self, side, count, dtype):
        held = self.pool.get((side, dtype))
        if held is None or held.numel() < count:
            held = self.pool[side, dtype] = torch.zeros(max(count, 16), dtype=dtype)
        return held[:count]

    def measure(self, collective, size, iterations, state, memory, type_name, check):
        if memory != "heap" or state == "cold":
            return {"ok": False, "why": "unsupported"}
        dtype = TYPES[type_name]
        rank, ranks = self.rank, self.ranks
        count = 0 if collective == "barrier" else size // dtype.itemsize // (ranks if collective in PARTS else 1)
        if count == 0 and collective != "barrier":
            return {"ok": False, "why": "fewer bytes than ranks"}
        whole = count * ranks
        in_place = collective in ("all_reduce", "broadcast", "send_recv", "barrier")
        source = self.tensor(0, whole if collective in ("scatter", "reduce_scatter", "all_to_all") else count, dtype)
        target = source if in_place else self.tensor(
            1, whole if collective in ("all_gather", "gather", "all_to_all") else count, dtype)
        source_parts, target_parts = list(source.split(max(count, 1))), list(target.split(max(count, 1)))

        def reduce_to_root():
            # torch reduces in place only: the input has to be copied first, as a program would.
            target.copy_(source)
            dist.reduce(target, 0)

        def ping_pong():
            if rank == 0:
                dist.send(target, 1)
                dist.recv(target, 1)
            elif rank == 1:
                dist.recv(target, 0)
                dist.send(target, 0)

        call = {
            "all_reduce": lambda: dist.all_reduce(target),
            "reduce": reduce_to_root,
            "broadcast": lambda: dist.broadcast(target, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(target, source),
            "gather": lambda: dist.gather(source, target_parts if rank == 0 else None, 0),
            "scatter": lambda: dist.scatter(target, source_parts if rank == 0 else None, 0),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(target, source),
            "all_to_all": lambda: dist.all_to_all_single(target, source),
            "send_recv": ping_pong,
            "barrier": dist.barrier,
        }[collective]
        own = pattern([rank], 0, source.numel(), dtype)
        wrong = 0
        if check:
            source.copy_(own)
            if not in_place:
                target.fill_(-7)
            self.align()
            try:
                call()
            except (RuntimeError, NotImplementedError) as error:
                return {"ok": False, "why": f"unsupported: {str(error).splitlines()[0][:100]}"}
            self.align()
            everyone = range(ranks)
            if collective == "all_reduce" or (collective == "reduce" and rank == 0):
                wrong = int((target != pattern(everyone, 0, count, dtype)).sum())
            elif collective == "broadcast" or (collective == "send_recv" and rank < 2):
                wrong = int((target != pattern([0], 0, count, dtype)).sum())
            elif collective == "reduce_scatter":
                wrong = int((target != pattern(everyone, rank * count, count, dtype)).sum())
            elif collective == "scatter":
                wrong = int((target != pattern([0], rank * count, count, dtype)).sum())
            elif collective in ("all_gather", "all_to_all") or (collective == "gather" and rank == 0):
                first = rank * count if collective == "all_to_all" else 0
                wrong = sum(int((part != pattern([other], first, count, dtype)).sum())
                            for other, part in enumerate(target_parts))
        source.zero_()
        row = state == "hot" and collective in SYMMETRIC and size < BACK_TO_BACK_BYTES
        in_a_row = min(iterations, 100) if row else 1
        per_call = in_a_row * (2e3 if collective == "send_recv" else 1e3)
        times = []
        for sample in range(-1 if row else -2, iterations // in_a_row):
            if state == "touched":
                source.copy_(own)
            self.align()
            begin = time.perf_counter_ns()
            for _ in range(in_a_row):
                call()
            spent = time.perf_counter_ns() - begin
            if sample >= 0:
                times.append(round(spent / per_call, 3))
        self.align()
        return {"ok": True, "wrong": wrong, "us": times}

    def answer(self, words):
        _, collective, size, iterations, state, memory, type_name, check = words
        return self.measure(collective, int(size), int(iterations), state, memory, type_name, check == "1")


def main():
    torch.set_num_threads(1)
    folder, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    peer = Peer(folder, rank, ranks)
    worker.serve(folder, rank, f"Gloo of torch {torch.__version__}", peer.answer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
