"""Common to the tests of cohort.horovod.torch on "cuda" tensors: runs on both devices, and counts of NCCL's operations."""

import contextlib
import os

import cuda_support  # before torch

import torch
from support_hvd import Case

BY_NCCL = os.environ.get("COHORT_NCCL") != "off"


def flat(results):
    if isinstance(results, (list, tuple)):
        return [one for part in results for one in flat(part)]
    return [results]


class Gpus(Case):
    def on_both(self, program, within=0.0):
        """Asserts that `program(device)` returns equal tensors for "cuda" and "cpu", on the GPU for "cuda"."""
        on_cpu, on_gpu = flat(program("cpu")), flat(program("cuda"))
        self.assertEqual(len(on_cpu), len(on_gpu))
        for plain, result in zip(on_cpu, on_gpu):
            self.assertEqual((plain.device.type, result.device.type), ("cpu", "cuda"))
            self.assertEqual((plain.dtype, plain.shape), (result.dtype, result.shape))
            if within:
                # A real GPU's kernels sum in a different order.
                within = within if cuda_support.FAKE else max(within, 1e-4)
                torch.testing.assert_close(result.cpu(), plain, rtol=within, atol=within)
            else:
                self.assertTrue(torch.equal(result.cpu(), plain), f"{result.cpu()} is not {plain}")
        return on_gpu

    @contextlib.contextmanager
    def by_nccl(self, count):
        """Asserts that the code within passes `count` operations to NCCL."""
        before = cuda_support.operations_of_nccl()
        yield
        if cuda_support.FAKE:
            self.assertEqual(cuda_support.operations_of_nccl() - before, count if BY_NCCL else 0)

    def values(self, device, *shape, dtype=torch.float32):
        count = 1
        for length in shape:
            count *= length
        return (torch.arange(count) % 5 + self.rank + 1).reshape(shape).to(dtype).to(device)
