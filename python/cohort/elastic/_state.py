"""A training's state, as the core's State: parts that optimizer steps change, and values that are copied at each
step."""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Callable
from typing import Any, Optional

from cohort import _core
from cohort.data import DistributedSampler
from cohort.elastic import _random
from cohort.errors import InvalidArgument

_PLAIN = (int, float, bool, str, bytes, type(None))
_POSITION = struct.Struct("<Qqqq")


class State:
    """The state of a training. Attributes set on the object are part of it: any objects that can be pickled, the same
    on all ranks (`state.best = 0.0`). Read them from the State, since a new world may bring other values.

    rng  each rank's generators, too, go back to their state of the last step when a step is repeated: torch's (of the
         CPU and of the current GPU), Python's `random` and NumPy's global one, if imported

    Only the thread that calls `run` uses it.
    """

    def __init__(self, *, rng: bool = True) -> None:
        self.__dict__.update(
            _core=_core.ElasticState(),
            _attributes={},
            _kept_attributes=({}, b""),
            _on_step=[],
            _on_change=[],
            _things={},  # by name
            _policies=[],  # functions that describe them, for a given size of the first world
            _schedules={},  # by name
        )
        self._core.add_value("attributes", self._get_attributes, self._set_attributes, False)
        if rng:
            self._core.add_value("generators", *_random.access(_random.GlobalGenerators()), True)

    def add(self, name: str, thing: Any, *more: Any, **options: Any) -> State:
        """Adds a thing under its own name, before `run` and in the same order on all ranks:

        a torch.nn.Module    its parameters and buffers. Not a wrapper: `train` wraps the module again in each world
        an optimizer         of torch, or of `cohort.horovod.torch`; its states and options. It may be followed by its model,
                             which is then checked to have its parameters. scale_lr="linear" or "sqrt" multiplies its
                             rates, and the rates that this state's schedules use, by the world's size over that of the
                             first world (or its square root); default: None
        a cohort.optim.LocalSGD or DiLoCo
                             instead of the module and the inner optimizer: new ranks get the last synchronised
                             parameters, the outer optimizer's state, the inner one's options and how many steps are
                             left until the next synchronisation; ranks that stay lose no step. `step` then synchronises
                             after the step has ended
        a cohort.data.DistributedSampler
                             with a batch_size: the ledger records its samples, and `step` calls its `step` unless the
                             program did. batch="keep", the default: steps have as many samples as in the first world,
                             spread over the current ranks; their shares may differ by one: DistributedDataParallel(...,
                             sampler=sampler) weights them. batch="scale": each rank has batch_size samples
        arrays               of NumPy or torch, or a dict of them, that only steps change. version=function, which
                             returns a new number whenever the arrays may have changed, avoids reading NumPy arrays at each
                             step
        a generator          torch.Generator, numpy.random.Generator, random.Random: each rank's own
        anything else        with state_dict and load_state_dict: schedules, GradScaler. It is pickled at each step. The
                             same on all ranks; with per_rank=True each rank's own, which is restored but never sent

        Returns the state. Raises InvalidArgument for a name already in use, and for a thing that cannot be kept.
        """
        if name in self._things:
            raise InvalidArgument(f"elastic.State.add: there is '{name}' already")
        torch = sys.modules.get("torch")
        if isinstance(thing, DistributedSampler):
            self._add_sampler(name, thing, *more, **options)
        elif torch is not None and isinstance(thing, torch.nn.Module):
            from cohort.elastic import _torch

            _torch.add_module(self, name, thing, *more, **options)
        elif torch is not None and isinstance(thing, torch.optim.Optimizer):
            from cohort.elastic import _torch

            _torch.add_optimizer(self, name, thing, *more, **options)
        elif "cohort._local_sgd" in sys.modules and isinstance(thing, sys.modules["cohort._local_sgd"].LocalSteps):
            from cohort.elastic import _torch

            _torch.add_local_steps(self, name, thing)
        elif _random.is_generator(thing):
            self._core.add_value(name, *_random.access(lambda: [thing], *more, **options), True)
        elif _is_array(thing) or (isinstance(thing, dict) and thing and all(map(_is_array, thing.values()))):
            self._add_arrays(name, {"": thing} if _is_array(thing) else thing, *more, **options)
        elif hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
            self._add_object(name, thing, *more, **options)
        else:
            loader = torch is not None and isinstance(thing, (torch.utils.data.DataLoader, torch.utils.data.Dataset))
            raise InvalidArgument(
                f"elastic.State.add: '{name}' is a {type(thing).__name__} -- "
                + (
                    "its position is its sampler's: add that; an IterableDataset has none that another world could go on from"
                    if loader
                    else f"it has no state_dict and load_state_dict; plain values are attributes: state.{name} = ..."
                )
            )
        self._things[name] = thing
        return self

    def on_change(self, callback: Callable[[Any], None]) -> None:
        """Registers a function to call with each new World, when all ranks have the same state, before `train`."""
        self._on_change.append(callback)

    def on_step(self, callback: Callable[[], None]) -> None:
        """Registers a function that `step` calls before anything else."""
        self._on_step.append(callback)

    def step(self) -> None:
        """Call it right after the optimizer's step and everything else that a step changes (a schedule's step), with no
        collective in between. After a later failure training continues from here; after an earlier failure the step is
        repeated. Changes after this call are lost if the members change with this step. Raises MembershipChanged, on all
        ranks at the same step, when ranks come or leave as planned, and the errors of a collective; `run` handles both."""
        for callback in self._on_step:
            callback()
        for schedule in self._schedules.values():
            schedule.step_ends()
        self._core.step()

    @property
    def steps(self) -> int:
        """The number of steps that have ended since training began, in all worlds."""
        return self._core.steps

    def set_steps(self, steps: int) -> None:
        """Sets the number of steps when training continues from a checkpoint; before `run`."""
        self._core.set_steps(steps)

    # -------------------------------------------------------------------------------------------- attributes

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or hasattr(type(self), name):
            raise AttributeError(f"elastic.State: '{name}' is not for values -- use another name")
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
            raise InvalidArgument(f"elastic.State: '{name}' is a {type(value).__name__} -- state.add('{name}', ...)")
        self._attributes[name] = value

    def __getattr__(self, name: str) -> Any:  # called for names that are not found otherwise
        try:
            return self.__dict__["_attributes"][name]
        except KeyError:
            raise AttributeError(f"elastic.State has no '{name}'") from None

    def __delattr__(self, name: str) -> None:
        try:
            del self._attributes[name]
        except KeyError:
            raise AttributeError(f"elastic.State has no '{name}'") from None

    def _get_attributes(self) -> bytes:
        now, (before, copy) = self._attributes, self._kept_attributes
        # An immutable value is unchanged if it is the same object.
        if now.keys() == before.keys() and all(type(v) in _PLAIN and v is before[k] for k, v in now.items()) and copy:
            return copy
        copy = pickle.dumps(now, -1)
        self.__dict__["_kept_attributes"] = (dict(now), copy)
        return copy

    def _set_attributes(self, copy: bytes) -> None:
        self._attributes.clear()
        self._attributes.update(pickle.loads(copy))

    # -------------------------------------------------------------------------------------------- things

    def _add_object(self, name: str, thing: Any, *, per_rank: bool = False) -> None:
        def set_state(copy: bytes) -> None:
            thing.load_state_dict(pickle.loads(copy))

        self._core.add_value(name, lambda: pickle.dumps(thing.state_dict(), -1), set_state, per_rank)
        if hasattr(getattr(thing, "optimizer", None), "register_step_pre_hook") and hasattr(thing, "last_epoch"):
            self._schedules[name] = _Schedule(self, name, thing)

    def _add_sampler(self, name: str, sampler: DistributedSampler, *, batch: str = "keep") -> None:
        if sampler.batch_size is None:
            raise InvalidArgument(
                f"elastic.State.add: the sampler '{name}' has no batch_size, so nothing says what a step has used -- "
                "DistributedSampler(data, batch_size=...) as the DataLoader's batch_sampler"
            )
        if batch not in ("keep", "scale"):
            raise InvalidArgument(f"elastic.State.add: batch is {batch!r} -- 'keep' or 'scale'")
        own = sampler.batch_size
        seen = sampler._calls_of_step
        seen_at = (sampler.epoch, sampler.cursor)

        def get() -> bytes:
            return _POSITION.pack(sampler.seed, sampler.epoch, sampler.cursor, sampler.size)

        def set_position(copy: bytes) -> None:
            nonlocal seen_at
            seed, epoch, cursor, size = _POSITION.unpack(copy)
            sampler.load_state_dict({"seed": seed, "epoch": epoch, "cursor": cursor, "size": size})
            seen_at = (epoch, cursor)

        def on_change(rank: int, size: int, first_size: int) -> None:
            # Steps of virtual ranks have equally many samples in any case.
            keeps = batch == "keep" and not sampler.virtual_ranks
            sampler.set_world(rank, size, own * first_size if keeps else None)
            _count_received()

        def step() -> None:
            nonlocal seen, seen_at
            if sampler.virtual_ranks:  # several batches make a step: the cursor tells whether it has been taken
                before = seen_at[1] if sampler.epoch == seen_at[0] else 0
                while sampler.cursor == before and sampler.global_batch() > 0:
                    sampler.step()
                seen_at = (sampler.epoch, sampler.cursor)
                return
            # If two optimizers train on one batch, the first one's step counts as the batch's.
            if sampler._calls_of_step == seen and sampler.global_batch() > 0 and sampler._received != 0:
                sampler.step()
            seen = sampler._calls_of_step

        self._core.add_value(name, get, set_position, False)
        self._core.add_samples(name, lambda: (sampler.epoch, sampler.cursor))
        self._core.on_change(on_change)
        self._on_step.append(step)
        self._policies.append(
            lambda first_size: f"sampler '{name}': "
            + (
                f"{own * (sampler.virtual_ranks or first_size)} samples a step, whatever the number of ranks"
                if batch == "keep" or sampler.virtual_ranks
                else f"{own} samples a step on each rank, so steps are larger on more ranks"
            )
        )

    def _add_arrays(self, name: str, arrays: dict, *, version: Optional[Callable[[], int]] = None) -> None:
        def contents() -> tuple[bytes, list]:
            items = sorted(arrays.items())
            return repr([(key, str(one.dtype), tuple(one.shape)) for key, one in items]).encode(), [
                (f"{name}{'.' if key else ''}{key}", _dense(one)) for key, one in items
            ]

        def assign(layout: bytes, items: list) -> None:
            mine = contents()[0]
            if layout != mine:
                raise InvalidArgument(f"elastic.State: '{name}' is {mine.decode()} here and {layout.decode()} on another rank")
            for (_, one), (_, data) in zip(sorted(arrays.items()), items):
                _fill(one, data)

        def content() -> int:
            torch = sys.modules.get("torch")
            tensors = [one for one in arrays.values() if torch is not None and isinstance(one, torch.Tensor)]
            others = [_dense(one) for one in arrays.values() if not any(one is tensor for tensor in tensors)]
            return sum(one._version for one in tensors) + (_core.digest(others) if others else 0)

        self._core.add_part(name, contents, assign, version or content)


class _Schedule:
    """Warns, on rank 0, of a schedule that steps after each `State.step`, so that step's copy lacks it. (A schedule
    that steps after an epoch's last step does so once per epoch.)"""

    _MANY = 3

    def __init__(self, state: Any, name: str, schedule: Any) -> None:
        self._name, self._schedule = name, schedule
        self._is_late, self._late = False, 0
        self._begin(1)
        state._core.on_change(lambda rank, *_: self._begin(rank))
        schedule.optimizer.register_step_pre_hook(self._look)

    def _begin(self, rank: int) -> None:
        self._rank = rank
        self._kept = self._schedule.last_epoch
        self._is_late = False

    def _look(self, *_: Any) -> None:
        self._is_late = self._is_late or self._schedule.last_epoch != self._kept

    def step_ends(self) -> None:
        if self._late < self._MANY:
            self._late = self._late + 1 if self._is_late else 0
            if self._late == self._MANY and self._rank == 0:
                print(
                    f"cohort: elastic: the schedule '{self._name}' goes on after each state.step(), so it loses a step with each "
                    "change of members -- call its step before state.step()",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
        self._is_late, self._kept = False, self._schedule.last_epoch


def _count_received() -> None:
    """Makes torch's DataLoader tell samplers when its loop receives a batch, since with workers it draws ahead."""
    loaders = sys.modules.get("torch.utils.data.dataloader")
    iterator = getattr(loaders, "_BaseDataLoaderIter", None)
    inner = getattr(iterator, "__next__", None)
    if iterator is None or inner is None or hasattr(inner, "_of_torch"):
        return

    def get_next(self: Any) -> Any:
        batch = inner(self)
        sampler = getattr(self, "_index_sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler._receive()
        return batch

    get_next._of_torch = inner  # type: ignore[attr-defined]
    iterator.__next__ = get_next


def _is_array(thing: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return (numpy is not None and isinstance(thing, numpy.ndarray)) or (torch is not None and isinstance(thing, torch.Tensor))


def _dense(array: Any) -> Any:
    """Returns a tensor's bytes, without a copy if the tensor is dense and on the CPU."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        from cohort._checkpoint.tensors import to_entry

        return to_entry("", array)[3]
    numpy = sys.modules["numpy"]
    return numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)


def _fill(array: Any, data: memoryview) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        from cohort.elastic._torch import fill

        fill(array, data)
    elif array.size:
        numpy = sys.modules["numpy"]
        array[...] = numpy.frombuffer(data, array.dtype).reshape(array.shape)

