"""A rank of tools/gpu/gpu-day, with torch: trains a small model on a GPU, or times DistributedDataParallel beside torch's.

gpu_day_training.py WAY       WAY: world (cohort's operations), nn (cohort.nn), horovod (cohort.horovod.torch), distributed (torch's
                              DistributedDataParallel over the backend "cohort"). All ranks together see the same data,
                              whatever their number, so the last loss is the same but for rounding
gpu_day_training.py arrays    sums of arrays of CuPy and of JAX, those that are there, by DLPack
gpu_day_training.py times     of a step of two models, one of convolutions and one of attention, by turns: cohort.nn, torch's
                              over "cohort", torch's over torch's own NCCL; and of torch.distributed's sums over both

--fake: over the fake driver, with tensors of "cuda" that pretend (python/tests/cuda_support.py), and smaller.
Rank 0 prints JSON.
"""

import json
import os
import pathlib
import statistics
import sys
import time

FAKE = "--fake" in sys.argv
if FAKE:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python" / "tests"))
    import cuda_support  # noqa: F401

import torch  # noqa: E402

import cohort  # noqa: E402

STEPS = 40


def own_device():
    device = torch.device("cuda", 0 if FAKE else int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if not FAKE:
        torch.cuda.set_device(device)
    return device


def averaged_by(way, model, optimizer):
    """(what is called, the optimizer, what averages gradients after backward)."""
    if way == "nn":
        return cohort.nn.DistributedDataParallel(model), optimizer, None
    if way == "horovod":
        import cohort.horovod.torch as hvd

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
        import cohort.horovod.torch as hvd

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
    where = "a GPU that pretends" if FAKE else torch.cuda.get_device_name(device)
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
    channels, blocks, side, batch = (4, 1, 8, 2) if FAKE else (256, 12, 32, 64)
    layers = [torch.nn.Conv2d(3, channels, 3, padding=1), *(Residual(channels) for _ in range(blocks))]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(channels, 10)]
    return torch.nn.Sequential(*layers, *head).to(device), torch.randn(batch, 3, side, side).to(device)


def attention(device):
    width, layers, length, batch = (8, 1, 4, 2) if FAKE else (1024, 12, 512, 8)
    layer = torch.nn.TransformerEncoderLayer(width, 2 if FAKE else 16, 4 * width, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers).to(device), torch.randn(batch, length, width).to(device)


def times():
    rank, ranks = begin("times")
    import cohort.nn

    device = own_device()
    rounds, steps = (1, 1) if FAKE else (4, 8)
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
                if not FAKE:
                    torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(steps):
                    optimizer.zero_grad()
                    parallel(inputs).square().mean().backward()
                    optimizer.step()
                of_host = time.perf_counter() - began
                if not FAKE:
                    torch.cuda.synchronize()
                if number > 0:  # the first warms up
                    both = (time.perf_counter() - began, of_host)
                    taken[name].append([seconds / steps * 1e3 for seconds in both])
        for name, each in taken.items():
            milliseconds[name] = [statistics.median(column) for column in zip(*each)]
        if rank == 0:
            print(json.dumps({"ranks": ranks, "model": make.__name__, "ways": milliseconds}), flush=True)
    sums(rank, ranks, device)


def sums(rank, ranks, device):
    """Times all_reduce of float32, ten in a row before the host waits."""
    ways = {"cohort": torch.distributed.group.WORLD}
    try:
        ways["nccl"] = torch.distributed.new_group(backend="nccl")
    except (RuntimeError, ValueError):
        pass  # as with the models
    for count in (8, 256) if FAKE else (2**14, 2**18, 2**22, 2**26):
        milliseconds = {}
        data = torch.ones(count, device=device)
        taken = {name: [] for name in ways}
        for number in range(6):
            for name, group in ways.items():
                torch.distributed.barrier()
                if not FAKE:
                    torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(10):
                    torch.distributed.all_reduce(data, group=group)
                if not FAKE:
                    torch.cuda.synchronize()
                if number > 0:
                    taken[name].append((time.perf_counter() - began) / 10 * 1e3)
        milliseconds.update({f"torch over {name}": statistics.median(each) for name, each in taken.items()})
        if rank == 0:
            print(json.dumps({"ranks": ranks, "model": f"all_reduce of {4 * count} bytes", "ways": milliseconds}), flush=True)


# A tenth of a second passes before it adds.
LATE = """extern "C" __global__ void late(float* x) {
  for (int i = 0; i < 1000000; ++i) __nanosleep(100);
  x[threadIdx.x] += 1;
}"""


def arrays():
    """CuPy's in place, JAX's, which nobody may change, into one of CuPy's."""
    cohort.init()
    world, device = cohort.world(), own_device()
    how = []
    try:
        import cupy
    except ImportError:
        how.append("there is no CuPy")
    else:
        with cupy.cuda.Device(device.index):
            kernel = cupy.RawKernel(LATE, "late")
            for sums in ("fast", "exact"):
                with cupy.cuda.Stream(non_blocking=True):
                    own = cupy.arange(256, dtype=cupy.float32)
                    kernel((1,), (256,), (own,))
                    world.all_reduce(own, gpu_sums=sums)
                wanted = cohort.size() * (cupy.arange(256, dtype=cupy.float32) + 1)
                assert bool((own == wanted).all()), (sums, own)
            how.append(f"CuPy {cupy.__version__} in its own stream, fast and exact")
            try:
                import jax
                import jax.numpy as jnp
            except ImportError:
                how.append("there is no JAX")
            else:
                source = jax.device_put(jnp.arange(1000.0, dtype=jnp.float32), jax.devices()[device.index]) + cohort.rank()
                output = cupy.empty(1000, dtype=cupy.float32)
                world.all_reduce(source, output)
                size = cohort.size()
                wanted = size * cupy.arange(1000, dtype=cupy.float32) + size * (size - 1) / 2
                assert bool((output == wanted).all()), output
                how.append(f"JAX {jax.__version__} on {source.device} into CuPy's")
    if cohort.rank() == 0:
        print(json.dumps({"how": "; ".join(how)}))


def main():
    (way,) = [word for word in sys.argv[1:] if not word.startswith("--")]
    {"times": times, "arrays": arrays}.get(way, lambda: train(way))()


if __name__ == "__main__":
    main()
