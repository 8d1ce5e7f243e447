#!/usr/bin/env python3
"""The digits example in Python, under torch's DistributedDataParallel with Gloo: what Cohort is compared with.

The same data, model, initial distribution, batch, learning rate and threads as examples/01-digits; the data lie in
memory as one tensor, and a batch is one index_select. Start it with `cohort run`, with torchrun, or alone.
Prints one line of JSON on rank 0.
"""
import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "01-digits" / "python"))
from digits import Net, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "data" / "digits")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step over all processes")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", 1)))
    parser.add_argument("--accuracy", action="store_true", help="evaluate after each epoch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(options.seed)
    net = Net()
    model: torch.nn.Module = net
    if world > 1:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(net)
    (images, labels), (test_images, test_labels) = load(options.data)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    part = options.batch_size // world

    speeds = []
    for epoch in range(options.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed + epoch))
        for group in optimizer.param_groups:
            group["lr"] = options.lr * 0.7**epoch
        # Whole batches only: the last, smaller one would be another measurement.
        steps = len(images) // options.batch_size
        begin = time.perf_counter()
        for step in range(steps):
            first = step * options.batch_size + rank * part
            batch = order[first : first + part]
            loss = F.nll_loss(model(images.index_select(0, batch)), labels.index_select(0, batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
        if world > 1:
            dist.barrier()
        speeds.append(steps * options.batch_size / (time.perf_counter() - begin))
        if options.accuracy and rank == 0:
            with torch.no_grad():
                right = (net(test_images).argmax(1) == test_labels).sum().item()
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, accuracy {right / len(test_labels):.4f}, {speeds[-1]:.0f} samples/s")
    if rank == 0:
        # The first epoch warms up: caches, allocators, DDP's rebuilt buckets.
        print(json.dumps({"program": "ddp", "world_size": world, "samples_per_second": sorted(speeds[1:])[len(speeds[1:]) // 2]}))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
