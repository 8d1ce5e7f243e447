"""Horovod's process sets: those of `cohort.torch`."""

from __future__ import annotations

from cohort.torch import ProcessSet, add_process_set, global_process_set, remove_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
