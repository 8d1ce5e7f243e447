"""What it costs to look for gradients that are not finite and to compare parameters: cohort.nn.DistributedDataParallel.

    cohort run -q -np 2 python3 bench/ddp_checks.py [--batches 32,128,512] [--width 2432] [--steps 40] [--warmup 5]

An MLP of 25 million parameters (100 MB of fp32 gradients in four large ones and small ones), the same as bench/ddp_step.*.
Two replicas of it train in turns in the same process, one with non_finite="raise", one without; who begins changes with
each pair. A step is forward, backward with communication and SGD, after a barrier that is not timed, and takes as long as
its slowest rank. Rank 0 prints medians of the steps, the median of the differences within pairs with its quartiles, and
their share of the step, in time and in time of the processor (the mean of the ranks), which holds also where other work
is running; then the same for a model of many small layers, and the time of require_same_parameters.
"""

import argparse
import statistics
import time

import torch

import cohort
from cohort.nn import DistributedDataParallel


def mlp(width):
    sizes = [512, *[width] * 5, 10]
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1]), 512


def many_small(_width):
    """300 layers, all of whose gradients are copied into buckets."""
    layers = [torch.nn.Linear(288, 288) for _ in range(300)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(288, 10)), 288


def over_ranks(comm, seconds, op):
    one = torch.tensor([seconds], dtype=torch.float64)
    comm.all_reduce(one, op=op)
    return one.item() * 1e3  # milliseconds


def step(comm, model, optimizer, x, y):
    """Milliseconds: of the slowest rank, and of the processor."""
    comm.barrier()
    began, processor = time.perf_counter(), time.process_time()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    took, used = time.perf_counter() - began, time.process_time() - processor
    return over_ranks(comm, took, "max"), over_ranks(comm, used, "average")


def difference(times, which):
    """The median without, and in words what comes with it."""
    off, on = ([one[which] for one in side] for side in times)
    median = statistics.median(off)
    low, middle, high = statistics.quantiles([b - a for a, b in zip(off, on)], n=4)
    share = [100 * one / median for one in (middle, low, high)]
    return (
        f"{median:.1f} ms, with {statistics.median(on):.1f} ms, difference {middle:+.2f} ms, that is {share[0]:+.2f} % "
        f"({share[1]:+.2f} to {share[2]:+.2f})"
    )


def measure(comm, make, batch, options):
    models = []
    for checks in ({"non_finite": "ignore"}, {"non_finite": "raise"}):
        torch.manual_seed(1)
        net, inputs = make(options.width)
        model = DistributedDataParallel(net, comm, **checks)
        models.append((model, torch.optim.SGD(net.parameters(), lr=0.01)))
    torch.manual_seed(100 + comm.rank())
    x, y = torch.rand(batch, inputs), torch.randint(0, 10, (batch,))
    times = ([], [])
    for number in range(options.warmup + options.steps):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        taken = {which: step(comm, *models[which], x, y) for which in order}
        if number >= options.warmup:
            for which in order:
                times[which].append(taken[which])
    return times, sum(parameter.numel() for parameter in models[0][0].parameters()), models


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", default="32,128,512", help="samples per rank and step")
    parser.add_argument("--width", type=int, default=2432, help="of each hidden layer")
    parser.add_argument("--steps", type=int, default=40, help="timed pairs of steps")
    parser.add_argument("--warmup", type=int, default=5, help="pairs before them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cohort.init()
    comm = cohort.world()
    for name, make, batches in (
        ("mlp", mlp, [int(batch) for batch in options.batches.split(",")]),
        ("300 small layers", many_small, [128]),
    ):
        for batch in batches:
            times, parameters, models = measure(comm, make, batch, options)
            if comm.rank() == 0:
                print(
                    f"{name}, {parameters / 1e6:.1f} million parameters, batch {batch}, {comm.size()} ranks:\n"
                    f"  time       {difference(times, 0)}\n  processor  {difference(times, 1)}",
                    flush=True,
                )
        model = models[0][0]
        times = []
        for _ in range(20):
            comm.barrier()
            began = time.perf_counter()
            model.require_same_parameters()
            times.append(over_ranks(comm, time.perf_counter() - began, "max"))
        if comm.rank() == 0:
            print(f"{name}: require_same_parameters {statistics.median(times):.1f} ms", flush=True)


if __name__ == "__main__":
    main()
