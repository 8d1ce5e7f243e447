"""Ranks that are threads: of one process, and with `cohort run -np N` of all processes."""

import array
import threading
import unittest

import cohort
import cohort.metrics
from support import torch

if torch is not None:
    import cohort.data
    import torch.nn.functional as F
    from torch import nn


def setUpModule():
    cohort.init()


def tearDownModule():
    cohort.shutdown()


def summed(world, factor=1.0):
    values = array.array("d", [factor * (world.rank() + 1)])
    world.all_reduce(values)
    return world.rank(), world.size(), values[0]


def learn(world, whole):
    """A few steps on this rank's part of each batch; the whole batches in a world of one are the measure."""
    net = nn.Linear(4, 2)
    with torch.no_grad():
        net.weight.fill_(0.5 + world.rank())  # rank 0's are everybody's
        net.bias.fill_(0.25)
    model = cohort.nn.DistributedDataParallel(net, world, samples=len)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for inputs, labels in whole:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[world.rank() :: world.size()]), labels[world.rank() :: world.size()]).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


class Threads(unittest.TestCase):
    def test_are_ranks(self):
        self.assertEqual(cohort.run_on_threads(summed, 3, (2.0,)), [(rank, 3, 12.0) for rank in range(3)])
        self.assertEqual(cohort.run_on_threads(summed, 1, kwargs={"factor": 3.0}), [(0, 1, 3.0)])
        self.assertFalse([one for one in threading.enumerate() if "cohort rank" in one.name])

    def test_the_first_exception_ends_the_others(self):
        told = []

        def fail(world):
            if world.rank() == 1:
                raise LookupError("rank 1 knows why")
            try:
                world.barrier()
            except cohort.Error as error:
                told.append(error)
                raise

        with self.assertRaisesRegex(LookupError, "rank 1 knows why"):
            cohort.run_on_threads(fail, 3)
        self.assertEqual(len(told), 2)
        for error in told:
            self.assertIsInstance(error, cohort.Aborted)
            self.assertIn("LookupError: rank 1 knows why", str(error))

    def test_who_returns_early_is_missed(self):
        with self.assertRaisesRegex(cohort.PeerLost, "rank 0"):
            cohort.run_on_threads(lambda world: world.barrier() if world.rank() else None, 2)

    def test_what_has_no_meaning_is_refused(self):
        for wrong in 0, -1, 1.5, True:
            with self.assertRaisesRegex(cohort.InvalidArgument, "give a number from 1"):
                cohort.run_on_threads(summed, wrong)

    @unittest.skipIf(torch is None, "needs torch")
    def test_train_together(self):
        generator = torch.Generator().manual_seed(1)
        whole = [(torch.randn(8, 4, generator=generator), torch.randint(0, 2, (8,), generator=generator)) for _ in range(4)]
        expected = cohort.run_on_threads(learn, 1, (whole,))[0]
        for parameters in cohort.run_on_threads(learn, 3, (whole,)):
            for one, other in zip(parameters, expected):
                torch.testing.assert_close(one, other)


class DefaultWorld(unittest.TestCase):
    """Code that asks for the default world on a thread that is a rank gets that thread's."""

    def test_of_who_i_am_and_what_is_reduced(self):
        def what(world):
            averages = cohort.metrics.Averages(["v"])
            averages.add("v", world.rank() + 1.0)
            sampler = cohort.data.DistributedSampler(8)
            self.assertIs(cohort.world(), world)
            self.assertTrue(cohort.is_initialized())
            cohort.init()  # there is one
            return (cohort.rank(), cohort.size(), averages.reduce()["v"].value, cohort.metrics.average(float(world.rank())).value,
                    sampler.num_replicas, sampler.rank)  # fmt: skip

        self.assertEqual(cohort.run_on_threads(what, 2), [(rank, 2, 1.5, 0.5, 2, rank) for rank in range(2)])
        self.assertEqual(cohort.world().size(), cohort.size())

    @unittest.skipIf(torch is None, "needs torch")
    def test_of_training(self):
        import cohort.chainermn

        def train(world):
            net = nn.Linear(4, 1)
            model = cohort.nn.DistributedDataParallel(net)
            model(torch.full((8, 4), world.rank() + 1.0)).sum().backward()
            comm = cohort.chainermn.create_communicator("naive")
            cohort.nn.require_same_parameters(net.named_parameters())
            return net.weight.grad[0, 0].item(), comm.size, comm.rank

        self.assertEqual(cohort.run_on_threads(train, 2), [(12.0, 2, 0), (12.0, 2, 1)])
        got = cohort.run_on_threads(train, 2, across=cohort.world())
        first, count = 2 * cohort.rank(), 2 * cohort.size()
        self.assertEqual(got, [(4.0 * (count + 1), count, first + thread) for thread in range(2)])

    def test_another_thread_is_refused(self):
        def what(world):
            refused = []

            def ask():
                for call in cohort.world, cohort.rank, cohort.is_initialized, lambda: cohort.data.DistributedSampler(8):
                    try:
                        call()
                    except cohort.InvalidArgument as error:
                        refused.append(str(error))

            thread = threading.Thread(target=ask, name="helper")
            thread.start()
            thread.join()
            return refused

        for refused in cohort.run_on_threads(what, 2):
            self.assertEqual(len(refused), 4)
            self.assertIn("'helper' is no rank", refused[0])
        self.assertTrue(cohort.is_initialized())

    def test_leaving_is_of_the_thread(self):
        def what(world):
            cohort.shutdown()
            self.assertFalse(cohort.is_initialized())
            with self.assertRaisesRegex(cohort.InvalidArgument, "has left the world"):
                cohort.init()
            return world.has_left

        self.assertEqual(cohort.run_on_threads(what, 2), [True, True])
        self.assertTrue(cohort.is_initialized())

    @unittest.skipIf(torch is None, "needs torch")
    def test_horovods_interface_is_refused(self):
        import cohort.horovod.torch as hvd

        def what(_world):
            for call in hvd.init, hvd.rank, lambda: hvd.allreduce(torch.ones(1)):
                with self.assertRaisesRegex(ValueError, "rank of run_on_threads"):
                    call()

        cohort.run_on_threads(what, 2)


class Across(unittest.TestCase):
    def test_the_threads_of_all_processes_are_one_world(self):
        mine, processes = cohort.rank(), cohort.size()
        total = sum(range(1, 2 * processes + 1))
        for _ in range(2):
            got = cohort.run_on_threads(summed, 2, across=cohort.world())
            self.assertEqual(got, [(2 * mine + thread, 2 * processes, float(total)) for thread in range(2)])

    def test_processes_that_differ_are_told(self):
        if cohort.size() == 1:
            self.skipTest("one process")
        with self.assertRaisesRegex(cohort.Mismatch, r"the processes give \[1, 2\] threads"):
            cohort.run_on_threads(summed, cohort.rank() + 1, across=cohort.world())


if __name__ == "__main__":
    unittest.main()
