"""A rank of bench/compare horovod: many small tensors per step, by name and by torch.distributed on Gloo.

usage: named.py FOLDER TENSORS BYTES         as a rank of `cohort run`

Every step reduces the same tensors, all of them asynchronously, and then waits for all. Cohort's are asked for by name
in an order that is shuffled anew on each rank and in each step; Gloo's need one order.
"""
import datetime
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.dont_write_bytecode = True

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import cohort  # noqa: E402
from cohort import _core  # noqa: E402
from lib import worker  # noqa: E402

DEADLINE = 60.0


class Gloo:
    def __init__(self, tensors):
        self.tensors = tensors

    def step(self):
        works = [dist.all_reduce(tensor, async_op=True) for tensor in self.tensors]
        for work in works:
            work.wait()


class Named:
    """One call for each tensor."""

    def __init__(self, tensors):
        self.engine = _core.NamedEngine(cohort.world().split(), timeout=DEADLINE)
        self.items = [(f"allreduce.layer{i}.weight", tensor) for i, tensor in enumerate(tensors)]
        self.order = random.Random(cohort.rank())

    def step(self):
        self.order.shuffle(self.items)  # its time is charged too
        all_reduce = self.engine.all_reduce
        works = [all_reduce(name, tensor, op="sum") for name, tensor in self.items]
        for work in works:
            work.wait()


class Grouped(Named):
    """One call for all of them."""

    def step(self):
        self.order.shuffle(self.items)
        works = self.engine.all_reduce_group([i[0] for i in self.items], [i[1] for i in self.items], op="sum")
        for work in works:
            work.wait()


def check(sides, tensors):
    size = dist.get_world_size()
    for name, side in sides.items():
        for i, tensor in enumerate(tensors):
            tensor.fill_(i % 97 + dist.get_rank())
        side.step()
        for i, tensor in enumerate(tensors):
            expected = size * (i % 97) + sum(range(size))
            if not bool((tensor == expected).all()):
                raise SystemExit(f"named: {name}: tensor {i} is {tensor.flatten()[0].item()}, not {expected}")
        for tensor in tensors:
            tensor.zero_()


def main():
    torch.set_num_threads(1)
    cohort.init(timeout=DEADLINE)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=DEADLINE))
    tensors = [torch.zeros(int(sys.argv[3]) // 4) for _ in range(int(sys.argv[2]))]
    sides = {"gloo": Gloo(tensors), "named": Named(tensors), "grouped": Grouped(tensors)}
    check(sides, tensors)

    def answer(words):
        if words[0] == "statistics":
            return {"statistics": sides["named"].engine.statistics()}
        return worker.timed(dist.barrier, sides[words[0]].step, int(words[1]))

    worker.serve(sys.argv[1], cohort.rank(), f"torch {torch.__version__}", answer)
    dist.destroy_process_group()
    cohort.shutdown()


if __name__ == "__main__":
    main()
