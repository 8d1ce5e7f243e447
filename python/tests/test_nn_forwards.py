"""Which forwards count in a backward of DistributedDataParallel: the cases of tests/cases/ddp_forwards.txt, which the C++ one
is tested with as well. Two ranks of `cohort run`."""

import pathlib
import unittest

from support import needs_torch, torch
from support_nn import Ranks, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

if torch is not None:
    from cohort.nn import DistributedDataParallel

    class TimesW(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x):
            return x * self.w


CASES = pathlib.Path(__file__).resolve().parents[2] / "tests" / "cases" / "ddp_forwards.txt"


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
        model = DistributedDataParallel(net)
        inputs, outputs, losses = {}, {}, {}

        def forward(name, rows):
            inputs[name] = torch.full((int(rows), 1), self.rank + 1.0, dtype=torch.float64, requires_grad=True)
            outputs[name] = model(inputs[name])
            losses[name] = outputs[name].mean()

        for verb, *words in lines:
            if verb == "needs":
                if tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, words[0].split("."))):
                    self.skipTest(f"with torch {torch.__version__} that cannot be told")
            elif verb == "forward":
                forward(words[0], words[1 + self.rank])
            elif verb == "local":
                with model.no_sync():
                    forward(words[0], words[1 + self.rank])
            elif verb == "loss":
                del outputs[words[0]]
            elif verb == "drop":
                del outputs[words[0]], losses[words[0]]
            elif verb == "slope":
                (slope,) = torch.autograd.grad(losses[words[0]], inputs[words[0]], create_graph=True)
                losses[words[0]] = losses[words[0]] + slope.sum()
            elif verb == "backward":
                sum(losses[name] for name in words).backward()
            elif verb == "local_backward":
                with model.no_sync():
                    sum(losses[name] for name in words).backward()
            else:
                self.assertEqual(verb, "gradient")
                self.assertAlmostEqual(net.w.grad.item(), float(words[0]), 12)
                self.assertEqual(model.stats().steps, int(words[1]))
                model.zero_grad()

    def test_only_those_that_a_backward_comes_to_count(self):
        cases = read_cases()
        self.assertGreaterEqual(len(cases), 10)
        for name, lines in cases:
            with self.subTest(case=name):
                self.carry_out(lines)


if __name__ == "__main__":
    unittest.main()
