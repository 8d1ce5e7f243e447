"""Detects cheaply whether a module's parameters, buffers and parts have been replaced."""

from __future__ import annotations

import torch

from cohort import _core


class Slots:
    """The contents of the attributes `kinds` ("_parameters", "_buffers" or "_modules") of a module and its parts."""

    def __init__(self, module: torch.nn.Module, *kinds: str) -> None:
        found = [getattr(part, kind) for part in module.modules() for kind in kinds]
        self._dicts = [slots for slots in found if isinstance(slots, dict)]
        # Keeps references, so that no other object gets the same address.
        self._values = [value for slots in self._dicts for value in dict.values(slots)]

    def changed(self) -> bool:
        """Returns whether anything was added, replaced or removed."""
        return not _core.holds_same(self._dicts, self._values)
