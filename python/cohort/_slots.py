"""Where a module keeps its parameters, buffers and parts: whether these are still the same ones costs little to see."""

from __future__ import annotations

import torch

from cohort import _core


class Slots:
    """What a module and all of its parts keep in the attributes `kinds`: "_parameters", "_buffers" or "_modules"."""

    def __init__(self, module: torch.nn.Module, *kinds: str) -> None:
        found = [getattr(part, kind) for part in module.modules() for kind in kinds]
        self._dicts = [slots for slots in found if isinstance(slots, dict)]
        # Held, so that no other object gets the same address.
        self._values = [value for slots in self._dicts for value in dict.values(slots)]

    def changed(self) -> bool:
        """Whether anything was added, replaced or removed."""
        return not _core.holds_same(self._dicts, self._values)
