"""What a step asks of the ranks, where Keras works with torch: at once, in the program's order, but for gradients of `fit`,
which are asked for while backward makes others."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from cohort._core import ReduceOp
from cohort._horovod.process_sets import ProcessSet, engine_of
from cohort._horovod.reduce_ops import ENGINE_OPS
from cohort._horovod.submit import Pending, named, started
from cohort.torch._gradients import on_gradient
from cohort.torch._tensors import copy_back, dense
from cohort.torch.compression import Compression

_WHAT = "DistributedOptimizer"
OVERLAPS = False  # all gradients are there when they are asked for
_BUCKET_BYTES = 1 << 20  # smaller gradients are asked for together: each call of Python's takes its time


def reduce_gradients(gradients: Sequence[Any], names: Sequence[str], **how: Any) -> List[Any]:
    """The gradients of all ranks: in place, unless they travel as something else."""
    return _start(gradients, names, **how)()


def _start(gradients: Sequence[Any], names: Sequence[str], *, op: int, prescale: float, postscale: float,
           process_set: ProcessSet, compression: Any = Compression.none,
           sparse_as_dense: bool = False) -> Callable[[], List[Any]]:  # fmt: skip
    """What waits for them."""
    compressed = [compression.compress(gradient.detach()) for gradient in gradients]
    used = [dense(sent, _WHAT) for sent, _ in compressed]
    full = [named("allreduce", name, process_set) for name in names]
    engine = engine_of(process_set)
    works = started("ALLREDUCE", full, engine.all_reduce_group, full, used, op=ENGINE_OPS[op], prescale=prescale,
                    postscale=postscale)  # fmt: skip
    pending = Pending(works, lambda: [
        compression.decompress(copy_back(sent, tensor), context) for (sent, context), tensor in zip(compressed, used)
    ])  # fmt: skip
    return pending.wait


class Early:
    """The gradients of a step that are asked for while backward goes on."""

    def __init__(self) -> None:
        self._how: Dict[str, Any] = {}  # empty: backward is none of this one's business
        self._names: Dict[int, str] = {}
        self._gathered: List[Tuple[Any, str]] = []
        self._under_way: List[Tuple[List[str], List[Any], Callable[[], List[Any]]]] = []
        self._watched: Dict[int, Tuple[Any, Callable[[], None]]] = {}  # held: parameters, and hooks of older torch

    def expect(self, variables: Sequence[Any], names: Sequence[str], how: Dict[str, Any]) -> None:
        """Backward comes next."""
        self._gathered, self._under_way = [], []
        self._names = {id(variable.value): name for variable, name in zip(variables, names)}
        self._how = how
        for variable in variables:
            parameter = variable.value
            if id(parameter) not in self._watched and parameter.requires_grad:
                remove = on_gradient(parameter, functools.partial(self._made, weakref.ref(parameter)))
                self._watched[id(parameter)] = (parameter, remove)

    def _made(self, parameter: Any) -> None:
        one = parameter()
        name = self._names.get(id(one)) if self._how else None
        if name is None or one.grad is None or one.grad.layout is not torch.strided:
            return
        self._gathered.append((one.grad, name))
        if sum(gradient.nbytes for gradient, _ in self._gathered) >= _BUCKET_BYTES:
            self._send()

    def _send(self) -> None:
        gradients, names = [one for one, _ in self._gathered], [name for _, name in self._gathered]
        self._gathered = []
        self._under_way.append((names, gradients, _start(gradients, names, **self._how)))

    def asked(self) -> Dict[str, Any]:
        """Backward is over: the gradients that have been asked for, by name."""
        self._how = {}
        self._gathered = []  # who asks for the others asks for these
        return {name: one for names, gradients, _ in self._under_way for name, one in zip(names, gradients)}

    def finish(self) -> Dict[str, Any]:
        """Those of all ranks."""
        under_way, self._under_way = self._under_way, []
        return {name: one for names, _, wait in under_way for name, one in zip(names, wait())}


def total(count: Any, name: str, process_set: ProcessSet) -> float:
    """The sum of a number over ranks."""
    return float(_reduced(torch.tensor([float(count)], dtype=torch.float64), name, process_set, ReduceOp.Sum))


def all_true(flag: Any, name: str, process_set: ProcessSet) -> Any:
    """Whether a flag is set on all ranks."""
    return _reduced(torch.as_tensor(flag).reshape(1).to(torch.uint8), name, process_set, ReduceOp.Min).reshape(()).bool()


def _reduced(tensor: torch.Tensor, name: str, process_set: ProcessSet, op: Any) -> torch.Tensor:
    full = named("allreduce", name, process_set)
    Pending(started("ALLREDUCE", [full], engine_of(process_set).all_reduce, full, tensor, op=op), lambda: None).wait()
    return tensor


def factor_of(count: Any, ranks: int, samples: Any) -> Any:
    """This rank's part of all samples, times the ranks."""
    return float(count) * ranks / samples if samples else 0.0


def times(value: Any, factor: Any) -> Any:
    """A loss or a gradient, times such a factor."""
    return value if isinstance(factor, float) and factor == 1 else value * factor


def samples_in(leaf: Any) -> Any:
    """The number of samples of a batch."""
    return int(leaf.shape[0])


def zeros(variable: Any, type_of_indices: Any) -> Any:
    """What a rank without a gradient brings."""
    tensor = variable.value
    return torch.zeros_like(tensor, requires_grad=False)


def type_of_indices(gradient: Any) -> None:
    """None: no gradients are sparse."""
