import os
import sys

import torch
import torch.distributed as dist
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler

from mnist import Net, dataset, save_checkpoint, test, train_one_epoch


def main_fn(directory):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    global_rank = int(os.environ["RANK"])
    print("Running on rank {} (local {})".format(global_rank, local_rank))

    torch.manual_seed(0)
    train_dataset = dataset()
    train_sampler = DistributedSampler(dataset=train_dataset)
    data_loader = torch.utils.data.DataLoader(train_dataset, batch_size=16, sampler=train_sampler)
    model = Net().to(local_rank)
    ddp_model = DDP(model, device_ids=[local_rank], output_device=local_rank)
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(1, 4):
        train_sampler.set_epoch(epoch)
        train_one_epoch(ddp_model, local_rank, data_loader, optimizer, epoch)
        if global_rank == 0:
            save_checkpoint(directory, ddp_model.module, optimizer, epoch)
    dist.destroy_process_group()
    return "finished"


if __name__ == "__main__":
    main_fn(sys.argv[1])
    if os.environ["RANK"] == "0":
        test(sys.argv[1], 3)
