#!/usr/bin/env python3
"""The training step of an MLP of 25 million parameters under torch's DistributedDataParallel with Gloo, or under Cohort's
for Python.

The same as ddp_step.cpp, which says what is timed: model, first values, batches, optimizer, order of steps. Started by
torchrun or `cohort run`, driven by bench/compare_exposed. Rank 0 writes one JSON object to --out.
"""
import argparse
import ctypes
import datetime
import json
import math
import os
import signal
import time

INPUTS, CLASSES, BATCHES = 512, 10, 4
DEADLINE = datetime.timedelta(seconds=60)


def die_with_parent() -> None:
    """torchrun puts its workers into sessions of their own, where they outlive it if it is killed."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise SystemExit("ddp_step: its launcher is gone")


die_with_parent()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402


class Mlp(torch.nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        sizes = [INPUTS] + [width] * hidden + [CLASSES]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for layer in self.layers:
                bound = math.sqrt(3 / layer.weight.size(1))
                layer.weight.uniform_(-bound, bound, generator=generator)
                layer.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


def make_batches(size: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [(torch.empty(size, INPUTS).uniform_(-1, 1, generator=generator),
             torch.empty(size, dtype=torch.long).random_(0, CLASSES, generator=generator)) for _ in range(BATCHES)]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.detach()


class Gloo:
    """torch's own: what both worlds are asked for."""

    name = "ddp"
    MAX, SUM = dist.ReduceOp.MAX, dist.ReduceOp.SUM

    def __init__(self) -> None:
        dist.init_process_group("gloo", timeout=DEADLINE)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.barrier = dist.barrier

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp, async_op: bool = False) -> object:
        return dist.all_reduce(tensor, op, async_op=async_op)

    def buffer(self, elements: int) -> torch.Tensor:
        return torch.zeros(elements)

    def wrap(self, net: torch.nn.Module, options: argparse.Namespace) -> torch.nn.Module:
        return torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=options.bucket_view)

    def leave(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


class Cohort:
    name = "cohort-python"
    MAX, SUM = "max", "sum"

    def __init__(self) -> None:
        import cohort
        import cohort.nn

        self.cohort = cohort
        cohort.init(timeout=DEADLINE)
        self.world = cohort.world()
        self.rank, self.size = cohort.rank(), cohort.size()
        self.barrier = self.world.barrier

    def all_reduce(self, tensor: torch.Tensor, op: str, async_op: bool = False) -> object:
        return self.world.all_reduce(tensor, op=op, async_op=async_op)

    def buffer(self, elements: int) -> torch.Tensor:
        return self.world.allocate(4 * elements).as_torch("float32")

    def wrap(self, net: torch.nn.Module, options: argparse.Namespace) -> torch.nn.Module:
        return self.cohort.nn.DistributedDataParallel(net)

    def leave(self) -> None:
        self.world.barrier()
        self.cohort.shutdown()


def timed(world: object, function: object) -> tuple[float, float]:
    """Milliseconds, and those of the CPU: of all threads of this process."""
    world.barrier()
    cpu, begin = time.process_time(), time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1000, (time.process_time() - cpu) * 1000


def reduced(world: object, values: list[float], op: object) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    world.all_reduce(tensor, op)
    return tensor.tolist()


def replicas_equal(world: object, net: torch.nn.Module) -> bool:
    total = sum(parameter.detach().double().sum().item() for parameter in net.parameters())
    high, low = reduced(world, [total, -total], world.MAX)
    return high == -low


def all_reduce_alone(world: object, parameters: int, options: argparse.Namespace) -> list[float]:
    pieces = [world.buffer(parameters // 4) for _ in range(4)]

    def reduce_all() -> None:
        works = [world.all_reduce(piece, world.SUM, async_op=True) for piece in pieces]
        for work in works:
            work.wait()

    times = [timed(world, reduce_all)[0] for _ in range(options.warmup + options.steps)]
    return reduced(world, times[options.warmup:], world.MAX)


def measure(world: object, options: argparse.Namespace, batch_size: int) -> dict:
    net, twin = Mlp(options.width, options.hidden), Mlp(options.width, options.hidden)
    model = world.wrap(net, options)
    optimizer = torch.optim.SGD(net.parameters(), lr=options.rate)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=options.rate)
    settings = optimizer.param_groups[0]
    batches = make_batches(batch_size, world.rank)

    sync, no_sync, plain, sync_cpu, plain_cpu = [], [], [], [], []
    first_loss = last_loss = 0.0
    for i in range(options.warmup + options.steps):
        batch = batches[i % len(batches)]
        plain_taken = timed(world, lambda: step(twin, twin_optimizer, batch))
        with model.no_sync():
            settings["lr"] = 0.0
            no_sync_taken = timed(world, lambda: step(model, optimizer, batch))
            settings["lr"] = options.rate
        losses = []
        sync_taken = timed(world, lambda: losses.append(step(model, optimizer, batch)))
        last_loss = losses[0].item()
        if i == 0:
            first_loss = last_loss
        if i >= options.warmup:
            sync.append(sync_taken[0])
            no_sync.append(no_sync_taken[0])
            plain.append(plain_taken[0])
            sync_cpu.append(sync_taken[1])
            plain_cpu.append(plain_taken[1])
    parameters = sum(parameter.numel() for parameter in net.parameters())

    def slowest(times: list[float]) -> list[float]:
        return reduced(world, times, world.MAX)

    first_loss, last_loss = (total / world.size for total in reduced(world, [first_loss, last_loss], world.SUM))
    return {"batch": batch_size, "parameters": parameters, "sync_ms": slowest(sync), "no_sync_ms": slowest(no_sync),
            "plain_ms": slowest(plain), "sync_cpu_ms": slowest(sync_cpu), "plain_cpu_ms": slowest(plain_cpu),
            "all_reduce_ms": all_reduce_alone(world, parameters, options),
            "first_loss": first_loss, "last_loss": last_loss, "replicas_equal": replicas_equal(world, net)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="32", help="samples per rank and step, a list with commas")
    parser.add_argument("--width", type=int, default=2432)
    parser.add_argument("--hidden", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--bucket-view", action="store_true", help="DDP's gradient_as_bucket_view")
    parser.add_argument("--cohort", action="store_true", help="cohort.nn.DistributedDataParallel")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    world = Cohort() if options.cohort else Gloo()
    result = {"side": world.name, "torch": torch.__version__, "ranks": world.size,
              "batches": [measure(world, options, int(batch)) for batch in options.batches.split(",")]}
    if world.rank == 0:
        with open(options.out, "w", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    world.leave()


if __name__ == "__main__":
    main()
