"""Shared by the tests: array libraries to try, and worlds of processes that a test starts itself."""

import array
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

# Every wait of the tests ends by itself, long before ctest's timeout.
SECONDS = 60.0

try:
    import numpy
except ImportError:
    numpy = None
try:
    import torch
except ImportError:
    torch = None


@contextlib.contextmanager
def stderr_of_process():
    """Captures what C++ and Python write to stderr meanwhile, in a list of lines that is filled at the end."""
    lines = []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines.extend(file.read().decode().splitlines())


class Numpy:
    name = "numpy"
    integers = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    dtypes = ("float16", "float32", "float64", "complex64", "complex128", "bool", *integers)

    @staticmethod
    def make(values, dtype):
        return numpy.array(values, dtype=dtype)

    @staticmethod
    def values(one):
        return one.tolist()


class Torch:
    name = "torch"
    integers = tuple(
        n
        for n in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
        if torch is not None and hasattr(torch, n)
    )
    dtypes = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool", *integers)

    @staticmethod
    def make(values, dtype):
        # torch makes the wider unsigned integers of tensors, not of lists.
        return torch.tensor(values, dtype=torch.float64 if dtype[:4] == "uint" else None).to(getattr(torch, dtype))

    @staticmethod
    def values(one):
        return one.to(torch.float64).tolist() if str(one.dtype)[6:10] == "uint" else one.tolist()


class Plain:
    """The standard library's own arrays."""

    name = "array"
    letters = {"float32": "f", "float64": "d", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B"}
    integers = ("int8", "int16", "int32", "int64", "uint8")
    dtypes = tuple(letters)

    @classmethod
    def make(cls, values, dtype):
        return array.array(cls.letters[dtype], [int(v) if dtype in cls.integers else v for v in values])

    @staticmethod
    def values(one):
        return list(one)


KINDS = [Plain] + ([Numpy] if numpy else []) + ([Torch] if torch else [])

needs_torch = unittest.skipUnless(torch, "torch is not installed")
needs_numpy = unittest.skipUnless(numpy, "NumPy is not installed")


def ranks_of_hosts(size):
    """Number of ranks of each host; for hosts that this machine acts as, if it does."""
    numbers = [int(number) for number in os.environ.get("COHORT_PRETEND_HOSTS", "1").split(",")]
    if len(numbers) > 1:
        return numbers
    hosts = min(numbers[0], size)
    return [size // hosts + (host < size % hosts) for host in range(hosts)]


class World:
    """N processes that run one script and meet at a file; `ends` waits for them. Nothing of it is left behind.

    arguments   give each process its rank and the size of the world as arguments
    """

    def __init__(self, script, size, arguments=False, **environment):
        self.folder = tempfile.TemporaryDirectory(prefix="cohort-python-")
        path = pathlib.Path(self.folder.name)
        (path / "script.py").write_text(script)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("COHORT_", "RANK", "WORLD_", "LOCAL_", "MASTER_"))}
        env.update(COHORT_TIMEOUT=str(int(SECONDS)), FOLDER=str(path), **environment)
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(path / "script.py"), *([str(rank), str(size)] if arguments else [])],
                env=dict(env, TEST_INIT=f"file://{path}/meeting?rank={rank}&world_size={size}"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]

    def ends(self, seconds=2 * SECONDS):
        """(exit status, output) of each rank."""
        try:
            return [(rank.wait(), text) for rank, text in [(r, r.communicate(timeout=seconds)[0]) for r in self.ranks]]
        finally:
            self.close()

    def close(self):
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
            rank.stdout.close()
        self.folder.cleanup()


def run_world(script, size, **environment):
    return World(script, size, **environment).ends()
