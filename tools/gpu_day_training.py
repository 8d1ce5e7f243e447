"""A rank of tools/gpu-day, with torch: trains a small model on a GPU, or times DistributedDataParallel beside torch's.

gpu_day_training.py WAY       WAY: world (cohort's operations), nn (cohort.nn), horovod (cohort.torch), distributed (torch's
                              DistributedDataParallel over the backend "cohort"). All ranks together see the same data,
                              whatever their number, so the last loss is the same but for rounding
gpu_day_training.py times     of a step of two models, one of convolutions and one of attention, by turns: cohort.nn, torch's
                              over "cohort", torch's over torch's own NCCL

--pretended: over the pretended driver, with tensors of "cuda" that pretend (python/tests/cuda_support.py), and smaller.
Rank 0 prints JSON.
"""

import json
import pathlib
import statistics
import sys
import time

PRETENDED = "--pretended" in sys.argv
if PRETENDED:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python" / "tests"))
    import cuda_support  # noqa: F401

import torch  # noqa: E402

import cohort  # noqa: E402

STEPS = 40


def own_device():
    device = torch.device("cuda", 0 if PRETENDED else cohort.local_rank() % torch.cuda.device_count())
    if not PRETENDED:
        torch.cuda.set_device(device)
    return device


def averaged_by(way, model, optimizer):
    """(what is called, the optimizer, what averages gradients after backward)."""
    if way == "nn":
        return cohort.nn.DistributedDataParallel(model), optimizer, None
    if way == "horovod":
        import cohort.torch as hvd

        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, hvd.DistributedOptimizer(optimizer, model.named_parameters()), None
    if way == "distributed":
        return torch.nn.parallel.DistributedDataParallel(model), optimizer, None
    world = cohort.world()
    for parameter in model.parameters():
        world.broadcast(parameter.data)
    return model, optimizer, lambda: world.all_reduce([parameter.grad for parameter in model.parameters()], op="average")


def begin(way):
    """(rank, ranks)"""
    if way == "horovod":
        import cohort.torch as hvd

        hvd.init()
        return hvd.rank(), hvd.size()
    if way in ("distributed", "times"):
        import cohort.distributed

        torch.distributed.init_process_group("cohort")
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    import cohort.nn

    cohort.init()
    return cohort.rank(), cohort.size()


def train(way):
    rank, ranks = begin(way)
    device = own_device()
    torch.manual_seed(1)
    inputs = torch.randn(1024, 64)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)).to(device)
    targets = inputs[:, :8].sum(1, keepdim=True).tanh()
    inputs, targets = inputs.to(device), targets.to(device)
    own = slice(rank, None, ranks)
    parallel, optimizer, average = averaged_by(way, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(parallel(inputs[own]), targets[own]).backward()
        if average is not None:
            average()
        optimizer.step()
        with torch.no_grad():
            losses.append(torch.nn.functional.mse_loss(model(inputs), targets).item())
    where = "a GPU that pretends" if PRETENDED else torch.cuda.get_device_name(device)
    if rank == 0:
        print(json.dumps({"first": losses[0], "last": losses[-1], "ranks": ranks, "how": f"torch {torch.__version__} on {where}"}))


class Residual(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False), torch.nn.BatchNorm2d(channels), torch.nn.ReLU(),
            torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False), torch.nn.BatchNorm2d(channels))  # fmt: skip

    def forward(self, x):
        return torch.relu(x + self.inner(x))


def convolutions(device):
    channels, blocks, side, batch = (4, 1, 8, 2) if PRETENDED else (256, 12, 32, 64)
    layers = [torch.nn.Conv2d(3, channels, 3, padding=1), *(Residual(channels) for _ in range(blocks))]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(channels, 10)]
    return torch.nn.Sequential(*layers, *head).to(device), torch.randn(batch, 3, side, side).to(device)


def attention(device):
    width, layers, length, batch = (8, 1, 4, 2) if PRETENDED else (1024, 12, 512, 8)
    layer = torch.nn.TransformerEncoderLayer(width, 2 if PRETENDED else 16, 4 * width, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers).to(device), torch.randn(batch, length, width).to(device)


def times():
    rank, ranks = begin("times")
    import cohort.nn

    device = own_device()
    rounds, steps = (1, 1) if PRETENDED else (5, 20)
    told = {"ranks": ranks}
    for make in (convolutions, attention):
        ways, milliseconds = {}, {}
        for name in ("cohort.nn", "torch over cohort", "torch over nccl"):
            torch.manual_seed(1)
            model, inputs = make(device)
            try:
                if name == "cohort.nn":
                    parallel = cohort.nn.DistributedDataParallel(model, process_group=torch.distributed.group.WORLD)
                else:
                    group = None if name == "torch over cohort" else torch.distributed.new_group(backend="nccl")
                    parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
            except (RuntimeError, ValueError) as error:
                milliseconds[name] = f"not there: {str(error).splitlines()[0]}"
                continue
            ways[name] = (parallel, inputs, torch.optim.SGD(model.parameters(), lr=1e-3))
        taken = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, (parallel, inputs, optimizer) in ways.items():
                if not PRETENDED:
                    torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(steps):
                    optimizer.zero_grad()
                    parallel(inputs).square().mean().backward()
                    optimizer.step()
                of_host = time.perf_counter() - began
                if not PRETENDED:
                    torch.cuda.synchronize()
                if number > 0:  # the first warms up
                    both = (time.perf_counter() - began, of_host)
                    taken[name].append([seconds / steps * 1e3 for seconds in both])
        for name, each in taken.items():
            milliseconds[name] = [statistics.median(column) for column in zip(*each)]
        told[make.__name__] = milliseconds
    if rank == 0:
        print(json.dumps(told))


def main():
    (way,) = [word for word in sys.argv[1:] if not word.startswith("--")]
    times() if way == "times" else train(way)


if __name__ == "__main__":
    main()
