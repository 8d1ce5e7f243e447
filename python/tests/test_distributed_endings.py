"""Ends of process groups of the backend "cohort": aborts, deaths, ranks that do not come. Starts its processes
itself."""

import signal
import time
import unittest

from support import SECONDS, World
from support_distributed import SMALLEST, Case


class Endings(Case):
    START = """
address = "file://" + os.environ["FOLDER"] + "/torch"
dist.init_process_group("cohort", init_method=address, rank=rank, world_size=int(sys.argv[2]), timeout=PATIENCE)
"""

    def test_a_missing_rank_is_named(self):
        script = self.START.replace("PATIENCE", "datetime.timedelta(seconds=12)")
        world = World(SMALLEST + "rank = int(sys.argv[1])\nif rank == 1: sys.exit()\n" + script, 3, arguments=True)
        first, _, third = world.ends(4 * SECONDS)
        self.assertRegex(first[1], r"1 of 3 ranks did not come within 12 s: 1")
        self.assertRegex(third[1], r"1 of 3 ranks did not come|rank 0 did not say")

    def test_a_rank_that_is_taken(self):
        script = "rank = 0\n" + self.START
        outputs = [output for _, output in self.world(script.replace("PATIENCE", "datetime.timedelta(seconds=10)"))]
        self.assertTrue(any("rank 0 is taken" in output for output in outputs), outputs)

    MONITORED = START + """
store = dist.distributed_c10d._get_default_store()

def come(group=None, seconds=5, **how):
    timeout = datetime.timedelta(seconds=seconds)
    if BY_TORCH:
        return dist.monitored_barrier(group, timeout, **how)
    return cohort.monitored_barrier(group, timeout, **how)

def good():  # nobody goes while another still counts on the group
    store.set(f"{rank} is done", "")
    store.wait([f"{other} is done" for other in range(int(sys.argv[2]))], PATIENCE)
    print("good", flush=True)

BY_TORCH = False
"""

    def test_monitored_barrier_names_who_is_missing(self):
        """Rank 1 is late: it comes once rank 0 waits. Rank 2 is missing."""
        self.all_good(
            self.MONITORED
            + """
if rank == 1:
    store.wait(["rank 0 comes"], PATIENCE)
    come()
    store.wait(["rank 0 comes again"], PATIENCE)
else:
    if rank == 0:
        store.set("rank 0 comes", "")
    come()
if rank == 2:
    store.wait(["it is over"], PATIENCE)
    try:
        dist.barrier()
        sys.exit("it is over")
    except cohort.Aborted as error:
        assert "monitored_barrier: rank 2 did not come within 5 s" in str(error), error
else:
    if rank == 0:
        store.set("rank 0 comes again", "")
    try:
        come(wait_all_ranks=rank == 0)
        sys.exit("rank 2 has not come")
    except cohort.Timeout as error:
        assert str(error).startswith("monitored_barrier: rank 2 did not come within 5 s"), error
    store.set("it is over", "")
good()
""",
            3,
        )

    def test_monitored_barrier_of_a_group(self):
        """All the missing ones, as the world counts them; and rank 0 of the group."""
        self.all_good(
            self.MONITORED
            + """
groups = [dist.new_group(ranks) for ranks in ([1, 2, 3], [0, 1, 3])]
for group, comes, said in (
    (groups[0], 1, "ranks 2, 3 of the group's ranks 1, 2, 3 did not come within 1 s"),
    (groups[1], 3, "rank 0 of the group's ranks 0, 1, 3 did not come|ranks 0, 1 of the group's"),
):
    if rank == comes:
        import re
        try:
            come(group, 1)
            sys.exit("nobody has come")
        except cohort.Timeout as error:
            assert re.match("monitored_barrier: (" + said + ")", str(error)), error
come(seconds=30)  # the world is as it was
good()
""",
            4,
        )

    def test_monitored_barrier_that_does_not_wait(self):
        self.all_good(
            self.MONITORED
            + """
if rank == 0:
    try:
        come(seconds=0)
        sys.exit("nobody has come")
    except cohort.Timeout as error:
        assert "monitored_barrier: rank 1 did not come" in str(error), error
for wrong in -1, float("nan"):
    try:
        cohort.monitored_barrier(timeout=wrong)
        sys.exit("it has no meaning")
    except cohort.InvalidArgument as error:
        assert "has no meaning" in str(error), error
good()
"""
        )

    def test_monitored_barrier_of_torchs(self):
        """torch 2.14 calls the group's; earlier ones know Gloo alone, and say so."""
        self.all_good(
            self.MONITORED
            + """
BY_TORCH = True
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
    try:
        come()
        sys.exit("torch has changed")
    except (ValueError, RuntimeError) as error:
        assert "only implemented for GLOO" in str(error), error
else:
    come()
    if rank == 0:
        try:
            come(seconds=1)
            sys.exit("rank 1 has not come")
        except cohort.Timeout as error:
            assert "monitored_barrier: rank 1 did not come within 1 s" in str(error), error
good()
"""
        )

    def test_abort(self):
        self.all_good(
            self.START
            + """
import cohort.distributed
if rank == 0:
    cohort.distributed.abort("enough of this")
else:
    work = dist.all_reduce(torch.ones(500_000), async_op=True)
    try:
        work.wait()
        sys.exit("aborted")
    except cohort.Aborted as error:
        assert "enough of this" in str(error), error
dist.destroy_process_group()
dist.init_process_group("cohort", init_method=address + "2", rank=rank, world_size=2, timeout=PATIENCE)
check()
dist.destroy_process_group()
print("good")
"""
        )

    def test_the_process_ends_after_what_its_futures_call(self):
        """A callback that is still running as the group is gone and the program is over: it comes to its end first."""
        self.all_good(
            self.START
            + """
import threading, time
called = threading.Event()
def slowly(future):
    called.set()
    time.sleep(1)
    print("good", flush=True)
    return future.value()
work = dist.all_reduce(torch.ones(4), async_op=True)
result = work.get_future().then(slowly)
work.wait()
called.wait()
dist.destroy_process_group()
"""
        )

    def test_a_dead_rank(self):
        script = self.START + """
import signal
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Linear(700, 700))
model(torch.ones(2, 700)).sum().backward()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    for _ in range(3):
        model(torch.ones(2, 700)).sum().backward()
    sys.exit("rank 1 is gone")
except RuntimeError as error:
    assert "rank 1" in str(error), error
print("good", flush=True)
"""
        began = time.monotonic()
        (status, output), (killed, _) = self.world(script)
        self.assertEqual((status, killed), (0, -signal.SIGKILL), output)
        self.assertIn("good", output)
        self.assertLess(time.monotonic() - began, 3 * SECONDS)

    def test_an_exception_ends_the_others(self):
        (first, _), (second, told) = self.world(
            self.START + """
if rank == 0:
    raise LookupError("no such thing")
try:
    dist.barrier()
except cohort.Error as error:
    print("told:", error)
"""
        )
        self.assertNotEqual(first, 0)
        self.assertRegex(told, "told:.*LookupError: no such thing")

    def test_an_end_without_destroy(self):
        # With futures whose operations nobody brings to an end.
        self.all_good(
            self.START
            + """
future = dist.all_reduce(torch.ones(300_000), async_op=True).get_future()
group = dist.new_group([0, 1])
other = dist.irecv(torch.empty(3), 1 - rank, tag=5).get_future() if rank == 0 else None
future.wait()
print("good", flush=True)
"""
        )


if __name__ == "__main__":
    unittest.main()
