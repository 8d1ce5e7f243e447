"""Hooks that replace the average over ranks, and choose the format in which gradients travel.

    model = cohort.nn.DistributedDataParallel(net)                      # or torch's, over the backend "cohort"
    model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    model.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=2), comm_hooks.powerSGD_hook)

Names, arguments and defaults are those of torch.distributed.algorithms.ddp_comm_hooks. `process_group` is a group of the
backend "cohort"; None: the ranks that train together, for torch's DistributedDataParallel the default group.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Optional

import torch

from cohort import Communicator, _core
from cohort.errors import InvalidArgument
from cohort.nn._groups import communicator_of
from cohort.nn._hooks import GradBucket, OfOneModel
from cohort.nn._tensors import is_dense

_logger = logging.getLogger("cohort")
_PREFIX = "powerSGD."


def _communicator(process_group: Any, bucket: Any) -> Communicator:
    if process_group is None and isinstance(bucket, GradBucket):
        return bucket.communicator
    if process_group is None:
        process_group = torch.distributed.group.WORLD
    comm = communicator_of(process_group, "a hook on gradients")
    assert comm is not None
    return comm


def _average(process_group: Any, bucket: Any, dtype: Optional[torch.dtype] = None, state: Optional[WireState] = None,
             **how: Any) -> Any:  # fmt: skip
    """Returns a future of the mean, sent as `dtype`, summed in float32. Tells `state` whether the mean is finite."""
    from cohort.distributed.work import Work

    comm, buffer = _communicator(process_group, bucket), bucket.buffer()
    sent = buffer if dtype is None else buffer.to(dtype)
    work = comm.all_reduce(sent, op="average", async_op=True, check_finite=state is not None, **how)

    def deliver() -> None:
        if sent is not buffer:
            buffer.copy_(sent)
        if state is not None and work.finite() is False:
            state._refuse_step()

    def failed(_: BaseException) -> None:
        if state is not None:
            state._refuse_step()

    line = ("hooks", id(comm))
    return Work("all_reduce", line, (work,), [buffer], deliver, failed=failed).get_future().then(_first)


def _first(future: Any) -> torch.Tensor:
    tensor: torch.Tensor = future.value()[0]
    return tensor


def allreduce_hook(process_group: Any, bucket: Any) -> Any:
    """Computes the mean, as without a hook."""
    return _average(process_group, bucket)


def fp16_compress_hook(process_group: Any, bucket: Any) -> Any:
    """Sends gradients as float16; they are summed in float32 and rounded once. Values above 65504 become infinite."""
    return _average(process_group, bucket, torch.float16)


def bf16_compress_hook(process_group: Any, bucket: Any) -> Any:
    """Sends gradients as bfloat16; they are summed in float32 and rounded once."""
    return _average(process_group, bucket, torch.bfloat16)


class WireState(OfOneModel):
    """State of int8_compress_hook and int4_compress_hook, for one model; any other model is refused.

    process_group   see above
    error_feedback  adds what encoding loses to the next step's gradients. Takes as much memory as the gradients, and is
                    kept until buckets are made anew. None: only with int4

    Nothing is kept from a step that was refused on all ranks or whose averages are not finite (a GradScaler skips it),
    nor from earlier steps. A copy has only the options.
    """

    def __init__(self, process_group: Any = None, error_feedback: Optional[bool] = None) -> None:
        self.process_group, self.error_feedback = process_group, error_feedback
        self._residuals: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}  # by bucket: parameters, residual
        self._refused = False  # for the step under way, or the last one

    def _without_model(self) -> dict[str, Any]:
        return {**super()._without_model(), "_residuals": {}, "_refused": False}

    def drop_residuals(self) -> None:
        """Drops what was kept from earlier steps. Call it on all ranks if they skip a step whose averages were finite."""
        self._residuals.clear()  # not set to zero, because an operation that has failed may still be writing there

    def _refuse_step(self) -> None:
        """Called if all ranks have seen that an average is not finite, or an error."""
        self._refused = True

    def _begin_step(self, last_step_refused: bool) -> None:
        if self._refused or last_step_refused:
            self.drop_residuals()
        self._refused = False

    def residual_of(self, bucket: Any) -> torch.Tensor:
        parameters, (known, residual) = bucket.parameters(), self._residuals.get(bucket.index(), ([], None))
        if residual is None or len(known) != len(parameters) or any(a is not b for a, b in zip(known, parameters)):
            residual = torch.zeros(bucket.buffer().numel(), dtype=torch.float32)  # the host's memory
            self._residuals[bucket.index()] = parameters, residual
        return residual


def _wire(state: Any, bucket: Any, wire_format: str) -> Any:
    own = isinstance(state, WireState)
    group, feedback = (state.process_group, state.error_feedback) if own else (state, None)
    if feedback is None and wire_format == "int4":
        if not own:
            raise InvalidArgument(
                "int4_compress_hook: without error feedback four bits lose too much -- give a WireState(process_group), which "
                "keeps it, as the state, or WireState(process_group, error_feedback=False)"
            )
        feedback = True
    if not feedback:
        how: dict[str, Any] = {} if bucket.buffer().dtype != torch.float32 else {"wire_format": wire_format}
        return _average(group, bucket, **how)
    if bucket.index() == 0:
        state._begin_step(isinstance(bucket, GradBucket) and bucket.last_step_refused())
    if bucket.buffer().dtype != torch.float32:
        return _average(group, bucket, state=state)
    return _average(group, bucket, state=state, wire_format=wire_format, residual=state.residual_of(bucket))


def int8_compress_hook(state: Any, bucket: Any) -> Any:
    """Sends float32 between hosts as 8 bits and a scale for each 256 elements; on one host nothing is rounded. `state`:
    a process group, or a WireState."""
    return _wire(state, bucket, "int8")


def int4_compress_hook(state: Any, bucket: Any) -> Any:
    """Sends float32 as 4 bits and a scale for each 128 elements, with error feedback. `state`: a WireState."""
    return _wire(state, bucket, "int4")


class PowerSGDState(OfOneModel):
    """Options of PowerSGD, and its state between steps, for one model; any other model is refused. Parameters and
    defaults are those of torch's class.

    process_group              see above
    matrix_approximation_rank  columns of the thin matrices. 1 to 4 are usual; more keeps more of the gradient
    start_powerSGD_iter        number of first steps that send whole gradients, since training is most sensitive then
    min_compression_rate       a gradient of n x m is compressed if (n + m) * rank * min_compression_rate < n * m; with
                               more dimensions, n is the first. Others, and all but float32, are averaged unchanged
    use_error_feedback         adds what compression loses to the next step's gradient; takes as much memory as the gradients
    warm_start                 a step begins with the Q of the step before instead of a random one
    orthogonalization_epsilon  added to the norms by which columns are divided; at most 1e-3
    random_seed                the same on all ranks
    compression_stats_logging_frequency  steps between two lines of the log at level INFO
    batch_tensors_with_same_shape        accepted for torch's sake; has no effect

    Nothing is kept from a step that was refused on all ranks or whose averages are not finite (a GradScaler skips it),
    nor from earlier steps. A copy keeps its own state, as if it had been saved and loaded. Raises
    cohort.InvalidArgument for values that have no meaning.
    """

    def __init__(self, process_group: Any = None, matrix_approximation_rank: int = 1, start_powerSGD_iter: int = 1_000,
                 min_compression_rate: float = 2, use_error_feedback: bool = True, warm_start: bool = True,
                 orthogonalization_epsilon: float = 0, random_seed: int = 0,
                 compression_stats_logging_frequency: int = 10_000,
                 batch_tensors_with_same_shape: bool = False) -> None:  # fmt: skip
        self.process_group = process_group
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self._options = (matrix_approximation_rank, start_powerSGD_iter, min_compression_rate, use_error_feedback, warm_start,
                         orthogonalization_epsilon, random_seed)  # fmt: skip
        self._core = _core.PowerSGD(*self._options)
        self._waiting: list[tuple[Any, torch.Tensor]] = []  # futures of this step's buckets, and their values

    def _without_model(self) -> dict[str, Any]:
        state = {name: value for name, value in super()._without_model().items() if name not in ("_core", "_waiting")}
        return {**state, "_kept": (self.iter, [one for one in self._core.kept() if one[3] or one[4]])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        kept = state.pop("_kept")
        super().__setstate__(state)
        self._waiting = []
        self._core = _core.PowerSGD(*self._options)
        self._core.restore(*kept)

    @property
    def iter(self) -> int:
        """The number of steps done."""
        return self._core.iteration

    def compression_stats(self) -> tuple[float, int, int]:
        """Returns the compression rate, and the numbers of elements before and after, over all steps that compress."""
        before, after = self._core.compression_stats()
        return (before / after if after else 0, before, after)

    def drop_residuals(self) -> None:
        """Drops what was kept from earlier steps. Call it on all ranks if they skip a step whose averages were finite."""
        self._core.drop_residuals()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns this rank's state, which differs from other ranks', for `state` of CheckpointFolder.save. Entries are
        named "powerSGD.NAME.error" and so on, by the parameters' names, as in C++. torch's DistributedDataParallel
        gives no names: NAME is "#N" then, for the Nth gradient, and only the same model, with the same parameters
        trained, can load the state."""
        state = {f"{_PREFIX}iter": torch.tensor([self.iter])}
        for name, rows, columns, error, q in self._core.kept():
            if error or q:
                state[f"{_PREFIX}{name}.shape"] = torch.tensor([rows, columns])
            for field, values in (("error", error), ("q", q)):
                if values:
                    floats = torch.frombuffer(bytearray(values), dtype=torch.float32)
                    state[f"{_PREFIX}{name}.{field}"] = floats.view(-1, columns)
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads a state, before training or between steps, on all ranks. Ignores names without the prefix "powerSGD.".

        Raises InvalidArgument, and changes nothing, for a state that `state_dict` cannot have returned. The next step
        raises it, naming the parameter, if a gradient has another shape or is missing."""
        kept: dict[str, dict[str, Any]] = {}
        iteration = 0
        for name, tensor in state.items():
            if not name.startswith(_PREFIX):
                continue
            parameter, _, field = name[len(_PREFIX) :].rpartition(".")
            if not isinstance(tensor, torch.Tensor):
                raise _not_loaded(name, f"is a {type(tensor).__name__}")
            if name == f"{_PREFIX}iter":
                (iteration,) = _integers(name, tensor, 1)
            elif parameter and field == "shape":
                kept.setdefault(parameter, {})[field] = _integers(name, tensor, 2)
            elif parameter and field in ("error", "q"):
                if not tensor.is_floating_point():
                    raise _not_loaded(name, "does not hold real numbers")
                kept.setdefault(parameter, {})[field] = tensor.detach().cpu().float().numpy().tobytes()
            else:
                raise _not_loaded(name, "is not one of its names")
        self._core.restore(iteration, [
            (parameter, *fields.get("shape", (0, 0)), fields.get("error", b""), fields.get("q", b""))
            for parameter, fields in kept.items()
        ])  # fmt: skip


def _not_loaded(name: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"PowerSGDState.load_state_dict: '{name}' {why}")


def _integers(name: str, tensor: torch.Tensor, count: int) -> list[int]:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or tensor.numel() != count:
        raise _not_loaded(name, "is not one integer" if count == 1 else "is not two integers")
    return [int(value) for value in tensor.reshape(-1).tolist()]


def _rows_of(gradient: torch.Tensor) -> int:
    """Returns the rows of the gradient's memory as a matrix: the size of the dimension with the largest stride."""
    if gradient.dim() < 2:
        return gradient.numel()
    wide = [dim for dim in range(gradient.dim()) if gradient.shape[dim] > 1]
    return gradient.shape[max(wide, key=gradient.stride)] if wide else 1


def powerSGD_hook(state: PowerSGDState, bucket: Any) -> Any:
    """Sends gradients of two and more dimensions as two thin matrices each. Averages are those matrices' product, the
    same bits on all ranks, whatever their processors; a gradient that is not finite on any rank is NaN on all. Raises
    cohort.Mismatch if ranks' states differ in options, steps done or Q. Futures have their values at the step's last
    bucket."""
    if not isinstance(state, PowerSGDState):
        raise InvalidArgument(f"powerSGD_hook: the state is a {type(state).__name__} -- a PowerSGDState is wanted")
    comm, buffer = _communicator(state.process_group, bucket), bucket.buffer()
    if buffer.device.type != "cpu":
        raise InvalidArgument(f"powerSGD_hook: gradients on {buffer.device} -- it is for those in the host's memory; torch's "
                              "powerSGD_hook works on GPUs")  # fmt: skip
    core, size = state._core, buffer.element_size()
    parameters, own = bucket.parameters(), isinstance(bucket, GradBucket)
    gradients = []
    for name, parameter, gradient in zip(bucket.names() if own else [""] * len(parameters), parameters, bucket.gradients()):
        # torch's buckets hold gradients in the memory order of dense parameters, but show them row by row.
        rows = _rows_of(gradient if own or not is_dense(parameter) else parameter)
        offset = (gradient.data_ptr() - buffer.data_ptr()) // size
        count = gradient.numel()
        if not own and parameter.is_complex():  # an element is two real numbers, of which torch's views show half
            count = 2 * parameter.numel()
            rows = rows if parameter.dim() > 1 else count
        gradients.append((name, id(parameter), offset, rows, count // rows if rows else 0))
    if bucket.index() == 0:
        state._waiting.clear()
        core.forget()
        if own and bucket.last_step_refused():
            core.drop_residuals()
    future: Any = torch.futures.Future()
    core.start(comm, buffer.data_ptr(), buffer.numel(), str(buffer.dtype), gradients, buffer)
    state._waiting.append((future, buffer))
    if bucket.is_last():
        core.finish(comm)
        waiting, state._waiting = state._waiting, []
        for one, value in waiting:
            one.set_result(value)
        if core.iteration % state.compression_stats_logging_frequency == 0 and core.compression_stats()[1]:
            _logger.info("PowerSGD, step %s: rate %.4g, %s elements before, %s after", core.iteration,
                         *state.compression_stats())  # fmt: skip
    return future


for _hook in (allreduce_hook, fp16_compress_hook, bf16_compress_hook, int8_compress_hook, int4_compress_hook,
              powerSGD_hook):  # fmt: skip
    _hook.__annotations__ = {}  # torch would compare these with types of its own
