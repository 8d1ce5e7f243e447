"""Programs whose graphs are not simply model, output, loss: cohort.nn's DistributedDataParallel trains them as one process
would that averages over the ranks. Two ranks of `cohort run`.

By hand, a table with torch's DistributedDataParallel over "cohort" and Gloo beside it:
`python3 test_nn_programs.py table`."""

import contextlib
import copy
import os
import subprocess
import sys
import unittest

from support import needs_torch, torch
from support_nn import Ranks, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort

if torch is not None:
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint

    class Net(torch.nn.Module):
        """With a head that forward does not use, and a running mean that it makes anew."""

        def __init__(self, reentrant=None):
            super().__init__()
            self.body, self.last = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)
            self.head = torch.nn.Linear(6, 3, bias=False)
            self.scale = torch.nn.Parameter(torch.tensor(0.5))
            self.register_buffer("mean", torch.zeros(4))
            self.reentrant = reentrant
            self.double()

        def forward(self, x):
            if self.training:
                self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            if self.reentrant is None:
                self.hidden = torch.tanh(self.body(x))
            else:
                self.hidden = torch.tanh(checkpoint(self.body, x, use_reentrant=self.reentrant))
            return self.last(self.hidden)

    class Plain(torch.nn.Module):
        """The reference: nothing happens until `average`."""

        def __init__(self, module, **_):
            super().__init__()
            self.module = module

        def forward(self, *args):
            return self.module(*args)

        def no_sync(self):
            return contextlib.nullcontext()


class Program:
    """Environment of a program: `wrap` is the wrapper, and `average` does the averaging where that does none."""

    def __init__(self, wrap, rank, size):
        self.wrap, self.rank, self.size = wrap, rank, size
        self.reference = wrap is Plain

    def net(self, **options):
        torch.manual_seed(3)
        net = Net(**options)
        return net, self.wrap(net)

    def data(self, step=0, rows=4):
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
        return x.requires_grad_(), torch.randn(rows, 3, generator=generator, dtype=torch.float64)

    def average(self, *modules):
        """Averages the gradients that there are."""
        if self.reference:
            for parameter in (p for module in modules for p in module.parameters() if p.requires_grad):
                some = torch.tensor(0 if parameter.grad is None else 1)
                cohort.world().all_reduce(some)
                if not some.item():
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                cohort.world().all_reduce(parameter.grad, op="average")


PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


def of(*modules):
    """Values to compare: parameters and their gradients."""
    found = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            found[f"{number}.{name}"] = parameter.detach().clone()
            if parameter.grad is not None:
                found[f"{number}.{name}.grad"] = parameter.grad.clone()
    return found


def one_backward(loss, **options):
    def run(this):
        net, model = this.net(**options)
        loss(this, net, model).backward()
        this.average(net)
        return of(net)

    return run


def trained(this, net, model, steps, step):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for number in range(steps):
        optimizer.zero_grad()
        step(number)
        this.average(net)
        optimizer.step()


@program
def parameter_used_in_the_loss(this):
    def loss(this, net, model):
        x, y = this.data()
        return F.mse_loss(model(x), y) * torch.exp(-net.scale) + net.scale

    return one_backward(loss)(this)


@program
def head_applied_in_the_loss(this):
    def loss(this, net, model):
        x, y = this.data()
        model(x)
        return F.mse_loss(F.linear(net.hidden, net.head.weight), y)

    return one_backward(loss)(this)


@program
def penalty_over_all_parameters(this):
    def loss(this, net, model):
        return model(this.data()[0]).square().mean() + 0.1 * sum(p.square().sum() for p in net.parameters())

    return one_backward(loss)(this)


@program
def penalty_by_a_backward_of_its_own(this):
    net, model = this.net()
    model(this.data()[0]).square().mean().backward()
    (0.1 * sum(p.square().sum() for p in net.parameters()) * (1 + this.rank)).backward()
    this.average(net)
    return of(net)


@program
def gradient_penalty_alone(this):
    def loss(this, net, model):
        x, _ = this.data()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    return one_backward(loss)(this)


@program
def gradient_penalty_beside_the_loss(this):
    def loss(this, net, model):
        x, y = this.data()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.mse_loss(output, y) + slope.square().mean()

    return one_backward(loss)(this)


@program
def loss_of_an_intermediate_value(this):
    def loss(this, net, model):
        model(this.data()[0])
        return net.hidden.square().mean()

    return one_backward(loss)(this)


@program
def two_forwards_into_one_backward(this):
    return one_backward(lambda this, net, model: sum(model(this.data(k)[0]).square().mean() for k in range(2)))(this)


@program
def two_backwards_of_one_forward(this):
    net, model = this.net()
    output = model(this.data()[0])
    output.square().mean().backward(retain_graph=True)
    output.exp().mean().backward()
    this.average(net)
    return of(net)


@program
def two_backwards_the_first_in_no_sync(this):
    net, model = this.net()
    output = model(this.data()[0])
    with model.no_sync():
        output.square().mean().backward(retain_graph=True)
    output.exp().mean().backward()
    this.average(net)
    return of(net)


@program
def re_entrant_checkpoint_inside(this):
    return one_backward(lambda this, net, model: model(this.data()[0]).square().mean(), reentrant=True)(this)


@program
def checkpoint_inside(this):
    return one_backward(lambda this, net, model: model(this.data()[0]).square().mean(), reentrant=False)(this)


def checkpoint_around(this, reentrant):
    net, model = this.net()

    def step(number):
        checkpoint(model, this.data(number)[0], use_reentrant=reentrant).square().mean().backward()

    trained(this, net, model, 3, step)
    return of(net)


@program
def re_entrant_checkpoint_around_the_wrapper(this):
    return checkpoint_around(this, True)


@program
def checkpoint_around_the_wrapper(this):
    return checkpoint_around(this, False)


def gan(this, wrapped):
    torch.manual_seed(5)
    made, judged = torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 1).double()
    generator, critic = (this.wrap(made), this.wrap(judged)) if wrapped else (made, this.wrap(judged))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (made, judged)]
    for step in range(3):
        real, noise = this.data(step)[0].detach(), this.data(step + 50)[0].detach()
        optimizers[1].zero_grad()
        F.softplus(-critic(real)).mean().backward()
        F.softplus(critic(generator(noise).detach())).mean().backward()
        this.average(judged)
        optimizers[1].step()
        optimizers[0].zero_grad()
        for parameter in judged.parameters():
            parameter.requires_grad_(False)
        F.softplus(-critic(generator(noise))).mean().backward()
        for parameter in judged.parameters():
            parameter.requires_grad_(True)
        if not wrapped:  # by hand
            for parameter in made.parameters():
                cohort.world().all_reduce(parameter.grad, op="average")
        else:
            this.average(made)
        optimizers[0].step()
    return of(made, judged)


@program
def gan_with_two_wrapped_models(this):
    return gan(this, True)


@program
def gan_with_one_wrapped_model(this):
    return gan(this, False)


@program
def frozen_then_unfrozen(this):
    torch.manual_seed(3)
    net = Net()
    net.body.requires_grad_(False)
    model = this.wrap(net)

    def step(number):
        if number == 2:
            net.body.requires_grad_(True)
        model(this.data(number)[0]).square().mean().backward()

    trained(this, net, model, 4, step)
    return of(net)


@program
def frozen_after_some_steps(this):
    net, model = this.net()

    def step(number):
        net.body.requires_grad_(number != 1)
        model(this.data(number)[0]).square().mean().backward()

    trained(this, net, model, 3, step)
    return of(net)


@program
def state_loaded_by_assignment(this):
    net, model = this.net()
    for number in range(3):
        net.zero_grad()
        model(this.data(number)[0]).square().mean().backward()
        this.average(net)
        state = {name: value.detach().clone() + 0.1 for name, value in net.state_dict().items()}
        if number == 1:
            net.load_state_dict(state, assign=True)
    return of(net)


@program
def average_of_weights_by_a_copy(this):
    net, model = this.net()
    ema = copy.deepcopy(net)

    def step(number):
        model(this.data(number)[0]).square().mean().backward()
        with torch.no_grad():
            for mine, theirs in zip(ema.parameters(), net.parameters()):
                mine.lerp_(theirs, 0.3)

    trained(this, net, model, 3, step)
    return of(net, ema)


@program
def averaged_model_of_the_wrapper(this):
    net, model = this.net()
    swa = torch.optim.swa_utils.AveragedModel(net if this.reference else model)

    def step(number):
        model(this.data(number)[0]).square().mean().backward()
        swa.update_parameters(net if this.reference else model)

    trained(this, net, model, 3, step)
    return {**of(net), **{name: value for name, value in enumerate(swa.parameters())}}


@program
def accumulation_with_a_tail(this):
    net, model = this.net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for micro in range(5):
        last = micro % 2 == 1 or micro == 4
        with contextlib.nullcontext() if last else model.no_sync():
            (model(this.data(micro)[0]).square().mean() / 2).backward()
        if last:
            this.average(net)
            optimizer.step()
            optimizer.zero_grad()
    return of(net)


@program
def sharpness_aware(this):
    net, model = this.net()

    def step(number):
        x, y = this.data(number)
        with model.no_sync():
            F.mse_loss(model(x), y).backward()
        moved = [None if p.grad is None else 0.05 * p.grad.clone() for p in net.parameters()]
        with torch.no_grad():
            for p, by in zip(net.parameters(), moved):
                p.add_(by) if by is not None else None
        net.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p, by in zip(net.parameters(), moved):
                p.sub_(by) if by is not None else None

    trained(this, net, model, 3, step)
    return of(net)


@program
def wrapper_bypassed(this):
    net, model = this.net()
    kept = model(this.data(7)[0])
    for number in range(2):
        net.zero_grad()
        net(this.data(number)[0]).square().mean().backward()
        this.average(net)
    del kept
    return of(net)


@program
def no_rows_in_the_first_argument(this):
    torch.manual_seed(3)

    class Prefixed(Net):
        def forward(self, prefix, x):
            return super().forward(torch.cat([prefix, x]))

    net = Prefixed()
    model = this.wrap(net)
    model(torch.empty(0, 4, dtype=torch.float64), this.data()[0]).square().mean().backward()
    this.average(net)
    return of(net)


@program
def lengths_first(this):
    torch.manual_seed(3)
    net = torch.nn.LSTM(4, 2).double()
    model = this.wrap(net)
    model(this.data(rows=2 + 30 * this.rank)[0].unsqueeze(1))[0][-1].square().mean().backward()
    this.average(net)
    return of(net)


@program
def used_by_one_rank_only(this):
    def loss(this, net, model):
        output = model(this.data()[0])
        return (F.linear(net.hidden, net.head.weight) if this.rank == 0 else output).square().mean()

    return one_backward(loss)(this)


@program
def compiled(this):
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    model = this.wrap(net)
    called = torch.compile(model, backend="eager")

    def step(number):
        called(this.data(number)[0]).square().mean().backward()

    trained(this, net, model, 3, step)
    return of(net)


def largest_difference(ours, theirs):
    """Largest difference of two results; None where they have not the same gradients."""
    if ours.keys() != theirs.keys():
        return None
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


@needs_torch
class Programs(Ranks):
    def test_are_trained_as_by_one_process(self):
        from cohort.nn import DistributedDataParallel

        for name, run in PROGRAMS.items():
            if torch.__version__ < "2.1" and name in ("compiled", "state loaded by assignment"):
                continue  # which it does not have
            with self.subTest(program=name):
                expected = run(Program(Plain, self.rank, self.size))
                found = run(Program(DistributedDataParallel, self.rank, self.size))
                self.assertEqual(found.keys(), expected.keys())
                self.assertLess(largest_difference(found, expected), 1e-10)

    def test_buffers_that_are_reassigned_are_rank_0_s(self):
        from cohort.nn import DistributedDataParallel

        net = Net()
        model = DistributedDataParallel(net, compare_parameters_every=1)
        this = Program(DistributedDataParallel, self.rank, self.size)
        for step in range(3):
            model(this.data(step)[0]).square().mean().backward()
        model.sync_buffers()
        self.assert_same_bits_on_all_ranks([net.mean])
        net.mean = net.mean + self.rank
        with self.assertRaisesRegex(cohort.Mismatch, "buffer 'mean'"):
            model.require_same_parameters()

    def test_a_batch_sampler_says_the_samples(self):
        from cohort.data import DistributedSampler
        from cohort.nn import DistributedDataParallel

        data = torch.utils.data.TensorDataset(torch.randn(27, 4, generator=torch.Generator().manual_seed(1)).double())

        def train(sampler, workers):
            torch.manual_seed(3)
            net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
            model = net if sampler.num_replicas == 1 else DistributedDataParallel(net, sampler=sampler)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=workers)
            for _ in range(2):
                for (x,) in loader:
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                    sampler.step()
            return list(net.parameters())

        expected = train(DistributedSampler(data, 1, 0, batch_size=4 * self.size), 0)
        for workers in (0, 2):
            with self.subTest(workers=workers):
                self.assert_close(train(DistributedSampler(data, batch_size=4), workers), expected)
        sampler = DistributedSampler(data, batch_size=4)
        model = DistributedDataParallel(torch.nn.Linear(4, 1).double(), sampler=sampler)
        with self.assertRaisesRegex(cohort.InvalidArgument, "call step once after each batch"):
            for batch in sampler:
                model(data[batch][0]).square().mean().backward()
        sampler.set_epoch(1)
        looked_at = model(data[:][0]).sum()
        with self.assertRaisesRegex(cohort.Mismatch, "no batch drawn"):
            looked_at.backward()
        sampler = DistributedSampler(data, batch_size=4 + self.rank)
        with self.assertRaisesRegex(cohort.Mismatch, f"batch_size=4.*batch_size={4 + 1}"):
            DistributedDataParallel(torch.nn.Linear(4, 1), sampler=sampler)

    def test_twins_in_another_order_are_refused(self):
        from cohort.nn import DistributedDataParallel

        models = [DistributedDataParallel(torch.nn.Linear(3, 3)) for _ in range(2)]
        first = models[self.rank % 2]
        with self.assertRaisesRegex(cohort.Mismatch, "tag"):
            first(torch.ones(2, 3)).sum().backward()

    def test_what_one_rank_does_alone_is_named(self):
        from cohort.nn import DistributedDataParallel

        for rate in (0.11, 1e-9):
            net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(10))).double()
            model = DistributedDataParallel(net)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1 if self.rank == 0 else rate)
            this = Program(DistributedDataParallel, self.rank, self.size)
            with self.subTest(rate=rate), self.assertRaisesRegex(cohort.Mismatch, "rank 1 .* has .*a learning rate|no side"):
                for step in range(6):  # 20 parameters, 8 at a time
                    optimizer.zero_grad()
                    model(this.data(step)[0]).exp().mean().backward()
                    optimizer.step()


WAYS = ("cohort.nn", "torch over cohort", "torch over gloo")


def one(name, way):
    """Prints on rank 0 how far this way is from one process, or what it raises."""
    import torch.distributed as dist

    import cohort.nn

    cohort.init(timeout=10)
    dist.init_process_group("gloo" if way == "torch over gloo" else "cohort")

    def torchs(module, **_):
        return torch.nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)

    rank, size = dist.get_rank(), dist.get_world_size()
    expected = PROGRAMS[name](Program(Plain, rank, size))
    wrap = cohort.nn.DistributedDataParallel if way == "cohort.nn" else torchs
    try:
        difference = largest_difference(PROGRAMS[name](Program(wrap, rank, size)), expected)
        result = "other gradients" if difference is None else "right" if difference < 1e-10 else f"off by {difference:.1g}"
    except Exception as error:
        result = f"{type(error).__name__}: {str(error)[:60]}".replace("\n", " ")
    if rank == 0:
        print(f"RESULT {result}", flush=True)
    os._exit(0)  # some ways leave a rank that waits


def table():
    """Each program in each way, in a world of its own."""
    print(" | ".join(["program", *WAYS]))
    for name in PROGRAMS:
        row = [name]
        for way in WAYS:
            command = ["cohort", "run", "-q", "-np", "2", sys.executable, __file__, "one", name, way]
            try:
                output = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
                row.append(next(line.partition("RESULT ")[2] for line in output.splitlines() if "RESULT" in line))
            except (subprocess.TimeoutExpired, StopIteration):
                row.append("hangs")
        print(" | ".join(row), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["table"]:
        table()
    elif sys.argv[1:2] == ["one"]:
        one(*sys.argv[2:])
    else:
        unittest.main()
