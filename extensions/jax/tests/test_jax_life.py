"""Life and end of `cohort.jax`: exits with programs under way, deaths, one world after another, several devices, other ways
to compile, JAX's own process groups. Starts its processes itself."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

from support_jax import JAX, NEEDED, jax  # isort: skip -- before NumPy

from support import SECONDS, World

START = f"""
import os, sys, time
if os.path.isdir({JAX!r}):
    sys.path.insert(0, {JAX!r})
import jax, jax.numpy as jnp, numpy as np
import cohort
import cohort.jax as hvd
cohort.init(os.environ["TEST_INIT"])
hvd.init()
rank, size = hvd.rank(), hvd.size()
"""


@unittest.skipIf(jax is None, NEEDED)
class Life(unittest.TestCase):
    def ends(self, script, size=2, start=START, **environment):
        return World(start + script, size, JAX_PLATFORMS="cpu", **environment).ends(3 * SECONDS)

    def all_good(self, script, size=2, **environment):
        for rank, (status, output) in enumerate(self.ends(script, size, **environment)):
            self.assertEqual(status, 0, f"rank {rank}: {output}")
            self.assertIn("good", output, f"rank {rank}: {output}")

    def test_exit_without_waiting(self):
        """The last programs' operations are carried out though nothing waits for them, so other ranks get results."""
        self.all_good(
            """
step = jax.jit(lambda x: hvd.allreduce(jnp.sin(x) @ jnp.cos(x), name="last", op=hvd.Sum))
x = jnp.ones((300, 300))
for _ in range(5):
    y = step(x)
if rank == 1:
    time.sleep(0.5)  # the other one is at its end
    y.block_until_ready()
del y
print("good")
"""
        )

    def test_exit_with_a_dropped_result(self):
        self.all_good(
            """
step = jax.jit(lambda x: hvd.allreduce(x, name="dropped", op=hvd.Sum))
if rank == 1:
    time.sleep(0.5)
    assert float(step(jnp.ones(100000))[0]) == 2
else:
    step(jnp.ones(100000))
print("good")
"""
        )

    def test_an_exception_waits_for_nothing(self):
        """The rank with the exception ends at once, and the other rank is informed even within a program."""
        failed, told = self.ends(
            """
step = jax.jit(lambda x: hvd.allreduce(jnp.sin(x) @ jnp.cos(x), name="step", op=hvd.Sum))
other = jax.jit(lambda x: hvd.allreduce(jnp.sin(x) @ jnp.cos(x), name="other", op=hvd.Sum))
x = jnp.ones((300, 300))
begun = time.monotonic()
try:
    step(x).block_until_ready()  # rank 0 may be through, and have raised, before rank 1 is
    begun = time.monotonic()
    if rank == 0:
        y = step(x)
        raise LookupError("no more data")
    other(x).block_until_ready()
except LookupError:
    raise
except Exception as error:
    print(f"told after {time.monotonic() - begun:.1f} s: {error}")
"""
        )
        self.assertEqual(failed[0], 1, failed[1])
        self.assertRegex(told[1], "told after [0-4][.].*LookupError: no more data")

    def test_a_dead_rank_is_named_in_seconds(self):
        for how in ("now", "jit"):
            with self.subTest(how):
                begun = time.monotonic()
                ends = self.ends(
                    f"""
step = (jax.jit if {how!r} == "jit" else lambda f: f)(lambda x: hvd.allreduce(x, name="step", op=hvd.Sum))
step(jnp.ones(10)).block_until_ready()
if rank == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), 9)
begun = time.monotonic()
try:
    step(jnp.ones(10)).block_until_ready()
    sys.exit("nothing failed")
except Exception as error:
    known = hvd.as_internal_error(error)
    assert known is not None and known.__cause__.peer == 1, (known, error)
    assert hvd.as_internal_error(ValueError("the program's own")) is None
    print(type(error).__name__, error, f"took {{time.monotonic() - begun:.1f}} s")
"""
                )
                status, output = ends[0]
                self.assertEqual(status, 0, output)
                self.assertEqual(ends[1][0], -9)
                self.assertRegex(output, r"(?s)(JaxRuntimeError|ValueError|HorovodInternalError) .*lost rank 1")
                self.assertLess(time.monotonic() - begun, SECONDS)
                self.assertLess(float(output.split("took ")[1].split()[0]), 15)

    def test_programs_in_another_order_on_each_rank(self):
        """JAX runs programs one after the other, so these wait for each other. Both ranks get an error with the names."""
        for status, output in self.ends(
            """
one = jax.jit(lambda x: hvd.allreduce(x, name="one", op=hvd.Sum))
two = jax.jit(lambda x: hvd.allreduce(2 * x, name="two", op=hvd.Sum))
try:
    for program in [one, two] if rank == 0 else [two, one]:
        program(jnp.ones(10)).block_until_ready()
    sys.exit("they have met")
except Exception as error:
    print(error)
    time.sleep(1)  # for the other one to hear the same
""",
            HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="3",
        ):
            self.assertEqual(status, 0, output)
            self.assertRegex(output, r"'jit.allreduce.(one|two)' timed out.*did not ask for it")

    def test_a_world_after_a_world(self):
        """Programs compiled in one world work in the next, or are compiled again if its size differs."""
        self.all_good(
            """
gather = jax.jit(lambda x: hvd.allgather(x, name="gather"))
assert gather(jnp.ones(2) * rank).shape == (4,)
hvd.shutdown()
try:
    gather(jnp.ones(2)).block_until_ready()
    sys.exit("there was no world")
except Exception as error:
    assert "call init()" in str(error), error
hvd.init()
assert gather(jnp.ones(2) * rank).tolist() == [0, 0, 1, 1]
hvd.shutdown()
hvd.init(comm=[rank])
assert hvd.size() == 1 and gather(jnp.ones(2)).shape == (2,)
print("good")
"""
        )

    def test_several_devices_are_refused(self):
        self.all_good(
            """
from jax.sharding import Mesh, NamedSharding, PartitionSpec
assert jax.local_device_count() == 2
mesh = Mesh(np.array(jax.devices()), ("d",))
spread = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("d")))
told = []
for operation in (hvd.allreduce, jax.jit(lambda x: hvd.allreduce(x, name="spread")),
                  jax.jit(jax.shard_map(lambda x: hvd.allreduce(x, name="map"), mesh=mesh, in_specs=PartitionSpec("d"),
                                        out_specs=PartitionSpec("d"), check_vma=False))):
    try:
        operation(spread)
        sys.exit("it was not refused")
    except ValueError as error:
        told.append(str(error))
assert all("2 devices" in one and "a process for each device" in one for one in told), told
one = jax.device_put(jnp.ones(3), jax.devices()[1])
assert float(hvd.allreduce(one, op=hvd.Sum)[0]) == float(jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(one)[0]) == 2
print("good")
""",
            XLA_FLAGS="--xla_force_host_platform_device_count=2",
        )

    def test_without_the_library(self):
        """Without a known XLA interface, results are the same, with a warning."""
        self.all_good(
            """
import warnings
from cohort.jax import _ffi
def refuse(): raise RuntimeError("it speaks version 7")
_ffi._register = refuse
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    step = jax.jit(jax.grad(lambda x: (hvd.allreduce(x, name="slow", op=hvd.Sum) ** 2).sum()))
    assert step(jnp.ones(3)).tolist() == [8, 8, 8]
    assert jax.jit(lambda x: hvd.allgather(x, name="slow.gather"))(jnp.ones((2, 1)) * rank).ravel().tolist() == [0, 0, 1, 1]
assert ["it speaks version 7" in str(one.message) for one in seen if one.category is RuntimeWarning] == [True], seen
print("good")
"""
        )

    def test_no_lock_of_python_s(self):
        """While programs wait for other ranks, Python runs."""
        self.all_good(
            """
step = jax.jit(lambda x: hvd.allreduce(x, name="late", op=hvd.Sum))
step(jnp.ones(10)).block_until_ready()
if rank == 1:
    time.sleep(1)
    step(jnp.ones(10)).block_until_ready()
else:
    import threading
    waiter = threading.Thread(target=lambda: step(jnp.ones(10)).block_until_ready())
    waiter.start()
    turns, until = 0, time.monotonic() + 0.5
    while time.monotonic() < until:
        turns += 1
    assert turns > 1000 and waiter.is_alive(), turns
    waiter.join()
print("good")
"""
        )

    def test_alone(self):
        [(status, output)] = self.ends(
            "hvd.init(); print(jax.jit(hvd.allreduce)(jnp.ones(2)), hvd.value_and_grad(lambda x: x * x)(3.0))",
            1,
            START.replace('cohort.init(os.environ["TEST_INIT"])', "").replace("cohort.init", "init"),
            COHORT_ALONE="1",
        )
        self.assertEqual((status, output.strip()), (0, output.strip()))
        self.assertIn("[1. 1.]", output)


@unittest.skipIf(jax is None, NEEDED)
class Command(unittest.TestCase):
    """Tests under `cohort run`."""

    def run_job(self, text, *options, **environment):
        command = os.environ.get("COHORT_COMMAND") or shutil.which("cohort")
        with tempfile.TemporaryDirectory(prefix="cohort-jax-test-") as folder:
            program = pathlib.Path(folder, "program.py")
            program.write_text(f"import os, sys\nif os.path.isdir({JAX!r}):\n    sys.path.insert(0, {JAX!r})\n" + text)
            return subprocess.run(
                [command, "run", "-q", "-np", "2", "--prefix", "none", *options, "--", sys.executable, program],
                cwd=folder,
                env=dict(os.environ, JAX_PLATFORMS="cpu", **environment),
                capture_output=True,
                text=True,
                timeout=3 * SECONDS,
            )

    def test_jax_s_own_processes_find_each_other(self):
        """jax.distributed.initialize() without arguments works beside hvd, also in what looks like a Slurm allocation."""
        done = self.run_job(
            """
import cohort.jax as hvd, jax, jax.numpy as jnp
jax.distributed.initialize()
hvd.init()
from jax.experimental import multihost_utils
own = jax.process_index()
every = multihost_utils.process_allgather(jnp.array([own]))
total = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(jnp.ones(2))
assert (own, jax.process_count()) == (hvd.rank(), hvd.size()) and every.ravel().tolist() == [0, 1] and total[0] == 2
print("good")
""",
            SLURM_JOB_ID="7",
            SLURM_STEP_NODELIST="other",
            SLURM_NTASKS="64",
            SLURM_PROCID="9",
            SLURM_LOCALID="0",
        )
        self.assertEqual((done.returncode, done.stdout.count("good")), (0, 2), done.stderr)

    def test_keras_finds_them_too(self):
        done = self.run_job(
            """
os.environ["KERAS_BACKEND"] = "jax"
import keras
keras.distribution.initialize()
import jax
assert jax.process_count() == 2 and jax.process_index() == int(os.environ["RANK"])
print("good")
"""
        )
        if "No module named 'keras'" in done.stderr:
            self.skipTest("needs keras: tools/setup --for all")
        self.assertEqual((done.returncode, done.stdout.count("good")), (0, 2), done.stderr)


if __name__ == "__main__":
    unittest.main()
