"""The images, the network and the loops that the MNIST programs share."""

import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = x.view(-1, 320)
        x = F.relu(self.fc1(x))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def dataset(train=True, size=1024):
    """Bars whose place is the label: learnt in seconds."""
    generator = torch.Generator().manual_seed(int(train))
    labels = torch.randint(0, 10, (size,), generator=generator)
    images = 0.1 * torch.randn(size, 1, 28, 28, generator=generator)
    for image, label in zip(images, labels.tolist()):
        image[0, :, 2 + 2 * label : 5 + 2 * label] += 1
    return TensorDataset(images, labels)


def train_one_epoch(model, device, data_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(data_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
    print("Train Epoch: {}\tLoss: {:.6f}".format(epoch, loss.item()))
    return loss.item()


def save_checkpoint(log_dir, model, optimizer, epoch):
    filepath = log_dir + "/checkpoint-{epoch}.pth.tar".format(epoch=epoch)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, filepath)


def load_checkpoint(log_dir, epoch):
    return torch.load(os.path.join(log_dir, "checkpoint-{epoch}.pth.tar".format(epoch=epoch)))


def test(log_dir, epoch):
    model = Net()
    model.load_state_dict(load_checkpoint(log_dir, epoch)["model"])
    model.eval()
    images, labels = dataset(train=False).tensors
    with torch.no_grad():
        output = model(images)
    accuracy = (output.argmax(1) == labels).float().mean().item()
    print("Average test loss: {}, accuracy: {}".format(F.nll_loss(output, labels).item(), accuracy))
    return accuracy
