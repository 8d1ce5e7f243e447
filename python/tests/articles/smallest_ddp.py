import argparse
import os

import cohort  # noqa: F401 -- for torch before 2.5
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--init-method", default="env://")
parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", -1))))
parser.add_argument("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", -1))))
args = parser.parse_args()

dist.init_process_group("cohort", init_method=args.init_method, rank=args.rank, world_size=args.world_size)
model = nn.Linear(10, 10)
ddp_model = DDP(model)
loss_fn = nn.MSELoss()
optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
outputs = ddp_model(torch.randn(20, 10))
labels = torch.randn(20, 10)
loss_fn(outputs, labels).backward()
optimizer.step()

total = model.weight.detach().clone()
dist.all_reduce(total)
assert torch.allclose(total, model.weight * dist.get_world_size())
print("rank {} of {} done".format(dist.get_rank(), dist.get_world_size()))
dist.destroy_process_group()
