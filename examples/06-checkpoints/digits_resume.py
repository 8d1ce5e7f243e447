"""Digits with Cohort's own DistributedDataParallel: interrupted at any moment, the same command goes on, to the same bits.

    cohort run -np 2 examples/06-checkpoints/digits_resume.py --out runs/digits
    kill -USR1 PID        # of the command or of any process of it: all save and end with the status 75
    cohort run -np 2 examples/06-checkpoints/digits_resume.py --out runs/digits     # goes on there

The lines that make it distributed are marked with (1) to (6), as in 01-digits.
"""

import argparse
import sys
import time
from pathlib import Path

import cohort
import torch
import torch.nn.functional as F
from cohort.checkpoint import CheckpointFolder, save_weights
from cohort.data import DistributedSampler
from cohort.metrics import Averages
from cohort.nn import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from digits import Net, load, right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and weights; goes on with what is there")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, over all processes")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--save-every", type=int, default=0, help="steps from one checkpoint to the next, besides each epoch's end")
    options = parser.parse_args()

    preemption = cohort.Preemption()  # (6) a signal asks to save and end; early, so that none is missed
    cohort.init()  # (1)
    rank, size = cohort.rank(), cohort.size()
    torch.manual_seed(1)
    train, test = load()

    net = Net()
    sampler = DistributedSampler(len(train.labels), batch_size=max(1, options.batch_size // size), seed=1)  # (2)
    model = DistributedDataParallel(net, sampler=sampler)  # (3)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    checkpoints = CheckpointFolder(options.out / "checkpoints")  # (4)
    step = 0
    if found := checkpoints.load_latest(net, optimizer):
        step = found.progress.step
        for group in optimizer.param_groups:  # loaded with the optimizer: what was asked for now counts
            group["lr"] = options.lr
        sampler.load_state(found.progress.sampler)
        if rank == 0:
            print(f"going on after step {step}")

    def save() -> None:
        checkpoints.save(net, optimizer, step=step, epoch=sampler.epoch, sampler=sampler)

    while sampler.epoch < options.epochs:
        losses = Averages(["loss"])
        begin, samples = time.perf_counter(), 0
        while (indices := sampler.next_batch()) is not None:
            optimizer.zero_grad()
            loss = F.nll_loss(model(train.images[indices]), train.labels[indices])
            loss.backward()
            optimizer.step()
            samples += sampler.global_batch()
            losses.add("loss", loss.item(), len(indices))
            sampler.step()
            step += 1
            preempted = preemption.requested()
            if preempted or (options.save_every and step % options.save_every == 0):
                save()
            if preempted:
                if rank == 0:
                    print(f"preempted at step {step}: saved")
                return cohort.REQUEUE_STATUS
        seconds = time.perf_counter() - begin
        sampler.next_epoch()
        save()
        loss = losses.reduce()["loss"].value
        counts = torch.tensor(right(net, test, rank, size))
        cohort.world().all_reduce(counts)  # (5)
        if rank == 0:
            accuracy = counts[0].item() / counts[1].item()
            print(f"epoch {sampler.epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}, {samples / seconds:.0f} samples/s")
    if rank == 0:
        save_weights(net, options.out / "weights.safetensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
