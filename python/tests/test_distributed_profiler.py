"""The backend "cohort" in torch's profiler, on all ranks of `cohort run -np N`: events of the names and kinds that
torch's own tests look for on Gloo."""

import unittest

from support import needs_torch, torch
from support_group import setUpModule, tearDownModule  # noqa: F401 -- unittest calls them

import cohort

if torch is not None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP


def events(profiler):
    return profiler.events() if hasattr(profiler, "events") else profiler.function_events


def ours(profiler):
    return [event for event in events(profiler) if event.name.startswith("cohort:")]


@needs_torch
class Events(unittest.TestCase):
    def setUp(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.kinds = {
            "autograd": lambda: torch.autograd.profiler.profile(record_shapes=True),
            "torch": lambda: torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
            ),
        }

    def shown(self, call):
        """The events of it in each of torch's profilers, by name, shapes."""
        found = []
        for kind, profile in self.kinds.items():
            with self.subTest(profiler=kind):
                dist.barrier()
                with profile() as profiler:
                    call()
                dist.all_reduce(torch.ones(1))  # nobody sees anything of it
                for event in ours(profiler):
                    self.assertTrue(event.is_async, event)
                    self.assertEqual(event.count, 1)
                    self.assertGreater(getattr(event, "cpu_time", 1.0), 0)
                found.append(sorted((event.name[len("cohort:"):], event.input_shapes) for event in ours(profiler)))
        self.assertEqual(found[0], found[1])
        return found[0]

    def test_names_and_shapes(self):
        size, rank = self.size, self.rank
        many = [torch.ones(3) for _ in range(size)]
        cases = {
            "all_reduce": (lambda: dist.all_reduce(torch.ones(2, 3)), [[2, 3]]),
            "broadcast": (lambda: dist.broadcast(torch.ones(4), 0), [[4]]),
            "reduce": (lambda: dist.reduce(torch.ones(4), 0), [[4]]),
            "all_gather": (lambda: dist.all_gather(list(many), torch.ones(3)), [[3]]),
            "gather": (lambda: dist.gather(torch.ones(3), list(many) if rank == 0 else None), [[3]]),
            "scatter": (lambda: dist.scatter(torch.ones(3), list(many) if rank == 0 else None), [[3]] * (rank == 0) * size),
            "reduce_scatter": (lambda: dist.reduce_scatter(torch.ones(3), list(many)), [[3]] * size),
            "all_to_all": (lambda: dist.all_to_all_single(torch.ones(2 * size), torch.ones(2 * size)), [[2 * size]]),
            "barrier": (dist.barrier, []),
            "sparse_all_reduce": (lambda: dist.all_reduce(torch.eye(2).to_sparse()), None),
        }
        for name, (call, shapes) in cases.items():
            with self.subTest(name):
                ((found, of),) = self.shown(call)
                self.assertEqual(found, name)
                if shapes is not None:
                    self.assertEqual(of, shapes)

    def test_messages(self):
        if self.size == 1:
            return

        def exchange():
            if self.rank == 0:
                dist.send(torch.ones(5), 1)
            elif self.rank == 1:
                dist.recv(torch.ones(5), 0)

        found = self.shown(exchange)
        self.assertEqual(found, [[("send", [[5]])], [("recv", [[5]])]][self.rank] if self.rank < 2 else [])

    def test_many_and_the_order_of_waiting(self):
        def several():
            works = [dist.all_reduce(torch.ones(i + 1), async_op=True) for i in range(4)]
            futures = [dist.all_reduce(torch.ones(9), async_op=True).get_future()]
            for work in reversed(works):
                work.wait()
            futures[0].wait()

        self.assertEqual(self.shown(several), [("all_reduce", [[n]]) for n in (1, 2, 3, 4, 9)])

    def test_an_operation_that_fails(self):
        if self.size == 1:
            return

        def mismatch():
            with self.assertRaises(cohort.Mismatch):
                dist.all_reduce(torch.ones(2 + self.rank))

        self.assertEqual(self.shown(mismatch), [("all_reduce", [[2 + self.rank]])])

    def test_training(self):
        model = DDP(torch.nn.Linear(3, 2, bias=False), broadcast_buffers=False)

        def step():
            model(torch.ones(1, 3)).sum().backward()

        for _ in range(2):  # in the second, DDP tells the ranks its order of the buckets
            step()
        self.assertEqual(self.shown(step), [("all_reduce", [[6]])])

    def test_it_begins_with_the_call_and_ends_before_whoever_waits_goes_on(self):
        with self.kinds["torch"]() as profiler, torch.autograd.profiler.record_function("all of it"):
            work = dist.all_reduce(torch.ones(2), async_op=True)
            work.wait()
        (event,) = ours(profiler)
        (outer,) = [event for event in events(profiler) if event.name == "all of it"]
        self.assertGreaterEqual(event.time_range.start, outer.time_range.start)
        self.assertLessEqual(event.time_range.end, outer.time_range.end)


if __name__ == "__main__":
    unittest.main()
