"""cohort.chainermn's communicator on all ranks of `cohort run -np N`: each rank runs this."""

import collections
import operator
import threading
import unittest

import support
from support import numpy, torch
from support_nn import Ranks, setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort

if torch is not None:
    from cohort import chainermn

Point = collections.namedtuple("Point", "x y")


class OfThisProgram:
    def __init__(self, value):
        self.value = value

    def __add__(self, other):
        return OfThisProgram(self.value + other.value)


class Case(Ranks):
    def setUp(self):
        if torch is None:
            self.skipTest("torch is not installed")
        super().setUp()
        self.comm = chainermn.create_communicator("naive")
        self.next, self.before = (self.rank + 1) % self.size, (self.rank - 1) % self.size

    def same(self, one, expected):
        self.assertIs(type(one), type(expected))
        self.assertEqual((one.dtype, tuple(one.shape)), (expected.dtype, tuple(expected.shape)))
        self.assertEqual(one.tolist(), expected.tolist())

    def all_same(self, ones, expected):
        self.assertEqual(len(ones), len(expected))
        for one, other in zip(ones, expected):
            self.same(one, other)

    def in_world_of_two(self):
        if self.size == 1:
            self.skipTest("for two ranks or more")


def arrays_of(rank):
    """Yields arrays of every kind, with values and shapes that differ by rank."""
    yield "torch", torch.arange(6, dtype=torch.float32).reshape(2, 3) + rank
    yield "torch, another shape on each rank", torch.full((rank + 1, 2), float(rank))
    yield "torch, nothing on rank 0", torch.full((rank,), rank)
    yield "torch, no dimension", torch.tensor(rank + 0.5, dtype=torch.float64)
    yield "torch, transposed", (torch.arange(6).reshape(2, 3) + rank).t()
    yield "torch, conjugate", (torch.arange(3) * (1 + 2j) + rank).conj()
    yield "bool", torch.tensor([rank % 2 == 0, True])
    yield "bfloat16", torch.tensor([rank, 1.5]).to(torch.bfloat16)
    if numpy is not None:
        yield "numpy", numpy.arange(4, dtype="float32").reshape(2, 2) + rank
        yield "numpy, another shape on each rank", numpy.full((2, rank), rank, dtype="int16")
        yield "numpy, no dimension", numpy.array(rank, dtype="int64")
        yield "numpy, every other", (numpy.arange(6, dtype="float64") + rank)[::2]
        yield "numpy, as others write it", numpy.array([rank, 7], dtype=">i4")
        yield "numpy, times", numpy.array([rank], dtype="datetime64[s]")


class Places(Case):
    def test_who_and_where(self):
        numbers = support.ranks_of_hosts(self.size)
        places = [(host, local) for host, count in enumerate(numbers) for local in range(count)]
        mine = sorted(places)[self.rank] if len(numbers) == 1 else None
        seen = self.comm.allgather_obj((self.comm.inter_rank, self.comm.intra_rank))
        self.assertEqual(sorted(seen), sorted(places))
        if mine is not None:
            self.assertEqual((self.comm.inter_rank, self.comm.intra_rank), mine)
        self.assertEqual((self.comm.rank, self.comm.size), (cohort.rank(), cohort.size()))
        self.assertEqual(self.comm.inter_size, len(numbers))
        self.assertEqual(self.comm.intra_size, numbers[self.comm.inter_rank])
        # Hosts are numbered by their lowest ranks, and the ranks of a host in order.
        lowest = [min(rank for rank, (host, _) in enumerate(seen) if host == number) for number in range(len(numbers))]
        self.assertEqual(lowest, sorted(lowest))
        mates = [rank for rank, (host, _) in enumerate(seen) if host == self.comm.inter_rank]
        self.assertEqual(mates[self.comm.intra_rank], self.rank)

    def test_names(self):
        for name in ("naive", "flat", "pure_nccl", "non_cuda_aware", "hierarchical", "two_dimensional", "dummy"):
            comm = chainermn.create_communicator(name)
            self.assertEqual(comm.name, name)
            self.same(comm.allreduce(torch.tensor([1.0])), torch.tensor([float(self.size)]))
        self.assertEqual(chainermn.create_communicator().name, "pure_nccl")
        if self.comm.inter_size == 1:
            self.assertEqual(chainermn.create_communicator("single_node").size, self.size)
        else:
            with self.assertRaisesRegex(ValueError, f"one host, and this job has {self.comm.inter_size}"):
                chainermn.create_communicator("single_node")
        with self.assertRaisesRegex(ValueError, "'mpi' is no communicator -- take one of naive, "):
            chainermn.create_communicator("mpi")
        with self.assertRaisesRegex(TypeError, "'colour' is no option"):
            chainermn.create_communicator("naive", colour=1)
        with self.assertRaisesRegex(TypeError, "without mpi4py"):
            chainermn.create_communicator("naive", mpi_comm=object())
        part = chainermn.create_communicator("naive", mpi_comm=cohort.world().split(self.rank % 2))
        self.assertEqual(part.size, len(range(self.rank % 2, self.size, 2)))

    def test_settings(self):
        self.assertEqual(self.comm.get_config(), {"allreduce_grad_dtype": None, "batched_copy": True})
        other = chainermn.create_communicator("pure_nccl", allreduce_grad_dtype="float16", batched_copy=False)
        self.assertEqual(other.get_config("allreduce_grad_dtype"), torch.float16)
        self.assertIs(other.get_config("batched_copy"), False)
        other.set_config("batched_copy")
        self.assertIs(other.get_config("batched_copy"), True)
        self.assertIs(self.comm.get_config("allreduce_grad_dtype"), None, "each has its own")
        for value in [torch.float64] + ([numpy.float64, numpy.dtype("float64")] if numpy else []):
            other.set_config("allreduce_grad_dtype", value)
            self.assertEqual(other.get_config("allreduce_grad_dtype"), torch.float64)
        for wrong in ("int32", "float17", 3):
            with self.assertRaisesRegex(ValueError, "allreduce_grad_dtype"):
                other.set_config("allreduce_grad_dtype", wrong)
        for call in (lambda: other.set_config("fast"), lambda: other.get_config("fast")):
            with self.assertRaisesRegex(ValueError, "'fast' is no setting"):
                call()

    def test_split(self):
        self.comm.set_config("allreduce_grad_dtype", "float16")
        part = self.comm.split(self.rank % 2, -self.rank)
        members = sorted(range(self.rank % 2, self.size, 2), reverse=True)
        self.assertEqual((part.size, part.rank), (len(members), members.index(self.rank)))
        self.assertEqual((part.name, part.get_config("allreduce_grad_dtype")), ("naive", torch.float16))
        self.assertEqual(part.allgather_obj(self.rank), members)
        self.assertLessEqual(part.inter_size, self.comm.inter_size)
        part.finalize()
        nobody = self.comm.split(None if self.rank == 0 else 1, 0)
        self.assertEqual(nobody is None, self.rank == 0)

    def test_finalize(self):
        part = self.comm.split(0, self.rank)
        for comm in (part, self.comm):
            comm.finalize()
            comm.finalize()
            with self.assertRaisesRegex(ValueError, "has been finalized"):
                comm.allreduce(torch.zeros(1))
        self.assertTrue(part._comm.has_left)
        self.assertEqual(chainermn.create_communicator("naive").allreduce_obj(1), self.size, "the job goes on")

    def test_copies_share_it_and_pickles_refuse(self):
        import copy
        import pickle

        self.assertIs(copy.deepcopy([self.comm])[0], self.comm)
        with self.assertRaisesRegex(TypeError, "cannot be pickled"):
            pickle.dumps(self.comm)


class Arrays(Case):
    def test_send_and_receive_round(self):
        self.in_world_of_two()
        for (kind, mine), (_, theirs) in zip(arrays_of(self.rank), arrays_of(self.before)):
            with self.subTest(kind=kind):
                self.comm.send(mine, self.next, tag=3)
                self.same(self.comm.recv(self.before, 3), theirs)

    def test_tuples(self):
        self.in_world_of_two()
        for values in ((), (torch.tensor([self.rank]),), (torch.zeros(2, 1), torch.ones(3))):
            self.comm.send(values, self.next, 0)
            came = self.comm.recv(self.before, 0)
            self.assertIsInstance(came, tuple)
            self.assertEqual([one.shape for one in came], [one.shape for one in values])
        if numpy is not None:
            self.comm.send([numpy.array([self.rank]), torch.tensor(2)], self.next)
            came = self.comm.recv(self.before)
            self.all_same(came, (numpy.array([self.before]), torch.tensor(2)))

    def test_tags_keep_apart(self):
        self.in_world_of_two()
        for tag in (5, 6):
            self.comm.send(torch.tensor([tag, self.rank]), self.next, tag)
        for tag in (6, 5):
            self.same(self.comm.recv(self.before, tag), torch.tensor([tag, self.before]))

    def test_bcast(self):
        for root in range(self.size):
            for kind, value in arrays_of(root):
                with self.subTest(root=root, kind=kind):
                    result = self.comm.bcast(value if self.rank == root else None, root=root)
                    self.same(result, value)
                    self.assertEqual(result is value, self.rank == root)

    def test_gather(self):
        for root in range(self.size):
            for kinds in zip(*[arrays_of(rank) for rank in range(self.size)]):
                with self.subTest(root=root, kind=kinds[0][0]):
                    result = self.comm.gather(kinds[self.rank][1], root=root)
                    if self.rank == root:
                        self.all_same(result, [value for _, value in kinds])
                    else:
                        self.assertIsNone(result)

    def test_allgather(self):
        for kinds in zip(*[arrays_of(rank) for rank in range(self.size)]):
            with self.subTest(kind=kinds[0][0]):
                self.all_same(self.comm.allgather(kinds[self.rank][1]), [value for _, value in kinds])

    def test_alltoall(self):
        def part(source, dest):
            return torch.full((source + 1, dest), 10 * source + dest)

        result = self.comm.alltoall(tuple(part(self.rank, dest) for dest in range(self.size)))
        self.all_same(result, [part(source, self.rank) for source in range(self.size)])
        rows = torch.arange(self.size) + 100 * self.rank
        self.all_same(self.comm.alltoall(rows), [torch.tensor(100 * r + self.rank) for r in range(self.size)])

    def test_scatter(self):
        for root in range(self.size):
            parts = tuple(torch.full((dest, 2), dest + root) for dest in range(self.size))
            self.same(self.comm.scatter(parts if self.rank == root else None, root=root), parts[self.rank])
            if numpy is not None:
                rows = numpy.arange(2 * self.size).reshape(self.size, 2) + root
                self.same(self.comm.scatter(rows if self.rank == root else None, root), rows[self.rank])

    def test_allreduce(self):
        for dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64):
            mine = torch.arange(6, dtype=torch.int64).reshape(2, 3).t().to(dtype) + self.rank
            kept = mine.clone()
            total = sum((torch.arange(6).reshape(2, 3).t() + rank for rank in range(self.size)), torch.zeros(3, 2, dtype=torch.int64))
            self.same(self.comm.allreduce(mine), total.to(dtype))
            self.same(mine, kept)
        if numpy is not None:
            self.same(self.comm.allreduce(numpy.full((2, 2), 0.5)), numpy.full((2, 2), 0.5 * self.size))
            self.same(self.comm.allreduce(numpy.array(2)), numpy.array(2 * self.size))

    def test_what_came_may_be_written_to(self):
        result = self.comm.bcast(torch.zeros(3) if self.rank == 0 else None)
        result += self.rank
        self.same(result, torch.full((3,), float(self.rank)))
        if numpy is not None:
            result = self.comm.allgather(numpy.zeros(2))[0]
            result += 1
            self.same(result, numpy.ones(2))

    def test_large(self):
        """Messages that are larger than the buffers."""
        value = torch.arange(1 << 21, dtype=torch.float32) + self.rank
        self.assertTrue(torch.equal(self.comm.allgather(value)[self.before], value - self.rank + self.before))
        if self.size > 1:
            if self.rank % 2 == 0 and self.rank + 1 < self.size:
                self.comm.send(value, self.rank + 1)
            elif self.rank % 2 == 1:
                self.assertTrue(torch.equal(self.comm.recv(self.rank - 1), value - 1))


class Refusals(Case):
    def test_what_is_no_array(self):
        for call in (self.comm.gather, self.comm.allgather, self.comm.allreduce):
            with self.subTest(call=call.__name__), self.assertRaisesRegex(TypeError, "array"):
                call(7)
        for call in (self.comm.gather, self.comm.allgather):
            with self.assertRaisesRegex(TypeError, "one array is needed, not a tuple"):
                call((torch.zeros(1),))
        self.assertEqual(self.comm.allreduce_obj(1), self.size)

    def test_an_error_of_the_root_is_everybodys(self):
        for call, kind in ((lambda: self.comm.bcast([torch.zeros(1)] if self.rank == 0 else None), TypeError),
                           (lambda: self.comm.scatter((1,) * (self.size + 1) if self.rank == 0 else None), ValueError),
                           (lambda: self.comm.bcast_obj(threading.Lock() if self.rank == 0 else None), Exception),
                           (lambda: self.comm.scatter_obj("no list" if self.rank == 0 else None), ValueError)):
            with self.assertRaises(kind if self.rank == 0 else ValueError) as caught:
                call()
            if self.rank != 0:
                self.assertIn("rank 0 could not bring its part -- ", str(caught.exception))
        self.assertEqual(self.comm.allreduce_obj(1), self.size, "all are in step")

    def test_an_error_of_one_rank_is_everybodys(self):
        self.in_world_of_two()
        for call in (self.comm.allgather_obj, lambda one: self.comm.alltoall_obj([one] * self.size)):
            with self.assertRaises(Exception) as caught:
                call(threading.Lock() if self.rank == 1 else 1)
            self.assertIn("pickle" if self.rank == 1 else "rank 1 could not bring its part -- TypeError", str(caught.exception))
        try:
            self.comm.gather_obj(threading.Lock() if self.rank == 1 else 1)
            self.assertGreater(self.rank, 1)
        except Exception as error:
            self.assertIn("pickle" if self.rank == 1 else "rank 1 could not bring its part", str(error))
        self.assertEqual(self.comm.allreduce_obj(1), self.size, "all are in step")

    def test_parts_that_do_not_fit(self):
        with self.assertRaisesRegex(ValueError, f"one part for each of {self.size} ranks"):
            self.comm.alltoall([torch.zeros(1)] * (self.size + 1))
        with self.assertRaisesRegex(ValueError, "the root is rank 99"):
            self.comm.gather(torch.zeros(1), root=99)
        self.in_world_of_two()
        with self.assertRaisesRegex(ValueError, "rank 0 brought torch's float32, rank 1 torch's float64"):
            self.comm.allgather(torch.zeros(1, dtype=torch.float64 if self.rank == 1 else torch.float32))
        with self.assertRaises(cohort.Mismatch):
            self.comm.allreduce(torch.zeros(2 + self.rank))

    def test_messages_of_another_kind(self):
        self.in_world_of_two()
        self.comm.send(torch.zeros(1), self.next)
        self.comm.send_obj(1, self.next)
        with self.assertRaisesRegex(ValueError, "is an array: it is received by recv"):
            self.comm.recv_obj(self.before)
        with self.assertRaisesRegex(ValueError, "is an object: it is received by recv_obj"):
            self.comm.recv(self.before)

    def test_tags_and_peers(self):
        for tag in (-1, 2**30):
            for call in (lambda: self.comm.send(torch.zeros(1), self.next, tag), lambda: self.comm.recv_obj(self.before, tag=tag)):
                with self.assertRaisesRegex(ValueError, f"the tag is {tag}"):
                    call()
        with self.assertRaises(ValueError):
            self.comm.send(torch.zeros(1), self.rank)
        with self.assertRaisesRegex(ValueError, "there is no status"):
            self.comm.recv_obj(self.before, status=object())

    @unittest.skipUnless(numpy, "NumPy is not installed")
    def test_arrays_of_objects(self):
        with self.assertRaisesRegex(ValueError, "no plain numbers"):
            self.comm.allgather(numpy.array([{}], dtype=object))


class Objects(Case):
    def objects(self, rank):
        return [rank, None, "text" * rank, {"a": [rank, (1, 2)]}, Point(rank, 2), OfThisProgram(rank), operator.add]

    def assert_same(self, one, other):
        if isinstance(other, OfThisProgram):
            self.assertIs(type(one), OfThisProgram, "not a copy of the class")
            one, other = one.value, other.value
        self.assertEqual(one, other)

    def test_from_rank_to_rank(self):
        self.in_world_of_two()
        for mine, theirs in zip(self.objects(self.rank), self.objects(self.before)):
            self.comm.send_obj(mine, self.next, tag=2)
            self.assert_same(self.comm.recv_obj(self.before, tag=2), theirs)

    def test_an_object_that_cannot_be_sent(self):
        self.in_world_of_two()
        with self.assertRaises(Exception) as caught:
            self.comm.send_obj(threading.Lock(), self.next)
        self.assertIn("pickle", str(caught.exception))
        with self.assertRaisesRegex(ValueError, f"rank {self.before} could not bring its part -- TypeError"):
            self.comm.recv_obj(self.before)

    def test_collectives(self):
        for root in range(self.size):
            for everybody in zip(*[self.objects(rank) for rank in range(self.size)]):
                mine = everybody[self.rank]
                self.assert_same(self.comm.bcast_obj(mine if self.rank == root else None, root=root), everybody[root])
                gathered = self.comm.gather_obj(mine, root=root)
                self.assertEqual(gathered is None, self.rank != root)
                for one, other in zip(gathered or [], everybody):
                    self.assert_same(one, other)
                self.assert_same(self.comm.scatter_obj(everybody if self.rank == root else None, root=root), mine)
                for one, other in zip(self.comm.allgather_obj(mine), everybody):
                    self.assert_same(one, other)
        sent = [(self.rank, dest) for dest in range(self.size)]
        self.assertEqual(self.comm.alltoall_obj(sent), [(source, self.rank) for source in range(self.size)])

    def test_allreduce(self):
        self.assertEqual(self.comm.allreduce_obj(self.rank + 0.5), sum(rank + 0.5 for rank in range(self.size)))
        self.assertEqual(self.comm.allreduce_obj(str(self.rank)), "".join(map(str, range(self.size))))
        self.assertEqual(self.comm.allreduce_obj(OfThisProgram(1)).value, self.size)

    def test_without_names(self):
        try:
            import cloudpickle  # noqa: F401
        except ImportError:
            with self.assertRaisesRegex(Exception, "install cloudpickle" if self.rank == 0 else "could not bring its part"):
                self.comm.bcast_obj((lambda: 7) if self.rank == 0 else None)
        else:
            self.assertEqual(self.comm.bcast_obj((lambda: 7) if self.rank == 0 else None)(), 7)


class Models(Case):
    def model(self, seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2).double())

    def test_bcast_data(self):
        model, expected = self.model(self.rank), self.model(0)
        if self.rank == 0:
            model[1].running_mean.fill_(3)
        expected[1].running_mean.fill_(3)
        self.comm.bcast_data(model)
        for (name, one), (_, other) in zip(model.state_dict().items(), expected.state_dict().items()):
            self.assertTrue(torch.equal(one, other), name)
        self.assertTrue(all(parameter.requires_grad for parameter in model.parameters()))
        self.assertEqual(self.comm.broadcast_data, self.comm.bcast_data)

    def test_models_that_differ(self):
        self.in_world_of_two()
        with self.assertRaisesRegex(cohort.Mismatch, r"bcast_data: .* 'weight' of float32 \[2, 3\], rank 1 has 'weight' of float32 \[2, 4\]"):
            self.comm.bcast_data(torch.nn.Linear(4 if self.rank == 1 else 3, 2))

    def gradient(self, rank, shape):
        return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) * (rank + 1) + rank

    def mean(self, shape, ranks=None):
        gradients = [self.gradient(rank, shape) for rank in (range(self.size) if ranks is None else ranks)]
        return sum(gradients) / self.size

    def with_gradients(self, *, without=()):
        model = self.model(0)
        for name, parameter in model.named_parameters():
            if name not in without:
                parameter.grad = self.gradient(self.rank, parameter.shape).to(parameter.dtype)
        return model

    def test_mean_of_gradients(self):
        for dtype, tolerance in ((None, 1e-6), ("float16", 4e-3), ("float32", 1e-6), ("float64", 1e-6)):
            self.comm.set_config("allreduce_grad_dtype", dtype)
            for call in (self.comm.multi_node_mean_grad, self.comm.allreduce_grad):
                model = self.with_gradients()
                model[0].weight.grad = self.gradient(self.rank, (3, 4)).float().t()  # not contiguous
                call(model)
                for name, parameter in model.named_parameters():
                    expected = self.mean((3, 4)).t() if name == "0.weight" else self.mean(parameter.shape)
                    self.assertEqual(parameter.grad.dtype, parameter.dtype)
                    torch.testing.assert_close(parameter.grad.double(), expected, rtol=tolerance, atol=tolerance)

    def test_type_of_the_reduction_is_that_of_the_setting(self):
        self.comm.set_config("allreduce_grad_dtype", "float16")
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.full((1,), 1.0 + 2**-20)  # float16 cannot hold it
        self.comm.multi_node_mean_grad([parameter])
        self.assertEqual(parameter.grad.item(), 1.0)

    def test_gradients_that_nobody_has(self):
        for zero_fill in (False, True):
            model = self.with_gradients(without=("0.bias",))
            self.comm.multi_node_mean_grad(model, zero_fill=zero_fill)
            if zero_fill:
                self.same(model[0].bias.grad, torch.zeros(4))
            else:
                self.assertIsNone(model[0].bias.grad)
            torch.testing.assert_close(model[0].weight.grad, self.mean((4, 3)).float())

    def test_gradients_that_some_have(self):
        self.in_world_of_two()
        without = ("0.bias", "1.weight") if self.rank % 2 else ("1.bias",)
        model = self.with_gradients(without=without)
        with self.assertRaisesRegex(cohort.Mismatch, "'0.bias' has a gradient on some ranks only .*zero_fill=True"):
            self.comm.multi_node_mean_grad(model)
        self.comm.multi_node_mean_grad(model, zero_fill=True)
        torch.testing.assert_close(model[0].bias.grad.double(), self.mean((4,), range(0, self.size, 2)))
        torch.testing.assert_close(model[1].bias.grad.double(), self.mean((4,), range(1, self.size, 2)))

    def test_frozen_and_sparse(self):
        model = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 1))
        with torch.no_grad():
            model[1].weight.fill_(1)
        model[1].bias.requires_grad_(False)
        model(torch.tensor([self.rank % 4])).sum().backward()
        self.comm.multi_node_mean_grad(model)
        expected = torch.zeros(4, 2)
        for rank in range(self.size):
            expected[rank % 4] += 1 / self.size
        torch.testing.assert_close(model[0].weight.grad, expected)
        self.assertIsNone(model[1].bias.grad)

    def test_no_model(self):
        for wrong in (7, torch.zeros(1)):
            with self.assertRaisesRegex(TypeError, "Module or a list of its parameters"):
                self.comm.multi_node_mean_grad(wrong)


if __name__ == "__main__":
    unittest.main()
