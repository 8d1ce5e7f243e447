"""cohort.chainermn's differentiable functions and models over ranks, against one process's autograd."""

import unittest

from support import torch
from support_nn import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them
from test_chainermn_communicator import Case

if torch is not None:
    from cohort import chainermn
    from cohort.chainermn import functions


class FunctionCase(Case):
    def values(self, rank, *shape):
        generator = torch.Generator()
        generator.manual_seed(rank)
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def leaf(self, rank, *shape):
        return self.values(rank, *shape).requires_grad_()

    def close(self, one, other):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def loss_on(rank, *tensors):
    """Returns a loss that differs by rank."""
    return sum(((rank + 1 + i) * tensor**2).sum() for i, tensor in enumerate(tensors))


class FromRankToRank(FunctionCase):
    def setUp(self):
        super().setUp()
        self.in_world_of_two()

    def test_round(self):
        """All ranks first send, more than is buffered, and then receive."""
        for size in (3, 1 << 18):
            x = self.leaf(self.rank, size)
            delegate = functions.send(x * 2, self.comm, self.next, tag=4)
            y = functions.recv(self.comm, self.before, delegate, tag=4)
            self.close(y.detach(), self.values(self.before, size) * 2)
            loss_on(self.rank, y).backward()
            alone = self.leaf(self.rank, size)
            loss_on(self.next, alone * 2).backward()
            self.close(x.grad, alone.grad)

    def test_there_and_back(self):
        """A part of rank 0's model is on the last rank."""
        last = self.size - 1
        weight = self.leaf(100, 4, 4)
        if self.rank == 0:
            x = self.leaf(0, 2, 4)
            delegate = functions.send(torch.tanh(x), self.comm, last)
            loss_on(0, functions.recv(self.comm, last, delegate)).backward()
            alone, theirs = self.leaf(0, 2, 4), self.leaf(100, 4, 4)
            loss_on(0, torch.tanh(alone) @ theirs).backward()
            self.close(x.grad, alone.grad)
            self.comm.send(theirs.grad, last)
        elif self.rank == last:
            delegate = functions.send(functions.recv(self.comm, 0) @ weight, self.comm, 0)
            delegate.backward()
            self.close(weight.grad, self.comm.recv(0))

    def test_tuples(self):
        x, y, indices = self.leaf(self.rank, 2), self.leaf(self.rank + 50, 3, 1), torch.tensor([self.rank])
        for sent in ((x, y), [x * 1, indices, y], (x,)):
            x.grad = y.grad = None
            delegate = functions.send(sent, self.comm, self.next)
            came = functions.recv(self.comm, self.before, delegate)
            self.assertIsInstance(came, tuple)
            self.assertEqual(len(came), len(sent))
            loss_on(self.rank, *[one for one in came if one.is_floating_point()]).backward()
            self.close(x.grad, 2 * (self.next + 1) * x.detach())
            if len(sent) > 1:
                self.close(y.grad, 2 * (self.next + 2) * y.detach())
            if len(sent) == 3:
                self.assertEqual(came[1].tolist(), [self.before])
        functions.send(x, self.comm, self.next)
        self.assertEqual(len(functions.recv(self.comm, self.before, force_tuple=True)), 1)

    def test_backward_in_another_order_than_forward(self):
        """Gradients are matched with their messages by number, whatever the tag."""
        xs = [self.leaf(10 * i + self.rank, 2 + i) for i in range(3)]
        delegates = [functions.send(x, self.comm, self.next) for x in xs]
        came = [functions.recv(self.comm, self.before) for _ in xs]
        for i in (1, 0, 2):
            loss_on(self.rank + i, came[i]).backward()
        for i in (2, 0, 1):
            delegates[i].backward()
        for i, x in enumerate(xs):
            self.close(x.grad, 2 * (self.next + i + 1) * x.detach())

    def test_nothing_to_be_trained(self):
        delegate = functions.send(self.values(self.rank, 2), self.comm, self.next)
        came = functions.recv(self.comm, self.before, delegate)
        weight = self.leaf(3, 2)
        loss_on(0, came * weight).backward()  # sends nothing back, and waits for nothing
        self.close(weight.grad, 2 * self.values(self.before, 2) ** 2 * weight.detach())
        with torch.no_grad():
            delegate = functions.send(self.leaf(self.rank, 2), self.comm, self.next)
            self.assertFalse(functions.recv(self.comm, self.before, delegate).requires_grad)
        self.assertFalse(functions.send(torch.tensor([1]), self.comm, self.next).grad_fn is None)
        self.assertFalse(functions.recv(self.comm, self.before).requires_grad)

    def test_mixed_with_the_communicator(self):
        self.comm.send(self.values(self.rank, 2), self.next)
        self.close(functions.recv(self.comm, self.before), self.values(self.before, 2))
        functions.send(self.leaf(self.rank, 2), self.comm, self.next)
        self.close(self.comm.recv(self.before), self.values(self.before, 2))

    def test_pseudo_connect(self):
        x, y, z = self.leaf(self.rank, 2), self.leaf(1, 3), self.leaf(2, 3)
        delegate = functions.send(x, self.comm, self.next)
        came = functions.recv(self.comm, self.before)
        one, other = functions.pseudo_connect(delegate, y * 2, z)
        (loss_on(self.rank, came) + loss_on(0, one, other)).backward()
        self.close(x.grad, 2 * (self.next + 1) * x.detach())
        self.close(y.grad, 8 * y.detach())
        self.close(z.grad, 4 * z.detach())

    def test_refused(self):
        x = torch.zeros(2)
        for call in (lambda: functions.send(x, self.comm, self.rank), lambda: functions.recv(self.comm, self.rank)):
            with self.assertRaisesRegex(ValueError, "wait for itself for ever"):
                call()
        for call in (lambda: functions.send(x, self.comm, self.size), lambda: functions.recv(self.comm, -1)):
            with self.assertRaisesRegex(ValueError, f"in a world of {self.size}"):
                call()
        with self.assertRaisesRegex(TypeError, "torch tensors are needed, not list"):
            functions.send(([1.0],), self.comm, self.next)


class Connections(FunctionCase):
    def test_without_a_delegate(self):
        x, y = self.leaf(0, 2), self.leaf(1, 2)
        self.assertIs(functions.pseudo_connect(None, x), x)
        self.assertEqual(functions.pseudo_connect(None, x, y), (x, y))
        self.assertIs(functions.pseudo_connect(x), x)


class Collectives(FunctionCase):
    """loss_on(rank, ...) on each rank. The expected gradients are those of the sum of all ranks' losses, in one process."""

    def test_bcast(self):
        for root in range(self.size):
            x = self.leaf(root, 2, 3)
            y = functions.bcast(self.comm, x * 2 if self.rank == root else None, root)
            self.close(y.detach(), 2 * self.values(root, 2, 3))
            loss_on(self.rank, y).backward()
            alone = self.leaf(root, 2, 3)
            sum(loss_on(rank, alone * 2) for rank in range(self.size)).backward()
            if self.rank == root:
                self.close(x.grad, alone.grad)
        self.assertFalse(functions.bcast(self.comm, self.values(0, 2)).requires_grad)

    def test_allgather(self):
        x = self.leaf(self.rank, self.rank + 1, 2)
        ys = functions.allgather(self.comm, x * 2)
        loss_on(self.rank, *ys).backward()
        alone = [self.leaf(rank, rank + 1, 2) for rank in range(self.size)]
        self.assertEqual([y.tolist() for y in ys], [(one * 2).tolist() for one in alone])
        sum(loss_on(rank, *[one * 2 for one in alone]) for rank in range(self.size)).backward()
        self.close(x.grad, alone[self.rank].grad)

    def test_allgather_where_one_rank_trains(self):
        x = self.values(self.rank, 2).requires_grad_(self.rank == 0)
        loss_on(self.rank, *functions.allgather(self.comm, x)).backward()
        if self.rank == 0:
            self.close(x.grad, sum(2 * (rank + 1) * x.detach() for rank in range(self.size)))
        self.assertFalse(functions.allgather(self.comm, x.detach())[0].requires_grad)

    def test_alltoall(self):
        xs = [self.leaf(10 * self.rank + dest, self.rank + 1, dest + 1) for dest in range(self.size)]
        ys = functions.alltoall(self.comm, tuple(x * 2 for x in xs))
        self.assertEqual([y.tolist() for y in ys],
                         [(2 * self.values(10 * rank + self.rank, rank + 1, self.rank + 1)).tolist() for rank in range(self.size)])
        loss_on(self.rank, *ys).backward()
        for dest, x in enumerate(xs):
            self.close(x.grad, 8 * (dest + 1 + self.rank) * x.detach())
        self.assertFalse(functions.alltoall(self.comm, [torch.zeros(1)] * self.size)[0].requires_grad)

    def test_gather(self):
        for root in range(self.size):
            x = self.leaf(self.rank, self.rank + 1)
            result = functions.gather(self.comm, x * 2, root)
            if self.rank == root:
                self.assertEqual([y.tolist() for y in result], [(2 * self.values(rank, rank + 1)).tolist() for rank in range(self.size)])
                loss_on(7, *result).backward()
            else:
                result.backward()
            self.close(x.grad, 8 * (8 + self.rank) * x.detach())

    def test_gather_of_what_some_train(self):
        x = self.values(self.rank, 2).requires_grad_(self.rank % 2 == 0)
        result = functions.gather(self.comm, x)
        (loss_on(0, *result) if self.rank == 0 else result).backward()
        if self.rank % 2 == 0:
            self.close(x.grad, 2 * (1 + self.rank) * x.detach())

    def test_scatter(self):
        for root in range(self.size):
            xs = [self.leaf(dest, dest + 1) for dest in range(self.size)]
            y = functions.scatter(self.comm, tuple(x * 2 for x in xs) if self.rank == root else None, root)
            self.close(y.detach(), 2 * self.values(self.rank, self.rank + 1))
            loss_on(self.rank, y).backward()
            if self.rank == root:
                for dest, x in enumerate(xs):
                    self.close(x.grad, 8 * (dest + 1) * x.detach())
        self.assertFalse(functions.scatter(self.comm, [self.values(0, 1)] * self.size).requires_grad)

    def test_what_is_given_in_vain_is_connected(self):
        for requires in (True, False):  # whether the root's tensor requires a gradient
            x, mine = self.values(0, 2).requires_grad_(requires), self.leaf(self.rank, 3)
            for call in (lambda given: functions.bcast(self.comm, x if self.rank == 0 else given),
                         lambda given: functions.scatter(self.comm, [x] * self.size if self.rank == 0 else (given, given))):
                result = call(mine * 2)
                if result.requires_grad:
                    loss_on(0, result).backward()
                self.assertTrue(result.requires_grad or (self.rank == 0 and not requires))
                if self.rank > 0:
                    self.close(mine.grad, torch.zeros(3, dtype=torch.float64))

    def test_half_precision(self):
        for dtype in (torch.float16, torch.bfloat16):
            x = torch.ones(2, dtype=dtype, requires_grad=True)
            sum(y.sum() for y in functions.allgather(self.comm, x)).backward()
            self.same(x.grad, torch.full((2,), float(self.size), dtype=dtype))

    def test_together(self):
        """Several functions in one graph, twice."""
        for _ in range(2):
            x = self.leaf(self.rank, 3)
            mixed = functions.alltoall(self.comm, list(functions.allgather(self.comm, torch.tanh(x))))
            total = functions.bcast(self.comm, sum(mixed))
            loss_on(self.rank, total).backward()
            alone = [self.leaf(rank, 3) for rank in range(self.size)]
            # Rank 0 gets the first part of every rank, which is rank 0's tensor.
            everybody = sum(torch.tanh(alone[0]) for _ in range(self.size))
            sum(loss_on(rank, everybody) for rank in range(self.size)).backward()
            self.close(x.grad, alone[self.rank].grad if self.rank == 0 else torch.zeros(3, dtype=torch.float64))

    def test_refused(self):
        if self.size > 1:
            with self.assertRaisesRegex(ValueError, "rank 0 brought torch's float32, rank 1 torch's float64"):
                functions.allgather(self.comm, torch.zeros(1, dtype=torch.float64 if self.rank == 1 else torch.float32))
        with self.assertRaisesRegex(ValueError, f"one part for each of {self.size} ranks"):
            functions.alltoall(self.comm, [torch.zeros(1)] * (self.size + 1))
        with self.assertRaises(TypeError if self.rank == 0 else ValueError):
            functions.bcast(self.comm, 7 if self.rank == 0 else None)
        with self.assertRaisesRegex(ValueError, "the root is rank 9"):
            functions.bcast(self.comm, None, 9)
        self.assertEqual(self.comm.allreduce_obj(1), self.size, "all are in step")


class ChainLists(FunctionCase):
    """Each rank has parts; together they are a model that one process can compute as well."""

    def part(self, number, *sizes):
        torch.manual_seed(number)
        return torch.nn.Sequential(torch.nn.Linear(*sizes), torch.nn.Tanh()).double()

    def check(self, model, parts, alone, compute, inputs, result_on):
        """parts: this rank's parts by number; alone: all parts by number; compute(alone): the result in one process."""
        for _ in range(2):
            model.zero_grad()
            result = model(*inputs)
            expected = compute(alone)
            for part in alone.values():
                part.zero_grad()
            loss_on(0, *(expected if isinstance(expected, tuple) else (expected,))).backward()
            if self.rank == result_on:
                self.assertEqual(type(result), type(expected))
                for one, other in zip(*[r if isinstance(r, tuple) else (r,) for r in (result, expected)]):
                    self.close(one.detach(), other.detach())
                loss_on(0, *(result if isinstance(result, tuple) else (result,))).backward()
            elif parts:
                result.backward()
            for number, part in parts.items():
                for one, other in zip(part.parameters(), alone[number].parameters()):
                    self.close(one.grad, other.grad)

    def test_chain(self):
        """0 -> 1 -> ... -> last."""
        alone = {rank: self.part(rank, 3, 3) for rank in range(self.size)}
        mine = self.part(self.rank, 3, 3)
        model = chainermn.MultiNodeChainList(self.comm)
        model.add_link(mine, None if self.rank == 0 else self.before, None if self.rank == self.size - 1 else self.next)
        x = self.values(7, 2, 3)

        def compute(parts):
            y = x
            for rank in range(self.size):
                y = parts[rank](y)
            return y

        self.check(model, {self.rank: mine}, alone, compute, (x,), self.size - 1)

    def test_cycle(self):
        """Rank 0 begins and ends: 0 -> 1 -> ... -> 0."""
        self.in_world_of_two()
        alone = {number: self.part(number, 3, 3) for number in range(self.size + 1)}
        parts = {self.rank: self.part(self.rank, 3, 3)}
        model = chainermn.MultiNodeChainList(self.comm)
        model.add_link(parts[self.rank], None if self.rank == 0 else self.before, self.next)
        if self.rank == 0:
            parts[self.size] = self.part(self.size, 3, 3)
            model.add_link(parts[self.size], rank_in=self.before)
        x = self.values(7, 2, 3)

        def compute(parts):
            y = x
            for number in range(self.size + 1):
                y = parts[number](y)
            return y

        self.check(model, parts, alone, compute, (x,), 0)

    def test_branches(self):
        """Rank 0 sends to all ranks, also to itself, and joins the results."""

        class Joined(torch.nn.Module):
            def __init__(self, part):
                super().__init__()
                self.part = part

            def forward(self, *xs):
                return self.part(torch.cat(xs, 1))

        everybody = list(range(self.size))
        alone = {"first": self.part(50, 3, 3), "last": self.part(51, 2 * self.size, 2)}
        alone.update({rank: self.part(rank, 3, 2) for rank in everybody})
        parts = {self.rank: self.part(self.rank, 3, 2)}
        model = chainermn.MultiNodeChainList(self.comm)
        if self.rank == 0:
            parts.update(first=self.part(50, 3, 3), last=self.part(51, 2 * self.size, 2))
            model.add_link(parts["first"], rank_out=everybody)
        model.add_link(parts[self.rank], rank_in=0, rank_out=0)
        if self.rank == 0:
            model.add_link(Joined(parts["last"]), rank_in=everybody)
        x = self.values(7, 2, 3)

        def compute(parts):
            first = parts["first"](x)
            return parts["last"](torch.cat([parts[rank](first) for rank in everybody], 1))

        self.check(model, parts, alone, compute, (x,), 0)

    def test_crossing_with_tuples(self):
        """Ranks 0 and 1 exchange their results, pairs of tensors, and continue with both."""
        self.in_world_of_two()

        class Twice(torch.nn.Module):
            def __init__(self, part):
                super().__init__()
                self.part = part

            def forward(self, x):
                return self.part(x), 2 * x

        class Both(torch.nn.Module):
            def __init__(self, part):
                super().__init__()
                self.part = part

            def forward(self, own, theirs):
                return self.part(own[0] * theirs[1]), self.part(own[1] * theirs[0])

        if self.rank > 1:
            return
        other = 1 - self.rank
        alone = {number: self.part(number, 3, 3) for number in range(4)}
        parts = {self.rank: self.part(self.rank, 3, 3), 2 + self.rank: self.part(2 + self.rank, 3, 3)}
        x = self.values(7, 2, 3)

        def compute(parts):
            made = [Twice(parts[rank])(x) for rank in range(2)]
            return tuple(out for rank in range(2) for out in Both(parts[2 + rank])(made[rank], made[1 - rank]))

        model = chainermn.MultiNodeChainList(self.comm)
        model.add_link(Twice(parts[self.rank]), rank_out=[self.rank, other])
        model.add_link(Both(parts[2 + self.rank]), rank_in=[self.rank, other], rank_out=0 if self.rank else None)
        if self.rank == 0:
            # Rank 1's output is a part of the result.
            class Result(torch.nn.Module):
                def forward(self, theirs):
                    return theirs

            model = chainermn.MultiNodeChainList(self.comm)
            model.add_link(Twice(parts[0]), rank_out=[0, 1])
            model.add_link(Both(parts[2]), rank_in=[0, 1], rank_out=0)

            class Joined(torch.nn.Module):
                def forward(self, own, theirs):
                    return (*own, *theirs)

            model.add_link(Joined(), rank_in=[0, 1])
        self.check(model, parts, alone, compute, (x,), 0)

    def test_evaluation_and_training(self):
        self.in_world_of_two()
        if self.rank > 1:
            return
        model = chainermn.MultiNodeChainList(self.comm)
        model.add_link(self.part(self.rank, 3, 3), None if self.rank == 0 else 0, 1 if self.rank == 0 else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, losses = self.values(7, 4, 3), []
        for _ in range(20):
            optimizer.zero_grad()
            result = model(x)
            if self.rank == 1:
                result = ((result - 0.25) ** 2).mean()
                losses.append(result.item())
            result.backward()
            optimizer.step()
        with torch.no_grad():
            result = model(x)
        self.assertEqual(result.requires_grad, False)
        if self.rank == 1:
            self.assertLess(losses[-1], losses[0] / 2)

    def test_refused(self):
        model = chainermn.MultiNodeChainList(self.comm)
        with self.assertRaisesRegex(ValueError, "there is no part"):
            model(torch.zeros(1))
        link = torch.nn.Identity()
        for ranks in (self.size, [0, -1], []):
            with self.assertRaisesRegex(ValueError, "MultiNodeChainList: (rank|an empty list)"):
                model.add_link(link, rank_in=ranks)
        model.add_link(link, rank_in=self.rank)
        with self.assertRaisesRegex(ValueError, "without rank_out already"):
            model.add_link(link)
        with self.assertRaisesRegex(ValueError, "part 0 takes from this rank, and nothing is there yet"):
            model(torch.zeros(1))
        model = chainermn.MultiNodeChainList(self.comm)
        model.add_link(link, rank_out=self.rank)
        with self.assertRaisesRegex(ValueError, "1 results for this rank itself were taken by no part"):
            model(torch.zeros(1))

    def test_copies_share_the_communicator(self):
        import copy

        model = chainermn.MultiNodeChainList(self.comm)
        model.add_link(torch.nn.Linear(2, 2), rank_in=None)
        other = copy.deepcopy(model)
        x = torch.ones(1, 2)
        self.assertEqual(other(x).tolist(), model(x).tolist())
        self.assertEqual(sorted(model.state_dict()), ["0.bias", "0.weight"])


if __name__ == "__main__":
    unittest.main()
