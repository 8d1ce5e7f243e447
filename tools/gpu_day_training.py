"""A rank of tools/gpu-day: trains a small model whose gradients are averaged in a GPU's memory by Python's world operations.

The model and its data are on the GPU, by torch. With --without-torch, over the pretended driver, it is a line of three
weights, of which the gradients alone are in that memory. All ranks together see the same data, whatever their number, so
the last loss is the same but for rounding. Prints it as JSON, from rank 0.
"""

import json
import pathlib
import sys

import cohort

STEPS = 40


def train_with_torch(world):
    import torch

    device = torch.device("cuda", cohort.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.manual_seed(1)
    inputs = torch.randn(1024, 64)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)).to(device)
    targets = inputs[:, :8].sum(1, keepdim=True).tanh()
    inputs, targets = inputs.to(device), targets.to(device)
    own = slice(cohort.rank(), None, cohort.size())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        world.broadcast(parameter.data)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[own]), targets[own]).backward()
        world.all_reduce([parameter.grad for parameter in model.parameters()], op="average")
        optimizer.step()
        with torch.no_grad():
            losses.append(torch.nn.functional.mse_loss(model(inputs), targets).item())
    return losses, f"torch {torch.__version__} on {torch.cuda.get_device_name(device)}"


def train_without_torch(world):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python" / "tests"))
    from test_gpus import Exported

    data = [([1.0, i / 16 - 1, (i * 7 % 32) / 16 - 1], 3 * (i / 16 - 1) + 0.5) for i in range(32)]
    weights, gradient = [0.0] * 3, Exported([0.0] * 3)

    def errors(rows):
        return [(x, sum(w * value for w, value in zip(weights, x)) - y) for x, y in rows]

    losses = []
    for _ in range(STEPS):
        own = errors(data[cohort.rank() :: cohort.size()])
        gradient.seen[:] = [sum(2 * error * x[i] for x, error in own) / len(own) for i in range(3)]
        world.all_reduce(gradient, op="average")
        weights = [w - 0.3 * g for w, g in zip(weights, gradient.seen)]
        losses.append(sum(error**2 for _, error in errors(data)) / len(data))
    return losses, "without torch"


def main():
    cohort.init()
    if "--without-torch" in sys.argv:
        losses, how = train_without_torch(cohort.world())
    else:
        losses, how = train_with_torch(cohort.world())
    if cohort.rank() == 0:
        print(json.dumps({"first": losses[0], "last": losses[-1], "ranks": cohort.size(), "how": how}))
    cohort.shutdown()


if __name__ == "__main__":
    main()
