"""Digits with torch's DistributedDataParallel, over Cohort: one word differs from the program for Gloo.

    cohort run -np 2 examples/02-digits-python/digits_ddp.py
    torchrun --nproc_per_node 2 examples/02-digits-python/digits_ddp.py

The lines that make it distributed are marked with (1) to (4).
"""

import argparse
import sys
import time
from pathlib import Path

import cohort  # torch before 2.5 does not find the backend by itself
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from digits import Net, load, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, over all processes")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--checkpoint", default="", help="file for model and optimizer after each epoch")
    options = parser.parse_args()

    dist.init_process_group("cohort")  # (1)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    train, test = load()
    dataset = torch.utils.data.TensorDataset(*train)
    sampler = torch.utils.data.DistributedSampler(dataset)  # (2)
    batches = torch.utils.data.DataLoader(dataset, batch_size=options.batch_size // size, sampler=sampler)

    net = Net()
    model = DistributedDataParallel(net)  # (3)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        begin = time.perf_counter()
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
        seconds = time.perf_counter() - begin
        counts = torch.tensor(right(net, test, rank, size))
        dist.all_reduce(counts)  # (4)
        if rank == 0:
            accuracy = counts[0].item() / counts[1].item()
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, accuracy {accuracy:.4f}, {len(dataset) / seconds:.0f} samples/s")
            if options.checkpoint:
                torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, options.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
