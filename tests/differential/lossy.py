"""Bounds of averages that are rounded on their way: those that the formats publish, and PowerSGD's by definition."""

from __future__ import annotations

from typing import Any

import numpy
import torch

# Off by at most so much of the largest value of a block, each time (docs/reference/comm-hooks.md).
STEP = {"bfloat16": 1 / 256, "int8": 1 / 253, "int4": 1 / 13.8}
HOOKS = {"int8_compress": "int8", "int4_compress": "int4"}


def hosts_of(text: str, ranks: int) -> list[range]:
    """The ranks of each host."""
    counts = [int(one) for one in text.split(",")] if "," in text else [ranks // int(text or 1)] * int(text or 1)
    begins = [sum(counts[:number]) for number in range(len(counts))]
    return [range(begin, min(ranks, begin + count)) for begin, count in zip(begins, counts) if begin < ranks]


class OutOfBounds(Exception):
    """An average that the format, or the method, cannot have given."""


def require(condition: Any, what: str) -> None:
    if not condition:
        raise OutOfBounds(what)


class Bounds:
    """Bounds of one model's averages. `check` raises OutOfBounds, which says where."""

    def __init__(self, program: dict[str, Any], replicas: list[Any]) -> None:
        options = program["options"]
        self.hook = options.get("hook")
        self.normalised = any(piece["kind"] == "BatchNorm" for piece in program["pieces"])
        self.views_complex = program["method"] == "torch_ddp"
        self.format = HOOKS.get(self.hook, options.get("wire_format"))
        given = options.get("feedback") if self.hook else options.get("error_feedback")
        self.feedback = self.hook == "powerSGD" and given is not False or (self.format == "int4" if given is None else bool(given))
        self.hosts = hosts_of(program["hosts"], len(replicas))
        self.owed: dict[str, numpy.ndarray] = {}  # what compression has kept of each average
        # Errors that may be owed for good: the rank that encodes an element is another in other buckets (docs/reference/comm-hooks.md).
        self.left: dict[str, float] = {}
        self.averages = 0
        self.unknown: set[str] = set()
        self.bound: dict[str, float] = {}

    def drop(self) -> None:
        """The step is refused, or its averages are not finite: nothing is kept."""
        self.owed.clear()
        self.bound.clear()
        self.left.clear()

    def rebuilt(self) -> None:
        """Buckets have been made anew."""
        if any(len(ranks) > 1 for ranks in self.hosts):
            self.left = {name: self.left.get(name, 0.0) + bound for name, bound in self.bound.items()}

    def check(self, step: int, trained: list[dict[str, torch.Tensor]], means: dict[str, Any], taken: dict[str, Any],
              weights: list[float]) -> None:  # fmt: skip
        if self.averages == 1:
            self.rebuilt()
        self.averages += 1
        missing = [name for name in means if means[name] is None or taken.get(name) is None]
        for name in missing:
            is_none = taken.get(name) is None
            require((means[name] is None) == is_none,
                    f"gradient {step} of '{name}' is {'None' if is_none else 'not None'}, and should not be")  # fmt: skip
        found = {name: (mean if mean.is_complex() else mean.double()).numpy() for name, mean in means.items() if mean is not None}
        if any(not numpy.isfinite(mean).all() for mean in found.values()):
            for name, mean in found.items():  # a step that nobody should take
                if not numpy.isfinite(mean).all():
                    require(not numpy.isfinite(taken[name]).all(), f"gradient {step} of '{name}' is finite, its mean is not")
            self.drop()
            return
        # Nothing is owed for certain after a step that a rank had no samples in, or that did not use a parameter.
        self.unknown.update(found if 0 in weights else missing)
        all_of = {name: self.largest(name, trained, weights) for name in found}
        for name, mean in found.items():
            # A hook's blocks are of the bucket, a wire format's of one parameter.
            self.one(step, name, mean, taken[name], trained[0][name].dtype, 1.5 * max(all_of.values()) if self.hook else all_of[name])

    def largest(self, name: str, trained: list[dict[str, torch.Tensor]], weights: list[float]) -> float:
        """Sum of the largest values of the hosts' parts of the mean; with more than two hosts that of the mean, too."""
        parts = []
        for ranks in self.hosts:
            grads = [(trained[rank][name].grad, weights[rank]) for rank in ranks]
            given = [(one.to_dense() if one.is_complex() else one.to_dense().double()) * weight for one, weight in grads if one is not None]
            parts.append(sum(given) / sum(weights) if given else torch.zeros(1))
        most = sum(float(part.abs().max()) for part in parts)
        return most + (float(torch.as_tensor(sum(parts)).abs().max()) if len(parts) > 2 else 0.0)

    def one(self, step: int, name: str, mean: Any, taken: Any, dtype: torch.dtype, largest: float) -> None:
        require(numpy.isfinite(taken).all(),
                f"gradient {step} of '{name}' is {taken.reshape(-1)[:3]}, its mean {mean.reshape(-1)[:3]}")  # fmt: skip
        # (A gradient may be what rounding of larger values leaves, as a bias' before a BatchNorm.)
        least = 0.1 if dtype == torch.float64 or self.normalised else 1e-9
        rounding = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.02) * (largest + least)
        off = taken - mean
        if self.hook == "powerSGD":
            if self.views_complex and numpy.iscomplexobj(mean) and mean.ndim > 1:  # as torch's bucket has it
                mean, taken = (numpy.stack([one.real, one.imag], -1) for one in (mean, taken))
                dtype = torch.float32
            if dtype == torch.float32 and mean.ndim > 1:
                self.low_rank(step, name, mean, taken, largest)
                return
        elif dtype == torch.float32 and len(self.hosts) > 1:
            # Each host's sum is rounded, with what it owes, and the sum of hosts once more.
            before = self.bound.get(name, 0.0) if self.feedback else 0.0
            mine = STEP[self.format] * (largest + 2 * before) * 1.01 + rounding
            self.bound[name] = max(mine, before) if self.feedback else 0.0
            require(abs(off).max() <= mine + before,
                f"gradient {step} of '{name}' is off by {abs(off).max():.3g} as {self.format}, which is off by {mine + before:.3g} at most")
            if self.feedback and name not in self.unknown:
                owed = self.owed.get(name, 0.0) - off
                most = self.bound[name] + self.left.get(name, 0.0)
                require(abs(owed).max() <= most or abs(off).max() <= mine,
                    f"gradient {step} of '{name}': error feedback owes {abs(owed).max():.3g}, {most:.3g} at most")
                self.owed[name] = owed
            return
        require(abs(off).max() <= rounding, f"gradient {step} of '{name}' is off by {abs(off).max():.3g}, and nothing is rounded there")

    def low_rank(self, step: int, name: str, mean: Any, taken: Any, largest: float) -> None:
        """An orthogonal projection of the mean with what is owed, or the mean."""
        wanted = mean + (self.owed.get(name, 0.0) if self.feedback else 0.0)
        size = float((wanted**2).sum())
        rest = wanted - taken
        if name not in self.unknown:
            across = abs(float((taken * rest).sum()))
            require(across <= 1e-3 * size + 1e-9,
                f"gradient {step} of '{name}' is no projection of the mean with what is owed: off by {across:.3g} of {size:.3g}")
            self.owed[name] = rest
        else:
            require(float((taken**2).sum()) <= 100 * (largest**2 * mean.size + 1e-9), f"gradient {step} of '{name}' is too large")
