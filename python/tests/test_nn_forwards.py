"""Tests what a backward of DistributedDataParallel averages, and by which weights: the cases of
src/torch/ddp_forwards.txt, which the C++ one is tested with as well. Two ranks of `cohort run`."""

import contextlib
import pathlib
import unittest

from support import needs_torch, torch
from support_nn import Ranks, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort

if torch is not None:
    from cohort.nn import DistributedDataParallel

    class TimesW(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x):
            return x * self.w


CASES = pathlib.Path(__file__).resolve().parents[2] / "src/torch/ddp_forwards.txt"


def read_cases():
    """[(name, lines of words)]"""
    cases = []
    for line in CASES.read_text().splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] == "case":
            cases.append((line[5:], []))
        else:
            cases[-1][1].append(words)
    return cases


@needs_torch
class Forwards(Ranks):
    def carry_out(self, lines):
        net = TimesW()
        by_rows = ["weights", "rows"] in lines
        model = DistributedDataParallel(net, samples=(lambda x: x.shape[0]) if by_rows else None)
        inputs, outputs, losses, refused = {}, {}, {}, None

        def forward(called, name, *rows):
            inputs[name] = torch.full((int(rows[self.rank]), 1), self.rank + 1.0, dtype=torch.float64, requires_grad=True)
            outputs[name] = called(inputs[name])
            losses[name] = outputs[name].mean()

        for verb, *words in lines:
            local = verb.startswith("local")
            with model.no_sync() if local else contextlib.nullcontext():
                if verb == "needs":
                    if tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, words[0].split("."))):
                        self.skipTest(f"with torch {torch.__version__} that cannot be told")
                elif verb in ("forward", "local"):
                    forward(model, *words)
                elif verb == "bypass":
                    forward(net, *words)
                elif verb == "alone":
                    losses[words[0]] = 4 * (self.rank + 1) * net.w.sum()
                elif verb == "count":
                    model.set_sample_count(int(words[self.rank]))
                elif verb == "loss":
                    del outputs[words[0]]
                elif verb == "drop":
                    del outputs[words[0]], losses[words[0]]
                elif verb == "slope":
                    (slope,) = torch.autograd.grad(losses[words[0]], inputs[words[0]], create_graph=True)
                    losses[words[0]] = losses[words[0]] + slope.sum()
                elif verb == "outside":
                    losses[words[0]] = losses[words[0]] * net.w.sum()
                elif verb == "refused":
                    refused = " ".join(words)
                elif verb == "gradient":
                    self.assertAlmostEqual(net.w.grad.item(), float(words[0]), 12)
                    self.assertEqual(model.stats().steps, int(words[1]))
                    model.zero_grad()
                elif verb != "weights":
                    self.assertIn(verb, ("backward", "retained", "local_backward", "local_retained"))
                    loss = sum(losses[name] for name in words)
                    with self.assertRaisesRegex(cohort.Mismatch, refused) if refused else contextlib.nullcontext():
                        loss.backward(retain_graph="retained" in verb)
                    refused = None

    def test_averages_and_weights(self):
        cases = read_cases()
        self.assertGreaterEqual(len(cases), 10)
        for name, lines in cases:
            with self.subTest(case=name):
                self.carry_out(lines)


if __name__ == "__main__":
    unittest.main()
