"""How process groups of the backend "cohort" end: aborts, deaths, ranks that do not come. Starts its processes itself."""

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

    def test_monitored_barrier(self):
        self.all_good(
            self.START
            + """
cohort.monitored_barrier()
if rank == 0:
    try:
        cohort.monitored_barrier(timeout=1.0, wait_all_ranks=True)
        sys.exit("nobody has come")
    except cohort.Timeout as error:
        assert "rank 1" in str(error) and "rank 2" in str(error), error
else:
    import time
    time.sleep(3)
    try:
        dist.barrier()
        sys.exit("it is over")
    except cohort.Error:
        pass
print("good")
""",
            3,
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
