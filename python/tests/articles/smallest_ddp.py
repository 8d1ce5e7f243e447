import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Points(Dataset):
    """Points, and the sums of their coordinates."""

    def __init__(self):
        self.points = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.points[index].sum(0, keepdim=True)


def train(local_rank):
    torch.cuda.set_device(local_rank)
    torch.manual_seed(dist.get_rank())  # DDP gives all of them the weights of rank 0
    dataset = Points()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = nn.Linear(8, 1).cuda(local_rank)
    ddp_model = DDP(model, device_ids=[local_rank])
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.1)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for points, sums in loader:
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(points.cuda(local_rank)), sums.cuda(local_rank))
            loss.backward()
            optimizer.step()
    length = model.weight.detach().norm().item()
    print("rank {} of {}, local {}: loss {:.6f}, weights {}".format(
        dist.get_rank(), dist.get_world_size(), local_rank, loss.item(), length))


if __name__ == "__main__":
    dist.init_process_group("nccl", init_method="env://")
    train(int(os.environ["LOCAL_RANK"]))
    dist.destroy_process_group()
