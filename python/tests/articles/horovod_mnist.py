import sys

import torch
import torch.nn.functional as F
import torch.optim as optim
import horovod.torch as hvd

from mnist import Net, dataset, save_checkpoint, test

# Initialize, and pin this process to the device of its local rank.
hvd.init()
torch.manual_seed(42)
torch.cuda.set_device(hvd.local_rank())

train_dataset = dataset()
train_sampler = torch.utils.data.distributed.DistributedSampler(
    train_dataset, num_replicas=hvd.size(), rank=hvd.rank()
)
train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=16, sampler=train_sampler)
model = Net()
model.cuda()
# The learning rate grows with the number of workers, and the epochs are divided among them.
optimizer = optim.SGD(model.parameters(), lr=0.025 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
)
for epoch in range(1, 8 // hvd.size() + 1):
    model.train()
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="avg_loss")
    if hvd.rank() == 0:
        print("Epoch {}: loss {:.4f}".format(epoch, mean.item()))
        save_checkpoint(sys.argv[1], model, optimizer, epoch)
if hvd.rank() == 0:
    test(sys.argv[1], 8 // hvd.size())
