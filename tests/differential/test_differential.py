"""The suite finds faults that are planted, and none where there are none; and its parts.

    PYTHONPATH=build/release/python python3 -m unittest test_differential
"""

from __future__ import annotations

import copy
import os
import random
import unittest
from typing import Any

import compare
import differential
import grammar
import lossy
import numpy
import reference
import shrink
import source
import torch

PLAIN = {"kind": "step", "how": "plain"}


def program(method: str, *events: dict[str, Any], pieces: tuple[str, ...] = ("Linear", "Tanh", "Linear"), **more: Any) -> dict[str, Any]:
    """On two ranks of two hosts."""
    made = {
        "seed": 1, "ranks": 2, "hosts": "2", "method": method, "dtype": "float64", "seeded_by_rank": False,
        "pieces": [{"kind": kind, "name": f"p{number}", "sparse": False} for number, kind in enumerate(pieces)],
        "optimizer": {"kind": "SGD", "options": {"lr": 0.1}, "groups": "one"}, "set_to_none": True, "options": {}, "sizes": [3, 3],
        "schedule": None, "scaler": False, "ema": False, "second_model": False, "events": list(events),
    }  # fmt: skip
    made.update(more)
    return made


THAWED = [PLAIN, PLAIN, {"kind": "thaw", "piece": "p0", "optimizer": "as_is"}, PLAIN, PLAIN, PLAIN]
FROZEN = [{"kind": "Linear", "name": "p0", "frozen": True}, {"kind": "Linear", "name": "p1"}]
NAN = {"kind": "step", "how": "nan", "rank": 1}
LOCAL = {"sync_every": 2, "context": False}
SHARDED = {"sharding": "gradients"}
# For each fault: a program that meets it, and what is said of it.
FAULTS = {
    "list_taken_once": (program("ddp", *THAWED), {"pieces": FROZEN}, "record"),
    "local_list_taken_once": (program("local_sgd", *THAWED, options=LOCAL), {"pieces": FROZEN},
                              "differs|is .*, not|was not looked at"),
    "residual_spoiled": (program("ddp", PLAIN, NAN, PLAIN, dtype="float32", scaler=True,
                              options={"hook": "int4_compress", "feedback": True}), {}, "gradient 2"),
    "rate_not_compared": (program("sharded", PLAIN, {"kind": "rate_one", "rank": 1}, *[PLAIN] * 4, options=SHARDED), {}, "is .*, not"),
    "rate_apart": (program("ddp", PLAIN, PLAIN), {}, "rank 1, record 0|differs"),
    "buffers_apart": (program("ddp", PLAIN, PLAIN, PLAIN, pieces=("Linear", "BatchNorm", "Linear")), {}, "running"),
    "refusal_alone": (program("ddp", *[PLAIN] * 4), {}, r"refused on ranks \[0\] only|one by"),
}  # fmt: skip


@unittest.skipUnless(hasattr(torch.amp, "GradScaler"), "torch 2.3 is needed")
class Faults(unittest.TestCase):
    """Each in a job of its own."""

    def judged(self, planted: str, made: dict[str, Any]) -> compare.Verdict:
        suite = differential.Suite(planted)
        try:
            verdict = suite.judge(made)
            assert verdict is not None
            return verdict
        finally:
            suite.jobs.close()

    def test_are_found(self) -> None:
        for name, (made, changed, said) in FAULTS.items():
            with self.subTest(name):
                verdict = self.judged(name, {**made, **changed})
                self.assertEqual(verdict.kind, "different", verdict)
                self.assertRegex(verdict.text, said)

    @unittest.skipUnless(os.environ.get("DIFFERENTIAL_CPP"), "runner.cpp is not built")
    def test_are_found_over_cpp(self) -> None:
        suite = differential.Suite(runner=os.environ["DIFFERENTIAL_CPP"])
        try:
            made = {**program("ddp", PLAIN, PLAIN), "lossy": False}
            self.assertEqual(suite.judge(made), compare.Verdict("same"))
            plain, ranks = suite.plain(made), copy.deepcopy(made)
            ranks["optimizer"]["options"]["lr"] *= 1.5
            job = suite.jobs.of(ranks)
            job.start(ranks)
            verdict = compare.verdict(made, plain, job.finish())
            self.assertEqual((verdict.kind, verdict.step), ("different", 0), verdict)
            virtual = {**made, "virtual": 3, "sizes": [3] * 3}
            self.assertEqual(suite.judge(virtual), compare.Verdict("same"))
            verdict = suite.judge({**virtual, "refused": 1})
            assert verdict is not None
            self.assertIn("not refused", verdict.text)
        finally:
            suite.jobs.close()

    def test_an_operation_that_a_program_leaves_behind_does_not_meet_the_next_one(self) -> None:
        suite = differential.Suite()
        try:
            left = {"kind": "step", "how": "skip_one", "rank": 0}
            suite.judge(program("chainermn", {"kind": "step", "how": "nan", "rank": 1}, PLAIN, left, PLAIN,
                                options={"double_buffering": True}))  # fmt: skip
            made = program("local_sgd", PLAIN, PLAIN, options=LOCAL)
            self.assertEqual(suite.judge(made), compare.Verdict("same"))
        finally:
            suite.jobs.close()

    def test_nothing_is_found_without_them(self) -> None:
        suite = differential.Suite()
        try:
            for name, (made, changed, _) in FAULTS.items():
                with self.subTest(name):
                    verdict = suite.judge({**made, **changed})
                    assert verdict is not None
                    self.assertIn(verdict.kind, ("same", "refused"), verdict)
        finally:
            suite.jobs.close()


@unittest.skipUnless(hasattr(torch.amp, "GradScaler"), "torch 2.3 is needed")
class Parts(unittest.TestCase):
    def test_a_seed_gives_one_program(self) -> None:
        for seed in range(30):
            self.assertEqual(grammar.program(seed), grammar.program(seed))
            compile(source.text_of(grammar.program(seed), reference=False), "program", "exec")

    def test_one_replica_is_plain_torch(self) -> None:
        made = program("ddp", PLAIN, PLAIN, ranks=1, hosts="", sizes=[3])
        records = reference.run(made)[0]
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
        torch.set_default_dtype(torch.float32)
        for step in range(2):
            x, y = reference.batch(step, 0, 3, torch.float64)
            net.zero_grad()
            ((net(x) - y) ** 2).mean().backward()
            with torch.no_grad():
                for one in net.parameters():
                    one -= 0.1 * one.grad
        ours = torch.cat([one.detach().reshape(-1) for one in net.parameters()])
        self.assertTrue(torch.allclose(torch.from_numpy(records.states[-1][1]), ours, 1e-12, 1e-12))

    def test_whole_batches_give_what_one_replica_has_on_all(self) -> None:
        """By theory: losses that are means, batches of one size, and no samples that see each other."""
        apart = reference.run(program("ddp", PLAIN, PLAIN))
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
        torch.set_default_dtype(torch.float32)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(2):
            x, y = (torch.cat(parts) for parts in zip(*(reference.batch(step, rank, 3, torch.float64) for rank in range(2))))
            optimizer.zero_grad()
            ((net(x) - y) ** 2).mean().backward()
            optimizer.step()
        ours = torch.cat([one.detach().reshape(-1) for one in net.parameters()])
        self.assertTrue(torch.allclose(torch.from_numpy(apart[1].states[-1][1]), ours, 1e-12, 1e-12))

    def test_one_bit_is_told_between_numbers_of_ranks(self) -> None:
        what, values = (("p0.weight", 2, "float64", True),), numpy.array([0.5, 1.0])
        here = [{"states": [(what, values)], "error": None}]
        there = [{"states": [(what, numpy.nextafter(values, 2))], "error": None}]
        self.assertIsNone(compare.other_bits(here, copy.deepcopy(here), [1]))
        self.assertRegex(compare.other_bits(here, there, [1]) or "", "rank 0, record 0")
        self.assertRegex(compare.other_bits(here, [{"states": [], "error": None}], [1]) or "", "0 records in place of 1")

    def test_what_error_feedback_may_owe_grows_only_where_a_host_has_several_ranks(self) -> None:
        for hosts, most in (("2", 0.0), ("2,2", 0.5)):
            made = program("ddp", PLAIN, options={"wire_format": "int8", "error_feedback": True}, hosts=hosts)
            bounds = lossy.Bounds(made, [None] * (4 if "," in hosts else 2))
            bounds.bound = {"p": 0.5}
            bounds.rebuilt()
            self.assertEqual(bounds.left.get("p", 0.0), most)

    def test_a_program_is_shrunk_to_what_fails(self) -> None:
        draw = random.Random(3)
        made = grammar.program(7, "ddp", 2)
        made["events"] += [grammar.step_of(draw, made) for _ in range(6)] + [{"kind": "eval"}]
        small = shrink.shrink(made, lambda one: any(event["kind"] == "eval" for event in one["events"]), 20)
        self.assertEqual([event["kind"] for event in small["events"]], ["eval"])
        self.assertEqual((len(small["pieces"]), small["ranks"], small["options"].get("bucket_bytes")), (1, 1, None))

    def test_errors_are_told_without_numbers_and_names(self) -> None:
        one = {"type": "Mismatch", "text": "rank 1 has 0.5 of 'p0.weight' (0x1.8p-3)\nmore"}
        self.assertEqual(compare.refusal(one), "Mismatch: rank N has N of '...' (N)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
