"""A step of an MLP of 100 million parameters whose Adam is torch's: what it takes, and the memory of the host. A rank of
`cohort run`; rank 0 writes one JSON object to --out, of the form of ddp_step's.

    cohort run -np 4 -- python3 bench/peers/zero_step.py --way zero --backend gloo --out FILE

    zero   DistributedDataParallel with bucket views, ZeroRedundancyOptimizer of Adam
    ddp    DistributedDataParallel with bucket views, Adam
    fsdp   FSDP2 (fully_shard, a group for each layer), Adam

"pss_bytes" is the memory of all ranks together (/proc/self/smaps_rollup: what they share counts once), the most of after
backward and after the optimizer's step, without what it was before, when a small model had been trained and was gone ("base_pss_bytes").
"""
import argparse
import datetime
import gc
import json
import os
import time

import cohort
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

INPUTS, HIDDEN, LAYERS, CLASSES = 512, 4960, 4, 10


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=["zero", "ddp", "fsdp"], default="zero")
    parser.add_argument("--backend", default="gloo", help="gloo or cohort [gloo]")
    parser.add_argument("--batch", type=int, default=4, help="samples per rank and step [4]")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help=f"width of the {LAYERS} hidden layers between [{HIDDEN}]")
    parser.add_argument("--steps", type=int, default=5, help="timed ones [5]")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them [2]")
    parser.add_argument("--fused", action="store_true", help="Adam in one kernel, where this torch has it")
    parser.add_argument("--out", required=True, help="file that rank 0 writes")
    return parser.parse_args()


def form_group(options):
    if options.backend == "cohort":
        dist.init_process_group("cohort", timeout=datetime.timedelta(seconds=120))
        return
    cohort.init()
    rank, size = cohort.rank(), cohort.size()
    if rank == 0 and os.path.exists(f"{options.out}.store"):
        os.remove(f"{options.out}.store")
    cohort.world().barrier()
    cohort.shutdown()
    dist.init_process_group(options.backend, init_method=f"file://{os.path.abspath(options.out)}.store", rank=rank, world_size=size)


def over_ranks(value, op):
    value = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(value, op)
    return value.tolist()


def pss():
    """The PSS of all ranks, in bytes."""
    dist.barrier()
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        own = next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    total = over_ranks(own * 1024, dist.ReduceOp.SUM)
    dist.barrier()
    return total


def make(options, hidden):
    sizes = [INPUTS] + [hidden] * (LAYERS + 1) + [CLASSES]
    torch.manual_seed(1)
    layers = [layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]
    net = nn.Sequential(*layers[:-1])
    count = sum(one.numel() for one in net.parameters())
    how = {"lr": 1e-4, **({"fused": True} if options.fused else {})}
    if options.way == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in [*net[::2], net]:
            fully_shard(layer, mesh=mesh)
        if options.backend == "cohort":
            for layer in net[::2]:
                layer.set_allocate_memory_from_process_group_for_comm(True)
        return net, torch.optim.Adam(net.parameters(), **how), count
    model = DDP(net, gradient_as_bucket_view=True)
    if options.way == "ddp":
        return model, torch.optim.Adam(net.parameters(), **how), count
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return model, ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, **how), count


def train(model, optimizer, inputs, labels, options):
    """Milliseconds of each step, of its processor time, losses, bytes."""
    wall, cpu, losses, memory = [], [], [], 0
    for step in range(options.warmup + options.steps):
        dist.barrier()
        used, begin = time.process_time(), time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        if step == options.warmup - 1:
            memory = max(memory, pss())
        optimizer.step()
        wall.append((time.perf_counter() - begin) * 1e3)
        cpu.append((time.process_time() - used) * 1e3)
        losses.append(loss.item())
        if step == options.warmup - 1:
            memory = max(memory, pss())
    return wall, cpu, losses, memory


def main():
    options = parse()
    torch.set_num_threads(1)
    form_group(options)
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    inputs, labels = torch.randn(options.batch, INPUTS, generator=generator), torch.randint(CLASSES, (options.batch,), generator=generator)
    train(*make(options, 64)[:2], inputs, labels, options)  # brings libraries and connections in
    gc.collect()
    base = pss()
    model, optimizer, count = make(options, options.hidden)
    wall, cpu, losses, memory = train(model, optimizer, inputs, labels, options)
    wall, cpu = (over_ranks(times[options.warmup :], dist.ReduceOp.MAX) for times in (wall, cpu))
    losses = [one / size for one in over_ranks(losses, dist.ReduceOp.SUM)]
    if rank == 0:
        found = {"batch": options.batch, "parameters": count, "sync_ms": wall, "sync_cpu_ms": cpu, "first_loss": losses[0],
                 "last_loss": losses[-1], "pss_bytes": memory - base, "base_pss_bytes": base,
                 "pss_bytes_per_parameter": (memory - base) / count}
        with open(options.out, "w", encoding="utf-8") as file:
            print(json.dumps({"side": f"{options.way} over {options.backend}", "torch": torch.__version__, "ranks": size,
                              "batches": [found]}), file=file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
