"""Digits with Horovod's API. Take `import horovod.torch as hvd`, and it is a Horovod program.

    cohort run -np 2 examples/03-horovod/digits_horovod.py

The lines that make it distributed are marked with (1) to (5).
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import cohort.horovod.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from digits import Net, load, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, over all processes")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--checkpoint", default="", help="file for model and optimizer after each epoch")
    options = parser.parse_args()

    hvd.init()  # (1)
    torch.manual_seed(1)
    train, test = load()
    dataset = torch.utils.data.TensorDataset(*train)
    sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())  # (2)
    batches = torch.utils.data.DataLoader(dataset, batch_size=options.batch_size // hvd.size(), sampler=sampler)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # (3)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (4)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        begin = time.perf_counter()
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
        seconds = time.perf_counter() - begin
        counts = hvd.allreduce(torch.tensor(right(model, test, hvd.rank(), hvd.size())), op=hvd.Sum)  # (5)
        if hvd.rank() == 0:
            accuracy = counts[0].item() / counts[1].item()
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, accuracy {accuracy:.4f}, {len(dataset) / seconds:.0f} samples/s")
            if options.checkpoint:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.checkpoint)
    hvd.shutdown()


if __name__ == "__main__":
    main()
