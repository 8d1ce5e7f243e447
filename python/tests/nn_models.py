"""Models and one-process references for the tests of cohort.nn and cohort.checkpoint. Needs torch."""

import torch
import torch.nn.functional as F


def pattern(shape, salt, dtype=torch.float64):
    """Values that depend on nothing but the shape and `salt`."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, dtype=torch.float64) * 1.7 + salt).reshape(shape).to(dtype)


class Mlp(torch.nn.Module):
    def __init__(self, dtype=torch.float64, hidden=17):
        super().__init__()
        self.first = torch.nn.Linear(5, hidden)
        self.second = torch.nn.Linear(hidden, hidden)
        self.last = torch.nn.Linear(hidden, 3)
        self.to(dtype)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def with_values(net, salt=0.0):
    with torch.no_grad():
        for at, parameter in enumerate(net.parameters()):
            parameter.copy_(pattern(parameter.shape, salt + at, parameter.dtype) * 0.5)
    return net


def loss_of(output, target):
    return F.mse_loss(output, target)


def batch_of(step, samples, dtype=torch.float64):
    """The global batch of a step: `samples` rows of input and target."""
    return pattern((samples, 5), step * 10.0, dtype), pattern((samples, 3), step * 10.0 + 5, dtype)


def gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def copies(module):
    return [tensor.detach().clone() for tensor in module.state_dict().values()]
