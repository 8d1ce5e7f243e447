"""Gives each owner its own names for operations, because two optimizers may have parameters of the same name.

The first owner of a name in a world has the name itself, others a numbered one, in the order in which they asked.
Programs make their optimizers in the same order on all ranks, so these names are the same on all. An owner that asks
again gets the same answer.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, Counter as Counts, Dict, Tuple

from cohort.horovod.process_sets import ProcessSet

# By process set: its engine, which is new in each world, and the number of owners of each name.
_counts: "weakref.WeakKeyDictionary[ProcessSet, Tuple[Any, Counts[str]]]" = weakref.WeakKeyDictionary()

# By id of an owner, because dictionaries of weak references would compare tensors by value.
_owners: Dict[int, Tuple["weakref.ref[Any]", Dict[Tuple[int, str], int]]] = {}


def claimed(name: str, owner: Any, process_set: ProcessSet) -> str:
    """Returns the name for this owner, which may be any object that supports weak references."""
    known, counts = _numbers_of(owner), _counts_of(process_set)
    key = (process_set._key, name)
    if key not in known:
        known[key] = counts[name]
    # In a new world, owners from earlier worlds come first.
    counts[name] = max(counts[name], known[key] + 1)
    return f"{name}~{known[key] + 1}" if known[key] else name


def _numbers_of(owner: Any) -> Dict[Tuple[int, str], int]:
    found = _owners.get(id(owner))
    if found is None or found[0]() is not owner:

        def forget(reference: Any, number: int = id(owner)) -> None:
            if _owners.get(number, (None,))[0] is reference:
                del _owners[number]

        found = _owners[id(owner)] = (weakref.ref(owner, forget), {})
    return found[1]


def _counts_of(process_set: ProcessSet) -> Counts[str]:
    engine, found = process_set._engine, _counts.get(process_set)
    if found is None or (None if found[0] is None else found[0]()) is not engine:
        found = _counts[process_set] = (None if engine is None else weakref.ref(engine), Counter())
    return found[1]
