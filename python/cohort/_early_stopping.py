"""Ends training once a value gets better no more: C++'s cohort::EarlyStopping, with the same promises."""

from __future__ import annotations

from cohort import _core, _world

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from cohort import Communicator


class EarlyStopping:
    """Ends training on all ranks in the same step, once a value that is watched gets better no more.

        early = cohort.EarlyStopping(patience=3)
        for epoch in range(epochs):
            ...                                               # train, and valid_loss over all of the validation data
            stop = early.should_stop(valid_loss)
            checkpoints.save(model, optimizer, epoch=epoch + 1, values={"valid_loss": valid_loss, "early": early.state()})
            if stop:
                break

    patience   values in a row that are no improvement, after which training ends; at least 1
    min_delta  an improvement is better than the best by more than this; at least 0
    mode       "min": lower is better, as of a loss; "max": higher, as of an accuracy

    Raises InvalidArgument for other values. One thread per rank.
    """

    def __init__(self, patience: int = 3, min_delta: float = 0.0, mode: str = "min") -> None:
        self._core = _core.EarlyStopping(patience, min_delta, mode)

    def should_stop(self, value: float, comm: Optional[Communicator] = None) -> bool:
        """True if training is to end: collective, the same answer on all ranks.

        value  rank 0's counts: of one that ranks have their own of, give the mean. NaN and infinite values are no improvement
        comm   default: the default world; where there is none, this process alone

        A broadcast of 32 bytes; raises what that raises.
        """
        if comm is None and _world.is_initialized():
            comm = _world.world()
        return self._core.should_stop(float(value), comm)

    @property
    def best(self) -> float:
        """The best value so far; NaN before there is one."""
        return self._core.best

    @property
    def waited(self) -> int:
        """Number of values since the best one that are no improvement."""
        return self._core.waited

    @property
    def improved(self) -> bool:
        """True if the last value was an improvement."""
        return self._core.improved

    def state(self) -> str:
        """A text to go on from, to be saved among a checkpoint's values."""
        return self._core.state()

    def load_state(self, text: str) -> None:
        """Goes on from what `state` gave. Raises InvalidArgument for any other text, or of another mode; nothing is
        changed then."""
        self._core.load_state(text)
