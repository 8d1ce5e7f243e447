import torch
import torch.nn as nn
import torch.optim as optim
import horovod.torch as hvd
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from smallest_ddp import Points

hvd.init()
torch.cuda.set_device(hvd.local_rank())
torch.manual_seed(hvd.rank())  # rank 0's weights are everybody's
dataset = Points()
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = nn.Linear(8, 1)
model.cuda()
optimizer = optim.SGD(model.parameters(), lr=0.05 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for points, sums in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(points.cuda()), sums.cuda())
        loss.backward()
        optimizer.step()
length = model.weight.detach().norm().item()
print("rank {} of {}, local {}: loss {:.6f}, weights {}".format(
    hvd.rank(), hvd.size(), hvd.local_rank(), loss.item(), length))
