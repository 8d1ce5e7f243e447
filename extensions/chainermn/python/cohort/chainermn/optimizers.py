"""Optimizers that average gradients over ranks before each step."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch.nn.parameter import is_lazy

from cohort.chainermn import _gradients
from cohort.chainermn.communicators import CommunicatorBase
from cohort.errors import InvalidArgument, Mismatch
from cohort._core import require_same_on_all_ranks
from cohort.nn._tensors import broadcast_tensors
from cohort.horovod.torch import _comparison
from cohort.horovod.torch._wrapping import Wrapped, derived

__all__ = ["create_multi_node_optimizer"]


def create_multi_node_optimizer(actual_optimizer: torch.optim.Optimizer, communicator: CommunicatorBase,
                                double_buffering: bool = False, zero_fill: bool = True,
                                compare_ranks: bool = True) -> Any:  # fmt: skip
    """Returns an optimizer with the class, the groups and the state of `actual_optimizer`, which must not be used any
    more.
    Collective.

    double_buffering  reduce gradients while the next ones are computed. Each step then uses the means of the step before,
                      so the first step changes nothing and leaves no gradient. A parameter that was frozen since is not
                      moved; ranks that have frozen different ones since are refused. Works with any communicator
    zero_fill         parameters without a gradient contribute zeros; otherwise they have to be without one on all ranks
    compare_ranks    whether step() raises Mismatch, on all ranks, if an option of the optimizer (such as its learning
                     rate) differs by rank. Checked every twentieth step, or with N > 20 groups every N steps

    All parameters become rank 0's, also those of groups added later; there is no first update that only sends them.
    `step()` averages the gradients over all ranks, each counted once, and steps; `update(lossfun, ...)` runs a whole
    iteration. Raises Mismatch on every rank if the ranks have different parameters.
    """
    if not isinstance(actual_optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"create_multi_node_optimizer: an optimizer of torch is needed, not {type(actual_optimizer).__name__}"
        )
    if isinstance(actual_optimizer, MultiNodeOptimizer):
        raise InvalidArgument("create_multi_node_optimizer: this is a multi-node optimizer already")
    self = derived(MultiNodeOptimizer, actual_optimizer)
    self.communicator = communicator
    self._double_buffering, self._zero_fill = double_buffering, zero_fill
    self._compares, self._steps = compare_ranks and communicator.communicator.size() > 1, 0
    self._scaled = False
    self.target = None
    self._under_way = None
    options = {"double_buffering": double_buffering, "zero_fill": zero_fill, "compare_ranks": compare_ranks}
    lines = [f"option {name}={value}" for name, value in options.items()]
    require_same_on_all_ranks(communicator.communicator, lines, who="create_multi_node_optimizer")
    self._send_parameters(self._named())
    return self


class MultiNodeOptimizer(Wrapped):
    """Mixed into the optimizer's class, so that the rest of `self` is the optimizer."""

    communicator: CommunicatorBase
    target: Optional[torch.nn.Module]
    _double_buffering: bool
    _zero_fill: bool
    _compares: bool
    _steps: int
    _scaled: bool  # the gradients are means already, and checked by a GradScaler
    _under_way: Optional[_gradients.Mean]

    def setup(self, link: torch.nn.Module) -> Any:
        """Sets all ranks' parameters and buffers of a module to rank 0's; errors then use its parameter names.

        Returns the optimizer. Collective. The module's parameters have to be the optimizer's.
        """
        ours = {id(tensor) for _, tensor in self._named()}
        for name, tensor in link.named_parameters():
            if tensor.requires_grad and id(tensor) not in ours:
                raise InvalidArgument(
                    f"setup: the optimizer was not given the module's '{name}' -- make it with model.parameters()"
                )
        self.target = link
        self.communicator.bcast_data(link)
        return self

    def update(
        self, lossfun: Optional[Callable[..., torch.Tensor]] = None, *args: Any, **kwargs: Any
    ) -> Optional[torch.Tensor]:
        """Runs one iteration: zero_grad(), lossfun(*args, **kwargs), its backward, and the step. Returns the loss.

        Without lossfun it only steps, with the existing gradients.
        """
        loss = None
        if lossfun is not None:
            self.zero_grad()
            loss = lossfun(*args, **kwargs)
            loss.backward()
        self.step()
        return None if loss is None else loss.detach()

    def step(self, closure: Optional[Callable[[], Any]] = None, *args: Any, **kwargs: Any) -> Any:
        """Averages the gradients and steps; collective.

        closure  called as the optimizer needs, the same number of times on all ranks; its gradients and the loss that
                 it returns are averaged. Not with double_buffering
        """
        if closure is not None and self._double_buffering:
            raise InvalidArgument("step: a closure is to be evaluated at once, which double_buffering does not")
        self._compare()
        result = None
        if closure is not None:
            result = super().step(lambda: self._averaged(closure), *args, **kwargs)  # type: ignore[misc]
        elif not self._double_buffering:
            if not self._scaled:
                self._start(copied=False).deliver()
            self._scaled = False
            result = super().step(*args, **kwargs)  # type: ignore[misc]
        else:
            before, self._under_way = self._under_way, None
            if before is not None:
                before.wait()
                self._require_same_frozen(before)
            self._under_way = self._start(copied=True)
            if before is not None:
                before.deliver()
            # Parameters that were unfrozen, added or first used since then have only this rank's current gradient.
            known = set() if before is None else set(map(id, before.parameters))
            for group in self.param_groups:
                for tensor in group["params"]:
                    if id(tensor) not in known or not tensor.requires_grad:
                        tensor.grad = None
            if before is not None:
                result = super().step(*args, **kwargs)  # type: ignore[misc]
        self._stepped()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the optimizer's own step runs the hooks of users

    def _before_scaler(self) -> None:
        # The scaler checks the means, which are the same on all ranks, so that all skip a step or none does.
        if self._double_buffering:
            raise InvalidArgument(
                "create_multi_node_optimizer: with double_buffering=True each step takes the gradients of the step before, which "
                "a GradScaler has scaled otherwise -- leave out one of the two"
            )
        self._start(copied=False).deliver()
        self._scaled = True

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Like the optimizer's own method."""
        self._scaled = False
        return super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def _compare(self) -> None:
        groups = self.param_groups
        self._steps += 1
        if not self._compares or self._steps % _comparison.period_of(groups):
            return
        comm = self.communicator.communicator
        options = _comparison.options_of(groups, self.defaults)  # type: ignore[attr-defined]
        digest = _comparison.digest_of(options)
        most = torch.tensor([digest, -digest], dtype=torch.int64)
        comm.all_reduce(most, op="max")
        if most[0] != -most[1]:
            difference = _comparison.difference_of(self.communicator.allgather_obj(options), range(comm.size()))
            if difference is not None:
                raise Mismatch(f"{difference}, in step {self._steps} of the optimizer: {_comparison.ADVICE}")

    def _require_same_frozen(self, before: _gradients.Mean) -> None:
        # The means move only parameters that a rank has not frozen since the reduction began, so ranks have to agree.
        comm = self.communicator.communicator
        if comm.size() == 1:
            return
        frozen = [not tensor.requires_grad for tensor in before.parameters]
        digest = zlib.crc32(bytes(frozen))
        most = torch.tensor([digest, -digest], dtype=torch.int64)
        comm.all_reduce(most, op="max")
        if most[0] != -most[1]:
            here = {id(tensor) for tensor, one in zip(before.parameters, frozen) if one}
            names = ", ".join(repr(name) for name, tensor in self._named() if id(tensor) in here) or "none"
            raise Mismatch(
                f"step with double_buffering: ranks have frozen different parameters since their last step (here: {names}) -- "
                "freeze the same ones on all ranks"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like the optimizer's own method; the new parameters become rank 0's. Collective."""
        before = {id(tensor) for _, tensor in self._named()}
        super().add_param_group(param_group)  # type: ignore[misc]
        self._send_parameters([(name, tensor) for name, tensor in self._named() if id(tensor) not in before])

    def _forget(self) -> None:
        self._under_way = None
        self._scaled = False

    def _named(self) -> _gradients.Named:
        names = {} if self.target is None else {id(tensor): name for name, tensor in self.target.named_parameters()}
        groups = self.param_groups
        return [
            (names.get(id(tensor), f"parameter {i} of group {g}"), tensor)
            for g, group in enumerate(groups)
            for i, tensor in enumerate(group["params"])
        ]

    def _start(self, *, copied: bool) -> _gradients.Mean:
        comm = self.communicator
        parameters = _gradients.collected(comm.communicator, self._named(), self._zero_fill)
        return _gradients.Mean(comm.communicator, parameters, comm.get_config("allreduce_grad_dtype"), copied=copied)

    def _averaged(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self._start(copied=False).deliver()
        # Ranks that saw different losses would make different decisions.
        mean = torch.as_tensor(loss).detach().clone()
        self.communicator.communicator.all_reduce(mean, op="average")
        return mean

    def _send_parameters(self, named: _gradients.Named) -> None:
        comm = self.communicator.communicator
        for name, tensor in named:
            if is_lazy(tensor):
                raise InvalidArgument(
                    f"create_multi_node_optimizer: {name} has no shape yet -- run a forward before, under torch.no_grad()"
                )
        lines = [f"'{name}' of {str(tensor.dtype)[6:]} {list(tensor.shape)}" for name, tensor in named]
        require_same_on_all_ranks(comm, lines, who="create_multi_node_optimizer")
        broadcast_tensors(comm, [tensor.detach() for _, tensor in named])
