"""Functions that make ranks equal: variables, any object."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence

from cohort.horovod import objects
from cohort.horovod.process_sets import ProcessSet, global_process_set
from cohort.tensorflow._collectives import assign_broadcast


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set,
                        inplace: bool = False) -> None:  # fmt: skip
    """Sets each variable of a list, of TensorFlow or Keras, to its value on rank `root_rank`.

    Variables are matched by their positions in the list; lists have the same length on all ranks, and the same shapes
    and types. `inplace` has no effect.
    """
    variables = list(variables)
    names = [f"broadcast.variables.{i}" for i in range(len(variables))]
    assign_broadcast(variables, root_rank, names, process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """Raises ValueError, because it is for the variables of a TensorFlow 1 graph."""
    raise ValueError(
        "broadcast_global_variables: there are no global variables in TensorFlow 2 -- call hvd.broadcast_variables("
        "model.variables, root_rank=0) once the model is built"
    )


def broadcast_object(obj: Any, root_rank: int = 0, session: Any = None, name: Optional[str] = None,
                     process_set: ProcessSet = global_process_set) -> Any:  # fmt: skip
    """Returns `root_rank`'s object on every rank; on that rank the same object. It is pickled. `session` is ignored.

    Raises on that rank the error of pickling, and on the others HorovodInternalError with its text.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(root_rank: int = 0, session: Any = None, name: Optional[str] = None,
                        process_set: ProcessSet = global_process_set) -> Callable[[Any], Any]:  # fmt: skip
    """Returns a function that broadcasts an object like `broadcast_object`, any number of times."""

    def broadcast(obj: Any) -> Any:
        return objects.broadcast_object(obj, root_rank, name or "broadcast_object_fn", process_set)

    return broadcast


def allgather_object(obj: Any, session: Any = None, name: Optional[str] = None,
                     process_set: ProcessSet = global_process_set) -> List[Any]:  # fmt: skip
    """Returns the objects of all ranks of the set, in rank order. Objects are pickled. `session` is not needed."""
    return objects.allgather_object(obj, name, process_set)
