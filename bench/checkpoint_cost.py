"""What checkpoints cost a training of 25 million parameters: run it with `cohort run -np N -- python3 bench/checkpoint_cost.py`.

Blocks of --every steps, each begun with no save, a save in the background, or a blocking one, in rotating order; a round is one of
each. Ratios are taken within rounds. Prints, on rank 0: the step without saves, what a block with a save takes longer (median over
rounds, and the least and most), in time and in processor time of rank 0 (which other programs disturb less), how long the call held
the program up, and how long the save itself took.
"""

import argparse
import shutil
import statistics
import tempfile
import threading
import time

import torch

import cohort
from cohort import checkpoint
from cohort.nn import DistributedDataParallel

MODES = ("none", "background", "blocking")


def model():
    """25.2 million parameters: 101 MB of float32."""
    layers = []
    for _ in range(6):
        layers += [torch.nn.Linear(2048, 2048), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(2048, 10))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=100, help="steps of a block (default: 100)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="samples of each rank's step (default: 32)")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="adam", help="adam has twice the parameters as state")
    parser.add_argument("--place", choices=("rank0", "shared", "local"), default="rank0")
    parser.add_argument("--folder", help="for the checkpoints (default: a new one in TMPDIR); the same on all ranks")
    options = parser.parse_args()

    cohort.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = DistributedDataParallel(model())
    parameters = sum(p.numel() for p in net.parameters())
    make = torch.optim.SGD if options.optimizer == "sgd" else torch.optim.Adam
    optimizer = make(net.parameters(), lr=1e-4)
    inputs, targets = torch.randn(options.batch, 2048), torch.randint(10, (options.batch,))
    loss = torch.nn.CrossEntropyLoss()
    own = options.folder or tempfile.mkdtemp(prefix="cohort-checkpoint-cost-")
    checkpoints = checkpoint.CheckpointFolder(own, keep=1, place=options.place)

    def step():
        optimizer.zero_grad()
        loss(net(inputs), targets).backward()
        optimizer.step()

    def block(mode):
        """Seconds of the block, of the call, and of the save, and of this process on processors."""
        cohort.world().barrier()
        used = time.process_time()
        began = time.perf_counter()
        pending = over = None
        if mode == "blocking":
            checkpoints.save(net, optimizer)
        elif mode == "background":
            pending = checkpoints.save_async(net, optimizer)
        held = time.perf_counter() - began
        if pending is not None:
            over = []
            watcher = threading.Thread(target=lambda: (pending.wait(), over.append(time.perf_counter() - began)))
            watcher.start()
        for _ in range(options.every):
            step()
        took = time.perf_counter() - began
        if pending is not None:
            watcher.join()
        return took, held, over[0] if over else held, time.process_time() - used

    try:
        for mode in MODES:  # first touches of memory are not what is measured
            block(mode)
        rounds = []
        for number in range(options.rounds):
            order = MODES[number % 3 :] + MODES[: number % 3]
            rounds.append({mode: block(mode) for mode in order})
        if cohort.rank() == 0:
            plain = [one["none"][0] for one in rounds]
            print(f"{parameters / 1e6:.1f} M parameters, {options.optimizer}, {cohort.size()} ranks, place {options.place}, a save "
                  f"every {options.every} steps, {options.rounds} rounds")
            print(f"step without saves {statistics.median(plain) / options.every * 1e3:.2f} ms")
            for mode in MODES[1:]:
                extra = [(one[mode][0] / one["none"][0] - 1) * 100 for one in rounds]
                processor = [(one[mode][3] / one["none"][3] - 1) * 100 for one in rounds]
                held = [one[mode][1] * 1e3 for one in rounds]
                save = [one[mode][2] * 1e3 for one in rounds]
                print(f"{mode:10}  block longer by {statistics.median(extra):.2f} % ({min(extra):.2f} to {max(extra):.2f}), processor "
                      f"{statistics.median(processor):.2f} % ({min(processor):.2f} to {max(processor):.2f}), call held "
                      f"{statistics.median(held):.1f} ms ({min(held):.1f} to {max(held):.1f}), save took {statistics.median(save):.0f} ms")
    finally:
        checkpoints.close()
        cohort.world().barrier()
        if not options.folder or cohort.rank() == 0:
            shutil.rmtree(own, ignore_errors=True)
    cohort.shutdown()


if __name__ == "__main__":
    main()
