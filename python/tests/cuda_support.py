"""Tensors of "cuda" for tests: in a torch without CUDA fake ones (src/torch/fake), where
COHORT_FAKE_CUDA_TENSORS names them, else those of a real GPU. To be imported before torch.

The fake's memory cannot be read where it lies; operations are those of the CPU, done when they are called."""

import contextlib
import ctypes
import os
import types

FAKE = "COHORT_FAKE_CUDA_TENSORS" in os.environ
if FAKE:
    ctypes.CDLL(os.environ["COHORT_FAKE_CUDA_TENSORS"], ctypes.RTLD_GLOBAL)
    NCCL = ctypes.CDLL("libnccl.so.2")

import torch  # noqa: E402

# Only the fake counts what it is given.
WITH_NCCL = FAKE and os.environ.get("COHORT_NCCL") != "off"


def operations_of_nccl():
    """Number of operations that this process has given to the fake NCCL so far."""
    return NCCL.fake_nccl_operations() if FAKE else 0


def new_stream():
    made = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(made), 0)
    return made.value


@contextlib.contextmanager
def delay_of_nccl(milliseconds):
    """Every operation that begins meanwhile takes so much longer."""
    os.environ["FAKE_NCCL_DELAY"] = str(milliseconds)
    try:
        yield
    finally:
        del os.environ["FAKE_NCCL_DELAY"]


def _clone(storage):
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),))
    copy = flat.clone()
    return copy.untyped_storage() if hasattr(copy, "untyped_storage") else copy._storage()


if FAKE:
    torch.cuda._lazy_init = lambda: None
    torch.cuda.current_stream = lambda device=None: types.SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    torch.cuda.Stream = lambda device=None: types.SimpleNamespace(cuda_stream=new_stream())
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda._initialized = True
    torch.cuda.default_generators = (torch.Generator(),)
    # A torch without CUDA has no devices to choose from, and makes no storage of CUDA's without a tensor.
    torch.cuda.set_device = lambda device: None
    torch.UntypedStorage.clone = _clone
else:
    torch.backends.cudnn.allow_tf32 = False  # results are compared with the CPU's
