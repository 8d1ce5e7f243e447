"""Messages from one rank to another in one piece: arrays of any type and shape, an object, or an error.

A packet is [length of the header, 8 bytes | header, JSON | contents]; parts begin at multiples of 64 bytes. Arrays are
stored as in memory, objects are pickled; since packets travel as uint8, they are always authenticated.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch

from cohort._launch import pickling as _pickling
from cohort.errors import InvalidArgument
from cohort.horovod.torch._tensors import dense

Bytes = Union[bytes, bytearray, memoryview]

_ALIGNMENT = 64


def is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or _is_numpy(value)


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # a program with a NumPy array has imported it
    return numpy is not None and isinstance(value, numpy.ndarray)


def type_name(array: Any) -> str:
    return f"torch's {str(array.dtype)[6:]}" if isinstance(array, torch.Tensor) else f"NumPy's {array.dtype}"


def of_arrays(value: Any, what: str, reply: int = 0) -> bytearray:
    """Returns a packet of an array, or of a tuple or list of arrays.

    reply  0, or the number under which the sender waits for the contents' gradients

    Raises TypeError for a value that is no array, ValueError for an array that cannot be sent.
    """
    many = isinstance(value, (tuple, list))
    described, contents = [], []
    for array in value if many else [value]:
        if isinstance(array, torch.Tensor):
            used: Any = dense(array, what).detach()
            library, name, content = "torch", str(used.dtype)[6:], _bytes_of_torch(used)
        elif _is_numpy(array):
            used = sys.modules["numpy"].ascontiguousarray(array)
            library, name, content = "numpy", _numpy_name(array, what), _bytes_of_numpy(used)
        else:
            raise TypeError(
                f"{what}: a NumPy array or a torch tensor is needed, not {type(array).__name__} -- objects are sent by "
                "send_obj, bcast_obj and the other names that end so"
            )
        described.append((library, name, list(array.shape), len(content)))
        contents.append((used, content))
    return _made({"kind": "arrays", "many": many, "arrays": described, "reply": reply}, [one for _, one in contents])


def _bytes_of_torch(tensor: torch.Tensor) -> Any:
    """Returns a view of the tensor's memory; the tensor has to outlive it."""
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B") if nbytes else b""


def _bytes_of_numpy(array: Any) -> Any:
    return memoryview(array.reshape(-1).view(sys.modules["numpy"].uint8)) if array.nbytes else b""


def _numpy_name(array: Any, what: str) -> str:
    if array.dtype.hasobject or array.dtype.names is not None:
        raise InvalidArgument(
            f"{what}: an array of {array.dtype} has no plain numbers in it -- send it as an object, by the names that end in _obj"
        )
    return str(array.dtype.str)


def of_object(value: Any) -> bytearray:
    """Returns a packet of a pickled object. Raises any error of pickling."""
    return _made({"kind": "object"}, [_pickling.dumps_for_ranks(value)])


def of_error(error: BaseException) -> bytearray:
    return _made({"kind": "error", "text": f"{type(error).__name__}: {error}"}, [])


def attempt(make: Callable[[], bytearray]) -> tuple[bytearray, Optional[Exception]]:
    """Returns the packet of `make`, or a packet that reports its error, with the error, to be raised after sending."""
    try:
        return make(), None
    except Exception as error:
        return of_error(error), error


def _made(header: dict[str, Any], contents: Sequence[Any]) -> bytearray:
    text = json.dumps(header).encode()
    at = _up(8 + len(text))
    packet = bytearray(at + sum(_up(len(one)) for one in contents))
    packet[:8] = len(text).to_bytes(8, "little")
    packet[8 : 8 + len(text)] = text
    view = memoryview(packet)
    for one in contents:
        view[at : at + len(one)] = one
        at += _up(len(one))
    return packet


def _up(size: int) -> int:
    return (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


class Received:
    """A packet that has arrived. Its arrays are views of it."""

    def __init__(self, packet: Bytes, source: int, what: str) -> None:
        """Raises InvalidArgument if the packet holds an error."""
        length = int.from_bytes(packet[:8], "little")
        self._header = json.loads(bytes(packet[8 : 8 + length]))
        self._contents = memoryview(packet)[_up(8 + length) :]
        self._source, self._what = source, what
        if self._header["kind"] == "error":
            raise InvalidArgument(f"{what}: rank {source} could not bring its part -- {self._header['text']}")

    @property
    def reply(self) -> int:
        """Returns the number under which the sender waits for gradients; 0: it does not wait."""
        return int(self._header["reply"])

    def arrays(self) -> Any:
        """Returns an array, or a tuple of arrays if a tuple was sent; of the same library as on the sender."""
        self._require("arrays", "an object: it is received by recv_obj")
        arrays, at = [], 0
        for library, dtype, shape, nbytes in self._header["arrays"]:
            arrays.append(self._array(library, dtype, shape, at, nbytes))
            at += _up(nbytes)
        return tuple(arrays) if self._header["many"] else arrays[0]

    def object(self) -> Any:
        self._require("object", "an array: it is received by recv")
        return _pickling.loads_of_ranks(self._contents)

    def _require(self, kind: str, instead: str) -> None:
        if self._header["kind"] != kind:
            raise InvalidArgument(f"{self._what}: what rank {self._source} sent is {instead}")

    def _array(self, library: str, name: str, shape: list[int], at: int, nbytes: int) -> Any:
        if library == "torch":
            dtype = getattr(torch, name)
            if nbytes == 0:
                return torch.empty(shape, dtype=dtype)
            count = nbytes // torch.empty(0, dtype=dtype).element_size()
            return torch.frombuffer(self._contents, dtype=dtype, count=count, offset=at).reshape(shape)
        import numpy

        if nbytes == 0:
            return numpy.empty(shape, dtype=name)
        return numpy.frombuffer(self._contents[at : at + nbytes], dtype=name).reshape(shape)
