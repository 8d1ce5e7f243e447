"""What makes ranks alike: parameters, the state of an optimizer, any object."""

from __future__ import annotations

from typing import Any, Iterable, List, Mapping, Optional, Tuple, Union

import torch
from cohort._horovod.objects import broadcast_object
from cohort._horovod.process_sets import ProcessSet, engine_of, global_process_set, root_in
from cohort.torch import _collectives as start
from cohort.torch._handles import synchronize
from cohort.torch._tensors import DEVICES
from torch import Tensor

Parameters = Union[Mapping[str, Tensor], Iterable[Union[Tensor, Tuple[str, Tensor]]]]


def broadcast_parameters(params: Parameters, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Gives every rank the values that `root_rank` has, in place.

    params  a `state_dict()`, `named_parameters()`, or tensors alone (then they are matched by order); what is None is
            passed over

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
    names = [name for name, _ in pairs]
    synchronize(start.broadcast_group_async_([value for _, value in pairs], root_rank, names, process_set))


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Optional[torch.nn.Module] = None,
                              process_set: ProcessSet = global_process_set) -> None:  # fmt: skip
    """Gives every rank the state and the hyper-parameters of `root_rank`'s optimizer, also where it has none yet.

    Tensors travel as they are, all else by `broadcast_object`. Parameters of an optimizer without a state have a gradient
    of zeros after that, if they require one: a sparse one with SparseAdam, and with SGD where an embedding of `model` makes
    such. `model` is not needed for more. Raises ValueError for LBFGS, and where the optimizers have different groups of
    parameters.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state: LBFGS keeps its history in one list per group, which is not supported")
    is_root = engine_of(process_set).rank() == root_in(process_set, root_rank)
    own = optimizer.state_dict()
    if not own["state"]:
        _zero_gradients(optimizer, model)
    tensors: List[Tensor] = []
    outline = _outline(own, tensors) if is_root else None
    outline = broadcast_object(outline, root_rank, "optimizer_state", process_set)
    if not is_root:
        tensors = []
        own = _filled(outline, tensors, _gpu_of(optimizer))
    synchronize(
        start.broadcast_group_async_(
            tensors, root_rank, [f"optimizer_state.{i}" for i in range(len(tensors))], process_set
        )
    )
    if not is_root:
        optimizer.load_state_dict(own)


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
                parameter.grad = torch.sparse_coo_tensor(indices, values, parameter.shape)
            else:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)


def _gpu_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Where this rank's parameters are, of those that are not on the CPU; the CPU if all are there."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return next((one.device for one in parameters if one.is_cuda), torch.device("cpu"))


class _Place:
    """Stands for a tensor that is sent by itself. Which GPU it is on is each rank's matter."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.on_gpu = tuple(tensor.shape), tensor.dtype, tensor.is_cuda


def _outline(value: Any, tensors: List[Tensor]) -> Any:
    """The value with a place for each tensor; those come into the list, in order."""
    if isinstance(value, Tensor) and value.layout is torch.strided and value.device.type in DEVICES:
        tensors.append(value)
        return _Place(value)
    if type(value) is dict:
        return {key: _outline(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_outline(item, tensors) for item in value)
    return value


def _filled(outline: Any, tensors: List[Tensor], gpu: torch.device) -> Any:
    """The opposite, with new tensors, on the CPU or `gpu`, which come into the list."""
    if isinstance(outline, _Place):
        tensors.append(torch.empty(outline.shape, dtype=outline.dtype, device=gpu if outline.on_gpu else None))
        return tensors[-1]
    if type(outline) is dict:
        return {key: _filled(item, tensors, gpu) for key, item in outline.items()}
    if type(outline) in (list, tuple):
        return type(outline)(_filled(item, tensors, gpu) for item in outline)
    return outline
