#!/usr/bin/env python3
"""Many small tensors per step: operations by name against torch.distributed on Gloo, in the same processes.

Every step reduces the same tensors, all of them asynchronously, and then waits for all. Cohort's are asked for by name
in an order that is shuffled anew on each rank and in each step; Gloo's need one order. Sides take turns, a few steps
each, in an order that rotates; a side that is not measured sleeps. A turn starts at a barrier, and its time is that of
the slowest rank. Started by bench/compare_named; rank 0 writes one JSON object to --out.
"""
import argparse
import datetime
import json
import random
import time

import torch
import torch.distributed as dist

import cohort
from cohort import _core

DEADLINE = 60.0


class Gloo:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def step(self) -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in self.tensors]
        for work in works:
            work.wait()


class Named:
    """One call for each tensor."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.engine = _core.NamedEngine(cohort.world().split(), timeout=DEADLINE)
        self.items = [(f"allreduce.layer{i}.weight", tensor) for i, tensor in enumerate(tensors)]
        self.order = random.Random(cohort.rank())

    def step(self) -> None:
        self.order.shuffle(self.items)  # its time is charged too
        all_reduce = self.engine.all_reduce
        works = [all_reduce(name, tensor, op="sum") for name, tensor in self.items]
        for work in works:
            work.wait()


class Grouped(Named):
    """One call for all of them."""

    def step(self) -> None:
        self.order.shuffle(self.items)
        works = self.engine.all_reduce_group([i[0] for i in self.items], [i[1] for i in self.items], op="sum")
        for work in works:
            work.wait()


def check(sides: dict, tensors: list[torch.Tensor]) -> None:
    size = dist.get_world_size()
    for name, side in sides.items():
        for i, tensor in enumerate(tensors):
            tensor.fill_(i % 97 + dist.get_rank())
        side.step()
        for i, tensor in enumerate(tensors):
            expected = size * (i % 97) + sum(range(size))
            if not bool((tensor == expected).all()):
                raise SystemExit(f"named_many: {name}: tensor {i} is {tensor.flatten()[0].item()}, not {expected}")
        for tensor in tensors:
            tensor.zero_()


def turn(side: object, steps: int) -> float:
    """Milliseconds per step, of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        side.step()
    taken = torch.tensor([(time.perf_counter() - begin) * 1000 / steps], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--bytes", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cohort.init(timeout=DEADLINE)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=DEADLINE))
    tensors = [torch.zeros(options.bytes // 4) for _ in range(options.tensors)]
    sides = {"gloo": Gloo(tensors), "named": Named(tensors), "grouped": Grouped(tensors)}
    check(sides, tensors)
    rounds = []
    for number in range(options.rounds):
        names = list(sides)
        names = names[number % len(names) :] + names[: number % len(names)]
        rounds.append({name: turn(sides[name], options.steps) for name in names})
    result = {
        "torch": torch.__version__,
        "ranks": cohort.size(),
        "rounds": rounds,
        "statistics": sides["named"].engine.statistics(),
    }
    if cohort.rank() == 0:
        with open(options.out, "w", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    cohort.shutdown()


if __name__ == "__main__":
    main()
