"""A rank of bench/compare saves: blocks of training steps, each begun with no save, one in the background, or a blocking one.

usage: saves.py FOLDER BATCH OPTIMIZER PLACE CHECKPOINTS        as a rank of `cohort run`
"""
import os
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.dont_write_bytecode = True

import torch  # noqa: E402

import cohort  # noqa: E402
from cohort import checkpoint  # noqa: E402
from cohort.nn import DistributedDataParallel  # noqa: E402
from lib import worker  # noqa: E402


def model():
    """25.2 million parameters: 101 MB of float32."""
    layers = []
    for _ in range(6):
        layers += [torch.nn.Linear(2048, 2048), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(2048, 10))


def main():
    folder, batch, kind, place, own = sys.argv[1:]
    cohort.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = DistributedDataParallel(model())
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[kind](net.parameters(), lr=1e-4)
    inputs, targets = torch.randn(int(batch), 2048), torch.randint(10, (int(batch),))
    loss = torch.nn.CrossEntropyLoss()
    checkpoints = checkpoint.CheckpointFolder(own, keep=1, place=place)

    def block(words):
        """Milliseconds of the block, of the processor, of the call that saves, and until it is saved."""
        mode, steps = words[0], int(words[1])
        held, saved, began = 0.0, [0.0], 0.0

        def since():
            return (time.perf_counter() - began) * 1e3

        def steps_with_save():
            nonlocal held, began
            began, watcher = time.perf_counter(), None
            if mode == "blocking":
                checkpoints.save(net, optimizer)
                saved[0] = since()
            elif mode == "background":
                pending = checkpoints.save_async(net, optimizer)
                watcher = threading.Thread(target=lambda: (pending.wait(), saved.__setitem__(0, since())))
                watcher.start()
            held = since()
            for _ in range(steps):
                optimizer.zero_grad()
                loss(net(inputs), targets).backward()
                optimizer.step()
            return watcher

        watcher = []
        times = worker.timed(cohort.world().barrier, lambda: watcher.append(steps_with_save()))
        if watcher[0] is not None:
            watcher[0].join()
        return {**times, "held_ms": [held], "saved_ms": saved}

    worker.serve(folder, cohort.rank(), f"torch {torch.__version__}", block)
    checkpoints.close()
    cohort.shutdown()


if __name__ == "__main__":
    main()
