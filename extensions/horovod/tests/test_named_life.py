"""Ends of engines of operations by name: exit, exceptions, interrupts, forks, deaths. Starts its processes itself."""

import time
import unittest

from support import SECONDS, run_world, World
from test_life import IMPORTS

START = (
    IMPORTS
    + """
from cohort import _core
cohort.init(os.environ["TEST_INIT"])
world, rank = cohort.world(), cohort.rank()
engine = _core.NamedEngine(world.split())
"""
)


class Life(unittest.TestCase):
    def all_good(self, script, size=2, **environment):
        for rank, (status, output) in enumerate(run_world(START + script, size, **environment)):
            self.assertEqual(status, 0, f"rank {rank}: {output}")
            self.assertIn("good", output)
            self.assertNotIn("warning", output)

    def test_a_program_s_end(self):
        # Nothing is shut down, and nothing waits for the last operation, which is carried out nevertheless.
        self.all_good(
            """
import threading
data = bytearray([1]) * 300_000
shown = threading.Event()
def show(work):
    print("good" if work.error() is None and data[-1] == 2 else work.error())
if rank == 1:
    time.sleep(0.3)
work = engine.all_reduce("last", data, op="sum")
work.add_done_callback(show)
"""
        )

    def test_cohort_s_end_ends_it(self):
        self.all_good(
            """
work = engine.all_reduce("last", bytearray(10))
cohort.shutdown()
assert work.done() and work.error() is None
try:
    engine.barrier("more")
    sys.exit("it has ended")
except cohort.InvalidArgument as error:
    assert "shut down" in str(error), error
assert "shut down" in repr(engine)
cohort.init(os.environ["TEST_INIT"])
engine = _core.NamedEngine(cohort.world().split())
engine.barrier("again").wait()
print("good")
"""
        )

    def test_what_others_never_ask_for(self):
        # Rank 0's operation fails when rank 1 ends, not when its own deadline does.
        began = time.monotonic()
        self.all_good(
            """
engine.barrier("both").wait()
if rank == 0:
    try:
        engine.all_reduce("lonely", bytearray(5)).wait()
        sys.exit("nobody has come")
    except cohort.Aborted as error:
        assert "shut down by rank 1" in str(error), error
        assert error.code == "Aborted"
print("good")
"""
        )
        self.assertLess(time.monotonic() - began, SECONDS)

    def test_an_unfinished_operation_at_the_end(self):
        # No rank waits for it, and no other rank requests it, so it is given up after the grace period.
        began = time.monotonic()
        self.all_good(
            """
engine.barrier("both").wait()
if rank == 0:
    work = engine.all_reduce("lonely", bytearray(5))
else:
    time.sleep(1)
print("good")
"""
        )
        self.assertLess(time.monotonic() - began, SECONDS)

    def test_an_exception_is_told(self):
        (bad, output), (good, other) = run_world(
            START
            + """
engine.barrier("both").wait()
if rank == 0:
    engine.all_reduce("unfinished", bytearray(5))
    raise RuntimeError("my own fault")
try:
    engine.all_reduce("x", bytearray(5)).wait()
    sys.exit("nobody has come")
except cohort.Aborted as error:
    assert "my own fault" in str(error), error
    print("good")
os._exit(0)
""",
            2,
        )
        self.assertEqual((bad, good), (1, 0), output + other)
        self.assertIn("good", other)

    def test_an_interrupt_ends_a_wait_and_not_the_operation(self):
        self.all_good(
            """
data = bytearray([1])
if rank == 1:
    work = engine.all_reduce("x", data, op="sum")
    interrupt_a_wait()
    try:
        work.wait()
        sys.exit("nobody has come")
    except KeyboardInterrupt:
        pass
    interrupt_a_wait()
    try:
        engine.form_group([0, 1])
        sys.exit("nobody has come")
    except KeyboardInterrupt:
        pass
    assert not work.done()
    world.send(bytearray(1), 0)
    assert work.wait() and data[0] == 2
else:
    world.recv(bytearray(1), 1)
    engine.all_reduce("x", data, op="sum").wait()
    group = engine.form_group([0, 1])
    assert group.size() == 2
world.barrier()
print("good")
"""
        )

    def test_a_limit_for_form_group(self):
        self.all_good(
            """
if rank == 1:
    try:
        engine.form_group([0, 1], timeout=0.05)
        sys.exit("nobody has come")
    except TimeoutError as error:
        assert "form_group" in str(error)
world.barrier()
if rank == 0:
    assert engine.form_group([0, 1]).size() == 2
engine.barrier("end").wait()
print("good")
"""
        )

    def test_a_forked_child_touches_nothing(self):
        self.all_good(
            """
data = bytearray([1])
work = engine.all_reduce("x", data, op="sum")
child = os.fork()
if child == 0:
    refused = 0
    for use in (lambda: engine.all_reduce("y", bytearray(1)), work.wait, work.error, engine.join, lambda: work.result):
        try:
            use()
        except cohort.InvalidArgument as error:
            refused += "forked child" in str(error)
    assert (engine.rank(), engine.size()) == (rank, 2)
    engine.statistics()
    engine.shutdown()
    cohort.shutdown()
    del engine, work
    os._exit(0 if refused == 5 else 1)
assert os.waitpid(child, 0)[1] == 0
work.wait()
assert data[0] == 2
# One that ends in good order, with everything that Python does then.
sys.stdout.flush()
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
engine.barrier("still there").wait()
print("good")
"""
        )

    def test_a_death_is_noticed_while_all_sleep(self):
        world = World(
            START
            + """
engine.barrier("both").wait()
work = engine.all_reduce("x", bytearray(1)) if rank == 0 else None
print("ready", flush=True)
if rank == 1:
    time.sleep(60)
try:
    work.wait()
    sys.exit("nobody is there")
except (cohort.PeerLost, cohort.Aborted) as error:
    print("good", type(error))
try:
    engine.barrier("more")
    sys.exit("the engine has ended")
except (cohort.PeerLost, cohort.Aborted):
    pass
""",
            2,
        )
        began = time.monotonic()
        for rank in world.ranks:
            while (line := rank.stdout.readline().strip()) != "ready":  # the log is in this output, too
                self.assertIn("cohort info", line)
        world.ranks[1].kill()
        (status, output), _ = world.ends()
        self.assertEqual(status, 0, output)
        self.assertIn("good", output)
        self.assertLess(time.monotonic() - began, SECONDS)

    def test_an_error_that_nobody_asks_for_is_logged(self):
        (_, output), (_, other) = run_world(
            START
            + """
engine.all_reduce("differs", bytearray(1 + rank))
engine.barrier("x").wait()
engine.barrier("y").wait()
""",
            2,
        )
        for text in (output, other):
            self.assertIn("nobody waited for it: 'differs' refused on all ranks", text)

    def test_callbacks(self):
        # Callbacks may use Python freely, and raise; later callbacks are still called.
        ((status, output),) = run_world(
            START
            + """
told = []
def careless(work):
    told.append(threading.current_thread() is threading.main_thread())
    raise ValueError("careless")
import threading
works = [engine.all_reduce(str(i), bytearray(1000)) for i in range(50)]
for work in works:
    work.add_done_callback(careless)
for work in works:
    work.wait()
cohort.shutdown()
_core.leave_all(grace=None, reason="", failed=False)
assert len(told) == 50
print("good")
""",
            1,
        )
        self.assertEqual(status, 0, output)
        self.assertIn("ValueError: careless", output)
        self.assertIn("good", output)

    def test_begin_and_end_are_quick(self):
        self.all_good(
            """
began_all, ended_all = [], []
engine.barrier("all").wait()
for i in range(10):
    comm = world.split()
    world.barrier()
    began = time.perf_counter()
    own = _core.NamedEngine(comm)
    own.barrier("x").wait()
    began_all.append(time.perf_counter() - began)
    world.barrier()
    began = time.perf_counter()
    own.shutdown()
    ended_all.append(time.perf_counter() - began)
print(f"good: begins in {sorted(began_all)[5] * 1e3:.1f} ms, ends in {sorted(ended_all)[5] * 1e3:.1f} ms")
assert sorted(began_all)[2] < 0.5 and sorted(ended_all)[2] < 0.5
""",
            size=4,
        )

    def test_many_that_nobody_holds(self):
        # Their threads end; an engine and its communicator have several each.
        self.all_good(
            """
def threads():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("Threads:")).split()[1])
engine.barrier("all").wait()
before = threads()
for i in range(12):
    own = _core.NamedEngine(world.split())
    own.all_reduce("x", bytearray(100))
    own.barrier("y").wait()
    del own
    world.barrier()
for i in range(10):  # making one looks for those that have ended
    time.sleep(0.05)
    last = _core.NamedEngine(world.split())
    del last
print("good" if threads() <= before + 8 else f"{before} threads before, {threads()} after")
"""
        )


if __name__ == "__main__":
    unittest.main()
