"""Elastic jobs as their ranks see them: hvd.elastic.run while workers are killed, removed and added. The test plays the
launcher's part."""

import os
import sys
import time
import unittest

import keras_support
from support import needs_torch
from support_elastic import ElasticJob

OLD_THINGS = """
import os, time
import cohort, torch
import cohort.horovod.torch as hvd
from cohort import _core

hvd.init()
old = hvd.add_process_set([0, 1])
group = cohort.world().split(0)
state = hvd.elastic.ObjectState(step=0)
handles = []

@hvd.elastic.run
def train(state):
    if _core.formed_epoch() == 0:
        print("ready", flush=True)
        if hvd.rank() == 2:
            time.sleep(60)
        handles.append(hvd.allreduce_async(torch.ones(1), name="never"))
        handles.append(hvd.allreduce_async(torch.ones(1), name="neither"))
        hvd.synchronize(handles[0])
    for old_thing in (lambda: hvd.allreduce(torch.ones(1), process_set=old), lambda: hvd.synchronize(handles[1]),
                      lambda: group.barrier()):
        try:
            old_thing()
        except Exception as error:
            print("refused", type(error).__name__, error, flush=True)
    print("sum", hvd.allreduce(torch.ones(1), name="never", op=hvd.Sum).item())
    new = hvd.add_process_set([hvd.size() - 1])
    if new.included():
        hvd.allreduce(torch.ones(1), process_set=new)
    print("of the new set", hvd.broadcast(torch.tensor([float(new.size())]), 1).item())

train(state)
"""


# Each worker prints "in EPOCH" when it has formed a world, and waits for the file "go-EPOCH" before it takes the state.
WAITING = """
import os, time
import cohort
from cohort import _core

def wait_to_go(epoch):
    print("in", epoch, flush=True)
    while not os.path.exists(os.path.join(os.environ["FOLDER"], f"go-{epoch}")):
        time.sleep(0.01)
"""

BY_STATE = """
import numpy as np
weights = np.zeros(4)
state = cohort.elastic.State().add("weights", weights)

@cohort.elastic.run
def train(state, world):
    print("has", world.epoch, state.steps, flush=True)
    while True:
        world.comm.all_reduce(weights)
        state.step()
        print("stepped", world.epoch, state.steps, flush=True)
        time.sleep(0.01)

state.set_steps(int(os.environ.get("LOADED", "0")))
cohort.init()
wait_to_go(_core.formed_epoch())
train(state)
"""

BY_HVD = """
import cohort.horovod.torch as hvd
hvd.init()
state = hvd.elastic.ObjectState(step=0)
state.register_reset_callbacks([lambda: wait_to_go(_core.formed_epoch())])
wait_to_go(_core.formed_epoch())

@hvd.elastic.run
def train(state):
    print("has", _core.formed_epoch(), state.step, flush=True)
    while True:
        state.step += 1
        state.commit()
        print("stepped", _core.formed_epoch(), state.step, flush=True)
        time.sleep(0.01)

train(state)
"""

BY_TORCH = """
import torch
import torch.distributed as dist
import cohort.distributed
step = int(os.environ.get("LOADED", "0"))
while True:
    try:
        dist.init_process_group("cohort")
        epoch = _core.formed_epoch("torch's members")
        wait_to_go(epoch)
        state = [step]
        dist.broadcast_object_list(state, src=0)
        step = state[0]
        while not cohort.distributed.members_changed(step if "LOADED" in os.environ else None):
            print("has", epoch, step, flush=True)
            step += 1
            print("stepped", epoch, step, flush=True)
            time.sleep(0.01)
    except RuntimeError:
        if not cohort.distributed.is_over():
            raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
"""


@needs_torch
class WhoHasTheState(unittest.TestCase):
    def check(self, script):
        with ElasticJob(WAITING + script) as job:

            def go(epoch):
                (job.path / f"go-{epoch}").touch()

            job.begin(0, 1)
            self.assertEqual(job.page(0), (-1, False))
            job.start(0, 1)
            for worker in (0, 1):
                job.wait_for(worker, "^in 0")
                self.assertEqual(job.page(worker), (0, False))
            go(0)
            for worker in (0, 1):
                job.wait_for(worker, "^stepped 0")
                self.assertEqual(job.page(worker), (0, True))
            job.start(2)
            self.assertEqual(job.page(2), (-1, False))
            job.begin(0, 1, 2)
            job.wait_for(2, "^in 1")
            self.assertEqual(job.page(2), (1, False))
            go(1)
            job.wait_for(2, "^stepped 1")
            for worker in (0, 1, 2):
                self.assertEqual(job.page(worker), (1, True))

    def test_of_cohort_elastic(self):
        self.check(BY_STATE)

    def test_of_hvd(self):
        self.check(BY_HVD)

    def test_of_torch_distributed(self):
        self.check(BY_TORCH)


@needs_torch
class AllThatHadTheStateAreLost(unittest.TestCase):
    def lose(self, job, reached, **environment):
        """Two workers train and are killed while two new ones have no state yet, so the new ones cannot begin."""
        job.begin(0, 1)
        job.start(0, 1, **environment)
        (job.path / "go-0").touch()
        job.wait_for(0, "^stepped 0 3$")
        job.start(2, 3, **environment)
        job.begin(0, 1, 2, 3)
        for worker in (2, 3):
            job.wait_for(worker, "^in 1")
        for worker in (0, 1):
            job.kill(worker)
            job.workers[worker].wait()
        job.begin(2, 3)
        for epoch in range(1, 9):
            (job.path / f"go-{epoch}").touch()
        for worker in (2, 3):
            self.assertNotEqual(job.workers[worker].wait(timeout=60), 0, job.log(worker))
            self.assertRegex(job.log(worker), "Unavailable.*: the training is lost: others had trained" + reached)
            self.assertNotIn("stepped", job.log(worker))
            self.assertEqual(job.page(worker), (2, False))

    def begins(self, job, worker, epoch, step, **environment):
        job.begin(worker)
        job.start(worker, **environment)
        job.wait_for(worker, f"^stepped {epoch} {step}$")
        job.kill(worker)
        job.workers[worker].wait()

    def refused(self, job, worker, **environment):
        job.begin(worker)
        job.start(worker, **environment)
        self.assertNotEqual(job.workers[worker].wait(timeout=60), 0, job.log(worker))
        self.assertIn("the training is lost", job.log(worker))

    def test_of_cohort_elastic(self):
        with ElasticJob(WAITING + BY_STATE) as job:
            self.lose(job, r" to step \d+ in this attempt .* with the state after step 0 -- go on from the last checkpoint: ")
            self.begins(job, 4, 3, 1150, LOADED="1000")  # a checkpoint of a later step
            self.refused(job, 5, LOADED="1000")  # by now the same checkpoint is of an earlier step
            self.begins(job, 6, 5, 1, COHORT_RESTART="1")

    def test_of_hvd(self):
        with ElasticJob(WAITING + BY_HVD) as job:
            self.lose(job, " in this attempt of the job, ")
            self.begins(job, 4, 3, 1, COHORT_RESTART="1")

    def test_of_torch_distributed(self):
        with ElasticJob(WAITING + BY_TORCH) as job:
            self.lose(job, " in this attempt of the job, ")
            self.begins(job, 4, 3, 1, COHORT_RESTART="1")
        with ElasticJob(WAITING + BY_TORCH) as job:
            self.lose(job, r" to step \d+ in this attempt .* with the state after step 0", LOADED="0")
            self.begins(job, 4, 3, 1150, LOADED="1000")
            self.refused(job, 5, LOADED="1000")


@needs_torch
class Training(unittest.TestCase):
    def check(self, job, *workers):
        """Asserts that all trained alike: one digest per step of an epoch, no step left out, at most one repeated."""
        digests = {}
        for worker in workers:
            before = None
            for _, epoch, step, _, _, digest in job.steps(worker):
                self.assertEqual(digests.setdefault((epoch, step), digest), digest, (worker, epoch, step))
                if before is not None:
                    self.assertIn(step, (before, before + 1), worker)
                before = step

    def test_survivors_go_on_and_a_newcomer_gets_their_state(self):
        with ElasticJob() as job:
            job.begin(0, 1, 2)
            job.start(0, 1, 2)
            for worker in range(3):
                job.wait_for_step(worker, 0, worker, 3)
            job.kill(1)
            job.begin(0, 2, cause="rank 1 was killed by signal 9")
            began = time.monotonic_ns()
            for worker, rank in ((0, 0), (2, 1)):
                self.assertLess((job.wait_for_step(worker, 1, rank, 2) - began) / 1e9, 5)
            # The next worker joins at a commit, so nothing fails.
            job.begin(0, 2, 3)
            job.start(3)
            for rank, worker in enumerate((0, 2, 3)):
                job.wait_for_step(worker, 2, rank, 3)
            self.assertGreater(job.steps(3)[0][2], job.steps(0)[0][2])
            job.begin(0, 3)
            job.wait_for(2, "is no member of the job any more")
            self.assertNotEqual(job.workers[2].wait(), 0)
            job.wait_for_step(0, 3, 0, 2)
            for worker, (status, output) in job.stop().items():
                self.assertEqual(status, 0, output)
                self.assertIn("\nover ", output)
            self.check(job, 0, 1, 2, 3)
            self.assertEqual(job.left_behind(), [])

    def test_deaths_while_survivors_form_the_next_world(self):
        with ElasticJob() as job:
            job.begin(0, 1, 2, 3)
            job.start(0, 1, 2, 3)
            for worker in range(4):
                job.wait_for_step(worker, 0, worker, 4)
            job.kill(3)
            job.wait_for(0, ".")
            # In this epoch worker 4 never appears, and worker 2 dies.
            job.begin(0, 1, 2, 4)
            time.sleep(0.3)
            job.kill(2)
            time.sleep(0.3)
            job.begin(0, 1)
            for worker in range(2):
                job.wait_for_step(worker, 2, worker, 2)
            job.kill(0)
            job.begin(1)
            job.wait_for_step(1, 3, 0, 1)
            # The world grows again from one rank.
            job.begin(1, 5)
            job.start(5)
            for rank, worker in enumerate((1, 5)):
                job.wait_for_step(worker, 4, rank, 2)
            for worker, (status, output) in job.stop().items():
                self.assertEqual(status, 0, output)
            self.check(job, 0, 1, 2, 3, 5)

    def test_a_world_of_one_grows(self):
        with ElasticJob() as job:
            job.begin(0)
            job.start(0)
            job.wait_for_step(0, 0, 0, 1)
            job.start(1)
            job.begin(0, 1)
            # Long enough for checks that run every 20 steps.
            job.wait_for_step(1, 1, 1, 2)
            for worker in range(2):
                job.wait_for(worker, rf"^step \d+ 1 {job.steps(1)[0][2] + 45} ")
            for worker, (status, output) in job.stop().items():
                self.assertEqual(status, 0, output)
            self.check(job, 0, 1)

    def test_what_belongs_to_an_old_world(self):
        with ElasticJob(OLD_THINGS) as job:
            job.begin(0, 1, 2)
            job.start(0, 1, 2)
            for worker in range(3):
                job.wait_for(worker, "^ready")
            job.kill(2)
            job.begin(0, 1)
            for worker in range(2):
                self.assertEqual(job.workers[worker].wait(timeout=60), 0, job.log(worker))
                said = job.log(worker)
                self.assertIn("refused ValueError ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None) was not", said)
                self.assertIn("refused HorovodInternalError", said)
                self.assertRegex(said, "refused (PeerLost|Aborted|InvalidArgument) ")
                self.assertIn("sum 2.0", said)
                self.assertIn("of the new set 1.0", said)


KERAS = """
import os, hashlib, time
import numpy as np, keras
import cohort.keras as hvd
from cohort import _core

stop = os.path.join(os.environ["FOLDER"], "stop")
hvd.init()
x = np.random.default_rng(int(os.environ["COHORT_WORKER"])).normal(size=(64, 8)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
state = hvd.elastic.KerasState(model, batch=0, epoch=0)

class Tell(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        digest = hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.get_weights())).hexdigest()[:12]
        print("step", time.monotonic_ns(), _core.formed_epoch(), state.epoch, hvd.rank(), hvd.size(), digest, flush=True)

@hvd.elastic.run
def train(state):
    while not hvd.broadcast_object(os.path.exists(stop), 0, "stop"):
        model.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=1, verbose=0, callbacks=[
            hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state), Tell(),
            hvd.elastic.CommitStateCallback(state, 2)])

train(state)
"""
KERAS_PLACE = keras_support.place_of("torch")


@unittest.skipUnless(KERAS_PLACE and KERAS_PLACE[0] == sys.executable, "no Keras with torch -- tools/setup --for all")
class Keras(unittest.TestCase):
    def test_workers_go_and_come(self):
        # Ranks that waited for different operations would wait until the operations' deadline of 30 s.
        with ElasticJob(KERAS, KERAS_BACKEND="torch", PYTHONPATH=os.pathsep.join([*KERAS_PLACE[1], os.environ["PYTHONPATH"]])) as job:
            job.begin(0, 1, 2)
            job.start(0, 1, 2)
            for worker in range(3):
                job.wait_for_step(worker, 0, worker, 3)
            job.kill(1)
            job.begin(0, 2)
            for rank, worker in enumerate((0, 2)):
                job.wait_for_step(worker, 1, rank, 2)
            job.start(3)
            job.begin(0, 2, 3)
            for rank, worker in enumerate((0, 2, 3)):
                job.wait_for_step(worker, 2, rank, 3)
            digests = {}
            for worker, (status, output) in job.stop().items():
                self.assertEqual(status, 0, output)
                for _, epoch, step, _, _, digest in job.steps(worker):
                    self.assertEqual(digests.setdefault((epoch, step), digest), digest)
                times = [step[0] for step in job.steps(worker) if step[1] == 2]
                self.assertLess(max([b - a for a, b in zip(times, times[1:])], default=0), 25e9)


if __name__ == "__main__":
    unittest.main()
