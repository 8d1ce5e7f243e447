"""Not here; importing it says what there is."""

from horovod._missing import not_yet

raise not_yet("horovod.keras")
