"""Digits in the shape of ChainerMN's MNIST example: communicator, multi-node optimizer, scattered data, multi-node evaluator.

    cohort run -np 2 examples/03-horovod/digits_chainermn.py
    mpiexec -n 2 python examples/03-horovod/digits_chainermn.py

There is no trainer: its loop is written out. The lines that make it distributed are marked with (1) to (5).
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Optional

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import cohort.chainermn as chainermn
from cohort.metrics import Averages

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from digits import Net, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--communicator", default="naive", help="any name of ChainerMN's: they all work here, and do the same")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, over all processes")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--same-batches", action="store_true", help="instead of a part of the data, each process takes its rows of "
                        "batches that all of them draw alike: the same training on any number of processes, to rounding")
    parser.add_argument("--checkpoint", default="", help="file for model and optimizer after each epoch")
    parser.add_argument("--out", default="", help="folder for every rank's state after each epoch; goes on with what is there")
    options = parser.parse_args()

    comm = chainermn.create_communicator(options.communicator)  # (1)
    if comm.rank == 0:
        print(f"{comm.size} processes on {comm.inter_size} hosts, {comm.name} communicator")
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm).setup(model)  # (2)

    train: Optional[TensorDataset] = None
    test: Optional[TensorDataset] = None
    if comm.rank == 0:  # nobody else needs the files
        train, test = (TensorDataset(*part) for part in load())
    if options.same_batches:
        batches = DataLoader(comm.bcast_obj(train), options.batch_size, shuffle=True, drop_last=True)
        batches = chainermn.create_synchronized_iterator(batches, comm)  # (3)
        rows = slice(comm.rank, None, comm.size)
    else:
        train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=1)  # (3)
        batches = DataLoader(train, max(1, options.batch_size // comm.size), shuffle=True)
        rows = slice(None)
    test = chainermn.scatter_dataset(test, comm, force_equal_length=False)

    def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(model(images), labels)

    def evaluate() -> dict:
        seen = Averages(["loss", "accuracy"])
        with torch.no_grad():
            for images, labels in DataLoader(test, batch_size=256):
                output = model(images)
                seen.add("loss", F.nll_loss(output, labels).item(), len(labels))
                seen.add("accuracy", (output.argmax(1) == labels).float().mean().item(), len(labels))
        return seen.local()

    evaluate = chainermn.create_multi_node_evaluator(evaluate, comm)  # (4)

    begin_at = 0
    if options.out:
        checkpointer = chainermn.create_multi_node_checkpointer("digits", comm, path=options.out)  # (5)
        state = {"model": model, "optimizer": optimizer}
        begin_at = checkpointer.maybe_load(state)
        if begin_at and comm.rank == 0:
            print(f"going on after epoch {begin_at}")

    for epoch in range(begin_at, options.epochs):
        begin, samples = time.perf_counter(), 0
        for images, labels in batches:
            optimizer.update(loss_of, images[rows], labels[rows])
            samples += len(labels) if options.same_batches else len(labels) * comm.size
        seconds = time.perf_counter() - begin
        results = evaluate()
        if options.out:
            checkpointer.save(state, epoch + 1)
        if comm.rank == 0:
            print(
                f"epoch {epoch + 1}: loss {results['loss'].value:.4f}, accuracy {results['accuracy'].value:.4f}, "
                f"{samples / seconds:.0f} samples/s"
            )
            if options.checkpoint:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.checkpoint)
    comm.finalize()


if __name__ == "__main__":
    main()
