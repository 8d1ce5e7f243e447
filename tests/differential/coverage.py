"""Coverage of each wrapper's public API by programs: names after a dot or a comma in their text."""

from __future__ import annotations

import re


class Used:
    def __init__(self) -> None:
        self.names: dict[str, set[str]] = {}

    def add(self, text: str, method: str) -> None:
        own = {"sharded": "ddp"}.get(method, method)
        for key in {method, own}:
            self.names.setdefault(key, set()).update(re.findall(r"[A-Za-z_]\w*", text))

    def report(self) -> None:
        """Prints what no program used; asks the package itself what there is."""
        try:
            found = public()
        except ImportError as error:
            print(f"what no program used is not known: {error}")
            return
        for method, names in found.items():
            missing = sorted(names - self.names.get(method, set()))
            print(f"not used, {method}: {', '.join(missing) or 'nothing'}")


def public() -> dict[str, set[str]]:
    """Parameters of the constructors, and methods, by method of training."""
    import inspect

    import torch

    import cohort.chainermn
    import cohort.nn
    import cohort.optim
    import cohort.horovod.torch as hvd
    from cohort._local_sgd import LocalSteps
    from cohort.chainermn.optimizers import MultiNodeOptimizer
    from cohort.nn import comm_hooks
    from cohort.optim import _Sharded
    from cohort.horovod.torch._reduced_optimizer import ReducedOptimizer

    def of(*things: object) -> set[str]:
        names: set[str] = set()
        for thing in things:
            if inspect.isclass(thing):
                base = set(dir(torch.nn.Module)) if issubclass(thing, torch.nn.Module) else set()
                names |= {name for name, value in vars(thing).items() if callable(value) and name[0] != "_"} - base
                thing = thing.__init__
            names |= {name for name in inspect.signature(thing).parameters if name not in ("self", "args", "kwargs", "options")}
        return names

    hooks = {name for name in dir(comm_hooks) if name.endswith("_hook") and name[0] != "_"}
    return {
        "ddp": of(cohort.nn.DistributedDataParallel) | hooks | of(comm_hooks.WireState, comm_hooks.PowerSGDState),
        "sharded": of(cohort.optim.Sharded, _Sharded), "local_sgd": of(cohort.optim.LocalSGD, LocalSteps),
        "diloco": of(cohort.optim.DiLoCo), "hvd": of(hvd.DistributedOptimizer, ReducedOptimizer),
        "chainermn": of(cohort.chainermn.create_multi_node_optimizer, MultiNodeOptimizer), "torch_ddp": hooks,
    }  # fmt: skip
