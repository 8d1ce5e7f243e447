"""Digits, asynchronously: all variables are on parameter servers, and no worker waits for another.

    cohort run -np 2 --servers 2 --evaluator "examples/10-parameter-server/digits_async.py --out runs/async" \\
        examples/10-parameter-server/digits_async.py --out runs/async

One program for all roles: servers keep and step the variables; workers read them and push gradients; worker 0, the chief,
saves checkpoints; the evaluator follows these.
"""

import argparse
import sys
import time
from pathlib import Path

import cohort
from cohort import ps

CONSISTENCIES = {"sync": ps.Sync(), "bounded": ps.Bounded(4), "async": ps.Async()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, over all workers")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--consistency", choices=CONSISTENCIES, default="async")
    options = parser.parse_args()
    if cohort.role() == "server":
        ps.serve()  # until the workers have left; no torch here
    elif cohort.role() == "evaluator":
        evaluate(options)
    else:
        train(options)


def train(options: argparse.Namespace) -> None:
    import torch
    import torch.nn.functional as F
    from cohort.checkpoint import CheckpointFolder
    from cohort.ps.torch import DistributedOptimizer
    from digits import Net, load, right

    torch.manual_seed(1)
    training, test = load()
    with ps.connect() as client:
        dataset = torch.utils.data.TensorDataset(*training)
        sampler = torch.utils.data.DistributedSampler(dataset, client.workers, client.worker)
        batches = torch.utils.data.DataLoader(dataset, batch_size=options.batch_size // client.workers, sampler=sampler)
        net = Net()
        # Steps with gradients of older values push on in the old direction: they are a momentum of their own.
        rule = ps.Sgd(lr=options.lr, momentum=0.9 if options.consistency == "sync" else 0.5)
        optimizer = DistributedOptimizer(
            client, net.named_parameters(), optimizer=rule, consistency=CONSISTENCIES[options.consistency]
        )
        checkpoints = CheckpointFolder(options.out)
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            begin = time.perf_counter()
            for images, labels in batches:
                optimizer.zero_grad()
                loss = F.nll_loss(net(images), labels)
                loss.backward()
                optimizer.step()  # pushes the gradients, and reads what all have made of the variables
            seconds = time.perf_counter() - begin
            print(f"worker {client.worker}, epoch {epoch + 1}: loss {loss.item():.4f}, {len(sampler) / seconds:.0f} samples/s")
            if client.worker == 0 and epoch + 1 < options.epochs:  # the chief
                checkpoints.save(net, step=client.now, epoch=epoch + 1)
        client.barrier()
        optimizer.pull()
        if client.worker == 0:
            counts = right(net, test, 0, 1)
            print(f"at the end: accuracy {counts[0] / counts[1]:.4f}")
            checkpoints.save(net, step=client.now, epoch=options.epochs)


def evaluate(options: argparse.Namespace) -> None:
    from cohort.checkpoint import CheckpointFolder, follow
    from digits import Net, load, right

    net, (_, test) = Net(), load()
    checkpoints = CheckpointFolder(options.out)
    for info in follow(options.out):
        info = checkpoints.load_latest(net) or info  # may be a newer one yet
        counts = right(net, test, 0, 1)
        print(f"epoch {info.progress.epoch}, step {info.progress.step}: accuracy {counts[0] / counts[1]:.4f}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
    main()
