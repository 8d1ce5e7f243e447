"""Functions that make ranks equal: parameters, the state of an optimizer, any object."""

from __future__ import annotations

import io
import pickle
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from cohort._checkpoint import optimizer_state as _optimizer_state
from cohort._launch.pickling import find_cloudpickle
from cohort.horovod.objects import broadcast_object
from cohort.horovod.operations import Call, named
from cohort.horovod.process_sets import ProcessSet, engine_of, global_process_set, root_in
from cohort.horovod.torch import _collectives as start
from cohort.horovod.torch._tensors import DEVICES
from torch import Tensor

Parameters = Union[Mapping[str, Tensor], Iterable[Union[Tensor, Tuple[str, Tensor]]]]


def broadcast_parameters(params: Parameters, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Sets every rank's values to those of `root_rank`, in place.

    params  a `state_dict()`, `named_parameters()`, or only tensors (then matched by order); None values are skipped

    Raises ValueError for anything else.
    """
    if isinstance(params, Mapping):
        pairs: List[Tuple[Optional[str], Any]] = sorted(params.items(), key=lambda pair: pair[0])
    elif isinstance(params, Iterable) and not isinstance(params, (Tensor, str, bytes)):
        pairs = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(f"broadcast_parameters: a dict or an iterable of parameters is needed, not {type(params).__name__}")
    for pair in pairs:
        if len(pair) != 2 or not (pair[1] is None or isinstance(pair[1], Tensor)):
            raise ValueError(f"broadcast_parameters: {pair[0]!r} is no tensor -- broadcast_object sends anything")
    pairs = [pair for pair in pairs if pair[1] is not None]
    _broadcast([value for _, value in pairs], [name for name, _ in pairs], root_rank, process_set)


def _broadcast(tensors: List[Tensor], names: Sequence[Optional[str]], root_rank: int, process_set: ProcessSet) -> None:
    full = [named("broadcast", name, process_set) for name in names]
    start.run(Call("broadcast", full, process_set, root=root_rank), tensors, in_place=True)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Optional[torch.nn.Module] = None,
                              process_set: ProcessSet = global_process_set) -> None:  # fmt: skip
    """Sets every rank's optimizer state and hyper-parameters to those of `root_rank`, even if the rank has none yet.

    They become exactly root's: types, dtypes, shapes; tensors on root's GPU go to this rank's. The dicts of
    `param_groups` and `state` stay the same objects, and so do tensors that fit; options that root lacks stay. Tensors
    are sent as they are, other values pickled.

    Afterwards, parameters of an optimizer without a state have a gradient of zeros, if they require one. It is sparse
    with SparseAdam, and with SGD if an embedding of `model` makes sparse gradients (`model` is needed only for that).
    Raises ValueError for LBFGS, and if the optimizers have different groups of parameters.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state: LBFGS keeps its history in one list per group, which is not supported")
    is_root = engine_of(process_set).rank() == root_in(process_set, root_rank)
    taken = _optimizer_state.take(optimizer)
    if _optimizer_state.is_empty(taken):
        _zero_gradients(optimizer, model)
    parameters = _optimizer_state.parameters_of(optimizer)
    sent = _Sent(taken, parameters) if is_root else None
    sent = broadcast_object(sent, root_rank, "optimizer_state", process_set)
    tensors = sent.tensors if is_root else [place.tensor(parameters) for place in sent.places]
    _broadcast(tensors, [f"optimizer_state.{i}" for i in range(len(tensors))], root_rank, process_set)
    if not is_root:
        _optimizer_state.put(optimizer, sent.value(tensors))


def _zero_gradients(optimizer: torch.optim.Optimizer, model: Optional[torch.nn.Module]) -> None:
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    layers = [] if model is None else [one for one in model.modules() if isinstance(one, embeddings) and one.sparse]
    sparse = {id(layer.weight) for layer in layers} if isinstance(optimizer, torch.optim.SGD) else set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            if isinstance(optimizer, torch.optim.SparseAdam) or id(parameter) in sparse:
                indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
                values = parameter.new_empty(0, *parameter.shape[1:])
                parameter.grad = torch.sparse_coo_tensor(indices, values, parameter.shape, **start.UNCHECKED)
            else:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)


class _Place(NamedTuple):
    """Placeholder for a tensor that is sent separately."""

    shape: Tuple[int, ...]
    stride: Tuple[int, ...]
    dtype: torch.dtype
    beside: Optional[int]  # number of the parameter whose GPU holds it; each rank has its own device

    def tensor(self, parameters: List[Tensor]) -> Tensor:
        device = "cpu" if self.beside is None else parameters[self.beside].device
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class _Sent:
    """Any value; its tensors are sent separately, and pickled as placeholders."""

    def __init__(self, value: Any, parameters: List[Tensor]) -> None:
        self._value = value
        self._numbers = {parameter.device: i for i, parameter in reversed(list(enumerate(parameters)))}
        self.tensors: List[Tensor] = []
        self._known: Dict[int, int] = {}

    def place(self, value: Any) -> Optional[int]:
        """Returns the number of a tensor that is sent separately."""
        if type(value) is not Tensor or value.layout is not torch.strided or value.device.type not in DEVICES:
            return None
        if id(value) not in self._known:
            self._known[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._known[id(value)]

    def __reduce__(self) -> Any:
        data = io.BytesIO()
        kind = type("Pickler", ((find_cloudpickle() or pickle).Pickler,), {"persistent_id": lambda _, value: self.place(value)})
        kind(data).dump(self._value)
        places = []
        for one in self.tensors:
            stride = torch.empty_like(one, device="meta").stride()  # dense, and channels last if it is
            places.append(_Place(tuple(one.shape), stride, one.dtype, self._numbers.get(one.device) if one.is_cuda else None))
        return _Received, (data.getvalue(), places)


class _Received:
    def __init__(self, data: bytes, places: List[_Place]) -> None:
        self._data = data
        self.places = places

    def value(self, tensors: List[Tensor]) -> Any:
        """Returns the value, with these tensors."""
        kind = type("Unpickler", (pickle.Unpickler,), {"persistent_load": lambda _, number: tensors[number]})
        return kind(io.BytesIO(self._data)).load()
