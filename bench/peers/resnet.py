"""ResNet-18 (He et al., Deep Residual Learning for Image Recognition, 2015) with a 3 x 3 stem, for images of 32 x 32:
11.2 million parameters, a network of the usual mixture of large and small gradients."""

import torch
import torch.nn.functional as F


class Block(torch.nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = torch.nn.BatchNorm2d(out)
        self.conv2 = torch.nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = torch.nn.BatchNorm2d(out)
        self.shortcut = torch.nn.Sequential()
        if stride != 1 or channels != out:
            convolution = torch.nn.Conv2d(channels, out, 1, stride, bias=False)
            self.shortcut = torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet18(torch.nn.Module):
    """Images [n, 3, 32, 32] to scores [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.norm = torch.nn.BatchNorm2d(64)
        blocks, channels = [], 64
        for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [Block(channels, out, stride), Block(out, out, 1)]
            channels = out
        self.blocks = torch.nn.Sequential(*blocks)
        self.scores = torch.nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.scores(x.mean(dim=(2, 3)))
