"""hvd's process sets, and ranks that have joined, on all ranks of `cohort run -np N`: each rank runs this."""

import copy
import pickle
import unittest

from support import torch
from support_hvd import Case, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

if torch is not None:
    import cohort.horovod.torch as hvd


class Sets(Case):
    def test_a_set(self):
        if self.size == 2:  # the set of both ranks exists already
            return
        last = self.size - 1
        ours = hvd.add_process_set(hvd.ProcessSet([last, 0]) if self.rank else [0, last])
        self.assertEqual((ours.process_set_id, ours.ranks, ours.size()), (1, [0, last], 2))
        self.assertEqual(ours.included(), self.rank in (0, last))
        with self.assertRaises(ValueError):
            hvd.add_process_set([0, last])
        if self.rank in (0, last):
            number = 0 if self.rank == 0 else 1
            self.assertEqual(ours.rank(), number)
            self.same(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=ours), [2.0])
            self.same(hvd.allgather(torch.tensor([self.rank]), process_set=ours), [0, last])
            self.same(hvd.broadcast(torch.tensor([self.rank]), last, process_set=ours), [last])
            self.same(hvd.alltoall(torch.tensor([number, number]), process_set=ours), [0, 1])
            self.same(hvd.reducescatter(torch.ones(2), op=hvd.Sum, process_set=ours), [2.0])
            self.assertEqual(hvd.allgather_object(self.rank, process_set=ours), [0, last])
            self.assertEqual(hvd.broadcast_object(self.rank, last, process_set=ours), last)
            hvd.barrier(process_set=ours)
            with self.assertRaises(ValueError):
                hvd.broadcast(torch.ones(1), 1, process_set=ours)
        else:
            with self.assertRaises(ValueError):
                hvd.allreduce(torch.ones(1), process_set=ours)
            with self.assertRaises(ValueError):
                ours.rank()
        self.same(hvd.allreduce(torch.ones(1), op=hvd.Sum), [self.size])
        self.assertTrue(hvd.remove_process_set(ours))
        self.assertIsNone(ours.process_set_id)
        self.assertIsNone(ours.included())
        self.assertFalse(hvd.remove_process_set(ours))
        with self.assertRaises(ValueError):
            hvd.allreduce(torch.ones(1), process_set=ours)

    def test_a_set_of_one(self):
        ours = hvd.add_process_set([1])
        self.assertEqual((ours.process_set_id, ours.included()), (1, self.rank == 1))
        if self.rank == 1:
            self.assertEqual((ours.rank(), ours.size()), (0, 1))
            self.same(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=ours), [1.0])
        self.assertIs(copy.deepcopy(ours), ours)
        self.assertIs(pickle.loads(pickle.dumps(ours)), ours)
        self.assertTrue(hvd.remove_process_set(ours))
        self.assertIs(pickle.loads(pickle.dumps(hvd.global_process_set)), hvd.global_process_set)

    def test_sets_progress_by_themselves(self):
        if self.size < 4:
            return
        low, high = hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])
        mine = low if self.rank < 2 else high
        pending = hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum) if self.rank else None
        for step in range(20):
            self.same(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=mine), [2.0])
        if pending is None:
            pending = hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum)
        self.same(hvd.synchronize(pending), [4.0])
        self.assertTrue(hvd.remove_process_set(high))
        again = hvd.add_process_set([1, 2])
        self.assertEqual(again.process_set_id, 2)  # numbers are reused
        hvd.remove_process_set(again)
        hvd.remove_process_set(low)

    def test_wrong_sets(self):
        for wrong in ([0.5], ["0"], [0, 0], [True], 0, None):
            with self.assertRaises(ValueError):
                hvd.ProcessSet(wrong)
        for wrong in ([], [0, self.size], [-1], list(range(self.size))):
            with self.assertRaises(ValueError):
                hvd.add_process_set(wrong)
        self.assertFalse(hvd.remove_process_set(hvd.global_process_set))
        self.same(hvd.allreduce(torch.ones(1), op=hvd.Sum), [self.size])
        self.assertEqual(str(hvd.ProcessSet([1, 0])), "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)")


class Joining(Case):
    def test_ranks_without_data_change_nothing(self):
        values = torch.tensor([-3.0, 4.0])
        for turn in range(2):  # the second time all operations are cached
            for step in range(self.rank + 1):
                active = self.size - step
                for op, expected in (
                    (hvd.Sum, values * active),
                    (hvd.Average, values * active / self.size),
                    (hvd.Min, values),
                    (hvd.Max, values),
                    (hvd.Product, values**active),
                ):
                    self.close(hvd.allreduce(values, name=f"join.{op}", op=op), expected)
                hvd.barrier()
            self.assertEqual(hvd.join(), self.size - 1)
            self.same(hvd.allreduce(torch.ones(1), op=hvd.Sum), [self.size])

    def test_names_after_a_join(self):
        for step in range(self.rank + 1):
            hvd.allreduce(torch.ones(1))  # without a name, so that ranks count to different numbers
        hvd.join()
        self.same(hvd.allreduce(torch.ones(1), op=hvd.Sum), [self.size])

    def test_what_joined_ranks_cannot_do(self):
        last = self.size - 1
        moving = {
            "allgather": lambda name: hvd.allgather(torch.ones(2), name=name),
            "grouped_allgather": lambda name: hvd.grouped_allgather([torch.ones(2), torch.ones(1)], name=name),
            "allgather_object": lambda name: hvd.allgather_object(7, name=name),
            "broadcast": lambda name: hvd.broadcast(torch.ones(2), last, name=name),
            "broadcast of one that joined": lambda name: hvd.broadcast(torch.ones(2), 0, name=name),
            "broadcast_object": lambda name: hvd.broadcast_object(7, last, name=name),
            "alltoall": lambda name: hvd.alltoall(torch.ones(self.size), name=name),
            "reducescatter": lambda name: hvd.reducescatter(torch.ones(self.size), name=name),
            "grouped_reducescatter": lambda name: hvd.grouped_reducescatter([torch.ones(self.size)], name=name),
        }
        for known in (False, True):  # the second time all operations are cached
            hvd.barrier()
            if known:
                for name, call in moving.items():
                    call(name)
            if self.rank > 0:
                for name, call in moving.items():
                    with self.subTest(operation=name, known=known):
                        with self.assertRaisesRegex(hvd.HorovodInternalError, "rank 0 has joined"):
                            call(name)
                mine = torch.full((2,), float(self.rank))
                with self.assertRaises(hvd.HorovodInternalError):
                    hvd.broadcast_(mine, last, name="in place")
                self.same(mine, [float(self.rank)] * 2)
                self.same(hvd.allreduce(torch.ones(1), op=hvd.Sum), [last])
                hvd.barrier()  # until here only rank 0 has joined
            hvd.join()
            self.same(hvd.allgather(torch.tensor([self.rank]), name="allgather"), list(range(self.size)))

    def test_what_goes_on_without_joined_ranks(self):
        if self.rank > 0:
            active = self.size - 1
            table = hvd.sparse_allreduce_async(torch.eye(self.size)[self.rank].to_sparse(), "join.sparse", hvd.Sum)()
            self.same(table.to_dense(), [0.0] + [1.0] * active)
            self.close(hvd.allreduce(torch.tensor([1.0, 2.0]), op=hvd.Adasum, name="join.adasum"), [1.0, 2.0])
            # The result is that of the remaining ranks.
            x = torch.full((2, 3), float(self.rank))
            x[0] += 1
            got = hvd.SyncBatchNorm(3)(x)
            everything = torch.cat([x - self.rank + rank for rank in range(1, self.size)])
            expected = torch.nn.BatchNorm1d(3)(everything)[2 * self.rank - 2 : 2 * self.rank]
            torch.testing.assert_close(got, expected)
            factor = torch.tensor([self.rank + 1.0], requires_grad=True)
            hvd.allreduce(factor, op=hvd.Product, name="join.product").backward()
            others = [rank + 1.0 for rank in range(1, self.size) if rank != self.rank]
            self.close(factor.grad, [active * torch.tensor(others).prod().item()])
            hvd.barrier()
        hvd.join()

    def test_a_set_joins(self):
        ours = hvd.add_process_set([0, 1]) if self.size > 2 else hvd.global_process_set
        if self.rank < 2:
            if self.rank == 1:
                self.same(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="one", process_set=ours), [1.0])
            self.assertEqual(hvd.join(process_set=ours), 1)
        hvd.barrier()
        hvd.remove_process_set(ours) if self.size > 2 else None


for case in (Sets, Joining):
    case.tearDown = lambda self: hvd.barrier()

if __name__ == "__main__":
    unittest.main()
