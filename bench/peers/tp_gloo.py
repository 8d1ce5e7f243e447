"""The step of tp_step.cpp over torch.distributed with Gloo: the same blocks, sizes and order, the sums in place.

usage, under `cohort run`: tp_gloo.py STEPS FILE
"""
import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

WIDTH, HEADS, LAYERS, BATCH, SEQUENCE = 256, 8, 12, 4, 64
taken = 0.0
number = 0


def add_up(x):
    global taken, number
    begin = time.perf_counter()
    dist.all_reduce(x)
    taken += time.perf_counter() - begin
    number += 1
    return x


class CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return add_up(grad.contiguous())


class ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return add_up(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Block(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.up = nn.Linear(WIDTH, 3 * WIDTH // parts), nn.Linear(WIDTH, 4 * WIDTH // parts)
        self.projection = nn.Linear(WIDTH // parts, WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH // parts, WIDTH, bias=False)
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(2)])

    def forward(self, x):
        size = WIDTH // HEADS
        parts = self.qkv(CopyTo.apply(self.first(x))).view(BATCH, SEQUENCE, -1, 3 * size).transpose(1, 2).chunk(3, -1)
        weights = torch.softmax(parts[0] @ parts[1].transpose(-1, -2) * 0.18, -1)
        heads = (weights @ parts[2]).transpose(1, 2).reshape(BATCH, SEQUENCE, -1)
        x = x + ReduceFrom.apply(self.projection(heads)) + self.biases[0]
        return x + ReduceFrom.apply(self.down(nn.functional.gelu(self.up(CopyTo.apply(self.second(x)))))) + self.biases[1]


def main():
    global taken, number
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    blocks = nn.Sequential(*[Block(dist.get_world_size()) for _ in range(LAYERS)])
    x = torch.ones(BATCH, SEQUENCE, WIDTH, requires_grad=True)
    found = {"ms": [], "communication_ms": []}
    for step in range(-3, int(sys.argv[1])):
        dist.barrier()
        taken, number = 0.0, 0
        begin = time.perf_counter()
        blocks(x).square().mean().backward()
        blocks.zero_grad()
        sums = torch.tensor([time.perf_counter() - begin, taken], dtype=torch.float64)
        found["collectives"] = number
        dist.all_reduce(sums)
        for key, value in zip(("ms", "communication_ms"), (sums / dist.get_world_size() * 1e3).tolist()):
            if step >= 0:
                found[key].append(value)
    if dist.get_rank() == 0:
        with open(sys.argv[2], "w", encoding="ascii") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
