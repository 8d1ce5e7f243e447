"""A rank of bench/compare training: training steps of one model on several sides, in the same process.

usage: steps.py FOLDER SIDES         as a rank of `cohort run`

Commands: `model NAME BATCH` makes the model anew for all sides; `step SIDE REPEAT`; `equal`: have all sides trained
alike?
"""
import datetime
import os
import sys

BENCH = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, BENCH)
sys.dont_write_bytecode = True

import cohort  # noqa: E402  (makes the backend known to torch before 2.5)
import cohort.nn  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

from lib import worker  # noqa: E402


def make_model(name):
    """The model, and the shape of a sample."""
    nn = torch.nn
    if name == "digits":
        sys.path.insert(0, os.path.join(os.path.dirname(BENCH), "examples", "01-digits", "python"))
        from digits import Net

        return Net(), (1, 28, 28)
    if name == "resnet":
        from peers.resnet import ResNet18

        return ResNet18(), (3, 32, 32)
    if name == "layers":  # all of whose gradients are copied into buckets
        return nn.Sequential(*(nn.Linear(288, 288) for _ in range(300)), nn.Linear(288, 10)), (288,)
    sizes = [64, 128, 64, 10] if name == "small" else [512] + [2432] * 5 + [10]
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), (sizes[0],)


def distance(ones, others):
    return sum((a.detach() - b.detach()).double().square().sum() for a, b in zip(ones, others)).sqrt().item()


class Steps:
    def __init__(self, sides):
        self.sides, self.models, self.optimizers = sides, {}, {}
        gloo = dist.new_group(list(range(dist.get_world_size())), backend="gloo") if {"gloo", "view"} & set(sides) else None
        self.wrap = {
            "nn": cohort.nn.DistributedDataParallel,
            "checked": lambda net: cohort.nn.DistributedDataParallel(net, non_finite="raise"),
            "cohort": DDP,
            "gloo": lambda net: DDP(net, process_group=gloo),
            "view": lambda net: DDP(net, process_group=gloo, gradient_as_bucket_view=True),
            "plain": lambda net: net,
        }

    def model(self, name, batch):
        self.models.clear()
        self.optimizers.clear()
        self.first = []
        for side in self.sides:
            torch.manual_seed(1)
            net, shape = make_model(name)
            self.first = self.first or [p.detach().clone() for p in net.parameters()]
            self.models[side] = self.wrap[side](net)
            self.optimizers[side] = torch.optim.SGD(net.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.inputs = torch.randn(batch, *shape, generator=generator)
        self.labels = torch.randint(0, 10, (batch,), generator=generator)
        return {"parameters": sum(p.numel() for p in self.first)}

    def step(self, side):
        self.optimizers[side].zero_grad(set_to_none=True)
        F.cross_entropy(self.models[side](self.inputs), self.labels).backward()
        self.optimizers[side].step()

    def equal(self):
        """Rings add in another order than ours, and training makes roundings grow: but not to 2 % of the way it went."""
        trained = [side for side in self.sides if side != "plain"]
        reference = list(self.models["gloo" if "gloo" in trained else trained[0]].parameters())
        way = distance(reference, self.first)
        return {"differ": [side for side in trained
                           if not distance(self.models[side].parameters(), reference) < 0.02 * way]}

    def answer(self, words):
        if words[0] == "model":
            return self.model(words[1], int(words[2]))
        if words[0] == "equal":
            return self.equal()
        if words[1] == "same":
            return worker.timed(dist.barrier, self.models["nn"].require_same_parameters)
        return worker.timed(dist.barrier, lambda: self.step(words[1]), int(words[2]))


def main():
    torch.set_num_threads(1)
    cohort.init()
    dist.init_process_group("cohort", timeout=datetime.timedelta(seconds=worker.SECONDS_PER_COMMAND))
    worker.serve(sys.argv[1], dist.get_rank(), f"torch {torch.__version__}", Steps(sys.argv[2].split(",")).answer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
