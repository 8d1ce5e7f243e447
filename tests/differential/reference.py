"""Runs a program's N ranks in one process and in plain torch: N replicas in lockstep, each with its own part of the
batch, buffers and random generator; between them the method's own rule; then each replica's optimizer."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
import warnings
from typing import Any, Callable, Optional

import numpy
import source
import torch
from pieces import FEATURES
from torch.nn.parameter import is_lazy



def batch(step: float, rank: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers in every process."""
    generator = torch.Generator().manual_seed(int(step * 10) * 100 + rank)
    x, y = torch.randn(2, count, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    return x, y


class Records:
    """A replica's states after each step and, if `gradients` are wanted, gradients after each synchronising backward.

    A state is (what, values): tuples (name, elements, type, whether it is a parameter), and all values as float64.
    """

    def __init__(self, lossy: bool) -> None:
        self.states: list[tuple[Any, Any]] = []
        self.gradients: list[dict[str, Any]] = []
        self.lossy = lossy

    def state(self, *nets: torch.nn.Module) -> None:
        what, values = [], []
        for number, net in enumerate(nets):
            trained = {name for name, _ in net.named_parameters(remove_duplicate=False)}
            for name, tensor in net.state_dict().items():
                if not isinstance(tensor, torch.Tensor) or is_lazy(tensor):
                    continue
                flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
                values.append(flat.reshape(-1).to(torch.float64))
                what.append((f"{number}.{name}" if number else name, flat.numel(), str(tensor.dtype)[6:], name in trained))
        self.states.append((tuple(what), torch.cat(values).numpy() if values else numpy.zeros(0)))

    def gradient(self, net: torch.nn.Module) -> None:
        if self.lossy:
            self.gradients.append({name: None if one.grad is None else wide(one.grad.detach()).numpy().copy()
                                   for name, one in net.named_parameters()})  # fmt: skip


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy in 64 bits, complex ones in 128."""
    return tensor.to_dense().to(torch.complex128 if tensor.is_complex() else torch.float64)


def names_for(program: dict[str, Any], records: Records, folder: str) -> dict[str, Any]:
    """Names that a program's text may use."""
    return {"torch": torch, "nn": torch.nn, "copy": copy, "io": io, "contextlib": contextlib, "batch": batch, "folder": folder,
            "record": records.state, "record_gradients": records.gradient, "PROGRAM": program}  # fmt: skip


class Replica:
    def __init__(self, rank: int, program: dict[str, Any], code: Any, folder: str) -> None:
        self.rank, self.records = rank, Records(False)
        self.names = names_for(program, self.records, folder)
        exec(code, self.names)
        self.random = torch.get_rng_state()
        self.net: Any = None
        self.optimizer: Any = None
        self.steps: Any = None

    def begin(self, phase: int, ranks: int) -> None:
        self.steps = self.names[f"phase_{phase}"](self.rank, ranks)

    def go_on(self) -> Any:
        """To where the rule is to be applied; None at the end."""
        torch.set_rng_state(self.random)
        try:
            point = next(self.steps, None)
        finally:
            self.random = torch.get_rng_state()
        if point is not None:
            self.net = point[2]
            at = self.steps.gi_frame.f_locals
            self.optimizer = at.get("optimizer2" if point[1] else "optimizer")
        return point


class Run:
    """One program. `forced`: by rank, what the ranks recorded as gradients, which are taken in place of the reference's once they
    are within the bounds of the rounding (`lossy`)."""

    def __init__(self, program: dict[str, Any], rule: Callable[..., Any], forced: Optional[list[Any]] = None) -> None:
        self.program, self.forced = program, forced
        self.make_rule = rule
        self.rules: dict[int, Any] = {}
        self.times = 0  # gradients that were recorded
        self.records: list[Records] = []
        self.text = source.text_of(program, reference=True)

    def run(self) -> list[Records]:
        """Raises what plain torch raises."""
        before = torch.get_rng_state(), torch.get_default_dtype()
        code = compile(self.text, "reference", "exec")
        try:
            with tempfile.TemporaryDirectory(prefix="differential") as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                phases = source.replicas_of(self.program)
                replicas = [Replica(rank, self.program, code, folder) for rank in range(max(phases))]
                self.records = [one.records for one in replicas]
                for phase, ranks in enumerate(phases):
                    self.rules.clear()
                    self.lockstep(replicas[:ranks], phase)
        finally:
            torch.set_rng_state(before[0])
            torch.set_default_dtype(before[1])
        return self.records

    def lockstep(self, replicas: list[Replica], phase: int) -> None:
        for one in replicas:
            one.begin(phase, len(replicas))
        while True:
            points = [one.go_on() for one in replicas]
            if points[0] is None:
                return
            assert len({point[:2] for point in points}) == 1, "replicas are at different lines"
            what, key = points[0][:2]
            weights = [point[-1] for point in points]
            rule = self.rules.get(key)
            if rule is None:
                rule = self.rules[key] = self.make_rule(self.program, replicas, self if key == 0 else None)
            with torch.no_grad():
                getattr(rule, what)(replicas, weights)


def parameters(replica: Replica) -> dict[str, torch.Tensor]:
    return dict(replica.net.named_parameters())


def stepped(replica: Replica) -> dict[str, torch.Tensor]:
    """Parameters that the optimizer will step: those that are trained, or were frozen since their gradient was computed."""
    owned = {id(one) for group in replica.optimizer.param_groups for one in group["params"]}
    return {name: one for name, one in parameters(replica).items()
            if id(one) in owned and (one.requires_grad or one.grad is not None)}  # fmt: skip


def equalise(replicas: list[Replica], buffers_only: bool = False) -> None:
    """Rank 0's parameters and buffers on all."""
    root = replicas[0].net
    for other in replicas[1:]:
        for pairs in (zip(root.buffers(), other.net.buffers()), () if buffers_only else zip(root.parameters(), other.net.parameters())):
            for own, theirs in pairs:
                if own is not theirs:
                    theirs.copy_(own)


def fold(tensors: list[torch.Tensor], weights: list[float], divisor: float) -> torch.Tensor:
    """Their weighted sum by ascending rank over `divisor`, 16 bits in float32 and rounded once."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = sum(one.to(wide) * weight for one, weight in zip(tensors, weights) if weight)
    return (total / divisor).to(dtype)


def sparse_mean(like: torch.Tensor, each: list[Optional[torch.Tensor]], weights: list[float], divisor: float) -> torch.Tensor:
    given = [one for one in each if one is not None and one.is_sparse]
    none = torch.zeros_like(like).to_sparse(given[0].sparse_dim())
    total = none
    for one, weight in zip(each, weights):
        total = total + (none if one is None else one if one.is_sparse else one.to_sparse(given[0].sparse_dim())) * (weight / divisor)
    return total.coalesce()


class Averaged:
    """DistributedDataParallel and its kin: the mean of gradients."""

    def __init__(self, program: dict[str, Any], replicas: list[Replica], run: Any) -> None:
        self.program, self.options, self.run = program, program["options"], run
        self.known: list[Any] = []
        self.lossy: Any = None
        if run is not None and run.forced is not None:
            import lossy

            self.lossy = lossy.Bounds(program, replicas)

    def wrap(self, replicas: list[Replica], weights: list[Any]) -> None:
        equalise(replicas)
        self.known = [self.trained(one) for one in replicas]

    broadcast = wrap

    def reloaded(self, replicas: list[Replica], weights: list[Any]) -> None:
        """The optimizer's state was loaded."""

    def end(self, replicas: list[Replica], weights: list[Any]) -> None:
        pass

    def trained(self, replica: Replica) -> Any:
        every = list(replica.net.parameters())
        return [id(one) for one in every], {(id(one), one.dtype) for one in every if one.requires_grad}

    def are_others(self, replicas: list[Replica]) -> bool:
        """Whether other parameters are trained than the last time."""
        before, self.known = self.known, [self.trained(one) for one in replicas]
        others = any(now[0] != then[0] or now[1] - then[1] for now, then in zip(self.known, before))
        if others and self.lossy is not None:
            self.lossy.rebuilt()
        return others

    def forward(self, replicas: list[Replica], weights: list[Any]) -> None:
        others = self.are_others(replicas)
        if others and self.program["method"] == "ddp":  # models are made equal again
            equalise(replicas)
        elif self.options.get("broadcast_buffers", True):
            equalise(replicas, buffers_only=True)

    def local_forward(self, replicas: list[Replica], weights: list[Any]) -> None:
        if self.are_others(replicas):
            equalise(replicas)

    def reduced(self, replica: Replica) -> dict[str, torch.Tensor]:
        return {name: one for name, one in parameters(replica).items() if one.requires_grad}

    def dropped(self, replica: Replica) -> list[torch.Tensor]:
        """Parameters without a gradient after a step that is refused."""
        return list(replica.net.parameters())

    def gradients(self, replicas: list[Replica], weights: list[float]) -> None:
        trained = [self.reduced(one) for one in replicas]
        means: dict[str, Optional[torch.Tensor]] = {}
        for name in trained[0]:
            each = [one[name].grad for one in trained]
            means[name] = None if all(one is None for one in each) else self.mean(trained[0][name], each, weights)
        if self.options.get("non_finite") == "raise" and not self.finite(trained, weights):
            means = dict.fromkeys(means)
            for replica in replicas:  # a step of the optimizer changes nothing, not even by the momentum of a frozen layer
                for parameter in self.dropped(replica):
                    parameter.grad = None
            if self.lossy is not None:
                self.lossy.drop()
        elif self.lossy is not None:
            at = self.run.times
            recorded = [one.gradients[at] for one in self.run.forced if len(one.gradients) > at]
            if recorded:
                self.lossy.check(at, trained, means, recorded[0], weights)
                means = {name: None if recorded[0].get(name) is None else torch.from_numpy(recorded[0][name]).to(trained[0][name].dtype)
                         for name in means}  # fmt: skip
        if self.run is not None:
            self.run.times += 1
        self.deliver(replicas, trained, means)

    def deliver(self, replicas: list[Replica], trained: list[dict[str, torch.Tensor]], means: dict[str, Any]) -> None:
        for one in trained:
            for name, mean in means.items():
                one[name].grad = None if mean is None else mean.clone()

    def finite(self, trained: list[dict[str, torch.Tensor]], weights: list[float]) -> bool:
        return all(bool(torch.isfinite(p.grad.to_dense()).all()) for one, weight in zip(trained, weights) if weight
                   for p in one.values() if p.grad is not None)  # fmt: skip

    def mean(self, like: torch.Tensor, each: list[Optional[torch.Tensor]], weights: list[float]) -> torch.Tensor:
        if self.program["method"] == "torch_ddp" and any(one is not None and one.is_sparse for one in each):
            return sparse_mean(like, each, weights, sum(weights))
        dense = [torch.zeros_like(like) if one is None else one.to_dense() for one in each]
        sent = {"bf16_compress": torch.bfloat16, "fp16_compress": torch.float16}.get(self.options.get("hook", ""))
        if self.options.get("hook") and sum(weights) != len(weights):  # the hook takes the plain mean
            dense = [one * (weight * len(weights) / sum(weights)) for one, weight in zip(dense, weights)]
            weights = [1.0] * len(weights)
        if sent is not None:
            dense = [one.to(sent) for one in dense]
        return fold(dense, weights, sum(weights)).to(like.dtype)


class Horovod(Averaged):
    """hvd.DistributedOptimizer: the mean, or the sum, of the gradients of the optimizer's parameters."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: set[str] = set()

    def forward(self, replicas: list[Replica], weights: list[Any]) -> None:
        pass

    def reduced(self, replica: Replica) -> dict[str, torch.Tensor]:
        return stepped(replica)

    def dropped(self, replica: Replica) -> list[torch.Tensor]:
        return [one for group in replica.optimizer.param_groups for one in group["params"]]

    def gradients(self, replicas: list[Replica], weights: list[float]) -> None:
        trained = [self.reduced(one) for one in replicas]
        for name in trained[0]:
            if any(one[name].grad is not None for one in trained):
                self.seen.add(name)
            elif name in self.seen and len(replicas) > 1:  # zeros are brought: it has had one
                for one in trained:
                    one[name].grad = torch.zeros_like(one[name])
        super().gradients(replicas, weights)

    def mean(self, like: torch.Tensor, each: list[Optional[torch.Tensor]], weights: list[float]) -> torch.Tensor:
        sparse = any(one is not None and one.is_sparse for one in each)
        if sparse:
            return sparse_mean(like, each, weights, sum(weights) if self.options["op"] == "Average" else 1)
        dense = [torch.zeros_like(like) if one is None else one for one in each]
        sent = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.options.get("compression", ""))
        if sent is not None and len(each) > 1:  # nothing travels on one rank
            dense = [one.to(sent) for one in dense]
        return fold(dense, weights, sum(weights) if self.options["op"] == "Average" else 1).to(like.dtype)


class ChainerMN(Averaged):
    """create_multi_node_optimizer: the mean at each step, or with double buffering that of the step before."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.before: Optional[dict[int, Any]] = None  # by rank 0's parameters

    def forward(self, replicas: list[Replica], weights: list[Any]) -> None:
        pass

    def reduced(self, replica: Replica) -> dict[str, torch.Tensor]:
        return stepped(replica)

    def wrap(self, replicas: list[Replica], weights: list[Any]) -> None:
        super().wrap(replicas, weights)
        self.before = None

    def grouped(self, replicas: list[Replica], weights: list[Any]) -> None:
        """New parameters become rank 0's; the others are equal."""
        for one in replicas[1:]:
            for own, theirs in zip(replicas[0].net.parameters(), one.net.parameters()):
                theirs.copy_(own)

    def reloaded(self, replicas: list[Replica], weights: list[Any]) -> None:
        self.before = None  # what was under way is forgotten

    def gradients(self, replicas: list[Replica], weights: list[float]) -> None:
        if self.options.get("zero_fill", True):
            for one in replicas:
                owned = [parameter for group in one.optimizer.param_groups for parameter in group["params"]]
                for parameter in owned:  # also of a layer that the model does not have any more
                    if parameter.grad is None and parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
        super().gradients(replicas, weights)

    def deliver(self, replicas: list[Replica], trained: list[dict[str, torch.Tensor]], means: dict[str, Any]) -> None:
        if self.options.get("double_buffering"):
            now = {id(one): means.get(name) for name, one in trained[0].items()}
            means = {name: (self.before or {}).get(id(one)) for name, one in trained[0].items()}
            self.before = now
            means = {name: mean if trained[0][name].requires_grad else None for name, mean in means.items()}
        super().deliver(replicas, trained, means)


class Fragment:
    def __init__(self, numbers: list[int], flat: torch.Tensor, ranks: int) -> None:
        self.numbers, self.outer = numbers, flat
        self.at = 0  # steps of the last synchronisation
        self.samples = [0.0] * ranks


class LocalSteps:
    """LocalSGD and DiLoCo: each replica steps its own; differences from the last synchronised parameters are averaged, and are a
    gradient to an outer optimizer."""

    def __init__(self, program: dict[str, Any], replicas: list[Replica], run: Any) -> None:
        o = self.options = program["options"]
        self.sgd = program["method"] == "local_sgd"
        self.steps = self.since = self.turn = 0
        self.apart = o["sync_every"] // o.get("fragments", 1)
        self.delay, self.alpha = o.get("fragment_sync_delay", 0), o.get("fragment_update_alpha", 0.0)
        self.under_way: Any = None
        self.fragments: list[Fragment] = []

    def trained(self, replica: Replica) -> list[torch.Tensor]:
        return [one for one in replica.net.parameters() if one.requires_grad]

    def wrap(self, replicas: list[Replica], weights: list[Any]) -> None:
        self.__init__(replicas[0].names["PROGRAM"], replicas, None)  # type: ignore[misc]
        equalise(replicas)
        self.of = [self.trained(one) for one in replicas]
        self.begun = {id(one): one.detach().clone() for one in replicas[0].net.parameters()}
        mine, parts = self.of[0], self.options.get("fragments", 1)
        cut: list[list[int]] = []
        whole, seen = sum(one.numel() for one in mine), 0
        for number, one in enumerate(mine):
            needed = len(mine) - number <= parts - len(cut)
            if not cut or (len(cut) < parts and (seen * parts >= whole * len(cut) or needed)):
                cut.append([])
            cut[-1].append(number)
            seen += one.numel()
        dtype = torch.float64 if any(one.dtype == torch.float64 for one in mine) else torch.float32
        self.fragments = [Fragment(part, self.flat(mine, part).to(dtype), len(replicas)) for part in cut]
        outer = [one.outer for one in self.fragments]
        if self.sgd:
            self.outer = torch.optim.SGD(outer, lr=1.0)
        else:
            momentum = self.options["outer_momentum"]
            self.outer = torch.optim.SGD(outer, self.options["outer_learning_rate"], momentum, nesterov=momentum > 0)

    def flat(self, tensors: list[torch.Tensor], numbers: list[int]) -> torch.Tensor:
        wide = torch.float64 if any(one.dtype == torch.float64 for one in tensors) else torch.float32
        return torch.cat([tensors[number].detach().to(wide).reshape(-1) for number in numbers])

    def forward(self, *_: Any) -> None:
        pass

    end = reloaded = forward

    def written(self, replicas: list[Replica], weights: list[Any]) -> None:
        equalise(replicas)
        self.under_way, self.since = None, 0
        self.outer.state.clear()
        for one in self.fragments:
            one.outer.copy_(self.flat(self.of[0], one.numbers).to(one.outer.dtype))
            one.at, one.samples = self.steps, [0.0] * len(replicas)

    def take_in(self, replicas: list[Replica]) -> None:
        """Puts parameters that are trained now, and were not when the model was wrapped, into the last fragment."""
        known = {id(one) for one in self.of[0]}
        last = self.fragments[-1]
        for news in zip(*map(self.trained, replicas)):
            if id(news[0]) not in known:
                last.numbers.append(len(self.of[0]))
                flat = self.begun.get(id(news[0]), news[0]).detach().to(last.outer.dtype).reshape(-1)
                last.outer.data = torch.cat([last.outer, flat])
                momentum = self.outer.state[last.outer].get("momentum_buffer")
                if momentum is not None:
                    self.outer.state[last.outer]["momentum_buffer"] = torch.cat([momentum, torch.zeros_like(flat)])
                for of, new in zip(self.of, news):
                    of.append(new)

    def stepped(self, replicas: list[Replica], weights: list[float]) -> None:
        self.take_in(replicas)
        self.steps += 1
        self.since += 1
        for one in self.fragments:
            one.samples = [have + weight for have, weight in zip(one.samples, weights)]
        period = 1 if self.steps <= self.options.get("warm_up_steps", 0) else self.apart
        if self.under_way is None and self.since >= period - self.delay:
            self.start(replicas, self.fragments[self.turn % len(self.fragments)])
        if self.under_way is not None and self.since >= period:
            self.turn += 1
            self.since = 0
            self.complete(replicas, self.alpha)

    def buffers(self, replica: Replica) -> list[torch.Tensor]:
        return [one for one in replica.net.buffers() if one.is_floating_point()]

    def start(self, replicas: list[Replica], one: Fragment) -> None:
        total = sum(one.samples)
        apart = [one.outer - self.flat(of, one.numbers) for of in self.of]
        mean = fold(apart, one.samples, total) if total else None
        weights = one.samples if total else [1.0] * len(replicas)
        buffers = [fold([b.to(one.outer.dtype) for b in each], weights, sum(weights))
                   for each in zip(*map(self.buffers, replicas))] if one is self.fragments[0] else []  # fmt: skip
        self.under_way = one, mean, buffers, list(one.samples), self.steps

    def complete(self, replicas: list[Replica], alpha: float) -> None:
        one, mean, buffers, sent, at = self.under_way
        self.under_way = None
        if mean is not None:
            one.outer.grad = mean
            self.outer.step()
            one.outer.grad = None
        one.at = at
        one.samples = [have - there for have, there in zip(one.samples, sent)]
        self.take(replicas, one, alpha)
        for replica in replicas:
            for own, other in zip(self.buffers(replica) if buffers else (), buffers):
                own.copy_(other)

    def take(self, replicas: list[Replica], one: Fragment, alpha: float) -> None:
        for of in self.of:
            begin = 0
            for number in one.numbers:
                own = of[number]
                outer = one.outer[begin : begin + own.numel()].view(own.shape)
                own.copy_(outer if alpha == 0 else outer.lerp(own.to(outer.dtype), alpha))
                begin += own.numel()

    def synchronize(self, replicas: list[Replica], weights: list[Any]) -> None:
        if self.under_way is not None:
            self.complete(replicas, 0.0)
        for one in self.fragments:
            if one.at == self.steps:
                self.take(replicas, one, 0.0)
            else:
                self.since = 0
                self.start(replicas, one)
                self.complete(replicas, 0.0)


RULES = {"ddp": Averaged, "sharded": Averaged, "torch_ddp": Averaged, "hvd": Horovod, "chainermn": ChainerMN,
         "local_sgd": LocalSteps, "diloco": LocalSteps}  # fmt: skip


def run(program: dict[str, Any], forced: Optional[list[Any]] = None) -> list[Records]:
    return Run(program, RULES[program["method"]], forced).run()
