"""One step for a model whose dense part is on every rank (DistributedDataParallel) and whose embeddings are on parameter
servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch

from cohort._checkpoint.optimizer_state import same_objects
from cohort.errors import InvalidArgument
from cohort.ps import Client, Table, Work
from cohort.ps._checks import refuse
from cohort.ps.torch._embedding import Rows

_NAME = "HybridOptimizer"


class _TableStep:
    """A table, its modules, and its group of options, to which learning rate schedules write."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.modules: list[Rows] = []
        self.group: dict[str, Any] = {"params": [], "lr": table.lr, "table": table.name}

    def gathered(self, average: bool) -> Optional[tuple[torch.Tensor, torch.Tensor]]:
        kept = [one for module in self.modules for one in module.kept or []]
        if not kept:
            return None
        keys = torch.cat([keys for keys, _ in kept])
        gradients = torch.cat([gradients for _, gradients in kept])
        if average and self.table.adds_workers and self.table.client.workers > 1:
            gradients = gradients / self.table.client.workers
        return keys, gradients

    def push(self, keys: torch.Tensor, gradients: torch.Tensor) -> Work:
        work: Work = self.table.push(keys, gradients, lr=float(self.group["lr"]), async_op=True)
        return work

    def drop(self) -> None:
        for module in self.modules:
            module.kept = []


class HybridOptimizer(torch.optim.Optimizer):
    """Steps the dense part and the tables together.

    dense    the dense part's optimizer: a torch one under DistributedDataParallel, or cohort.horovod.torch.DistributedOptimizer
    tables   the modules (Embedding, EmbeddingBag) whose rows are to be stepped. From now on their backward keeps
             gradients, which `step` pushes and `zero_grad` drops
    average  gradients of tables with Sync are divided by the number of workers, as DistributedDataParallel divides its
             own; with Bounded and Async each worker's push is a separate step and is not divided

    `step` pushes the tables' gradients, steps the dense part, and ends this worker's clock. Pushes take effect only
    with the clock, so a process that dies in between leaves nothing of its step on the servers (with Async tables it
    may). Its steps of the dense part are lost as well, and the training continues from a CheckpointFolder.

    `param_groups` are the dense optimizer's groups and one for each table (with "lr", and its name as "table"), so
    learning-rate schedules work on both; with Sync the lowest worker's rate counts. A closure is called once.
    """

    def __init__(self, dense: torch.optim.Optimizer, tables: Iterable[torch.nn.Module], *, average: bool = True) -> None:
        if not hasattr(dense, "param_groups") or not hasattr(dense, "defaults"):
            refuse(_NAME, "dense", dense, "pass the dense part's optimizer: torch.optim.Adam(module.parameters())")
        if isinstance(tables, Rows) or not isinstance(tables, Iterable):
            refuse(_NAME, "tables", tables, "pass a list of modules: tables=[embedding]")
        if isinstance(dense, torch.optim.LBFGS):
            raise InvalidArgument("HybridOptimizer: LBFGS takes several passes for one step, which tables cannot undo")
        self.dense = dense
        self.average = average
        self._steps: list[_TableStep] = []
        self._half = False
        super().__init__([torch.zeros(1)], dict(dense.defaults))  # for schedules and hooks, which expect an optimizer
        for module in tables:
            self._add(module)
        if not self._steps:
            raise InvalidArgument("HybridOptimizer: there are no tables -- use the dense optimizer alone")

    def _add(self, module: torch.nn.Module) -> None:
        if not isinstance(module, Rows):
            raise InvalidArgument(f"HybridOptimizer: a {type(module).__name__} is no Embedding or EmbeddingBag of cohort.ps.torch")
        if module.kept is not None:
            raise InvalidArgument(f"HybridOptimizer: another one steps the embedding of table {module.table.name!r} already")
        if self._steps and module.table.client is not self.client:
            raise InvalidArgument("HybridOptimizer: the tables are of several clients, whose clocks do not end together")
        step = next((step for step in self._steps if step.table.name == module.table.name), None)
        if step is None:
            step = _TableStep(module.table)
            self._steps.append(step)
        step.modules.append(module)
        module.kept = []

    @property
    def client(self) -> Client:
        return self._steps[0].table.client

    # The base class has its own attribute, which its constructor sets.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [*self.dense.param_groups, *(step.group for step in self._steps)]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        pass

    @property
    def state(self) -> Any:
        return self.dense.state

    @state.setter
    def state(self, state: Any) -> None:
        pass

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the dense optimizer."""
        if self._steps:
            self.dense.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.dense.zero_grad(set_to_none=set_to_none)
        for step in self._steps:
            step.drop()

    # GradScaler checks this; `step` then reports unsupported uses.
    _step_supports_amp_scaling = True

    def step(self, closure: Optional[Callable[[], Any]] = None, *, grad_scaler: Any = None) -> Any:
        """Returns the closure's result. Before changing anything, raises NonFinite for a table's gradient, naming the
        key, and InvalidArgument if a table refuses its learning rate (Ftrl keeps its own). After any other error the
        two parts may be inconsistent: then further steps are refused."""
        if grad_scaler is not None:
            raise InvalidArgument("HybridOptimizer: gradients of tables are not unscaled -- use autocast to bfloat16, without GradScaler")
        if self._half:
            raise InvalidArgument(
                "HybridOptimizer: an earlier step failed in its midst, so the dense part and the tables may not belong "
                "together -- go on from the last checkpoint, in new processes"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pushes = [(step, gathered) for step in self._steps if (gathered := step.gathered(self.average)) is not None]
        for step, (keys, gradients) in pushes:
            if not gradients.isfinite().all():
                step.push(keys, gradients)  # raises NonFinite, naming the key, and sends nothing
        for step, (keys, gradients) in pushes:
            step.push(keys[:0], gradients[:0]).wait()  # sends nothing, but raises if the table refuses its rate
        self._half = True
        works = [step.push(*gathered) for step, gathered in pushes]
        self.dense.step()
        for work in works:
            work.wait()
        self.client.clock()
        self._half = False
        for step in self._steps:
            step.drop()
        return loss

    def table_rates(self) -> dict[str, float]:
        """Returns learning rates by table."""
        return {step.table.name: float(step.group["lr"]) for step in self._steps}

    def set_table_rates(self, rates: dict[str, float]) -> None:
        for step in self._steps:
            if step.table.name in rates:
                step.group["lr"] = rates[step.table.name]

    def state_dict(self) -> dict[str, Any]:
        """Returns the dense optimizer's state and the tables' learning rates; rows and their state are on servers."""
        return {"dense": self.dense.state_dict(), "tables": self.table_rates()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with same_objects(self.dense):  # schedules may refer to its groups
            self.dense.load_state_dict(state_dict["dense"])
        self.set_table_rates(state_dict["tables"])
