"""`DistributedOptimizer`: any optimizer, with gradients that are reduced over ranks while backward still runs."""

from __future__ import annotations

from typing import Iterable, List, Optional, Sequence, Tuple, Type, Union

import torch
from cohort.horovod import basics
from cohort.horovod.process_sets import ProcessSet, global_process_set, require_world
from cohort.horovod.operations import Adasum, Average, check_groups, check_options, parts_of
from cohort.horovod.torch._adasum_optimizer import AdasumOptimizer
from cohort.horovod.torch._gradients import Reducer
from cohort.horovod.torch._reduced_optimizer import ReducedOptimizer
from cohort.horovod.torch.compression import Compression, Compressor
from torch import Tensor

Names = Iterable[Tuple[str, Tensor]]
Groups = Union[None, int, Sequence[Sequence[Tensor]]]


def DistributedOptimizer(optimizer: torch.optim.Optimizer, named_parameters: Optional[Names] = None,
                         compression: Union[Type[Compressor], Compressor] = Compression.none,
                         backward_passes_per_step: int = 1, op: int = Average, gradient_predivide_factor: float = 1.0,
                         num_groups: int = 0, groups: Groups = None, sparse_as_dense: bool = False,
                         process_set: ProcessSet = global_process_set,
                         non_finite: str = "ignore", average_by: str = "ranks",
                         compare_ranks: bool = True) -> torch.optim.Optimizer:  # fmt: skip
    """Returns an optimizer that steps with the gradients of all ranks. It shares the groups, the state and the class of
    `optimizer`, which should not be used any more.

    named_parameters           names for all parameters of the optimizer, by which ranks match gradients; default: their
                               positions
    compression                the format in which gradients travel
    backward_passes_per_step   number of backward passes whose gradients are summed on each rank before a reduction
    op                         hvd.Average, Sum, or Adasum, which reduces the changes by each rank's own step
    gradient_predivide_factor  f: with hvd.Average, gradients are divided by f before the sum, and by size / f after it
    num_groups                 deprecated; use groups
    groups                     a number of groups, each reduced together; or lists of parameters
    sparse_as_dense            reduce sparse gradients as dense ones; the optimizer still receives sparse ones
    process_set                the ranks that reduce; others step with their own gradients
    non_finite                 not Horovod's. "raise": if any rank has a gradient that is NaN or infinite, or that
                               compression makes infinite, step() and synchronize() raise cohort.nn.NonFiniteError on all
                               ranks. It names the first gradient of the lowest such rank. All gradients are None
                               then, nothing has been stepped, and training can continue with the next batch. Costs one
                               reading of the gradients and one small reduction for each step. Not with hvd.Adasum, nor
                               with a GradScaler, which makes infinite gradients on purpose
    average_by                 not Horovod's. "samples": before each backward, set_sample_count(n) gives the number of
                               samples of which this rank's loss is the mean, and the average is over all samples, exact
                               even if ranks have different numbers of them. Costs one small reduction for each step,
                               while forward runs. With op=hvd.Average and backward_passes_per_step=1. Default "ranks",
                               as in Horovod: every rank counts equally
    compare_ranks              not Horovod's. If set, step() and synchronize() raise cohort.Mismatch, on all ranks, if
                               an option of the optimizer (the learning rate, for example) differs by rank: within 21
                               steps, or one more than there are groups. It names rank and value. Each comparison also
                               covers 65,536 weights on the CPU, one parameter after another

    Raises ValueError for arguments that have no meaning, and before `init`.
    """
    groups = check_groups(groups, num_groups, "parameters")
    check_options(op, gradient_predivide_factor, backward_passes_per_step)
    if non_finite not in ("ignore", "raise"):
        raise ValueError(f"non_finite={non_finite!r}: 'ignore' and 'raise' are possible")
    if non_finite == "raise" and op == Adasum:
        raise ValueError("non_finite='raise' does not go with op=hvd.Adasum, which reduces steps and not gradients")
    if average_by not in ("ranks", "samples"):
        raise ValueError(f"average_by={average_by!r}: 'ranks' and 'samples' are possible")
    if average_by == "samples" and (op != Average or backward_passes_per_step != 1):
        raise ValueError("average_by='samples' goes with op=hvd.Average and backward_passes_per_step=1 alone")
    names = _names(optimizer, named_parameters)
    included = True
    if process_set is global_process_set or process_set.process_set_id is None:
        require_world("DistributedOptimizer")
    else:
        included = bool(process_set.included())
    size = process_set.size() or 1
    if op == Adasum and (size > 1 or basics.may_grow()):
        return AdasumOptimizer.wrap(
            optimizer, names, compression, backward_passes_per_step, process_set, included, compare_ranks
        )
    reducer = Reducer(names, compression, backward_passes_per_step, Average if op == Adasum else op,
                      gradient_predivide_factor, _groups(optimizer, groups), sparse_as_dense, process_set, non_finite,
                      average_by)  # fmt: skip
    return ReducedOptimizer.wrap(optimizer, reducer, included, compare_ranks)


def _parameters(optimizer: torch.optim.Optimizer) -> List[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(optimizer: torch.optim.Optimizer, named_parameters: Optional[Names]) -> List[Tuple[str, Tensor]]:
    """Returns a name for each parameter of the optimizer."""
    if named_parameters is None:
        return [
            (f"allreduce.noname.{i}.{j}", parameter)
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        ]
    named = list(named_parameters)
    if any(not isinstance(one, tuple) or len(one) != 2 or not isinstance(one[1], Tensor) for one in named):
        raise ValueError(
            "named_parameters: pairs of a name and a parameter are needed -- usually model.named_parameters()"
        )
    names = [name for name, _ in named]
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise ValueError(f"named_parameters: names have to be different, and these are not: {', '.join(repeated)}")
    known = {id(parameter) for _, parameter in named}
    missing = sum(id(parameter) not in known for parameter in _parameters(optimizer))
    if missing:
        raise ValueError(
            f"named_parameters: {missing} parameters of the optimizer have no name -- name all of them, or leave out "
            "named_parameters"
        )
    wanted = {id(parameter) for parameter in _parameters(optimizer)}
    return [(name, parameter) for name, parameter in named if id(parameter) in wanted]


def _groups(optimizer: torch.optim.Optimizer, groups: Groups) -> List[List[Tensor]]:
    """Returns the lists of parameters that are reduced together."""
    if groups is None:
        return []
    ours = [parameter for parameter in _parameters(optimizer) if parameter.requires_grad]
    if isinstance(groups, int):
        return parts_of(ours, groups)
    seen = set()
    known = {id(parameter) for parameter in ours}
    lists: List[List[Tensor]] = []
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, Tensor):
                raise ValueError(f"groups: {type(parameter).__name__} is no parameter")
            if id(parameter) in seen:
                raise ValueError("groups: a parameter can be in one group only")
            seen.add(id(parameter))
        lists.append([parameter for parameter in group if id(parameter) in known])
    return [group for group in lists if group]
