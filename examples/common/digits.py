"""Shared by the digits programs: the images, the network, the test. Nothing here knows of other processes."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

FOLDER = Path(__file__).resolve().parents[2] / "data" / "digits"


class Digits(NamedTuple):
    images: torch.Tensor  # [n, 1, 28, 28], mean 0 and deviation 1 over the training images
    labels: torch.Tensor  # [n]


class Net(torch.nn.Module):
    """Images [n, 1, 28, 28] to logarithms of probabilities [n, 10]; that of common/model.h."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 32, 3)
        self.conv2 = torch.nn.Conv2d(32, 64, 3)
        self.fc1 = torch.nn.Linear(64 * 12 * 12, 128)
        self.fc2 = torch.nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), 1)


def read_idx(path: Path) -> torch.Tensor:
    """A file of the MNIST format, as it is or compressed (with .gz after its name)."""
    data = path.read_bytes() if path.exists() else gzip.decompress(Path(f"{path}.gz").read_bytes())
    shape = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
    return torch.frombuffer(bytearray(data[4 + 4 * data[3] :]), dtype=torch.uint8).reshape(shape)


def load(folder: Path = FOLDER) -> tuple[Digits, Digits]:
    """Training and test images."""
    parts = []
    for part in ("train", "t10k"):
        images = read_idx(folder / f"{part}-images-idx3-ubyte").float().div(255).unsqueeze(1)
        if images.shape[-1] != 28:
            images = F.interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)
        parts.append((images, read_idx(folder / f"{part}-labels-idx1-ubyte").long()))
    mean, deviation = parts[0][0].mean(), parts[0][0].std()
    train, test = (Digits((images - mean) / deviation, labels) for images, labels in parts)
    return train, test


def right(model: torch.nn.Module, test: Digits, rank: int, size: int) -> tuple[int, int]:
    """In this process's part of the test images, how many the model gets right, and how many there are."""
    images, labels = test.images[rank::size], test.labels[rank::size]
    with torch.no_grad():
        return int((model(images).argmax(1) == labels).sum()), len(labels)
