"""cohort.Distributor runs a program of torch's DistributedDataParallel as it is. Alone in a file: torch takes long to start."""

import atexit
import contextlib
import ctypes
import importlib.util
import os
import sys
import threading
import time
import unittest

import cohort
from run_support import Folder, captured


def ddp(steps):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    weights = [torch.empty(1, 4) for _ in range(dist.get_world_size())]
    # Kept until the end: a tensor that only the group's thread still holds needs Python to be freed, and torch 1.13 holds
    # on to Python while it waits for that thread, when the model goes and takes the group with it.
    mine = model.module.weight.detach()
    dist.all_gather(weights, mine)
    dist.destroy_process_group()
    return weights


def leaves_a_collective_to_torchs_threads():
    import torch
    import torch.distributed as dist

    class Slow:
        def __del__(self):
            time.sleep(2)

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        sys.slow = Slow()  # while Python is taken down, if it is
        dist.all_reduce(torch.ones(1000), async_op=True)
        return "here"
    time.sleep(1)
    with contextlib.suppress(RuntimeError):  # rank 0 may be gone
        dist.all_reduce(torch.ones(1000))


def leaves_things_to_the_end(folder):
    import torch  # noqa: F401 -- such processes end in another way

    def write(name, text):
        (folder / f"{name}-{os.environ['RANK']}").write_text(text)

    def late():
        time.sleep(0.5)
        write("thread", "joined")

    sys.file = open(folder / f"file-{os.environ['RANK']}", "w")
    sys.file.write("flushed")
    sys.raw = open(folder / f"raw-{os.environ['RANK']}", "wb")
    sys.raw.write(b"flushed")
    atexit.register(write, "atexit", "called")
    threading.Thread(target=late).start()
    print("python's last words", end="")
    ctypes.CDLL(None).printf(b"and C's\n")
    return "here"


class Ddp(Folder):
    @unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not installed")
    def test_a_ddp_program(self):
        with captured():
            first, second = cohort.Distributor(2, use_gpu=False).run(ddp, 3)
        self.assertTrue(first.equal(second))

    @unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not installed")
    def test_threads_of_torch_do_not_fail_a_rank_that_has_returned(self):
        with captured():
            self.assertEqual(cohort.run(leaves_a_collective_to_torchs_threads, np=2)[0], "here")

    @unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not installed")
    def test_nothing_is_lost_at_the_end(self):
        with captured() as (out, _):
            self.assertEqual(cohort.run(leaves_things_to_the_end, args=(self.folder,), np=2), ["here", "here"])
        for rank in range(2):
            for name, text in {"file": "flushed", "raw": "flushed", "atexit": "called", "thread": "joined"}.items():
                self.assertEqual((self.folder / f"{name}-{rank}").read_text(), text, name)
            self.assertIn(f"{rank} | python's last words", out.getvalue())
        self.assertEqual(out.getvalue().count("and C's"), 2)


if __name__ == "__main__":
    unittest.main()
