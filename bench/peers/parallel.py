"""A rank of bench/compare parallel: steps of models that are larger than one process, over one backend.

usage: parallel.py FOLDER BACKEND         as a rank of `cohort run`

Commands: `model WAY` makes the model anew; `step WAY REPEAT`; `sum WAY`: of what it has been trained to.
"""
import datetime
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.dont_write_bytecode = True

import cohort  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from lib import worker  # noqa: E402


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs):
        return inputs + self.down(F.relu(self.up(self.norm(inputs))))


def blocks(count, width):
    torch.manual_seed(1)
    return nn.Sequential(*(Block(width) for _ in range(count)))


class Way:
    """A model, its optimizer and a step."""

    def __init__(self, net, rows, width):
        self.net, self.optimizer = net, torch.optim.SGD(net.parameters(), lr=1e-3)
        self.inputs = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))

    def step(self):
        self.optimizer.zero_grad()
        self.net(self.inputs).square().mean().backward()
        self.optimizer.step()


def fsdp(in_memory):
    """33 million parameters; batch 8."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = blocks(4, 1024)
    for layer in [*net, net]:
        fully_shard(layer, mesh=mesh)
    for layer in net:
        if in_memory and hasattr(layer, "set_allocate_memory_from_process_group_for_comm"):
            layer.set_allocate_memory_from_process_group_for_comm(True)
    return Way(net, 8, 1024)


def tensor_parallel():
    """4 blocks, 128 rows of 512."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = blocks(4, 512)
    for block in net:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return Way(net, 128, 512)


class Pipeline(Way):
    """A block a stage, 16 micro-batches of 32 rows of 512."""

    def __init__(self):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        rank, size = dist.get_rank(), dist.get_world_size()
        super().__init__(blocks(size, 512)[rank], 16 * 32, 512)
        stage = PipelineStage(self.net, rank, size, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, 16, loss_fn=F.mse_loss)
        self.words = [self.inputs] if rank == 0 else []
        self.more = {"target": torch.zeros_like(self.inputs)} if rank == size - 1 else {}

    def step(self):
        self.optimizer.zero_grad()
        self.schedule.step(*self.words, **self.more)
        self.optimizer.step()


WAYS = {"fsdp": lambda: fsdp(True), "fsdp_heap": lambda: fsdp(False), "tp": tensor_parallel, "1f1b": Pipeline}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Ways:
    def __init__(self):
        self.made = {}

    def answer(self, words):
        if words[0] == "model":
            self.made = {words[1]: WAYS[words[1]]()} if words[1] != "fsdp_heap" else {**self.made, words[1]: WAYS[words[1]]()}
            return {}
        way = self.made[words[1]]
        if words[0] == "sum":
            return {"sum": sum(whole(one).double().square().sum().item() for one in way.net.parameters())}
        return worker.timed(dist.barrier, way.step, int(words[2]))


def main():
    torch.set_num_threads(1)
    if sys.argv[2] == "cohort":
        dist.init_process_group("cohort", timeout=datetime.timedelta(seconds=worker.SECONDS_PER_COMMAND))
    else:
        cohort.init()
        rank, size = cohort.rank(), cohort.size()
        cohort.shutdown()
        dist.init_process_group(sys.argv[2], init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=size)
    worker.serve(sys.argv[1], dist.get_rank(), f"torch {torch.__version__}", Ways().answer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
