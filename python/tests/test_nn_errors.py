"""Errors of DistributedDataParallel: what it refuses, and what they say. Ranks of `cohort run -np N`; a test that
breaks a world has one of its own."""

import inspect
import unittest

from support import needs_torch, run_world, torch
from support_nn import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort
from cohort import _core
from tiers import slow

if torch is not None:
    from nn_models import Mlp, batch_of, loss_of, with_values

    from cohort.data import DistributedSampler
    from cohort.nn import DistributedDataParallel, DistributedDataParallelOptions


@needs_torch
class Refused(unittest.TestCase):
    def setUp(self):
        self.rank, self.size = cohort.rank(), cohort.size()

    def test_models_that_differ_are_named_on_every_rank(self):
        last = self.size - 1

        class Named(torch.nn.Module):
            def __init__(self, name="weight", shape=(2,), dtype=torch.float32, more=False, frozen=False):
                super().__init__()
                self.register_parameter(name, torch.nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=not frozen))
                self.register_parameter("z", torch.nn.Parameter(torch.ones(1)))
                if more:
                    self.register_buffer("count", torch.zeros(3))

        for options, word in (
            ({"name": "other"}, "parameter 'other' of float32 \\[2\\]"),
            ({"shape": (3,)}, "\\[3\\]"),
            ({"dtype": torch.float64}, "float64"),
            ({"more": True}, "rank 0 has nothing more, .* has buffer 'count'"),
            ({"frozen": True}, "frozen"),
        ):
            with self.subTest(**options), self.assertRaisesRegex(cohort.Mismatch, word) as caught:
                DistributedDataParallel(Named(**(options if self.rank == last else {})))
            self.assertEqual(caught.exception.peer, last)
            self.assertEqual(caught.exception.rank, self.rank)
        options = {"bucket_cap_mb": (8.0, 7.0), "first_bucket_bytes": (1 << 20, 7), "broadcast_buffers": (True, False),
                   "wire_format": ("none", "bfloat16"), "error_feedback": ("by format", False), "non_finite": ("ignore", "raise"),
                   "compare_parameters_every": (0, 3), "check_replicas": (True, False), "sharding": ("none", "optimizer"),
                   "protect_parameters": (False, True), "virtual_ranks": (0, 8), "compute_threads": (0, 1)}  # fmt: skip
        names = {name for _, name, _ in _core.agreed_options(None)}
        self.assertEqual({name.replace("bucket_cap_mb", "bucket_bytes") for name in options}, names)
        for name, (common, other) in options.items():
            given = {"sharding": "parameters"} if name == "protect_parameters" else {}
            if self.rank == last or name == "bucket_cap_mb":
                given[name] = other if self.rank == last else common
            told = f"rank 0 has {name} = {str(common).lower()}, rank {last} has {name} = {str(other).lower()} -- "
            with self.subTest(name), self.assertRaisesRegex(cohort.Mismatch, told):
                DistributedDataParallel(Named(), **given)
        DistributedDataParallel(Named())  # the world is as good as before

    def test_the_options_are_those_of_the_core_and_described(self):
        names = [name for _, name, _ in _core.agreed_options(None)]
        arguments = inspect.signature(DistributedDataParallel).parameters
        of_python = {"module", "comm", "bucket_cap_mb", "gradient_as_bucket_view", "observer", "sampler", "samples", "process_group",
                     "seed_python"}
        self.assertEqual({*arguments} - of_python, {*names} - {"bucket_bytes"})
        for name in arguments:
            self.assertRegex(DistributedDataParallel.__doc__, rf"(?m)^    {name}( {{2,}}\S|$)")
        model = DistributedDataParallel(Mlp())
        self.assertEqual(_core.agreed_options(model.options), _core.agreed_options(None))  # the defaults
        self.assertEqual([*vars(model.options)], [*names, "observer"])
        self.assertEqual(DistributedDataParallelOptions(), model.options)
        with self.assertRaisesRegex(cohort.InvalidArgument, "observer=3 -- a function"):
            DistributedDataParallel(Mlp(), observer=3)
        for name, wrong in (("first_bucket_bytes", "1k"), ("first_bucket_bytes", -1), ("compare_parameters_every", 2.5),
                            ("sharding", "all"), ("non_finite", None), ("broadcast_buffers", "no"), ("error_feedback", "on")):
            with self.assertRaisesRegex(cohort.InvalidArgument, f"DistributedDataParallel: {name}={wrong!r} "):
                DistributedDataParallel(Mlp(), **{name: wrong})

    def test_misuse_is_an_error_and_not_a_silence(self):
        net = with_values(Mlp())
        model = DistributedDataParallel(net)
        x, y = batch_of(0, 4)
        with self.assertRaisesRegex(cohort.InvalidArgument, "already wrapped"):
            DistributedDataParallel(net)
        loss_of(model(x), y).backward()
        with self.assertRaisesRegex(cohort.InvalidArgument, "no_sync"), model.no_sync():
            model.step_without_samples()
        with self.assertRaisesRegex(cohort.InvalidArgument, "no parameter 'nobody'"):
            model.slot_of("nobody")
        for refused in ("divide_by_initial_world_size", "throw_on_early_termination"):
            with self.assertRaisesRegex(cohort.InvalidArgument, refused), model.join(**{refused: True}):
                pass
        with model.join(enable=False):
            pass
        with model.no_sync():
            loss_of(net(x), y).backward()  # local, and said so
        model.zero_grad()
        loss_of(model(x), y).backward()  # all is well
        steps = model.stats().steps
        self.assertEqual(steps, 2)

    def test_what_cannot_be_trained_is_refused(self):
        frozen = Mlp()
        for parameter in frozen.parameters():
            parameter.requires_grad_(False)
        with self.assertRaisesRegex(cohort.InvalidArgument, "no parameter"):
            DistributedDataParallel(frozen)
        with self.assertRaisesRegex(cohort.InvalidArgument, "complex"):
            DistributedDataParallel(torch.nn.Linear(2, 2, dtype=torch.complex64))
        with self.assertRaisesRegex(cohort.InvalidArgument, "no shape yet"):
            DistributedDataParallel(torch.nn.LazyLinear(2))
        with self.assertRaisesRegex(cohort.InvalidArgument, "meta"):
            DistributedDataParallel(torch.nn.Linear(2, 2, device="meta"))
        with self.assertRaisesRegex(cohort.InvalidArgument, "device_ids"):
            DistributedDataParallel(Mlp(), [0])
        with self.assertRaises(cohort.InvalidArgument):
            DistributedDataParallel(Mlp(), bucket_cap_mb=0)
        for wrong in "25", float("nan"), float("inf"), 1e30, -1, True:
            with self.assertRaisesRegex(cohort.InvalidArgument, "bucket_cap_mb=.*a size in MiB"):
                DistributedDataParallel(Mlp(), bucket_cap_mb=wrong)
        DistributedDataParallel(Mlp(), bucket_cap_mb=None)  # torch's default
        with self.assertRaisesRegex(cohort.InvalidArgument, "gradient_as_bucket_view=False"):
            DistributedDataParallel(Mlp(), gradient_as_bucket_view=False)
        with self.assertRaises(cohort.InvalidArgument):
            DistributedDataParallel("Mlp")

        class NoTensor(Mlp):
            def forward(self):
                return super().forward(torch.ones(2, 5, dtype=torch.float64))

        DistributedDataParallel(NoTensor())().sum().backward()  # which has no batch to be told of
        data = range(20)
        for options, words in (
            ({"sampler": torch.utils.data.SequentialSampler(data)}, "a cohort.data.DistributedSampler is wanted"),
            ({"sampler": DistributedSampler(data, remainder="keep")}, "no batch_size"),
            ({"sampler": DistributedSampler(data, batch_size=2, num_replicas=7, rank=3)}, "rank 3 of 7"),
            ({"sampler": DistributedSampler(data, batch_size=2), "samples": len}, "give one"),
            ({"samples": 3}, "a function"),
        ):
            with self.subTest(words=words), self.assertRaisesRegex(cohort.InvalidArgument, words):
                DistributedDataParallel(Mlp(), **options)

    def test_reentrant_backward_over_shared_parameters(self):
        from torch.utils.checkpoint import checkpoint

        class Shared(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3, 3)

            def forward(self, x):
                for _ in range(2):
                    x = checkpoint(self.layer, x, use_reentrant=True)
                return x

        model = DistributedDataParallel(Shared())
        with self.assertRaisesRegex(cohort.InvalidArgument, "second gradient"):
            model(torch.ones(1, 3, requires_grad=True)).sum().backward()
        with self.assertRaisesRegex(cohort.Aborted, "out of step"):
            model(torch.ones(1, 3, requires_grad=True))

    def test_a_mismatch_comes_out_of_backward_on_all_ranks(self):
        model = DistributedDataParallel(with_values(Mlp()))
        x, y = batch_of(0, 4)
        loss = loss_of(model(x), y)
        with self.assertRaises(cohort.Mismatch):
            if self.rank == 0:
                loss.backward()
            else:
                cohort.world().barrier()
        cohort.world().barrier()


FAILING = """
import os, sys, torch, cohort
torch.set_num_threads(1)
from cohort.nn import DistributedDataParallel

class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient): raise ValueError("the user's own")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)
    def forward(self, x, fail):
        hidden = self.first(x)
        return self.last(Failing.apply(hidden) if fail else hidden)

cohort.init(os.environ["TEST_INIT"], timeout=30)
model = DistributedDataParallel(Net())
x = torch.ones(2, 5)
loss, other = model(x, cohort.rank() == 1).sum(), model(x, False).sum()
if cohort.rank() == 0:
    try:
        loss.backward()  # its peer never comes
    except cohort.Error as error:
        print("rank 0:", type(error).__name__, error)
else:
    try:
        loss.backward()
    except ValueError as error:
        print("rank 1:", error)
        try:
            other.backward()
        except cohort.Aborted as error:
            print("rank 1, in a second backward:", error)
    try:
        model(x, False)
    except cohort.Aborted as error:
        print("rank 1:", error)
    cohort.world().abort("as the message says")
"""


# The end of backward fails on rank 1, before it has launched what rank 0 waits for.
FAILING_AT_THE_END = """
import os, torch, cohort
torch.set_num_threads(1)
from cohort.nn import DistributedDataParallel

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    def forward(self, x):
        return x * self.used

def observer(number, size):
    if failing and number == model.slot_of("unused").bucket:
        raise failing

cohort.init(os.environ["TEST_INIT"], timeout=30)
failing = None
model = DistributedDataParallel(Net(), bucket_cap_mb=12 / 2**20, first_bucket_bytes=12, observer=observer)
x = torch.ones(2, 3)
loss, other = model(x).mean(), 100 * model(x).mean()
if cohort.rank() == 0:
    try:
        loss.backward()  # its peer never comes
    except cohort.Error as error:
        print("rank 0:", type(error).__name__, error)
else:
    failing = {"own": ValueError, "cohort": cohort.Timeout}[os.environ["TEST_KIND"]]("the observer's own")
    try:
        loss.backward()
    except type(failing) as error:
        print("rank 1:", error)
        held = error  # with all its frames
    failing = None
    for number, call in enumerate((other.backward, lambda: model(x), model.step_without_samples, model.join().__enter__)):
        try:
            call()
        except cohort.Aborted as error:
            print(f"rank 1, {number}:", error)
    cohort.world().abort("as the message says")
"""


@needs_torch
class OneRankFails(unittest.TestCase):
    def tearDown(self):
        # The others wait for rank 0's processes here, not in the next test, whose deadlines are shorter.
        cohort.world().barrier(timeout=120)

    @slow
    def test_a_failure_at_the_end_of_backward_is_not_forgotten(self):
        if cohort.rank() != 0:
            return  # rank 0 starts the processes
        for kind in ("own", "cohort"):
            with self.subTest(kind=kind):
                (first, ours), (_, theirs) = run_world(FAILING_AT_THE_END, 2, TEST_KIND=kind)
                self.assertEqual(first, 0, ours)
                self.assertRegex(ours, "rank 0: Aborted .*as the message says")
                self.assertIn("the observer's own", theirs)
                for number in range(4):
                    self.assertRegex(theirs, f"rank 1, {number}: .*out of step")

    def test_a_failed_backward_is_not_forgotten(self):
        if cohort.rank() != 0:
            return  # rank 0 starts the processes
        (first, ours), (_, theirs) = run_world(FAILING, 2)
        self.assertEqual(first, 0, ours)
        self.assertRegex(ours, "rank 0: Aborted .*as the message says")
        self.assertIn("rank 1: the user's own", theirs)
        self.assertRegex(theirs, "rank 1: .*out of step")
        self.assertRegex(theirs, "rank 1, in a second backward: .*out of step")


if __name__ == "__main__":
    unittest.main()
