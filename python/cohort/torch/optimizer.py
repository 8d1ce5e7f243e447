"""`DistributedOptimizer`: any optimizer, with gradients that are reduced over ranks while backward still runs."""

from __future__ import annotations

from typing import Iterable, List, Optional, Sequence, Tuple, Type, Union

import torch
from cohort.hvd import basics
from cohort.hvd.process_sets import ProcessSet, global_process_set, require_world
from cohort.hvd.operations import Adasum, Average, check_groups, check_options, parts_of
from cohort.torch._adasum_optimizer import AdasumOptimizer
from cohort.torch._gradients import Reducer
from cohort.torch._reduced_optimizer import ReducedOptimizer
from cohort.torch.compression import Compression, Compressor
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
    """An optimizer that steps with the gradients of all ranks. It shares the groups, the state and the class of `optimizer`,
    which should not be used any more.

    named_parameters           names under which ranks meet, for all parameters of the optimizer; without them their
                               positions are names
    compression                what gradients travel as
    backward_passes_per_step   gradients of so many backward passes are added up on each rank before they are reduced
    op                         hvd.Average, Sum, or Adasum, which reduces what each rank's own step would change
    gradient_predivide_factor  f: gradients are divided by f before the sum, and by size / f after; with hvd.Average
    num_groups                 deprecated: groups
    groups                     a number: gradients are reduced in so many groups, each at once; or lists of parameters
    sparse_as_dense            reduce sparse gradients as dense ones; the optimizer is given sparse ones again
    process_set                the ranks that reduce; others step with what they have
    non_finite                 not Horovod's. "raise": if any rank has a gradient that is NaN or infinite, or that
                               compression makes infinite, step() and synchronize() raise cohort.nn.NonFiniteError on all
                               ranks: it names the one that the lowest such rank reduced first. All gradients are None
                               then, nothing has been stepped, and training can go on with the next batch. Costs one
                               reading of the gradients and one small reduction for each step. Not with hvd.Adasum, and
                               not beside a GradScaler, which makes infinite gradients on purpose
    average_by                 not Horovod's. "samples": before each backward, set_sample_count(n) says of how many samples
                               this rank's loss is the mean, and the average is that of all samples, exact also where
                               ranks have different numbers of them. Costs one small reduction for each step, while
                               forward runs. With op=hvd.Average and backward_passes_per_step=1. Default "ranks", as
                               Horovod: every rank counts alike
    compare_ranks              not Horovod's. If set, step() and synchronize() raise cohort.Mismatch, on all ranks,
                               where an option of the optimizer (a learning rate, say) differs by rank: within 21 steps,
                               or one more than there are groups. It names rank and value. In each comparison 65,536
                               weights on the CPU are compared, too, one parameter after another

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
    """A name for each parameter of the optimizer."""
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
    """Lists of parameters that are reduced together."""
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
