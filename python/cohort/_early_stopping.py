"""Ends training when a value no longer improves, like cohort::EarlyStopping in C++ and with the same guarantees."""

from __future__ import annotations

from cohort import _core
from cohort._process import world as _world

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from cohort import Communicator


class EarlyStopping:
    """Ends training on all ranks in the same step, when a watched value no longer improves.

        early = cohort.EarlyStopping(patience=3)
        for epoch in range(epochs):
            ...                                               # train; valid_loss over all validation data
            stop = early.should_stop(valid_loss)
            checkpoints.save(model, optimizer, epoch=epoch + 1, values={"valid_loss": valid_loss, "early": early.state()})
            if stop:
                break

    patience   number of consecutive values without improvement after which training ends; at least 1
    min_delta  a value is an improvement if better than the best by more than this; at least 0
    mode       "min": lower is better, as for a loss; "max": higher, as for an accuracy

    Raises InvalidArgument for other values. One thread per rank.
    """

    def __init__(self, patience: int = 3, min_delta: float = 0.0, mode: str = "min") -> None:
        self._core = _core.EarlyStopping(patience, min_delta, mode)

    def should_stop(self, value: float, comm: Optional[Communicator] = None) -> bool:
        """Returns True if training is to end; collective, with the same answer on all ranks.

        value  rank 0's is used: if ranks' values differ, pass the mean. NaN and infinite values are no improvement
        comm   default: the default world; without one, this process alone

        A broadcast of 32 bytes; raises the errors of a broadcast.
        """
        if comm is None and _world.is_initialized():
            comm = _world.world()
        return self._core.should_stop(float(value), comm)

    @property
    def best(self) -> float:
        """The best value so far; NaN if there is none."""
        return self._core.best

    @property
    def waited(self) -> int:
        """Number of consecutive values without improvement since the best one."""
        return self._core.waited

    @property
    def improved(self) -> bool:
        """True if the last value was an improvement."""
        return self._core.improved

    def state(self) -> str:
        """Returns a text to continue from, to be saved among a checkpoint's values."""
        return self._core.state()

    def load_state(self, text: str) -> None:
        """Continues from the text of `state`. Raises InvalidArgument for any other text, or a state of another mode;
        nothing is changed then."""
        self._core.load_state(text)
