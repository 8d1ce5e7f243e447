"""cohort.Distributor runs a program of torch's DistributedDataParallel as it is. Alone in a file: torch takes long to start."""

import importlib.util
import os
import unittest

import cohort
from run_support import Folder, captured


def ddp(steps):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    weights = [torch.empty(1, 4) for _ in range(dist.get_world_size())]
    # Kept until the end: a tensor that only the group's thread still holds needs Python to be freed, and torch 1.13 holds
    # on to Python while it waits for that thread, when the model goes and takes the group with it.
    mine = model.module.weight.detach()
    dist.all_gather(weights, mine)
    dist.destroy_process_group()
    return weights


class Ddp(Folder):
    @unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not installed")
    def test_a_ddp_program(self):
        with captured():
            first, second = cohort.Distributor(2, use_gpu=False).run(ddp, 3)
        self.assertTrue(first.equal(second))


if __name__ == "__main__":
    unittest.main()
