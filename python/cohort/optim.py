"""Optimizers divided over the ranks (ZeRO; Rajbhandari et al. 2020, arXiv 1910.02054); training with fewer
synchronisations (LocalSGD, DiLoCo); and the learning rate for N ranks: N times the batch needs a larger rate, reached
gradually (Goyal et al. 2017, arXiv 1706.02677). The optimizers themselves are torch's. Needs torch."""

from __future__ import annotations

import enum
import inspect
import logging
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Callable, Optional, Union

import torch
from torch.optim.lr_scheduler import LambdaLR

from cohort._process import world as _world
from cohort._core import Transaction
from cohort._local_sgd import DiLoCo, LocalSGD
from cohort.errors import InvalidArgument
from cohort.nn import DistributedDataParallel

__all__ = ["DiLoCo", "LocalSGD", "Piece", "Scaling", "Sharded", "WarmupScheduler", "scale_factor"]

_log = logging.getLogger("cohort.optim")


class Scaling(enum.Enum):
    """How the learning rate grows with the number of ranks, n."""

    LINEAR = "linear"  # times n: for SGD, while the batch is far smaller than the data
    SQUARE_ROOT = "square_root"  # times sqrt(n): often better for Adam and similar optimizers
    NONE = "none"  # unchanged: also for a global batch that does not grow with n


def scale_factor(scaling: Union[Scaling, str], world_size: int) -> float:
    """Returns the factor that `scaling` gives for `world_size` ranks. Raises InvalidArgument for a world below 1."""
    if world_size < 1:
        raise InvalidArgument(f"learning rate for a world of {world_size} ranks")
    kind = Scaling(scaling)
    return float(world_size) if kind is Scaling.LINEAR else math.sqrt(world_size) if kind is Scaling.SQUARE_ROOT else 1.0


class WarmupScheduler(LambdaLR):
    """Sets the optimizer's rate immediately, for step 0, and after each `step()`.

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)      # the rate of one rank
        schedule = cohort.optim.WarmupScheduler(optimizer, warmup_steps=200)
        ...  optimizer.step(); schedule.step()

    world_size    default: the default world's (1 where there is none)
    scaling       "linear", "square_root" or "none"
    warmup_steps  optimizer steps over which the rate rises linearly from the optimizer's own to the scaled rate; 0:
                  scaled from the start
    decay         a further factor for each step from 0; default: 1
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, world_size: Optional[int] = None,
                 scaling: Union[Scaling, str] = Scaling.LINEAR, warmup_steps: int = 0,
                 decay: Optional[Callable[[int], float]] = None) -> None:  # fmt: skip
        """Raises InvalidArgument for a world below 1 or negative warm-up."""
        if world_size is None:
            world_size = _world.size() if _world.is_initialized() else 1
        if warmup_steps < 0:
            raise InvalidArgument(f"learning rate: {warmup_steps} warm-up steps")
        full = scale_factor(scaling, world_size)

        def factor(step: int) -> float:
            value = full if step >= warmup_steps else 1.0 + (full - 1.0) * step / warmup_steps
            return value * decay(step) if decay is not None else value

        self._factor = factor
        super().__init__(optimizer, factor)

    @property
    def steps(self) -> int:
        """Optimizer steps done; save the number, and restore it with `set_step`."""
        return self.last_epoch

    def set_step(self, step: int) -> None:
        """Continues from a step, and sets its rates."""
        if step < 0:
            raise InvalidArgument(f"learning rate of step {step}")
        self.last_epoch = step
        self._last_lr = []
        for group, base in zip(self.optimizer.param_groups, self.base_lrs):
            rate = base * self._factor(step)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            self._last_lr.append(group["lr"])

    def rate_at(self, step: int) -> float:
        """Returns the rate of parameter group 0 at a step."""
        return float(self.base_lrs[0]) * self._factor(step)

    def state_dict(self) -> dict:
        """Returns torch's state without the function, which the constructor makes again."""
        state = super().state_dict()
        state.pop("_factor", None)
        return state


@dataclass(frozen=True)
class Piece:
    """A range of a parameter's elements, in row-major order, that this rank steps."""

    parameter: str  # its name in the module
    begin: int  # index of the first element in the parameter
    tensor: torch.Tensor  # 1-D; the optimizer's parameter. float32 if the module's parameter has 16 bits


class _Sharded:
    """The part of Sharded that is added to a torch optimizer."""

    def __init__(self, model: DistributedDataParallel, base: type, params: Any, options: dict[str, Any]) -> None:
        self._model = model
        self._reducer = model._attached
        self.pieces: list[Piece] = []
        self._base = base
        self._groups: list[list[torch.Tensor]] = []  # the module's parameters, by group
        self._own: list[Any] = []  # this rank's pieces in the reducer
        self._trained: list[torch.Tensor] = []  # all parameters of the groups
        self._indices: list[int] = []  # their indices among the model's parameters
        self._writes: list[int] = []  # by piece: the writes to its parameter that its master includes
        self._free = {id(tensor): index for index, tensor in enumerate(self._reducer.parameters)}  # those in no group, by id
        self._members: list[str] = []  # by parameter: its group's name
        self._compared = False  # this step's clip_grad_norm has compared the options
        self._clips = False
        self._transaction = Transaction("Sharded")
        self._reducer.has_optimizer = True
        params = self._reducer.parameters if params is None else params
        base.__init__(self, params if isinstance(params, torch.Tensor) else list(params), **options)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = param_group["params"] if isinstance(param_group, dict) else None
        if given is None or isinstance(given, set):
            super().add_param_group(param_group)  # type: ignore[misc] # refuses it
            return
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        whole = [one[1] if isinstance(one, tuple) else one for one in given]
        frozen = {id(one) for one in self._model.module.parameters() if not one.requires_grad}
        own: list[tuple[Piece, Any]] = []
        free, trained = dict(self._free), []
        for parameter in whole:
            index = free.pop(id(parameter), None)
            if index is not None:
                trained.append((index, parameter))
                for of in self._reducer.pieces_of.get(index, ()):
                    tensor = of.values.float() if _has_master(of.values) else of.values
                    own.append((Piece(of.name, of.begin, tensor), of))
            elif id(parameter) not in frozen:
                raise InvalidArgument(
                    "Sharded: a parameter group has a tensor that the model does not train, or that is in a group already -- "
                    "give parameters of the module that the DistributedDataParallel wraps, each once"
                )
        options = {name: value for name, value in param_group.items() if name != "param_names"}
        super().add_param_group({**options, "params": [piece.tensor for piece, _ in own]})  # type: ignore[misc]
        for piece, of in own:
            self.pieces.append(piece)
            self._own.append(of)
            self._writes.append(self._reducer.writes_to(of.index))
        names = self._reducer._parameters
        self._members += [f"'{names[index].name}' in parameter group {len(self._groups)}" for index, _ in trained]
        self._members.sort()
        self._groups.append(whole)
        self._trained += [parameter for _, parameter in trained]
        self._indices += [index for index, _ in trained]
        self._free = free

    # -------------------------------------------------------------------------------------------- what has to be alike

    def _agree(self, *more: tuple[str, str, str]) -> list[float]:
        """Returns numbers whose sums over ranks tell whether all ranks have the same groups and options."""
        groups: Any = self.param_groups  # type: ignore[attr-defined]
        names = sorted(self.defaults)  # type: ignore[attr-defined]
        options = [(f"parameter group {number}", name, f"{_plain(group.get(name))}")
                   for number, group in enumerate(groups) for name in names]  # fmt: skip
        options += [("", f"'{name}' without a gradient", "") for name in self._without_gradient()]
        options += self._local_gradients()
        self._transaction.agree([*(("", member, "") for member in self._members), *more, *options])
        return self._transaction.sums()

    def _without_gradient(self) -> list[str]:
        """Returns parameters without a gradient. With whole gradients, a rank that drops one leaves out its piece."""
        if self._reducer.core.divides_gradients:
            return []
        return [one.name for one in self._reducer._parameters if one.tensor.grad is None]

    def _local_gradients(self) -> list[tuple[str, str, str]]:
        """Returns gradients made since the last reduction. They are this rank's own, unless the program averages them."""
        reducer = self._reducer
        told = []
        for index, parameter in zip(self._indices, self._trained):
            if parameter.grad is None or not reducer.core.is_local(index):
                continue
            name = reducer._parameters[index].name
            if reducer.core.divides_gradients:
                raise InvalidArgument(
                    f"Sharded: the gradient of '{name}' was accumulated in no_sync, and no backward outside of it has come since: "
                    "nothing of it would be stepped -- let the last backward before clip_grad_norm and step be outside of no_sync "
                    "(or call the model's step_without_samples()), or drop it by zero_grad()"
                )
            digest = _digest(parameter.grad)
            told.append(("", f"gradient of '{name}', which no backward outside of no_sync has averaged", f"{digest}"))
        return told

    @torch.no_grad()
    def _before_step(self) -> None:
        reducer = self._reducer
        reducer.check_parameters("Sharded.step")
        groups: Any = self.param_groups  # type: ignore[attr-defined]
        if sum(len(group["params"]) for group in groups) != len(self.pieces):
            raise InvalidArgument(
                "Sharded.step: parameter groups have other tensors than this rank's pieces -- add parameters by "
                "add_param_group of this optimizer"
            )
        work = None
        if not self._compared:
            sums = torch.tensor(self._agree(), dtype=torch.float64)
            work = reducer.comm.all_reduce(sums, async_op=True) if reducer.comm.size() > 1 else None
        reducer.take_gradients()
        reducer.note_writes()
        for number, (piece, of) in enumerate(zip(self.pieces, self._own)):
            writes = reducer.writes_to(of.index)
            written = writes != self._writes[number] and piece.tensor is not of.values
            # If the weights equal the rounded master, the master was saved together with them.
            if written and not torch.equal(of.values, piece.tensor.to(of.values.dtype)):
                piece.tensor.copy_(of.values)
            self._writes[number] = writes
            piece.tensor.grad = None if of.gradient is None else of.gradient.to(piece.tensor.dtype)
        # Other ranks of this host may still read parameters, for outputs that they compute.
        if work is not None:
            work.wait()
            self._transaction.require_sums(reducer.comm, sums.tolist(), "Sharded.step")
        elif reducer.core.shares_parameters:
            reducer.core.meet()
        self._compared = False
        reducer.core.allow_writes()

    @torch.no_grad()
    def _after_step(self) -> None:
        reducer = self._reducer
        for piece, of in zip(self.pieces, self._own):
            if piece.tensor is not of.values:
                of.values.copy_(piece.tensor)
            piece.tensor.grad = None
            if reducer.core.divides_gradients:
                of.gradient = None
        reducer.core.gather()
        reducer.core.forbid_writes()
        if reducer.core.shares_parameters:
            reducer.core.meet()
        # For autograd the parameters count as changed in place, because an older graph must not be used any more.
        for parameter in self._trained:
            parameter.view(-1)[:0].zero_()
        reducer.note_step()
        self._transaction.end("", True)

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._tell_of_clipping()
        self._before_step()
        # torch wraps this function in a step's hooks; as soon as a plain optimizer of `base` exists, `base`'s step too.
        step: Any = self._base.step  # type: ignore[attr-defined]
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(self)
        self._after_step()
        return loss

    def _tell_of_clipping(self) -> None:
        global _told_of_clipping
        reducer = self._reducer
        if self._clips or _told_of_clipping or not reducer.core.divides_gradients:
            return
        _told_of_clipping = True
        if reducer.comm.rank() == 0:
            _log.warning(
                "Sharded: gradients are divided (sharding='%s'): torch.nn.utils.clip_grad_norm_ and clip_grad_value_ find "
                "none, and clip nothing -- if this program calls them, call clip_grad_norm(max_norm) of the optimizer instead",
                self._model.options.sharding,
            )

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> float:
        if not max_norm > 0:
            raise InvalidArgument(f"clip_grad_norm({max_norm}): a norm is above 0")
        reducer = self._reducer
        reducer.take_gradients()
        given = [of.gradient for of in self._own if of.gradient is not None]
        square = sum(float(gradient.double().square().sum()) for gradient in given)
        digest = self._agree(("clip_grad_norm", "max_norm", f"{float(max_norm)}"))
        sums = torch.tensor([square, *digest], dtype=torch.float64)
        reducer.comm.all_reduce(sums)
        self._transaction.require_sums(reducer.comm, sums[1:].tolist(), "Sharded.clip_grad_norm")
        self._compared = self._clips = True
        norm = math.sqrt(float(sums[0]))
        factor = max_norm / (norm + 1e-6)
        if not factor >= 1:  # as torch does if the norm is not finite
            if not reducer.core.divides_gradients:
                given = [tensor.grad for tensor in self._trained if tensor.grad is not None]
            for gradient in given:
                gradient.mul_(factor)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._trained:
            parameter.grad = None
        for of in self._own:
            of.gradient = None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        masters = {number: piece.tensor for number, (piece, of) in enumerate(zip(self.pieces, self._own))
                   if piece.tensor is not of.values}  # fmt: skip
        state["pieces"] = self._places()
        return {**state, "masters": masters} if masters else state

    def _places(self) -> list[tuple[str, int, int]]:
        """Returns parameter, first element and number of elements of each piece."""
        return [(piece.parameter, piece.begin, piece.tensor.numel()) for piece in self.pieces]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        masters = state_dict.get("masters", {})
        taken = [(piece.tensor, masters[number]) for number, (piece, of) in enumerate(zip(self.pieces, self._own))
                 if number in masters and piece.tensor is not of.values]  # fmt: skip
        places = [tuple(place) for place in state_dict.get("pieces", ())]
        if places != self._places() or len(taken) != len(masters) or any(own.shape != master.shape for own, master in taken):
            raise InvalidArgument(
                "Sharded.load_state_dict: the state is of other pieces -- it is of a rank of another layout, or of another "
                "model: cohort.checkpoint.CheckpointFolder divides anew"
            )
        super().load_state_dict(state_dict)  # type: ignore[misc]
        for own, master in taken:
            own.copy_(master)

    # For cohort.checkpoint, which treats the sharded optimizer as one of the whole module.

    def _whole(self) -> torch.optim.Optimizer:
        """Returns a new optimizer of the module's whole parameters, with the options of this one's groups."""
        whole: Any = object.__new__(self._base)
        groups: Any = self.param_groups  # type: ignore[attr-defined]
        whole.param_groups = [{**group, "params": of} for group, of in zip(groups, self._groups)]
        whole.state = defaultdict(dict)
        whole.defaults = self.defaults  # type: ignore[attr-defined]
        return whole

    def _shards(self) -> dict[str, tuple[torch.Tensor, tuple[list[int], int]]]:
        """Returns, by name in a checkpoint, this rank's part of each tensor of the state, the sizes of the whole
        tensor, and the part's first element."""
        runs: dict[str, list[tuple[int, torch.Tensor]]] = {}
        sizes: dict[str, list[int]] = {}
        state: Any = self.state  # type: ignore[attr-defined]
        for piece, of in zip(self.pieces, self._own):
            fields = dict(state.get(piece.tensor, {}))
            if piece.tensor is not of.values:
                fields["master"] = piece.tensor
            for field, value in fields.items():
                name = f"optimizer/state/{piece.parameter}/{field}"
                if isinstance(value, torch.Tensor) and value.shape == piece.tensor.shape:
                    runs.setdefault(name, []).append((piece.begin, value.detach()))
                    sizes[name] = list(self._reducer.parameters[of.index].shape)
                elif value is not None and piece.begin == 0:  # a count is the same for all pieces
                    count = value.item() if isinstance(value, torch.Tensor) else value
                    runs[name], sizes[name] = [(0, torch.tensor(int(count)))], []
        return {
            name: (torch.cat([value for _, value in run]) if sizes[name] else run[0][1], (sizes[name], run[0][0]))
            for name, run in runs.items()
        }

    def _masters_written(self) -> None:
        self._writes = [self._reducer.writes_to(of.index) for of in self._own]

    @torch.no_grad()
    def _take(self, whole: torch.optim.Optimizer, masters: dict[str, torch.Tensor]) -> None:
        """Takes over the options and the state of `whole`; `masters`: by parameter, if they were saved."""
        groups: Any = self.param_groups  # type: ignore[attr-defined]
        for group, of in zip(groups, whole.param_groups):
            group.update({name: value for name, value in of.items() if name != "params"})
        state: Any = self.state  # type: ignore[attr-defined]
        state.clear()
        for piece, own in zip(self.pieces, self._own):
            parameter = self._reducer.parameters[own.index]
            here = slice(piece.begin, piece.begin + piece.tensor.numel())
            for field, value in whole.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):  # a count has no dimensions; nor may a parameter
                    is_whole = field != "step" and value.shape == parameter.shape
                    value = value.reshape(-1)[here].clone() if is_whole else value.clone()
                state[piece.tensor][field] = value
            if piece.tensor is not own.values:
                master = masters.get(piece.parameter)
                piece.tensor.copy_(own.values if master is None else master.reshape(-1)[here])


def _has_master(values: torch.Tensor) -> bool:
    return values.dtype in (torch.float16, torch.bfloat16)


def _digest(tensor: torch.Tensor) -> int:
    """Returns the same number on all ranks that have the same bits, in any order of the sum, since integers wrap around."""
    bits = tensor.detach().reshape(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return int((bits.long() * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum())


def _plain(value: Any) -> Any:
    """Returns an option in a form equal on all ranks; None for an object, which may differ between ranks."""
    if isinstance(value, torch.Tensor):
        return _plain(value.item()) if value.numel() == 1 else None
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, (bool, str)):
        return value
    return float(value) if isinstance(value, (int, float)) else None


_told_of_clipping = False
# Optimizers of torch.optim that give the same bits in pieces. Others look at whole matrices, or at all parameters.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop")
_NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon")


def _require_elementwise(optimizer: Any, declared: bool) -> None:
    if not isinstance(optimizer, type) or not issubclass(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"Sharded: {optimizer!r} is no class of torch.optim, such as torch.optim.AdamW")
    for name in _NOT_ELEMENTWISE:
        if issubclass(optimizer, getattr(torch.optim, name, ())):
            raise InvalidArgument(
                f"Sharded: {name} does not work on each element alone, so that it would be another optimizer in pieces -- take "
                "another one, or a DistributedDataParallel without sharding"
            )
    known = (getattr(torch.optim, name, None) for name in _ELEMENTWISE)
    step = inspect.unwrap(optimizer.step)
    if not declared and all(one is None or inspect.unwrap(one.step) is not step for one in known):
        raise InvalidArgument(
            f"Sharded: {optimizer.__name__} is none of torch's {', '.join(_ELEMENTWISE)} -- if its step works on each element "
            "alone (no norms, factors or shapes of whole parameters), say so by elementwise=True; else it would be another "
            "optimizer in pieces"
        )


def Sharded(model: DistributedDataParallel, optimizer: type, params: Any = None, *, elementwise: bool = False,
            **options: Any) -> Any:  # fmt: skip
    """A torch optimizer divided over the ranks, for a DistributedDataParallel with `sharding`.

        model = cohort.nn.DistributedDataParallel(net, sharding="parameters")
        optimizer = cohort.optim.Sharded(model, torch.optim.AdamW, lr=1e-3)
        ...  loss.backward(); optimizer.clip_grad_norm(1.0); optimizer.step(); optimizer.zero_grad()

    model      its `sharding` says what is divided: "optimizer" (the optimizer's state), "gradients" (gradients, too:
               after a backward outside of no_sync no parameter has one), "parameters" (parameters, too: the ranks of a
               host share one copy, to which only the optimizer writes; the next forward or step refuses a parameter
               that was written in place, and names it)
    optimizer  a class of torch.optim that works on each element separately: SGD, Adam, AdamW, Adagrad, RMSprop, ...
    params     the module's parameters, as torch's optimizers take them: tensors, (name, tensor), or parameter groups, dicts
               with "params"; default: all of them. Frozen parameters are skipped. A model may have several optimizers;
               each parameter belongs to one
    elementwise  True: `optimizer` is not torch's, and works on each element separately
    options    arguments of the optimizer: lr, betas, ...; the same on all ranks, also when schedules change them

    Returns an instance of `optimizer` whose parameters are this rank's `pieces`, so that learning-rate schedules, the
    options of groups and add_param_group work as usual, with
        step(closure=None)        collective: afterwards all ranks have all parameters, with the same bits as those of
                                  `optimizer`
        clip_grad_norm(max_norm)  collective, between backward and step: scales the gradients so that their norm over
                                  all ranks is at most max_norm, and returns the norm before; squares are summed in
                                  float64, by rank (of the model's communicator: parts of the model on other ranks are
                                  not included). torch.nn.utils.clip_grad_norm_ finds no gradients if they are divided,
                                  and clips nothing
        zero_grad()               sets the gradients of its parameters and pieces to None, whatever set_to_none says;
                                  `step` also removes divided gradients
        pieces                    list of Piece
    Parameters of 16 bits are updated in float32 ("master weights"), which the pieces keep, and rounded afterwards. A
    parameter without a gradient is not changed. state_dict() holds this rank's state, the pieces it belongs to ("pieces"),
    and their master weights ("masters"); load_state_dict raises InvalidArgument for a state of other pieces. Hooks of
    `step` run once, before pieces have their gradients and after all ranks have all parameters. torch's GradScaler finds
    no gradients in the optimizer.

    Raises InvalidArgument if the model has no sharding, for tensors that it does not train, and for optimizers that do
    not work on each element separately. `step` and `clip_grad_norm` raise Mismatch on all ranks if options or groups
    differ. If gradients are not divided, they also raise Mismatch if ranks differ in which parameters have a gradient,
    or in gradients from no_sync that no later backward has averaged; if gradients are divided, such gradients are
    refused (InvalidArgument).
    """
    if not isinstance(model, DistributedDataParallel) or model.options.sharding == "none":
        raise InvalidArgument(
            "Sharded: a cohort.nn.DistributedDataParallel with sharding='optimizer', 'gradients' or 'parameters' is wanted"
        )
    _require_elementwise(optimizer, elementwise)
    return type(f"Sharded{optimizer.__name__}", (_Sharded, optimizer), {})(model, optimizer, params, options)
