"""Where gradients lie: buckets of several gradients each, in communicator memory.

A bucket is [large gradients | small ones | one flag per parameter: this rank used it | one flag: this rank has samples |
one flag: this rank has found a value that is not finite], all of one type, each gradient aligned. A large gradient is an all_reduce of its own, which reads it where autograd made
it and writes the average to its place here, so that most of it is never copied. The small ones are written to their
places first, and are one all_reduce with the flags. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

import torch

from cohort import Communicator, _core

# Gradients begin on cache lines: kernels of torch and of the reduction run on whole vectors.
_ALIGNMENT = 64

# From here on an operation of its own, and the waits that come with it, cost less than the copy that it saves (at 1 MiB
# already where gradients are few, but not in convolutional networks).
_LARGE_BYTES = 8 << 20

# A flag that survives being divided by large worlds and multiplied by small weights in every type: in half precision,
# 65504 * (weight / sum of weights) is non-zero down to a ratio of 1e-12.
_FLAG = 65504.0


def plan_buckets(
    parameters: Sequence[torch.Tensor], order: Sequence[int], *, first_bucket_bytes: int, bucket_bytes: int
) -> list[list[int]]:
    """Numbers of parameters for each bucket, in the order in which their gradients are expected.

    A bucket is closed by the parameter that brings it to its size. The first bucket of each type is the small one.
    Buckets are ordered by when they are complete.
    """
    plan: list[list[int]] = []
    members: dict[torch.dtype, list[int]] = {}
    filled: dict[torch.dtype, int] = {}
    limits: dict[torch.dtype, int] = {}
    for index in order:
        parameter = parameters[index]
        kind = parameter.dtype
        members.setdefault(kind, []).append(index)
        filled[kind] = filled.get(kind, 0) + parameter.numel() * parameter.element_size()
        if filled[kind] >= limits.get(kind, first_bucket_bytes):
            plan.append(members.pop(kind))
            filled[kind], limits[kind] = 0, bucket_bytes
    # What is left open is complete when its last parameter is.
    plan.extend(members.values())
    place = {index: at for at, index in enumerate(order)}
    return sorted(plan, key=lambda bucket: place[bucket[-1]])


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps and overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Bucket:
    """The memory of one bucket, and the gradients over it."""

    def __init__(self, comm: Communicator, parameters: Sequence[torch.Tensor]) -> None:
        """parameters: those of this bucket, in order. Raises Unavailable when there is no memory."""
        dtype, element = parameters[0].dtype, parameters[0].element_size()
        sizes = [parameter.numel() * element for parameter in parameters]
        self.large = [position for position, size in enumerate(sizes) if size >= _LARGE_BYTES]
        small = [position for position, size in enumerate(sizes) if size < _LARGE_BYTES]
        self.offsets = [0] * len(parameters)  # in bytes
        size = small_begin = 0
        for position in self.large + small:
            self.offsets[position] = size
            size += (sizes[position] + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
            if position in self.large:
                small_begin = size
        elements = size // element + len(parameters) + 2
        memory = comm.allocate(elements * element)
        self.bytes = elements * element
        self.address = memory.data_ptr()
        # Tensors over the memory keep it alive, so a gradient may outlive bucket and communicator.
        flat = memory.as_torch(dtype, elements)
        self.small = flat[small_begin // element :]  # with the flags
        self._small_gradients = flat[small_begin // element : size // element]
        self._flags = flat[size // element : -1]
        self._non_finite_flag = flat[-1:]
        self._small_begin = small_begin
        self._sizes = sizes
        # `set_` on an empty tensor instead of a view of the whole: views refuse detach_().
        self.gradients = [
            torch.empty(0, dtype=dtype).set_(
                flat,
                offset // element,
                parameter.shape,
                # Optimizers are fastest where gradient and parameter have the same strides.
                parameter.stride() if _is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride(),
            )
            for offset, parameter in zip(self.offsets, parameters)
        ]

    def can_read(self, position: int, gradient: torch.Tensor) -> bool:
        """Whether the reduction can take this instead of what lies at the gradient's place."""
        place = self.gradients[position]
        return (
            position in self.large
            and gradient.layout == torch.strided
            and gradient.dtype == place.dtype
            and gradient.shape == place.shape
            and gradient.stride() == place.stride()
        )

    def set_flags(self, used: Sequence[bool], has_samples: bool) -> None:
        """used: for each parameter, whether this rank used it."""
        if has_samples and all(used):
            self._flags.fill_(_FLAG)
        else:
            values = [_FLAG if value else 0.0 for value in (*used, has_samples)]
            self._flags.copy_(torch.tensor(values, dtype=self._flags.dtype))

    def flags(self) -> list[bool]:
        """After the reduction: for each parameter whether a rank with samples used it, then whether any had samples."""
        return [value != 0.0 for value in self._flags.tolist()]

    def set_non_finite_flag(self, value: bool) -> None:
        """value: this rank has found a value that is not finite, here or in an earlier bucket."""
        self._non_finite_flag.fill_(_FLAG if value else 0.0)

    def non_finite_flag(self) -> bool:
        """After the reduction: whether a rank with samples has found one."""
        return self._non_finite_flag.item() != 0.0

    def first_non_finite(
        self, reduced: Callable[[int], Optional[torch.Tensor]], wire_dtype: Optional[str]
    ) -> Optional[int]:
        """The position of the first gradient with a value that is not finite, in the order in which they lie.

        reduced: of a large one, what is reduced; None: it is not to be looked at.
        """
        for position in self.large:
            gradient = reduced(position)
            if gradient is None:
                continue
            # As it lies in memory, whatever its strides: all of them are dense.
            flat = gradient.as_strided((gradient.numel(),), (1,))
            if _core.first_non_finite(flat, wire_dtype) is not None:
                return position
        # The small ones in one go. What lies between them is zero.
        index = _core.first_non_finite(self._small_gradients, wire_dtype)
        if index is None:
            return None
        offset = self._small_begin + index * self._small_gradients.element_size()
        return next(p for p, o in enumerate(self.offsets) if o <= offset < o + self._sizes[p])
