"""The training of same_bits_peer.cpp in Python, with the same options: same_bits_peer.py MODEL STEPS."""

import hashlib
import pathlib
import sys

import torch
import torch.nn.functional as F

import cohort
from cohort.data import DistributedSampler
from cohort.nn import DistributedDataParallel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "common"))
from digits import load

VIRTUAL_RANKS, BATCH, CONTEXT, VOCABULARY, WIDTH = 8, 4, 16, 50, 32


class Gpt(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        return self.head(self.blocks(self.embedding(x), mask)).flatten(0, 1)


def made(model):
    nn = torch.nn
    if model == "gpt":
        return Gpt()
    if model == "conv":
        return nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 16, 3, 2),
                             nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 6 * 6, 10))  # fmt: skip
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10))


def main():
    name, steps = sys.argv[1], int(sys.argv[2])
    world = cohort.init()
    torch.set_num_threads(1)
    torch.manual_seed(1 + world.rank())  # all get rank 0's weights
    images, labels = load()[0]
    net = made(name)
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)
    sampler = DistributedSampler(images, batch_size=BATCH, virtual_ranks=VIRTUAL_RANKS)
    model = DistributedDataParallel(net, sampler=sampler, virtual_ranks=VIRTUAL_RANKS, bucket_cap_mb=0.02)

    def loss_of(indices, of):
        if name == "gpt":
            at, begin = torch.arange(CONTEXT + 1), torch.tensor(indices).reshape(-1, 1)
            text = (begin * 7 + at * at * (begin % 5 + 1)) % VOCABULARY
            inputs, targets = text[:, :-1], text[:, 1:].flatten()
        else:
            inputs, targets = images[indices], labels[indices]
        return F.cross_entropy(model(inputs), targets) * (len(indices) / of)

    loss, step = 0.0, 0
    while step < steps:
        for indices in sampler:
            half, total = len(indices) // 2, 0.0
            if not indices:
                model.step_without_samples()
            else:
                if half:
                    with model.no_sync():
                        part = loss_of(indices[:half], len(indices))
                        part.backward()
                    total += part.item()
                part = loss_of(indices[half:], len(indices))
                part.backward()
                total += part.item()
            mean = model.mean_loss(total)
            loss = loss if mean is None else mean
            complete = model.step_complete()
            if complete:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                step += 1
            sampler.step()
            if complete and step == steps:
                break
        else:
            sampler.next_epoch()
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in net.state_dict().values())).hexdigest()[:16]
    print(f"digest {digest}, loss {loss!r}", flush=True)


if __name__ == "__main__":
    main()
